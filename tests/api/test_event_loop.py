"""What takes long is done elsewhere: whoever streams meanwhile must not notice."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from starlette.types import Message

from nesa_node.api.endpoints.chat import ChatCompletionBuilder
from nesa_node.api.endpoints.embeddings import EmbeddingRequest
from nesa_node.api.endpoints.tokenization import DetokenizeRequest
from nesa_node.api.gateway import UsageCounter
from nesa_node.api.generation.job import CandidateToken, Delta, PrefillDone, SequenceToken
from nesa_node.api.generation.tokenization import MAX_THREADS_PER_KEY
from nesa_node.api.models.jobs import JobEvent
from nesa_node.api.responses.http_responses import MAX_CHUNK_BYTES, ComputedResponse
from nesa_node.api.responses.in_flight import GracefulShutdown
from nesa_node.api.schemas import request_body as reading
from nesa_node.api.schemas.chat_request import ChatCompletionRequest
from nesa_node.api.schemas.generation_request import CompletionRequest
from nesa_node.api.schemas.responses_request import ResponsesRequest
from nesa_node.web.key_store import KeyLimits, KeyStore
from tests.api.scripted import NAME, chat_body, serving, until

MANY = 5000
TOOLS_TEMPLATE = "{{ tools|tojson }}{% for message in messages %}{{ message.content }}{% endfor %}"


class Spied:
    """A tokenizer that remembers which of its methods ran in the thread that made this."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._thread = threading.get_ident()
        self.here: list[str] = []
        self.elsewhere: list[str] = []

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __call__(self, *given: Any, **options: Any) -> Any:
        return self._noted("__call__")(*given, **options)

    def __getattr__(self, name: str) -> Any:
        if name in ("decode", "apply_chat_template", "convert_ids_to_tokens"):
            return self._noted(name)
        return getattr(self._tokenizer, name)

    def _noted(self, name: str) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            mine = threading.get_ident() == self._thread
            (self.here if mine else self.elsewhere).append(name)
            return getattr(self._tokenizer, name)(*given, **options)

        return call


def _calls(count: int) -> list[dict[str, Any]]:
    one = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return [one] * count


