"""Chat templates: prompts of conversations, and whether a template supports tools."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pydantic_core import from_json

from nesa_node.api.generation.bounded_json import exceeds_json_chars
from nesa_node.api.generation.tokenization import encode, offload_if_large
from nesa_node.api.processes.template_program import REFUSAL_ERRORS, describe_refusal
from nesa_node.api.schemas.chat_request import ChatMessage, Tool
from nesa_node.api.schemas.request_body import find_json_excess
from nesa_node.web.problem import invalid_request

_CHARS_PER_MESSAGE = 64
"""Cost of rendering a message or a tool call, in characters that take as long."""
_MAX_TEMPLATE_CHARS = 1 << 18
"""Limit on an untrusted template, which is sent to a child process with each conversation."""
_MAX_TOOLS_CHARS = 1 << 20
"""Limit on the parameters of all tools of a conversation, as JSON."""
_MAX_ARGUMENTS_CHARS = 1 << 20
"""Limit on a call's arguments that are parsed for the template; longer ones stay text."""

Render = Callable[[bytes], Awaitable[str]]
"""Renderer in a child process: `TemplateRenderer.render`."""


async def chat_prompt(
    tokenizer: Any,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] = (),
    *,
    max_tokens: int,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
    param: str = "messages",
    render: Render | None = None,
) -> list[int]:
    """Tokens of a conversation, at most about `max_tokens`, that an answer continues.

    `continue_final_message`: the answer continues the last message; `add_special_tokens`: add the
    tokenizer's special tokens; `render`: renders an untrusted template in a child process; None:
    the template is trusted and rendered here. Raises `HttpProblem`, about the field `param`, for
    conversations that the template refuses.
    """
    template = find_template(tokenizer, bool(tools), param)

    def asked() -> dict[str, Any]:
        return {
            "conversation": _to_template_messages(
                messages, has_developer_role="developer" in template
            ),
            "tools": _dump_tools(tools) or None,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }

    # The size of tools' schemas is not estimated.
    size = math.inf if tools else _estimate_chars(messages)
    try:
        if render is None:
            apply = tokenizer.apply_chat_template
            text = await offload_if_large(size, lambda: apply(**asked(), tokenize=False))
        else:
            text = await render(
                await offload_if_large(
                    size, lambda: _encode_render_call(tokenizer, template, asked())
                )
            )
    except REFUSAL_ERRORS as error:
        raise invalid_request(
            f"the model's chat template refuses these messages: {describe_refusal(error)}",
            param=param,
            code="template_error",
        ) from None
    return await encode(
        tokenizer, text, add_special_tokens=add_special_tokens, max_tokens=max_tokens, param=param
    )


def _dump_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as dicts for the template. Raises `HttpProblem` if their parameters are too large."""
    if exceeds_json_chars([tool.function.parameters for tool in tools], _MAX_TOOLS_CHARS):
        raise invalid_request(
            f"tools: their parameters have more than {_MAX_TOOLS_CHARS} characters: send less",
            param="tools",
        )
    return [tool.model_dump(exclude_none=True) for tool in tools]


def _estimate_chars(messages: Sequence[ChatMessage]) -> int:
    """Estimated cost of rendering `messages`, in characters."""
    calls = [call for message in messages for call in message.tool_calls or ()]
    size = _CHARS_PER_MESSAGE * (len(messages) + len(calls))
    size += sum(len(call.function.arguments) for call in calls)
    for message in messages:
        size += len(message.text_content()) + len(message.reasoning_content or "")
    return size


def find_template(tokenizer: Any, with_tools: bool, param: str = "messages") -> str:
    """Chat template of a tokenizer. Raises `HttpProblem` if there is none, or none with `tools`."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = (with_tools and template.get("tool_use")) or template.get("default")
    if not isinstance(template, str):
        raise invalid_request(
            "the model has no chat template, so that it cannot chat: use /v1/completions",
            param=param,
            code="no_chat_template",
        )
    if with_tools and "tools" not in template:
        raise invalid_request(
            "tools error: the model's chat template knows no tools; leave tools away, or choose "
            "a model that was trained to call them",
            param="tools",
            code="unsupported_parameter",
        )
    return template


def _encode_render_call(tokenizer: Any, template: str, asked: dict[str, Any]) -> bytes:
    """JSON question to `template_program.py`, from the arguments of `apply_chat_template`."""
    if len(template) > _MAX_TEMPLATE_CHARS:
        raise ValueError(f"it has more than {_MAX_TEMPLATE_CHARS} characters")
    special: dict[str, str] = tokenizer.special_tokens_map
    conversations = [asked.pop("conversation")]
    given = {**special, **asked, "conversations": conversations, "chat_template": template}
    return json.dumps(given).encode()


def _to_template_messages(
    messages: Sequence[ChatMessage], *, has_developer_role: bool
) -> list[dict[str, Any]]:
    conversation = []
    for message in messages:
        role = "system" if message.role == "developer" and not has_developer_role else message.role
        entry: dict[str, Any] = {"role": role, "content": message.text_content()}
        for key in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(message, key)) is not None:
                entry[key] = value
        if message.tool_calls:
            entry["tool_calls"] = calls = [call.model_dump() for call in message.tool_calls]
            for call in calls:
                call["function"]["arguments"] = _parse_arguments(call["function"]["arguments"])
        conversation.append(entry)
    return conversation


def _parse_arguments(text: str) -> object:
    """Parsed arguments; the text itself if it is not JSON or too large to parse (escaped brackets
    pass the check of the body)."""
    if len(text) > _MAX_ARGUMENTS_CHARS or find_json_excess(text.encode("utf-8", "surrogatepass")):
        return text
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        return text
