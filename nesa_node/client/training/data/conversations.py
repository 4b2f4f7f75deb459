"""Conversations as a chat template writes them, and where the assistant's answers lie in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from nesa_node.client.training.data.examples import SupervisedText
from nesa_node.core.errors import ConfigError

Message = Mapping[str, Any]
"""A role, a content, and what else the template reads, such as `tool_calls`."""
_ASSISTANT = "assistant"
_GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_THOUGHT = re.compile(r"<think>\s*(</think>\s*)?\Z")
_REFUSALS = (
    TemplateError,
    # Errors of templates that do not expect this conversation.
    *(TypeError, ValueError, LookupError, AttributeError, RecursionError, ArithmeticError),
)
_MAX_REASON_CHARS = 300


class ConversationRenderer:
    """A tokenizer's chat template, applied to conversations to learn from."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.values()
        self._special = tuple(
            {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        )

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> SupervisedText:
        """The text of a conversation, of which the assistant's answers are learned.

        They are what the template marks by `{% generation %}`. Without marks, an answer is what
        follows the prompt for it, with the end of the turn. Raises `ConfigError` if there is none,
        if the template refuses the conversation, or if it writes earlier messages in another way
        where more follow, so that an answer cannot be found.
        """
        template = self._find_template(tools)
        if not _GENERATION_MARK.search(template):
            return self.render_completion((), messages, tools)
        [text], [marked] = self._render(
            template, [messages], tools, return_assistant_tokens_mask=True
        )
        targets = tuple((start, end) for start, end in marked if start < end)
        return _make_text(text, targets)

    def render_completion(
        self,
        prompt: Sequence[Message],
        completion: Sequence[Message],
        tools: Sequence[Any] | None = None,
    ) -> SupervisedText:
        """The text of both, of which the assistant's answers in `completion` are learned.

        Marks of the template are not used. Raises as `render` without them.
        """
        messages = [*prompt, *completion]
        numbers = [
            number
            for number, message in enumerate(messages)
            if message["role"] == _ASSISTANT and number >= len(prompt)
        ]
        if not numbers:
            raise ConfigError(
                "no message is the assistant's, so that there is nothing to learn: add its answer"
            )
        if numbers[0] == 0:
            raise ConfigError(
                "the assistant's answer has no prompt: begin with a message of the user"
            )
        template = self._find_template(tools)
        befores, _ = self._render(
            template, [messages[:number] for number in numbers], tools, add_generation_prompt=True
        )
        ends = dict.fromkeys([*(number + 1 for number in numbers), len(messages)])
        rendered, _ = self._render(template, [messages[:end] for end in ends], tools)
        afters = dict(zip(ends, rendered, strict=True))
        text = afters[len(messages)]
        targets = []
        for number, before in zip(numbers, befores, strict=True):
            start = _find_start(text, before)
            if start is None:
                raise _make_refusal(number, "the text before it, up to the prompt for an answer,")
            end = self._find_end(text, start, afters[number + 1], messages[number])
            if end is None:
                raise _make_refusal(number, "it")
            targets.append((start, end))
        return _make_text(text, tuple(targets))

    def _find_end(self, text: str, start: int, after: str, message: Message) -> int | None:
        """Where an answer that starts at `start` ends; None if that cannot be told.

        `after` is the conversation that ends with this answer, `message`.
        """
        # Some templates end conversations, not turns, in the end of the sequence.
        for whole in (after, after.removesuffix(self._tokenizer.eos_token or "")):
            if len(whole) > start and text.startswith(whole):
                return self._strip_end(text, start, len(whole))
        # Some write the last answer in another way than earlier ones, with an empty thought say,
        # but end both alike.
        content = str(message.get("content") or "").strip()
        if not content or content not in after:
            return None
        ended = content + after[after.rindex(content) + len(content) :]
        begin = len(text) - len(text[start:].lstrip())
        if not text.startswith(ended, begin):
            return None
        return self._strip_end(text, start, begin + len(ended))

    def _strip_end(self, text: str, start: int, end: int) -> int:
        """Leave out white space after a special token, which no answer goes on to."""
        answer = text[start:end].rstrip()
        return start + len(answer) if answer.endswith(self._special) else end

    def _find_template(self, tools: Sequence[Any] | None) -> str:
        try:
            return self._tokenizer.get_chat_template(tools=list(tools) if tools else None)
        except ValueError:
            raise ConfigError(
                "the model has no chat template: use records with prompt and completion as texts, "
                "or the model's variant for chats"
            ) from None

    def _render(
        self,
        template: str,
        conversations: Sequence[Sequence[Message]],
        tools: Sequence[Any] | None,
        **options: bool,
    ) -> tuple[list[str], list[list[tuple[int, int]]]]:
        """Texts, and of each the ranges that are marked, as `apply_chat_template` makes them."""
        variables: dict[str, Any] = {**self._tokenizer.special_tokens_map, **options}
        try:
            rendered: Any = render_jinja_template(
                conversations=[[dict(each) for each in messages] for messages in conversations],
                tools=list(tools) if tools else None,
                chat_template=template,
                **variables,
            )
        except _REFUSALS as error:
            reason = " ".join(str(error).split())[:_MAX_REASON_CHARS]
            raise ConfigError(
                f"the model's chat template refuses this conversation: {reason}"
            ) from error
        texts, marked = rendered
        return list(texts), marked


def _find_start(text: str, before: str) -> int | None:
    """Where the answer to the prompt `before` starts; None if that cannot be told.

    A prompt may begin a thought that the answer in the text lacks.
    """
    for prompt in (before, _THOUGHT.sub("", before)):
        if text.startswith(prompt):
            return len(prompt)
    return None


def _make_text(text: str, targets: tuple[tuple[int, int], ...]) -> SupervisedText:
    edges = [edge for target in targets for edge in target]
    if any(before > after for before, after in pairwise(edges)):
        raise ConfigError("the model's chat template marks answers that overlap")
    return SupervisedText(text, targets, is_rendered=True)


def _make_refusal(number: int, what: str) -> ConfigError:
    return ConfigError(
        f"message {number + 1}, the assistant's, cannot be found in the text of the model's chat "
        f"template, which writes {what} in another way where more follows. Use a record for each "
        'answer, {"prompt": [...], "completion": [...]}, or prompt and completion as texts, or a '
        "template that marks answers by {% generation %}"
    )
