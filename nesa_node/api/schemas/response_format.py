"""Field `response_format`, and the grammar of the JSON schema that it asks for."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from nesa_node.api.schemas.request_body import RequestBody, Text
from nesa_node.api.schemas.tokenization import offload_if_large
from nesa_node.web.problem import HttpProblem

ANY_OBJECT: dict[str, Any] = {"type": "object"}

GrammarCheck = Callable[[str], Awaitable[None]]
"""Check of a grammar. Raises `ValueError` if it cannot be followed."""


class PlainText(RequestBody):
    type: Literal["text"]


class JsonObject(RequestBody):
    type: Literal["json_object"]


class NamedSchema(RequestBody):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: Text | None = None
    # A field named `schema` would hide pydantic's method.
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class JsonSchema(RequestBody):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")]


def requested_schema(
    response_format: PlainText | JsonObject | JsonSchema | None,
) -> dict[str, Any] | None:
    """JSON schema that the answer must follow; None: any text."""
    match response_format:
        case JsonObject():
            return ANY_OBJECT
        case JsonSchema():
            return (
                ANY_OBJECT
                if response_format.json_schema.schema_ is None
                else response_format.json_schema.schema_
            )
    return None


async def checked_grammar(
    schema: dict[str, Any] | None, param: str, check: GrammarCheck
) -> str | None:
    """Checked grammar of a JSON schema; `HttpProblem` for a schema that cannot be followed."""
    if schema is None:
        return None
    from nesa_node.api.generation.grammar import json_schema_grammar

    try:
        grammar = await offload_if_large(math.inf, lambda: json_schema_grammar(schema))
    except ValueError as error:
        raise _format_problem(param, str(error)) from None
    await check_grammar(grammar, param, check)
    return grammar


async def check_grammar(grammar: str, param: str, check: GrammarCheck) -> None:
    """Raise `HttpProblem` if `check` refuses a grammar made of JSON schemas in field `param`."""
    try:
        await check(grammar)
    except ValueError as error:
        raise _format_problem(param, f"the JSON schema cannot be followed: {error}") from None


def _format_problem(param: str, reason: str) -> HttpProblem:
    return HttpProblem(400, f"{param}: {reason[:1000]}", code="invalid_value", param=param)
