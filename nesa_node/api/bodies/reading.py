"""Request bodies: JSON, then the fields of a `Body`, or a `Problem`.

How large they may be is `web/bodies.py`'s business.
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
"""Lists and objects of one body, counted with the brackets in its texts. 8 MiB of empty ones would
be 250 MiB and stop all threads while they are made."""
MAX_KEYS = 256 * 1024
"""Of all objects of one body, counted with what looks like one in its texts: all threads stop while
they are read, 80 ms for so many."""
_SUBJECT = re.compile(r"^(?:Input|List|String|Dictionary) should")
_OF_LENGTH = ("too_long", "too_short")


def body_of(kind: type[B]) -> Any:
    """A dependency: the request's body as a `kind`. Raises `Problem`."""

    async def read(request: Request) -> B:
        _require_json(request)
        data = await request.body()
        return await light(len(data), lambda: parse(kind, data))

    reader: Callable[[Request], Awaitable[B]] = read
    return Depends(reader)


def parse(kind: type[B], data: bytes) -> B:
    """A `kind` from JSON. Raises `Problem` with the field that is wrong."""
    if crowd := crowd_in(data):
        raise Problem(
            400, f"the body has more than {crowd}: send less at once", code="invalid_value"
        )
    try:
        # Refuses NaN, lone surrogates, bytes that are no UTF-8, and nesting beyond 200.
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
    """What JSON has too much of to be read at once, whatever its size: brackets, or keys.

    None: neither. It may have fewer than are counted, since its texts are not told apart, and never
    more.
    """
    if data.count(b"[") + data.count(b"{") > MAX_CONTAINERS:
        return f"{MAX_CONTAINERS} brackets that open"
    # White space may stand before a colon. Texts have many colons that follow no quote.
    if data.count(b":") > MAX_KEYS and data.translate(None, b" \t\r\n").count(b'":') > MAX_KEYS:
        return f"{MAX_KEYS} keys"
    return None


def _require_json(request: Request) -> None:
    """Also keeps strange pages out: browsers ask before they let them send this type."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Problem(
            415, "the content type must be application/json", code="unsupported_media_type"
        )


def _problem(details: Sequence[ErrorDetails], value: object) -> Problem:
    """Of several errors, the first of those farthest down: of a union, the branch that was meant.

    But that a list has too many parts, or none, is told by the branch that it otherwise fits.
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
    """The part of `loc` that leads into `value`: pydantic also names the branches of unions."""
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
    """`messages[0].content`."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return text.removeprefix(".")[:200]
