"""A grammar that cannot be checked in bounded time is refused, and holds up no other."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from string import ascii_letters
from typing import Any

import pytest

from nesa_node.api.generation.grammar import json_schema_grammar
from nesa_node.api.models.sandbox import MAX_WAITING_CHECKS, GrammarChecker
from nesa_node.core.errors import BusyError
from tests.api.scripted import Server, chat_body, serving

HONEST: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-z]{1,20}$"}},
    "required": ["name"],
}


def intersected(count: int, wrapped: str = ".*{}.*") -> dict[str, Any]:
    """The time that reading it takes doubles with each pattern."""
    return {
        "allOf": [
            {"type": "string", "pattern": wrapped.format(ascii_letters[number])}
            for number in range(count)
        ]
    }


HOSTILE = {
    "all of many patterns": intersected(26),
    "a key of many patterns": {
        "type": "object",
        "patternProperties": {"^.*(" + "|".join("ab") + ").{20}$": intersected(26)},
    },
    "within an array": {"type": "array", "items": intersected(30, "[^{0}]*{0}[^{0}]*")},
}


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker()
    yield made
    await made.close()


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_schema_without_bound_is_refused_in_bounded_time(
    checker: GrammarChecker, name: str
) -> None:
    grammar = json_schema_grammar(HOSTILE[name])
    began = time.monotonic()
    with pytest.raises(ValueError, match="it takes"):
        await checker.check(grammar)
    assert time.monotonic() - began < 8
    began = time.monotonic()
    with pytest.raises(ValueError, match="it takes"):
        await checker.check(grammar)
    assert time.monotonic() - began < 0.1, "it was not remembered"
    await checker.check(json_schema_grammar(HONEST))


async def test_schemas_of_one_caller_do_not_hold_up_another(checker: GrammarChecker) -> None:
    await checker.check(json_schema_grammar({"const": "warm"}), "honest")
    hostile = [
        asyncio.ensure_future(checker.check(json_schema_grammar(intersected(24 + at)), "hostile"))
        for at in range(4)
    ]
    await asyncio.sleep(0.1)
    for number in range(20):
        began = time.monotonic()
        await checker.check(json_schema_grammar({"const": number}), "honest")
        assert time.monotonic() - began < 1
    for result in await asyncio.gather(*hostile, return_exceptions=True):
        assert isinstance(result, ValueError)


async def test_a_caller_with_many_schemas_is_told_to_wait(checker: GrammarChecker) -> None:
    running = [
        asyncio.ensure_future(checker.check(json_schema_grammar({"const": number}), "a"))
        for number in range(MAX_WAITING_CHECKS)
    ]
    await asyncio.sleep(0)
    with pytest.raises(BusyError):
        await checker.check(json_schema_grammar({"const": "one more"}), "a")
    await checker.check(json_schema_grammar({"const": "one more"}), "b")
    await asyncio.gather(*running)


async def test_a_check_that_is_given_up_ends_its_process(checker: GrammarChecker) -> None:
    checking = asyncio.ensure_future(checker.check(json_schema_grammar(intersected(26))))
    await asyncio.sleep(0.5)
    before = children()
    assert before
    checking.cancel()
    await asyncio.gather(checking, return_exceptions=True)
    assert not before & children()


def children() -> set[int]:
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        return set(map(int, file.read().split()))


async def test_a_hostile_schema_is_a_client_error_and_delays_no_other_request(
    tokenizer: Any,
) -> None:
    async with serving(tokenizer) as server:
        assert (await with_schema(server, HONEST)).status_code == 200
        asking = [
            asyncio.ensure_future(with_schema(server, intersected(26 + at % 2))) for at in range(8)
        ]
        await asyncio.sleep(0.2)
        began = time.monotonic()
        body = {"model": "scripted", "prompt": "hello " * 1000, "max_tokens": 1}
        assert (await server.post("/v1/completions", body)).status_code == 400  # too long, split
        assert (await server.chat()).status_code == 200
        assert time.monotonic() - began < 1.5
        for response in await asyncio.gather(*asking):
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "response_format")
            assert "takes more than 1 s" in error["message"]


async def test_tools_that_must_be_called_are_checked_too(tokenizer: Any) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": intersected(26)}}}
    tools = [{"type": "function", "function": function}]
    async with serving(tokenizer) as server:
        response = await server.chat(tools=tools, tool_choice="required")
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools")


async def with_schema(server: Server, schema: dict[str, Any]) -> Any:
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return await server.post("/v1/chat/completions", chat_body(response_format=wanted))