@pytest.mark.parametrize(
    ("path", "body", "method"),
    [
        ("/v1/embeddings", {"input": ["hello " * 20] * 100}, "__call__"),
        ("/v1/completions", {"prompt": ["hello " * 20] * 100}, "__call__"),
        ("/v1/completions", {"prompt": [[5] * 40] * 120, "echo": True}, "decode"),
        ("/detokenize", {"tokens": [5] * MANY}, "decode"),
        (
            "/tokenize",
            {"prompt": "hello " * MANY, "return_token_strs": True},
            "convert_ids_to_tokens",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": ""}] * 100},
            "apply_chat_template",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": _calls(100)}]},
            "apply_chat_template",
        ),
        (
            "/v1/chat/completions",
            {**chat_body(), "tools": [{"type": "function", "function": {"name": "f"}}]},
            "apply_chat_template",
        ),
    ],
)
async def test_work_without_bound_is_done_in_a_thread(
    tokenizer: Any, path: str, body: dict[str, Any], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "tools" in body:
        monkeypatch.setattr(tokenizer, "chat_template", TOOLS_TEMPLATE)
    spied = Spied(tokenizer)
    async with serving(spied) as server:
        response = await server.post(path, {**body, "model": NAME})
        assert response.status_code in (200, 400), response.text
    assert method in spied.elsewhere
    assert method not in spied.here


async def test_short_requests_need_no_thread(tokenizer: Any) -> None:
    spied = Spied(tokenizer)
    async with serving(spied) as server:
        assert (await server.chat()).status_code == 200
    assert not spied.elsewhere


async def test_large_bodies_are_read_in_a_thread(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    parse = reading.parse_body

    def noted(*given: Any) -> Any:
        threads.append(threading.get_ident())
        return parse(*given)

    monkeypatch.setattr(reading, "parse_body", noted)
    async with serving(tokenizer) as server:
        assert (await server.chat(user="x" * 4096)).status_code == 200
    assert threads != [threading.get_ident()]


async def test_large_work_of_one_key_does_not_keep_another_waiting(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts, bodies and schemas of one key get half of the threads, whatever else waits."""
    store = KeyStore(tmp_path / "keys.json")
    first, second = (
        {"authorization": f"Bearer {store.add(name, KeyLimits())[1]}"} for name in ("a", "b")
    )
    begun: list[str] = []
    go_on = threading.Event()
    parse = reading.parse_body

    def noted(kind: Any, data: bytes) -> Any:
        found = parse(kind, data)
        begun.append(found.user[0])
        assert found.user[0] == "b" or go_on.wait(20)
        return found

    monkeypatch.setattr(reading, "parse_body", noted)
    async with serving(tokenizer, keys_path=store.path) as server, asyncio.TaskGroup() as group:
        path = "/v1/chat/completions"
        for _ in range(MAX_THREADS_PER_KEY + 10):
            group.create_task(server.post(path, chat_body(user="a" * 4096), headers=first))
        try:
            await until(lambda: len(begun) == MAX_THREADS_PER_KEY)
            async with asyncio.timeout(10):
                answer = await server.post(path, chat_body(user="b" * 4096), headers=second)
            assert answer.status_code == 200
            assert begun == ["a"] * MAX_THREADS_PER_KEY + ["b"]
        finally:
            go_on.set()


class Turns:
    """Counts what happens in each turn of the event loop."""

    def __init__(self) -> None:
        self.now = 0
        self.counts: Counter[int] = Counter()

    def note(self) -> None:
        self.counts[self.now] += 1

    @contextmanager
    def passing(self) -> Iterator[None]:
        async def passed() -> None:
            while True:
                await asyncio.sleep(0)
                self.now += 1

        passing = asyncio.create_task(passed())
        try:
            yield
        finally:
            passing.cancel()


@pytest.mark.parametrize(("encoding", "method"), [("float", "tolist"), ("base64", "numpy")])
async def test_of_many_embeddings_few_are_encoded_at_a_time(
    tokenizer: Any, encoding: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns()
    right = getattr(torch.Tensor, method)
    vectors = list(torch.rand(64, 4096))

    def noted(vector_D: torch.Tensor) -> Any:
        turns.note()
        return right(vector_D)

    async def embed(_prompts: object) -> list[torch.Tensor]:
        return vectors

    async with serving(tokenizer) as server:
        monkeypatch.setattr(server.model, "embed", embed)
        monkeypatch.setattr(torch.Tensor, method, noted)
        body = {"model": NAME, "input": ["hello"] * 64, "encoding_format": encoding}
        with turns.passing():
            response = await server.post("/v1/embeddings", body)
    data = response.json()["data"]
    assert [entry["index"] for entry in data] == list(range(64))
    assert turns.counts.total() == 64
    # The first two chunks are made together.
    assert max(turns.counts.values()) <= 2 * -(-MAX_CHUNK_BYTES // (4096 * 4))
    if encoding == "float":
        assert torch.tensor(data[63]["embedding"]).equal(vectors[63])


async def test_log_probabilities_of_a_whole_answer_are_sent_in_chunks() -> None:
    turns, sent = Turns(), []
    top = tuple(CandidateToken(number, b"top", -0.5) for number in range(20))
    token = SequenceToken(7, b"seven", -0.25, top)

    @asynccontextmanager
    async def run() -> AsyncIterator[AsyncIterator[JobEvent]]:
        yield events()

    async def events() -> AsyncIterator[JobEvent]:
        yield 0, PrefillDone()
        for _ in range(1000):
            yield 0, Delta(index=0, text="x", tokens=(token,))

    async def send(message: Message) -> None:
        if body := message.get("body"):
            turns.note()
            sent.append(body)

    async def silent() -> Message:
        return await asyncio.Future()

    answer = ChatCompletionBuilder(
        "m", "f", n=1, with_logprobs=True, usage=UsageCounter({}).start("m", 1)
    )
    scope = {"type": "http", "method": "POST", "headers": []}
    with turns.passing():
        await ComputedResponse(partial(answer.build_json, run), GracefulShutdown())(
            scope, silent, send
        )
    (choice,) = json.loads(b"".join(sent))["choices"]
    assert choice["message"]["content"] == "x" * 1000
    assert len(choice["logprobs"]["content"]) == 1000
    assert choice["logprobs"]["content"][999]["top_logprobs"][19]["token"] == "top"
    assert len(sent) > 10
    assert max(map(len, sent)) < 2 * MAX_CHUNK_BYTES
    assert max(turns.counts.values()) == 1


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatCompletionRequest, {f"x{number}": 1 for number in range(MANY)}),
        (ChatCompletionRequest, chat_body(messages=[1] * 4000)),
        (ChatCompletionRequest, chat_body(messages=[{"role": "user", "content": [1] * 1000}] * 10)),
        (ChatCompletionRequest, chat_body(messages=[dict.fromkeys(map(str, range(MANY)), 1)])),
        (ChatCompletionRequest, chat_body(tools=[1] * 100)),
        (
            ChatCompletionRequest,
            chat_body(messages=[{"role": "assistant", "tool_calls": [1] * 100}]),
        ),
        (CompletionRequest, {"model": NAME, "prompt": [""] * MANY}),
        (CompletionRequest, {"model": NAME, "prompt": [[""] * MANY] * 20}),
        (EmbeddingRequest, {"model": NAME, "input": [[""]] * 2000}),
        (ResponsesRequest, {"model": NAME, "input": [1] * 4000}),
        (ResponsesRequest, {"model": NAME, "input": [{"role": "user", "content": [1] * 1000}]}),
        (DetokenizeRequest, {"tokens": [""] * MANY}),
    ],
)
def test_what_is_wrong_a_thousand_times_is_told_once(kind: Any, body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 8
