"""Where answers lie in conversations, against the marks that transformers finds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nesa_node.client.training.data.conversations import ConversationRenderer, Message
from nesa_node.client.training.data.examples import IGNORED, ExampleTokenizer
from nesa_node.core.errors import ConfigError
from tests.client.training.data.chat_tokenizers import (
    CHATML,
    EMPTY_THOUGHT,
    MARKED_CHATML,
    PLAIN_WORDS,
    REFUSING,
    SYSTEM_IN_LAST,
    WITH_TOOLS,
    make_tokenizer,
)

MARKED, PLAIN = make_tokenizer(MARKED_CHATML), make_tokenizer(CHATML)
CONTENTS = st.text(st.sampled_from("the cat, sa.\n é:<|im_end|>"), max_size=12)


def say(*contents: str, system: str | None = None) -> list[Message]:
    """Messages of the user and the assistant in turn."""
    first = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant") * len(contents)
    turns = zip(roles, contents, strict=False)
    return [*first, *({"role": role, "content": content} for role, content in turns)]


def learned(template: str, messages: list[Message]) -> list[str]:
    text = ConversationRenderer(make_tokenizer(template)).render(messages)
    return [text.text[start:end] for start, end in text.targets]


@given(
    contents=st.lists(CONTENTS, min_size=2, max_size=7),
    system=st.none() | CONTENTS,
)
def test_answers_are_found_where_marks_would_be(contents: list[str], system: str | None) -> None:
    messages = say(*contents, system=system)
    apply: Any = MARKED.apply_chat_template
    expected = apply(messages, return_assistant_tokens_mask=True, return_dict=True)
    for tokenizer in (MARKED, PLAIN):
        text = ConversationRenderer(tokenizer).render(messages)
        [example] = ExampleTokenizer(tokenizer).tokenize([text])
        assert example.ids.tolist() == expected["input_ids"]
        assert (example.labels != IGNORED).tolist() == [
            mask == 1 for mask in expected["assistant_masks"]
        ]


def test_answer_ends_in_the_end_of_its_turn() -> None:
    found = learned(CHATML, say("the", "cat", "sat", "on", "mat"))
    assert found == ["cat<|im_end|>", "on<|im_end|>"]


def test_template_without_special_tokens_has_answers_up_to_the_next_turn() -> None:
    assert learned(PLAIN_WORDS, say("the", "cat", "sat", "on")) == [" cat\n", " on\n"]


@pytest.mark.parametrize(("change", "answer"), [("|trim", "cat"), ("", " cat ")])
def test_earlier_answers_are_found_though_the_last_one_is_written_otherwise(
    change: str, answer: str
) -> None:
    template = EMPTY_THOUGHT.replace("|trim", change)
    assert learned(template, say("the", " cat ", "sat", "on")) == [
        f"{answer}<|im_end|>",
        "<think>\n\n</think>\n\non<|im_end|>",
    ]


@pytest.mark.parametrize("thought", ["<think>\n", "<think>\n\n</think>\n\n"])
def test_answer_without_the_thought_that_its_prompt_begins_is_found(thought: str) -> None:
    """As DeepSeek R1 and Qwen 3.5 write prompts."""
    template = CHATML.replace(
        "assistant\n' }}{% endif %}", f"assistant\n{thought}' }}}}{{% endif %}}"
    )
    assert thought in template
    assert learned(template, say("the", "<cat", "sat", "on")) == ["<cat<|im_end|>", "on<|im_end|>"]


def test_thought_of_an_answer_that_its_prompt_begins_is_not_learned_twice() -> None:
    template = EMPTY_THOUGHT.replace(
        "assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}"
    )
    assert learned(template, say("the", "cat")) == ["\n</think>\n\ncat<|im_end|>"]


def test_answers_before_the_end_of_a_conversation_are_found() -> None:
    """As Phi 3 writes it: the end of the sequence stands after the last turn only."""
    template = CHATML.replace(
        "{% if add", "{% if not add_generation_prompt %}<end>{% endif %}{% if add"
    )
    assert learned(template, say("the", "cat", "sat", "on")) == [
        "cat<|im_end|>",
        "on<|im_end|>\n<end>",
    ]


def test_prompt_that_is_written_otherwise_later_is_refused() -> None:
    messages = say("the", "cat", "sat", "on", system="be brief")
    with pytest.raises(
        ConfigError, match=r"message 3, .* writes the text before it, .* record for"
    ):
        learned(SYSTEM_IN_LAST, messages)
    assert learned(SYSTEM_IN_LAST, messages[:3]) == [" cat<end>"]
    renderer = ConversationRenderer(make_tokenizer(SYSTEM_IN_LAST))
    text = renderer.render_completion(messages[:4], messages[4:])
    assert [text.text[start:end] for start, end in text.targets] == [" on<end>"]


def test_answer_whose_end_cannot_be_told_is_refused() -> None:
    template = EMPTY_THOUGHT.replace(
        "m.content|trim", "(m.content if m.role == 'user' or loop.last else 'left out')"
    )
    with pytest.raises(ConfigError, match=r"message 2, the assistant's, .* writes it in another"):
        learned(template, say("the", "cat", "sat", "on"))


def test_answer_that_the_template_leaves_out_is_refused() -> None:
    template = CHATML.replace("in messages %}", "in messages if m.content %}")
    messages = [*say("the", ""), *say("the", "cat")[1:]]
    with pytest.raises(ConfigError, match="message 2, the assistant's, cannot be found"):
        learned(template, messages)


def test_answers_of_a_prompt_are_not_learned() -> None:
    messages = say("the", "cat", "sat", "on", "the", "mat")
    text = ConversationRenderer(MARKED).render_completion(messages[:3], messages[3:])
    assert [text.text[start:end] for start, end in text.targets] == [
        "on<|im_end|>",
        "mat<|im_end|>",
    ]


def test_template_gets_tools_and_calls() -> None:
    messages: list[Message] = [
        {"role": "user", "content": "the weather?"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "wet"},
    ]
    tools = [{"type": "function", "function": {"name": "look"}}]
    text = ConversationRenderer(make_tokenizer(WITH_TOOLS)).render(messages, tools)
    assert text.text.startswith('<|im_start|>tools\n[{"type": "function"')
    assert [text.text[start:end] for start, end in text.targets] == [
        "look<|im_end|>",
        "wet<|im_end|>",
    ]


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (CHATML, say("the"), "no message is the assistant's"),
        (CHATML, say("the", "cat")[1:], "begin with a message of the user"),
        (None, say("the", "cat"), "no chat template"),
        (REFUSING, say("the", "cat", system="be brief"), "refuses .*: System role not supported"),
        ("{{ messages[0].content + 1 }}", say("the", "cat"), "refuses this conversation"),
        ("{{ 1 / 0 }}", say("the", "cat"), "refuses this conversation"),
    ],
)
def test_conversation_that_cannot_be_learned_is_refused(
    template: str | None, messages: list[Message], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        ConversationRenderer(make_tokenizer(template)).render(messages)
