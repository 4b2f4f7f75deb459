"""Parsing of request bodies: from JSON to a `Body`, or a `Problem`.

`web/bodies.py` limits their size.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from fastapi import Depends
from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import Request

from nesa_node.api.bodies.fields import UNSUPPORTED, Body
from nesa_node.api.bodies.splitting import light
from nesa_node.web.problem import Problem

B = TypeVar("B", bound=Body)

MAX_CONTAINERS = 256 * 1024
"""Limit on lists and objects of a body; brackets within strings count, too. 8 MiB of empty lists
would take 250 MiB and hold the GIL while they are created."""
MAX_KEYS = 256 * 1024
"""Limit on keys of all objects of a body; look-alikes within strings count, too. Parsing holds the
GIL, for 80 ms at this limit."""
_SUBJECT = re.compile(r"^(?:Input|List|String|Dictionary) should")
_OF_LENGTH = ("too_long", "too_short")


def body_of(kind: type[B]) -> Any:
    """FastAPI dependency that parses the request's body as a `kind`. Raises `Problem`."""

    async def read(request: Request) -> B:
        _require_json(request)
        data = await request.body()
        return await light(len(data), lambda: parse(kind, data))

    reader: Callable[[Request], Awaitable[B]] = read
    return Depends(reader)


def parse(kind: type[B], data: bytes) -> B:
    """Parse JSON as a `kind`. Raises `Problem` that names the wrong field."""
    if crowd := crowd_in(data):
        raise Problem(
            400, f"the body has more than {crowd}: send less at once", code="invalid_value"
        )
    try:
        # Refuses NaN, lone surrogates, invalid UTF-8, and nesting beyond 200 levels.
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise Problem(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise Problem(400, "the body must be a JSON object", code="invalid_type")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        raise _problem(found, value) from None


def crowd_in(data: bytes) -> str | None:
    """Name of what `data` has too many of to be parsed at once: brackets or keys; None: neither.

    The counts include look-alikes within strings, so they are upper bounds.
    """
    if data.count(b"[") + data.count(b"{") > MAX_CONTAINERS:
        return f"{MAX_CONTAINERS} brackets that open"
    # White space may precede a colon. Strings have many colons that follow no quote.
    if data.count(b":") > MAX_KEYS and data.translate(None, b" \t\r\n").count(b'":') > MAX_KEYS:
        return f"{MAX_KEYS} keys"
    return None


def _require_json(request: Request) -> None:
    """Refuse other content types: browsers send this one cross-origin only after a preflight."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Problem(
            415, "the content type must be application/json", code="unsupported_media_type"
        )


def _problem(details: Sequence[ErrorDetails], value: object) -> Problem:
    """Report the most deeply nested error: in a union it belongs to the branch that was meant.

    Errors of a list's length go first, since only the matching branch of a union checks it.
    """
    found = [(_place(detail["loc"], value, detail["type"]), detail) for detail in details]
    keys, detail = max(found, key=lambda each: (each[1]["type"] in _OF_LENGTH, len(each[0])))
    param = _spell(keys)
    kind = detail["type"]
    if kind == "extra_forbidden":
        return Problem(400, f"unknown parameter: {param}", code="unknown_parameter", param=param)
    if kind == UNSUPPORTED:
        return Problem(400, f"{param}: {detail['msg']}", code=UNSUPPORTED, param=param)
    if kind == "missing":
        return Problem(400, f"{param} is required", code="missing_required_parameter", param=param)
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    words = _SUBJECT.sub("it should", detail["msg"].removeprefix("Value error, "))
    words = words.replace(" after validation", "")
    return Problem(400, f"{param or 'the body'}: {words}", code=code, param=param or None)


def _place(loc: Sequence[int | str], value: Any, kind: str) -> tuple[int | str, ...]:
    """Keys of `loc` that exist in `value`: pydantic's paths also name branches of unions."""
    keys: list[int | str] = []
    for number, key in enumerate(loc):
        if _leads(key, value):
            value = value[key]
        elif not (kind == "missing" and number == len(loc) - 1):
            continue
        keys.append(key)
    return tuple(keys)


def _leads(key: int | str, value: object) -> bool:
    if isinstance(value, list):
        return isinstance(key, int) and key < len(value)
    return isinstance(value, dict) and key in value


def _spell(keys: Sequence[int | str]) -> str:
    """Path of a field as text, such as `messages[0].content`; at most 200 characters."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return text.removeprefix(".")[:200]
