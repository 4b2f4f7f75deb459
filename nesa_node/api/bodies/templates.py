"""Chat templates: prompts of conversations, and whether a template supports tools."""

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
"""Cost of rendering a message or a tool call, in characters that take as long."""
_MAX_TEMPLATE_CHARS = 1 << 18
"""Limit on an untrusted template, which is sent to a child process with each conversation."""
_MAX_TOOLS_CHARS = 1 << 20
"""Limit on the parameters of all tools of a conversation, as JSON."""
_ARGUMENTS_CHARS = 1 << 20
"""Limit on a call's arguments that are parsed for the template; longer ones stay text."""

Render = Callable[[bytes], Awaitable[str]]
"""Renderer in a child process: `TemplateRenderer.render`."""


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
    """Tokens of a conversation, at most about `most`, that an answer continues.

    `continued`: the answer continues the last message; `special`: add the tokenizer's special
    tokens; `render`: renders an untrusted template in a child process; None: the template is
    trusted and rendered here. Raises `Problem`, about the field `param`, for conversations that
    the template refuses.
    """
    template = template_of(tokenizer, bool(tools), param)

    def asked() -> dict[str, Any]:
        return {
            "conversation": _conversation(messages, developer="developer" in template),
            "tools": _told(tools) or None,
            "add_generation_prompt": generation,
            "continue_final_message": continued,
        }

    # The size of tools' schemas is not estimated.
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
    """Tools as dicts for the template. Raises `Problem` if their parameters are too large."""
    if is_longer([tool.function.parameters for tool in tools], _MAX_TOOLS_CHARS):
        raise Problem(
            400,
            f"tools: their parameters have more than {_MAX_TOOLS_CHARS} characters: send less",
            code="invalid_value",
            param="tools",
        )
    return [tool.model_dump(exclude_none=True) for tool in tools]


def _size(messages: Sequence[ChatMessage]) -> int:
    """Estimated cost of rendering `messages`, in characters."""
    size = 0
    for message in messages:
        size += _MESSAGE_CHARS + len(message.words()) + len(message.reasoning_content or "")
        for call in message.tool_calls or ():
            size += _MESSAGE_CHARS + len(call.function.arguments)
    return size


def template_of(tokenizer: Any, tools: bool, param: str = "messages") -> str:
    """Chat template of a tokenizer. Raises `Problem` if there is none, or none with `tools`."""
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
    """JSON question to `template_program.py`, from the arguments of `apply_chat_template`."""
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
    """Messages as dicts for the template: contents as text, arguments as objects."""
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
    """Parsed arguments; the text itself if it is not JSON or too large to parse (escaped brackets
    pass the check of the body)."""
    if len(text) > _ARGUMENTS_CHARS or crowd_in(text.encode("utf-8", "surrogatepass")):
        return text
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        return text
