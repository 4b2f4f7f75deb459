"""Field `response_format`, and the grammar of the JSON schema that it asks for."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from nesa_node.api.bodies.fields import Body, Text
from nesa_node.api.bodies.splitting import light
from nesa_node.web.problem import Problem

ANY_OBJECT: dict[str, Any] = {"type": "object"}

Check = Callable[[str], Awaitable[None]]
"""Check of a grammar. Raises `ValueError` if it cannot be followed."""


class PlainText(Body):
    type: Literal["text"]


class JsonObject(Body):
    type: Literal["json_object"]


class NamedSchema(Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: Text | None = None
    # A field named `schema` would hide pydantic's method.
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class JsonSchema(Body):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")]


def schema_of(wanted: PlainText | JsonObject | JsonSchema | None) -> dict[str, Any] | None:
    """JSON schema that the answer must follow; None: any text."""
    match wanted:
        case JsonObject():
            return ANY_OBJECT
        case JsonSchema():
            return ANY_OBJECT if wanted.json_schema.schema_ is None else wanted.json_schema.schema_
    return None


async def grammar_of(schema: dict[str, Any] | None, param: str, check: Check) -> str | None:
    """Checked grammar of a JSON schema. Raises `Problem` for a schema that cannot be followed."""
    if schema is None:
        return None
    from nesa_node.api.decoding.grammar import json_schema_grammar

    try:
        grammar = await light(math.inf, lambda: json_schema_grammar(schema))
    except ValueError as error:
        raise _refused(param, str(error)) from None
    await checked(grammar, param, check)
    return grammar


async def checked(grammar: str, param: str, check: Check) -> None:
    """Raise `Problem` if `check` refuses a grammar made of the JSON schemas in field `param`."""
    try:
        await check(grammar)
    except ValueError as error:
        raise _refused(param, f"the JSON schema cannot be followed: {error}") from None


def _refused(param: str, reason: str) -> Problem:
    return Problem(400, f"{param}: {reason[:1000]}", code="invalid_value", param=param)
