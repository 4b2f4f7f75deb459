"""What the endpoints answer, and that they watch their clients."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from nesa_node.api.generation.job import Delta, GenerationEvent, Job, PrefillDone
from nesa_node.core.errors import BusyError, MissingBlocksError
from nesa_node.core.ids import PeerId, Span
from nesa_node.core.wait_tracking import track_wait
from tests.api.scripted import NAME, chat_body, events_of, says, serving, until


async def test_a_chat_is_answered(tokenizer: Any) -> None:
    async with serving(tokenizer) as server:
        response = await server.chat(n=2, seed=7, temperature=0.5, stop="x", max_tokens=9)
        answer = response.json()
        (job,) = server.model.jobs
    assert response.status_code == 200, answer
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["hello wörld"] * 2
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["prompt_tokens"] == len(job.prompt)
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert answer["system_fingerprint"].startswith("fp_")
    assert (job.n, job.stop, job.max_tokens, job.sampling.seed) == (2, ("x",), 9, 7)


async def test_a_stream_has_roles_deltas_reasons_usage_and_an_end(tokenizer: Any) -> None:
    async with serving(tokenizer) as server:
        events = await server.stream(
            "/v1/chat/completions",
            chat_body(stream=True, n=2, stream_options={"include_usage": True}),
        )
    assert events.pop() == "[DONE]"
    usage = events.pop()
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4
    assert all(event["usage"] is None for event in events)
    for index in range(2):
        deltas = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(d["delta"].get("content", "") for d in deltas) == "hello wörld"
        assert [d["finish_reason"] for d in deltas] == [None, None, None, "stop"]
    assert len({event["id"] for event in events}) == 1


async def test_log_probabilities_are_told_with_bytes(tokenizer: Any) -> None:
    async with serving(tokenizer) as server:
        answer = (await server.chat(logprobs=True, top_logprobs=2)).json()
    first = answer["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], first["bytes"], first["logprob"]) == ("t5", [116, 53], -0.25)
    assert first["top_logprobs"][0] == {"token": "�", "bytes": [0xC3], "logprob": -0.5}
    assert first["top_logprobs"][1]["logprob"] == -9999.0


async def test_completions_take_several_prompts_and_echo_them(tokenizer: Any) -> None:
    async with serving(tokenizer) as server:
        body = {"model": NAME, "prompt": ["hello", "again the"], "n": 2, "echo": True}
        answer = (await server.post("/v1/completions", body | {"logprobs": 1})).json()
        legacy = answer["choices"][2]["logprobs"]
        assert [job.prompt_logprobs for job in server.model.jobs] == [True, True]
        assert server.model.running == 0
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["hellohello wörld"] * 2 + ["again thehello wörld"] * 2
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert legacy["token_logprobs"] == [None, -0.25, -0.25, -0.25]
    assert legacy["top_logprobs"][0] is None
    assert legacy["top_logprobs"][1] == {"bytes:\\xc3": -0.5, "b": -9999.0, "t7": -0.25}
    assert legacy["text_offset"] == [0, 2, 4, 6]


async def test_tokens_and_lists_of_tokens_are_prompts(tokenizer: Any) -> None:
    async with serving(tokenizer) as server:
        for prompt, jobs in (([5, 6], 1), ([[5], [6, 7]], 2), ("hello", 1)):
            server.model.jobs.clear()
            answer = await server.post("/v1/completions", {"model": NAME, "prompt": prompt})
            assert answer.status_code == 200, answer.text
            assert len(server.model.jobs) == jobs
            assert all(job.max_tokens == 16 for job in server.model.jobs)
        events = await server.stream(
            "/v1/completions", {"model": NAME, "prompt": [[5], [6]], "stream": True}
        )
    assert events.pop() == "[DONE]"
    for index in range(2):
        mine = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == "hello wörld"


async def test_a_private_gateway_gives_text_alone(tokenizer: Any) -> None:
    """Numbers that it decrypted would give its key away."""
    async with serving(tokenizer) as server:
        server.model.is_private = True
        assert (await server.chat()).status_code == 200
        prompt: dict[str, Any] = {"model": NAME, "prompt": "hello"}
        answers = [
            await server.chat(logprobs=True, top_logprobs=2),
            await server.post("/v1/completions", prompt | {"logprobs": 1}),
            await server.post("/v1/embeddings", {"model": NAME, "input": "hello"}),
        ]
    for answer in answers:
        assert answer.status_code == 400
        assert "--private" in answer.json()["error"]["message"]


async def test_embeddings_come_as_numbers_and_as_base64(tokenizer: Any) -> None:
    async with serving(tokenizer) as server:
        body: dict[str, Any] = {"model": NAME, "input": ["hello", "again"]}
        plain = (await server.post("/v1/embeddings", body)).json()
        packed = (await server.post("/v1/embeddings", body | {"encoding_format": "base64"})).json()
    assert [item["index"] for item in plain["data"]] == [0, 1]
    assert plain["usage"] == {"prompt_tokens": 2, "total_tokens": 2}
    vector = struct.unpack("<2f", base64.b64decode(packed["data"][1]["embedding"]))
    assert list(vector) == plain["data"][1]["embedding"]


async def test_responses_answer_text_and_stream_typed_events(tokenizer: Any) -> None:
    async with serving(tokenizer) as server:
        items = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
        body = {"model": NAME, "input": items, "instructions": "the capital", "store": True}
        answer = (await server.post("/v1/responses", body)).json()
        events = await server.stream("/v1/responses", body | {"stream": True})
        prompt = tokenizer.decode(server.model.jobs[0].prompt)
    assert prompt.startswith("system the capital user hello")
    assert answer["output"][0]["content"][0]["text"] == "hello wörld"
    assert answer["status"] == "completed"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "hello wörld"
    assert events[-1]["response"]["usage"]["output_tokens"] == 2


async def test_models_health_and_version_are_told(tokenizer: Any) -> None:
    async with serving(tokenizer) as server:
        listed = (await server.client.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == [NAME]
        one = (await server.client.get(f"/v1/models/{NAME}")).json()
        assert one == listed["data"][0]
        assert one["owned_by"] == "nesa-node"
        assert (await server.client.get("/v1/models/no/such")).status_code == 404
        assert (await server.client.get("/health")).status_code == 200
        assert "version" in (await server.client.get("/version")).json()


async def test_tokens_go_there_and_back(tokenizer: Any) -> None:
    async with serving(tokenizer) as server:
        told = (await server.post("/tokenize", {"prompt": "the capital"})).json()
        assert told == {"count": 2, "max_model_len": 64, "tokens": [7, 8], "token_strs": None}
        chat = {"model": NAME, "messages": chat_body()["messages"], "return_token_strs": True}
        assert (await server.post("/tokenize", chat)).json()["token_strs"][-1] == "assistant"
        back = (await server.post("/detokenize", {"tokens": told["tokens"]})).json()
    assert back == {"prompt": "the capital"}


async def test_what_fails_before_the_first_event_has_a_status(tokenizer: Any) -> None:
    async def busy(job: Job) -> AsyncIterator[GenerationEvent]:
        if job.n == 1:
            raise BusyError("no room", 2.5)
        yield PrefillDone()

    async with serving(tokenizer, busy) as server:
        for stream in (False, True):
            response = await server.chat(stream=stream)
            assert response.status_code == 503
            assert response.headers["retry-after"] == "3"
            assert response.json()["error"]["code"] == "busy"


async def test_what_fails_later_is_an_event(tokenizer: Any) -> None:
    async def fails(job: Job) -> AsyncIterator[GenerationEvent]:
        yield PrefillDone()
        yield Delta(index=0, text="he")
        raise MissingBlocksError([(2, 4)], "nobody serves the blocks 2:4")

    async with serving(tokenizer, fails) as server:
        events = await server.stream("/v1/chat/completions", chat_body(stream=True))
        assert events[-2]["error"]["code"] == "missing_blocks"
        assert events[-1] == "[DONE]"
        typed = await server.stream(
            "/v1/responses", {"model": NAME, "input": "hello", "stream": True}
        )
        assert typed[-1]["type"] == "response.failed"
        assert typed[-1]["response"]["error"]["code"] == "missing_blocks"
        response = await server.chat()
        assert (response.status_code, server.model.running) == (503, 0)


async def test_missing_blocks_are_told_soon_and_by_name(tokenizer: Any) -> None:
    async with serving(tokenizer, _waits_for_ever, holes=[Span(2, 4)]) as server:
        for stream in (False, True):
            async with asyncio.timeout(3):
                response = await server.chat(stream=stream)
            assert response.status_code == 503
            assert "2:4" in response.json()["error"]["message"]
            assert int(response.headers["retry-after"]) > 0
        assert server.model.running == 0


async def test_who_waits_long_gets_comments(tokenizer: Any) -> None:
    async def slow(job: Job) -> AsyncIterator[GenerationEvent]:
        await asyncio.sleep(0.5)
        async for event in says("late")(job):
            yield event

    async with serving(tokenizer, slow, keepalive_s=0.1) as server:
        response = await server.chat(stream=True)
        assert response.text.startswith(": waiting\n\n")
        assert 3 <= response.text.count(": waiting") <= 6
        assert events_of(response.text)[1]["choices"][0]["delta"] == {"content": "late"}


async def test_comments_say_after_two_seconds_what_is_waited_for(tokenizer: Any) -> None:
    async def slow(job: Job) -> AsyncIterator[GenerationEvent]:
        with track_wait("room", blocks=[Span(10, 20)], peers=[PeerId("peer-abcdef")], limit_s=30):
            await asyncio.sleep(1)
            with track_wait("what comes sooner"):
                await asyncio.sleep(1.5)
        async for event in says("late")(job):
            yield event

    async with serving(tokenizer, slow, keepalive_s=10) as server:
        response = await server.chat(stream=True)
    comment, _, rest = response.text.partition("\n\n")
    assert comment == ": waiting for room: blocks 10:20, node …abcdef, 2 s of at most 30 s"
    assert not any(line.startswith(":") for line in rest.splitlines())
    assert events_of(response.text)[1]["choices"][0]["delta"] == {"content": "late"}


async def test_a_client_that_goes_ends_its_job_at_once(tokenizer: Any) -> None:
    async with serving(tokenizer, _waits_for_ever) as server:
        for stream in (False, True):
            async with httpx.AsyncClient(base_url=f"http://{server.address}") as client:
                asking = asyncio.create_task(
                    client.post("/v1/chat/completions", json=chat_body(stream=stream))
                )
                await until(lambda: server.model.running == 1)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            await until(lambda: server.model.running == 0, 1)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello " * 40}]}),
        ("/v1/completions", {"prompt": "hello " * 40}),
        ("/v1/completions", {"prompt": "hello " * 40, "stream": True}),
        ("/v1/responses", {"input": "hello " * 40, "stream": True}),
        ("/v1/embeddings", {"input": "hello " * 40}),
    ],
)
async def test_a_client_that_goes_pays_for_its_prompt(
    tokenizer: Any, path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    began = asyncio.Event()

    async def waits(_job: Job) -> AsyncIterator[GenerationEvent]:
        began.set()
        await asyncio.Event().wait()
        yield PrefillDone()

    async def embeds(_prompts: object) -> None:
        began.set()
        await asyncio.Event().wait()

    async with serving(tokenizer, waits, tokens_per_minute=60) as server:
        monkeypatch.setattr(server.model, "embed", embeds)
        async with httpx.AsyncClient(base_url=f"http://{server.address}") as client:
            asking = asyncio.create_task(client.post(path, json={"model": NAME, **fields}))
            await began.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

        async def left() -> int:
            answer = await server.client.get("/v1/models")
            return int(answer.headers["x-ratelimit-remaining-tokens"])

        async with asyncio.timeout(5):
            while await left() > 30:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_a_client_that_goes_mid_stream_ends_its_job_at_once(tokenizer: Any) -> None:
    async with serving(tokenizer, _talks_for_ever) as server:
        async with server.client.stream(
            "POST", "/v1/chat/completions", json=chat_body(stream=True)
        ) as response:
            async for line in response.aiter_lines():
                if "word" in line:
                    break
        await until(lambda: server.model.running == 0, 1)


async def test_who_is_answered_when_the_gateway_ends_gets_a_word_of_why(tokenizer: Any) -> None:
    async with serving(tokenizer, _talks_for_ever) as server:
        asking = asyncio.create_task(server.chat(stream=True))
        await until(lambda: server.model.running == 1)
        async with asyncio.timeout(3):
            await server.closing.close(0.2)
        events = events_of((await asking).text)
        assert events[-2]["error"]["code"] == "shutting_down"
        refused = await server.chat()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")


async def test_streams_of_many_clients_are_not_mixed_up(tokenizer: Any) -> None:
    async def echo(job: Job) -> AsyncIterator[GenerationEvent]:
        yield PrefillDone()
        for token in job.prompt:
            await asyncio.sleep(0)
            yield Delta(index=0, text=f" {token}")
        yield Delta(index=0, finish_reason="stop")

    async with serving(tokenizer, echo) as server:

        async def ask(number: int) -> str:
            prompt = [5 + (number + step) % 50 for step in range(20)]
            body = {"model": NAME, "prompt": prompt, "stream": True}
            events = await server.stream("/v1/completions", body)
            text = "".join(event["choices"][0]["text"] for event in events[:-1])
            assert text.split() == [str(token) for token in prompt]
            return text

        texts = await asyncio.gather(*(ask(number) for number in range(50)))
    assert len(set(texts)) == 50


async def test_tools_of_a_model_that_knows_none_are_an_error(tokenizer: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    async with serving(tokenizer) as server:
        response = await server.chat(tools=tools)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "tools")
        assert error["message"].startswith("tools error")
        assert (await server.chat(tools=tools, tool_choice="none")).status_code == 200
        assert (await server.chat(tools=[])).status_code == 200


async def test_calls_of_tools_are_read(tokenizer: Any) -> None:
    knowing = copy.deepcopy(tokenizer)
    knowing.chat_template = "{# tools <tool_call> #}" + tokenizer.chat_template
    tools = [{"type": "function", "function": {"name": "add"}}]
    said = says("Sure <tool", '_call>{"name": "add", "argu', 'ments": {"a": 1}}</tool_call>', "")
    async with serving(knowing, said) as server:
        choice = (await server.chat(tools=tools)).json()["choices"][0]
        events = await server.stream("/v1/chat/completions", chat_body(tools=tools, stream=True))
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Sure "
    assert json.loads(call["function"]["arguments"]) == {"a": 1}
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Sure "
    (told,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert told[0]["index"] == 0
    assert told[0]["function"]["name"] == "add"
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"


async def _waits_for_ever(job: Job) -> AsyncIterator[GenerationEvent]:
    await asyncio.Event().wait()
    yield PrefillDone()


async def _talks_for_ever(job: Job) -> AsyncIterator[GenerationEvent]:
    yield PrefillDone()
    while True:
        await asyncio.sleep(0.001)
        yield Delta(index=0, text=" word")
