"""Answers in a given format: `response_format` and its like, as grammars."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from pydantic import Field

from nesa_node.api.bodies.fields import Body, Text
from nesa_node.core.errors import NesaError
from nesa_node.web.problem import Problem

ANY_OBJECT: dict[str, Any] = {"type": "object"}
COMPILE_S = 10.0


class PlainText(Body):
    type: Literal["text"]


class JsonObject(Body):
    type: Literal["json_object"]


class NamedSchema(Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: Text | None = None
    # A field named `schema` would hide a method of pydantic's.
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class JsonSchema(Body):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")]


def schema_of(wanted: PlainText | JsonObject | JsonSchema | None) -> dict[str, Any] | None:
    """The JSON schema that an answer must follow; None: any text."""
    match wanted:
        case JsonObject():
            return ANY_OBJECT
        case JsonSchema():
            return ANY_OBJECT if wanted.json_schema.schema_ is None else wanted.json_schema.schema_
    return None


async def grammar_of(schema: dict[str, Any] | None, param: str) -> str | None:
    """The grammar of a schema, made in a thread. Raises `Problem` for what cannot be followed."""
    if schema is None:
        return None
    from nesa_node.api.decoding.grammar import compile_json_schema

    try:
        async with asyncio.timeout(COMPILE_S):
            return await asyncio.to_thread(compile_json_schema, schema)
    except TimeoutError:
        raise Problem(
            400, f"{param}: the schema takes too long to read", code="invalid_value", param=param
        ) from None
    except (ValueError, NesaError) as error:
        raise Problem(
            400, f"{param}: {str(error)[:1000]}", code="invalid_value", param=param
        ) from None
