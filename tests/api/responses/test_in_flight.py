"""Answers that are not read take a key's room, for as long as they are there."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Message

from nesa_node.api.generation.job import Delta, GenerationEvent, Job, PrefillDone
from nesa_node.api.responses import in_flight as answer_room
from nesa_node.api.responses.in_flight import ResponseMemory
from nesa_node.api.responses.token_logprobs import reserve_logprobs
from nesa_node.api.schemas.responses_request import InputPart
from nesa_node.web.problem import HttpProblem
from nesa_node.web.rate_limits import FairSlots
from tests.api.scripted import chat_body, serving, until

LOGPROBS: dict[str, Any] = {"logprobs": True, "top_logprobs": 4, "max_tokens": 20}
KIB_OF_LOGPROBS = 20


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> FairSlots:
    shares = FairSlots(KIB_OF_LOGPROBS * 2 - 1, "KiB of large answers", retry_after_s=1)
    monkeypatch.setattr(answer_room, "_memory_shares", shares)
    return shares


async def test_log_probabilities_take_room_while_they_may_come(
    tokenizer: Any, room: FairSlots
) -> None:
    async def waits(_job: Job) -> AsyncIterator[GenerationEvent]:
        yield PrefillDone()
        await asyncio.Event().wait()

    async with serving(tokenizer, waits) as server:
        post = server.client.stream("POST", "/v1/chat/completions", json=ask(stream=True))
        async with post as response:
            assert response.status_code == 200
            assert room.held == KIB_OF_LOGPROBS
            refused = await server.post("/v1/chat/completions", ask())
            assert refused.status_code == 503
            assert "KiB of large answers" in refused.json()["error"]["message"]
        await until(lambda: not room.held)


def ask(**fields: Any) -> dict[str, Any]:
    return chat_body(**LOGPROBS, **fields)


async def test_embeddings_take_room(tokenizer: Any, room: FairSlots) -> None:
    body = {"input": ["hello"] * 40}
    async with serving(tokenizer) as server:
        server.model.hidden_size = 1
        refused = await server.post("/v1/embeddings", body)
        assert refused.status_code == 503
        fits = await server.post("/v1/embeddings", {"input": ["hello"] * 30})
        assert fits.status_code == 200
        await until(lambda: not room.held)


async def test_room_is_taken_until_an_answer_was_sent(room: FairSlots) -> None:
    """The job has ended by then, and its share of requests was given back."""
    sending, read = asyncio.Event(), asyncio.Event()

    async def app(_scope: object, _receive: object, send: Any) -> None:
        answer_room.reserve_memory(5000)
        await send({})

    async def send(_message: Message) -> None:
        sending.set()
        await read.wait()

    async def receive() -> Message:
        raise AssertionError

    async with asyncio.TaskGroup() as group:
        group.create_task(ResponseMemory(app)({"type": "http"}, receive, send))
        await sending.wait()
        assert room.held == 5
        read.set()
    assert not room.held


def test_a_token_takes_more_than_those_that_it_was_chosen_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []
    monkeypatch.setattr("nesa_node.api.responses.token_logprobs.reserve_memory", taken.append)
    job = Job(prompt=(1, 2), max_tokens=3, n=2)
    reserve_logprobs([job], is_private=False, param="x")
    reserve_logprobs(
        [Job(prompt=(1, 2), max_tokens=3, n=2, top_logprobs=0)], is_private=False, param="x"
    )
    echo = Job(prompt=(1, 2), max_tokens=3, n=2, top_logprobs=5, prompt_logprobs=True)
    reserve_logprobs([echo, job], is_private=False, param="x")
    assert taken == [0, 6 * 340, 10 * (340 + 5 * 160)]
    with pytest.raises(HttpProblem, match="log probabilities"):
        reserve_logprobs(
            [Job(prompt=(1,), max_tokens=1 << 19, n=3, top_logprobs=0)], is_private=False, param="x"
        )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_does_not_keep_its_input(tokenizer: Any, stream: bool) -> None:
    alive: list[int] = []

    async def counts(_job: Job) -> AsyncIterator[GenerationEvent]:
        yield PrefillDone()
        alive.append(sum(type(one) is InputPart for one in gc.get_objects()))
        yield Delta(index=0, text="hello", finish_reason="stop")

    parts = [{"type": "input_text", "text": "hello"}] * 8
    body = {"input": [{"role": "user", "content": parts}], "stream": stream}
    async with serving(tokenizer, counts) as server:
        assert (await server.post("/v1/responses", body)).status_code == 200
    assert alive == [0]
