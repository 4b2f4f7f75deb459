"""A model that is opened by the first request for it: the stream says what it waits for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from nesa_node.api.models.sandbox import GrammarChecker
from nesa_node.core.errors import ModelNotFoundError
from nesa_node.core.wait_tracking import MIN_REPORTED_WAIT_S
from nesa_node.web.key_store import KeyLimits, KeyStore
from tests.api.scripted import NAME, chat_body, events_of, serving, until

OPENING_S = MIN_REPORTED_WAIT_S + 0.8
BODIES = {
    "/v1/chat/completions": chat_body(stream=True),
    "/v1/completions": {"model": NAME, "prompt": "hello", "stream": True},
    "/v1/responses": {"model": NAME, "input": "hello", "stream": True},
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "any", "schema": {"type": "object"}}}
COMMENT = ": waiting for the model to be opened for the first time: 2 s so far\n\n"


async def test_streams_say_that_the_model_is_being_opened(tokenizer: Any) -> None:
    async with serving(tokenizer, opening=lambda: asyncio.sleep(OPENING_S)) as server:
        answers = await asyncio.gather(*(server.post(*each) for each in BODIES.items()))
        opened_now = await server.post("/v1/chat/completions", chat_body(stream=True))
    for answer in answers:
        assert answer.status_code == 200
        assert answer.text.startswith(COMMENT)
        assert "error" not in events_of(answer.text)[0]
        assert len(events_of(answer.text)) > 2
    assert not opened_now.text.startswith(":")


async def test_model_that_opens_soon_needs_no_comment(tokenizer: Any) -> None:
    async with serving(tokenizer, opening=lambda: asyncio.sleep(0.1)) as server:
        answer = await server.post("/v1/chat/completions", chat_body(stream=True))
    assert answer.text.startswith("data: ")


@pytest.mark.parametrize("path", BODIES)
async def test_what_fails_soon_has_a_status(tokenizer: Any, path: str) -> None:
    async def fail() -> None:
        raise ModelNotFoundError("its files are gone")

    async with serving(tokenizer, opening=fail) as server:
        answer = await server.post(path, BODIES[path])
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "its files are gone"


async def test_what_fails_after_a_comment_is_an_event(tokenizer: Any) -> None:
    async def fail() -> None:
        await asyncio.sleep(OPENING_S)
        raise ModelNotFoundError("its files are gone")

    async with serving(tokenizer, opening=fail) as server:
        answers = await asyncio.gather(*(server.post(*each) for each in BODIES.items()))
    for answer in answers:
        assert answer.text.startswith(COMMENT)
        error, done = events_of(answer.text)
        assert error["error"]["message"] == "its files are gone"
        assert done == "[DONE]"


async def test_client_that_goes_does_not_end_the_opening(tokenizer: Any) -> None:
    begun, may_open, times = asyncio.Event(), asyncio.Event(), []

    async def open_slowly() -> None:
        times.append(1)
        begun.set()
        await may_open.wait()

    async with serving(tokenizer, opening=open_slowly) as server:
        with pytest.raises(httpx.ReadTimeout):
            await server.post("/v1/chat/completions", chat_body(stream=True), timeout=0.3)
        await begun.wait()
        waiting = asyncio.create_task(server.chat(stream=True))
        await asyncio.sleep(0.1)
        may_open.set()
        assert (await waiting).status_code == 200
    assert len(times) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("slow", ["opening", "schema"])
async def test_client_that_goes_before_its_answer_begins_leaves_its_slot(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str, stream: bool
) -> None:
    may_go_on, waiting = asyncio.Event(), []

    async def wait(*_given: object, **_options: object) -> None:
        waiting.append(1)
        await may_go_on.wait()

    monkeypatch.setattr(GrammarChecker, "check", wait)
    store = KeyStore(tmp_path / "keys.json")
    headers = {"authorization": f"Bearer {store.add('a', KeyLimits(concurrent_requests=1))[1]}"}
    body = chat_body(stream=stream, response_format=SCHEMA if slow == "schema" else None)
    opening = wait if slow == "opening" else None
    async with serving(tokenizer, opening=opening, keys_path=store.path) as server:
        asking = asyncio.create_task(
            server.post("/v1/chat/completions", body, headers=headers, timeout=30)
        )
        try:
            await until(lambda: bool(waiting))
            second = await server.client.get("/v1/models", headers=headers)
            assert second.status_code == 429
            asking.cancel()
            async with asyncio.timeout(5):
                while second.status_code == 429:
                    await asyncio.sleep(0.02)
                    second = await server.client.get("/v1/models", headers=headers)
            assert second.status_code == 200
        finally:
            may_go_on.set()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
