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

from nesa_node.api.bodies.chat_body import NamedTool, Tool
from nesa_node.api.bodies.reading import crowd_in
from nesa_node.api.decoding.bounded_json import bounded_json, is_longer
from nesa_node.web.problem import Problem

Format = Literal["tagged", "bare"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TAGGED = re.compile(rf"{_OPEN}(.*?)(?:{_CLOSE}|\Z)", re.DOTALL)
MAX_CALLS = 64
MOST_SCHEMA_BYTES = 64 * 1024
"""Limit on the schemas of tools in a grammar: compiling ten times as much takes a minute."""
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
"""JSON schema of a tool without parameters."""
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Options of llguidance: with free white space, small models write nothing else."""


def format_of(template: str) -> Format:
    return "tagged" if _OPEN in template else "bare"


class CallReader:
    """Incremental parser that splits one choice's text into content and tool calls."""

    def __init__(self, written: Format, names: Collection[str]) -> None:
        self._written = written
        self._names = frozenset(names)
        self._held = ""
        self._plain = False

    def feed(self, text: str) -> str:
        """Add text; return the content that cannot be part of a call."""
        self._held += text
        keep = self._calls_from()
        words, self._held = self._held[:keep], self._held[keep:]
        return words

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """Rest of the content, and the calls in OpenAI's format."""
        held, self._held = self._held, ""
        if self._written == "tagged":
            return self._tagged(held)
        calls = self._calls(held)
        return ("", calls) if calls else (held, [])

    def _calls_from(self) -> int:
        """Offset in the pending text at which a call begins, or may begin once more text comes."""
        held = self._held
        if self._written == "bare":
            self._plain = self._plain or held.lstrip()[:1] not in ("", "{", "[")
            return len(held) if self._plain else 0
        if (start := held.find(_OPEN)) >= 0:
            return start
        for length in range(min(len(_OPEN) - 1, len(held)), 0, -1):
            if held.endswith(_OPEN[:length]):
                return len(held) - length
        return len(held)

    def _tagged(self, held: str) -> tuple[str, list[dict[str, Any]]]:
        calls: list[dict[str, Any]] = []

        def take(found: re.Match[str]) -> str:
            read = self._calls(found[1])
            calls.extend(read)
            return "" if read else found[0]

        words = _TAGGED.sub(take, held)
        return (words if words.strip() else ""), calls[:MAX_CALLS]

    def _calls(self, text: str) -> list[dict[str, Any]]:
        """Calls in `text`; an empty list if it is anything else, or names an unknown tool."""
        if crowd_in(text.encode("utf-8", "surrogatepass")):
            return []
        try:
            value = from_json(text.strip(), allow_inf_nan=False)
        except ValueError:
            return []
        calls = [self._call(one) for one in (value if isinstance(value, list) else [value])]
        return [call for call in calls if call] if all(calls) else []

    def _call(self, value: object) -> dict[str, Any] | None:
        if not isinstance(value, dict):
            return None
        name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
        # The model's JSON is arbitrary: a name may be unhashable.
        if not isinstance(name, str) or name not in self._names:
            return None
        if not isinstance(arguments, dict | str):
            return None
        text = arguments if isinstance(arguments, str) else _json(arguments)
        return {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": name, "arguments": text},
        }


def forced_calls(
    written: Format, tools: Sequence[Tool], choice: Literal["required"] | NamedTool
) -> str:
    """llguidance grammar of one call, of the chosen tool or of any; not checked yet.

    Raises `Problem` if the chosen tool does not exist, or if schemas exceed `MOST_SCHEMA_BYTES`.
    """
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
        if not tools:
            raise Problem(
                400,
                f"tool_choice names {choice.function.name!r}, which is not among the tools",
                code="invalid_value",
                param="tool_choice",
            )
    # Checked before they are copied: they may be as large as a body.
    if is_longer([tool.function.parameters for tool in tools], MOST_SCHEMA_BYTES):
        raise _too_large()
    calls = [_call_schema(tool, written, f"#/anyOf/{at}") for at, tool in enumerate(tools)]
    whole = {"anyOf": calls, "x-guidance": _ONE_LINE}
    if (schema := bounded_json(whole, MOST_SCHEMA_BYTES, compact=True)) is None:
        raise _too_large()
    start = f'"{_OPEN}\\n" call "\\n{_CLOSE}"' if written == "tagged" else "call"
    return f"start: {start}\ncall: %json {schema}\n"


def _too_large() -> Problem:
    return Problem(
        400,
        "tools: the schemas of the tools to choose from have more than the "
        f"{MOST_SCHEMA_BYTES} characters that are allowed",
        code="invalid_value",
        param="tools",
    )


def _json(value: Any) -> str:
    """JSON of a parsed value, also of integers beyond 64 bits."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _call_schema(tool: Tool, written: Format, place: str) -> dict[str, Any]:
    """JSON schema of a call; `place` is its own path in the whole schema."""
    arguments = "arguments" if written == "tagged" else "parameters"
    parameters = tool.function.parameters or NO_PARAMETERS
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.function.name},
            arguments: _moved(parameters, f"{place}/properties/{arguments}"),
        },
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """Copy of `schema` with its local references rebased to the path `place`."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(part, place) for key, part in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        moved["$ref"] = place + target[1:]
    return moved
