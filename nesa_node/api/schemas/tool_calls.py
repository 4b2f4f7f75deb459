"""Tool calls in a model's answer: their format, parser, and grammar of a forced call.

Two formats: `<tool_call>{"name": ..., "arguments": ...}</tool_call>` (Hermes, Qwen, SmolLM3), and
an answer that is only such an object or a list of them (Llama 3 with "parameters", Mistral).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Sequence
from typing import Any, Literal

from pydantic_core import from_json

from nesa_node.api.generation.bounded_json import (
    MAX_SCHEMA_BYTES,
    WHITESPACE_RULES,
    dump_bounded_json,
    exceeds_json_chars,
)
from nesa_node.api.generation.tokenization import overlap_chars
from nesa_node.api.schemas.chat_request import Tool, ToolChoice
from nesa_node.api.schemas.request_body import find_json_excess
from nesa_node.web.problem import HttpProblem, invalid_request

CallFormat = Literal["tagged", "bare"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TAGGED = re.compile(rf"{_OPEN}(.*?)(?:{_CLOSE}|\Z)", re.DOTALL)
MAX_CALLS = 64
EMPTY_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
"""JSON schema of a tool without parameters."""


def detect_call_format(template: str) -> CallFormat:
    return "tagged" if _OPEN in template else "bare"


class ToolCallParser:
    """Incremental parser that splits one choice's text into content and tool calls."""

    def __init__(self, call_format: CallFormat, names: Collection[str]) -> None:
        self._call_format = call_format
        self._names = frozenset(names)
        self._pending = ""
        self._is_plain_text = False

    def feed(self, text: str) -> str:
        """Add text; return the content that cannot be part of a call."""
        self._pending += text
        keep = self._call_start()
        words, self._pending = self._pending[:keep], self._pending[keep:]
        return words

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """Rest of the content, and the calls in OpenAI's format."""
        held, self._pending = self._pending, ""
        if self._call_format == "tagged":
            return self._parse_tagged(held)
        calls = self._parse_calls(held)
        return ("", calls) if calls else (held, [])

    def _call_start(self) -> int:
        """Offset in the pending text at which a call begins, or may begin once more text comes."""
        held = self._pending
        if self._call_format == "bare":
            self._is_plain_text = self._is_plain_text or held.lstrip()[:1] not in ("", "{", "[")
            return len(held) if self._is_plain_text else 0
        if (start := held.find(_OPEN)) >= 0:
            return start
        return len(held) - overlap_chars(held, _OPEN)

    def _parse_tagged(self, held: str) -> tuple[str, list[dict[str, Any]]]:
        calls: list[dict[str, Any]] = []

        def take(found: re.Match[str]) -> str:
            read = self._parse_calls(found[1])
            calls.extend(read)
            return "" if read else found[0]

        words = _TAGGED.sub(take, held)
        return (words if words.strip() else ""), calls[:MAX_CALLS]

    def _parse_calls(self, text: str) -> list[dict[str, Any]]:
        """Calls in `text`; an empty list if it is anything else, or names an unknown tool."""
        if find_json_excess(text.encode("utf-8", "surrogatepass")):
            return []
        try:
            value = from_json(text.strip(), allow_inf_nan=False)
        except ValueError:
            return []
        calls = [self._parse_call(one) for one in (value if isinstance(value, list) else [value])]
        return [call for call in calls if call] if all(calls) else []

    def _parse_call(self, value: object) -> dict[str, Any] | None:
        if not isinstance(value, dict):
            return None
        name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
        # The model's JSON is arbitrary: a name may be unhashable.
        if not isinstance(name, str) or name not in self._names:
            return None
        if not isinstance(arguments, dict | str):
            return None
        if isinstance(arguments, dict):
            # Not msgspec: integers may have more than 64 bits.
            arguments = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
        return {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }


def forced_call_grammar(
    call_format: CallFormat, tools: Sequence[Tool], choice: Literal["required"] | ToolChoice
) -> str:
    """llguidance grammar of one call, of the chosen tool or of any; not checked yet.

    Raises `HttpProblem` if the chosen tool does not exist, or if schemas exceed
    `MAX_SCHEMA_BYTES`.
    """
    if isinstance(choice, ToolChoice):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
        if not tools:
            raise invalid_request(
                f"tool_choice names {choice.function.name!r}, which is not among the tools",
                param="tool_choice",
            )
    # Checked before they are copied: they may be as large as a body.
    if exceeds_json_chars([tool.function.parameters for tool in tools], MAX_SCHEMA_BYTES):
        raise _too_large_problem()
    calls = [_call_schema(tool, call_format, f"#/anyOf/{at}") for at, tool in enumerate(tools)]
    whole = {"anyOf": calls, "x-guidance": WHITESPACE_RULES}
    if (schema := dump_bounded_json(whole, MAX_SCHEMA_BYTES, compact=True)) is None:
        raise _too_large_problem()
    start = f'"{_OPEN}\\n" call "\\n{_CLOSE}"' if call_format == "tagged" else "call"
    return f"start: {start}\ncall: %json {schema}\n"


def _too_large_problem() -> HttpProblem:
    return invalid_request(
        "tools: the schemas of the tools to choose from have more than the "
        f"{MAX_SCHEMA_BYTES} characters that are allowed",
        param="tools",
    )


def _call_schema(tool: Tool, call_format: CallFormat, path: str) -> dict[str, Any]:
    """JSON schema of a call; `path` is its own path in the whole schema."""
    arguments = "arguments" if call_format == "tagged" else "parameters"
    parameters = tool.function.parameters or EMPTY_PARAMETERS
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.function.name},
            arguments: _rebase_refs(parameters, f"{path}/properties/{arguments}"),
        },
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _rebase_refs(schema: Any, path: str) -> Any:
    """Copy of `schema` with its local references rebased to the path `path`."""
    if isinstance(schema, list):
        return [_rebase_refs(part, path) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _rebase_refs(part, path) for key, part in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        moved["$ref"] = path + target[1:]
    return moved
