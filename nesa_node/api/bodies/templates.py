"""Chat templates: what a tokenizer's template makes of a conversation, and what it knows."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pydantic_core import from_json

from nesa_node.api.bodies.chat_body import ChatMessage, Tool
from nesa_node.api.bodies.reading import crowd_in
from nesa_node.api.bodies.splitting import encode, light
from nesa_node.api.bodies.template_program import REFUSALS, reason_of
from nesa_node.api.decoding.bounded_json import is_longer
from nesa_node.web.problem import Problem

_MESSAGE_CHARS = 64
"""What a template does for each message, or call, takes as long as for so many characters."""
_MAX_TEMPLATE_CHARS = 1 << 18
"""Of a stranger's, which is sent to a process with each conversation."""
_MAX_TOOLS_CHARS = 1 << 20
"""Of the parameters of all tools of a conversation, as JSON."""
_ARGUMENTS_CHARS = 1 << 20
"""Of one call that a template gets as an object."""

Render = Callable[[bytes], Awaitable[str]]
"""What renders elsewhere: `TemplateRenderer.render`."""


async def chat_prompt(
    tokenizer: Any,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] = (),
    *,
    most: int,
    generation: bool = True,
    continued: bool = False,
    special: bool = False,
    param: str = "messages",
    render: Render | None = None,
) -> list[int]:
    """The tokens of a conversation, at most about `most`, ready for the answer to follow.

    `continued`: the last message is left open; `special`: the tokenizer adds its own tokens, too;
    `render`: where a stranger's template is rendered, None: here, as one that is trusted.
    Raises `Problem`, about the field `param`, for conversations that the template refuses.
    """
    template = template_of(tokenizer, bool(tools), param)

    def asked() -> dict[str, Any]:
        return {
            "conversation": _conversation(messages, developer="developer" in template),
            "tools": _told(tools) or None,
            "add_generation_prompt": generation,
            "continue_final_message": continued,
        }

    # Schemas of tools may be of any size.
    size = math.inf if tools else _size(messages)
    try:
        if render is None:
            apply = tokenizer.apply_chat_template
            text = await light(size, lambda: apply(**asked(), tokenize=False))
        else:
            text = await render(await light(size, lambda: _question(tokenizer, template, asked())))
    except REFUSALS as error:
        raise _refusal(error, param) from None
    return await encode(tokenizer, text, special=special, most=most, param=param)


def _told(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """As templates expect it. Raises `Problem` for tools too large to be written at once."""
    if is_longer([tool.function.parameters for tool in tools], _MAX_TOOLS_CHARS):
        raise Problem(
            400,
            f"tools: their parameters have more than {_MAX_TOOLS_CHARS} characters: send less",
            code="invalid_value",
            param="tools",
        )
    return [tool.model_dump(exclude_none=True) for tool in tools]


def _size(messages: Sequence[ChatMessage]) -> int:
    """About as many characters as it takes to render them."""
    size = 0
    for message in messages:
        size += _MESSAGE_CHARS + len(message.words()) + len(message.reasoning_content or "")
        for call in message.tool_calls or ():
            size += _MESSAGE_CHARS + len(call.function.arguments)
    return size


def template_of(tokenizer: Any, tools: bool, param: str = "messages") -> str:
    """Raises `Problem` if there is none, or, with `tools`, none that knows tools."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = (tools and template.get("tool_use")) or template.get("default")
    if not isinstance(template, str):
        raise Problem(
            400,
            "the model has no chat template, so that it cannot chat: use /v1/completions",
            code="no_chat_template",
            param=param,
        )
    if tools and "tools" not in template:
        raise Problem(
            400,
            "tools error: the model's chat template knows no tools; leave tools away, or choose "
            "a model that was trained to call them",
            code="unsupported_parameter",
            param="tools",
        )
    return template


def _question(tokenizer: Any, template: str, asked: dict[str, Any]) -> bytes:
    """For a process to render (`template_program.py`) what `apply_chat_template` is asked."""
    if len(template) > _MAX_TEMPLATE_CHARS:
        raise ValueError(f"it has more than {_MAX_TEMPLATE_CHARS} characters")
    special: dict[str, str] = tokenizer.special_tokens_map
    conversations = [asked.pop("conversation")]
    given = {**special, **asked, "conversations": conversations, "chat_template": template}
    return json.dumps(given).encode()


def _refusal(error: BaseException, param: str) -> Problem:
    return Problem(
        400,
        f"the model's chat template refuses these messages: {reason_of(error)}",
        code="template_error",
        param=param,
    )


def _conversation(messages: Sequence[ChatMessage], *, developer: bool) -> list[dict[str, Any]]:
    """As templates expect it: text for contents, objects for arguments."""
    conversation = []
    for message in messages:
        role = "system" if message.role == "developer" and not developer else message.role
        entry: dict[str, Any] = {"role": role, "content": message.words()}
        for key in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(message, key)) is not None:
                entry[key] = value
        if message.tool_calls:
            entry["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": _arguments(call.function.arguments),
                    },
                }
                for call in message.tool_calls
            ]
        conversation.append(entry)
    return conversation


def _arguments(text: str) -> object:
    """Text where it is no JSON, or too much to be read at once: a body may escape its brackets."""
    if len(text) > _ARGUMENTS_CHARS or crowd_in(text.encode("utf-8", "surrogatepass")):
        return text
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        return text
