"""Odd, wrong and hostile requests: each is refused, with OpenAI's body, and nothing else."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from nesa_node.api.generation.job import GenerationEvent, Job, PrefillDone
from tests.api.scripted import NAME, Server, chat_body, serving

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
JSON = {"content-type": "application/json"}


@pytest.fixture
async def server(tokenizer: Any) -> AsyncIterator[Server]:
    async with serving(tokenizer, max_request_bytes=200_000) as server:
        yield server


def error_of(response: httpx.Response) -> dict[str, Any]:
    """What OpenAI's clients look for."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert response.headers["x-request-id"]
    assert isinstance(error, dict)
    return error


def fields(path: str, **more: Any) -> dict[str, Any]:
    usual: dict[str, dict[str, Any]] = {
        CHAT: chat_body(),
        COMPLETIONS: {"model": NAME, "prompt": "hello"},
        RESPONSES: {"model": NAME, "input": "hello"},
        EMBEDDINGS: {"model": NAME, "input": "hello"},
    }
    return {**usual[path], **more}


HUGE = 10**400
UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"audio": {"voice": "a"}}, "audio"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"prediction": {"type": "content"}}, "prediction"),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"service_tier": "priority"}, "service_tier"),
    (CHAT, {"web_search_options": {}}, "web_search_options"),
    (CHAT, {"moderation": {"model": "m"}}, "moderation"),
    (CHAT, {"prompt_cache_options": {"mode": "explicit"}}, "prompt_cache_options"),
    (COMPLETIONS, {"suffix": "x"}, "suffix"),
    (COMPLETIONS, {"best_of": 3}, "best_of"),
    (EMBEDDINGS, {"dimensions": 8}, "dimensions"),
    (RESPONSES, {"background": True}, "background"),
    (RESPONSES, {"conversation": "c"}, "conversation"),
    (RESPONSES, {"previous_response_id": "r"}, "previous_response_id"),
    (RESPONSES, {"reasoning": {"effort": "high"}}, "reasoning.effort"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools"),
    (RESPONSES, {"truncation": "auto"}, "truncation"),
    (RESPONSES, {"context_management": [{"type": "compaction"}]}, "context_management"),
    (RESPONSES, {"moderation": {"model": "m"}}, "moderation"),
    (RESPONSES, {"reasoning": {"mode": "pro"}}, "reasoning.mode"),
]
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hello"}, "messages"),
    (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0]",
    ),
    (CHAT, {"temperature": 2.5}, "temperature"),
    (CHAT, {"temperature": "1"}, "temperature"),
    (CHAT, {"temperature": True}, "temperature"),
    (CHAT, {"temperature": HUGE}, "temperature"),
    (CHAT, {"top_p": -0.1}, "top_p"),
    (CHAT, {"top_p": 1.1}, "top_p"),
    (CHAT, {"top_k": 1.5}, "top_k"),
    (CHAT, {"n": 0}, "n"),
    (CHAT, {"n": 1000}, "n"),
    (CHAT, {"n": HUGE}, "n"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_tokens": -HUGE}, "max_tokens"),
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    (CHAT, {"max_tokens": 64}, "messages"),
    (CHAT, {"seed": HUGE}, "seed"),
    (CHAT, {"stop": ["a"] * 17}, "stop"),
    (CHAT, {"stop": ""}, "stop"),
    (CHAT, {"stream": "yes"}, "stream"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"stream": False, "stream_options": {}}, "stream_options"),
    (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options"),
    (RESPONSES, {"stream_options": {"include_obfuscation": False}}, "stream_options"),
    (CHAT, {"logit_bias": {"x": 1}}, "logit_bias.x"),
    (CHAT, {"logit_bias": {"5": 101}}, "logit_bias.5"),
    (CHAT, {"logit_bias": {"9999": 1}}, "logit_bias"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format"),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
        "response_format.json_schema.name",
    ),
    (
        CHAT,
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "nonsense"}},
            }
        },
        "response_format",
    ),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "f g"}}]},
        "tools[0].function.name",
    ),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [5, "x"]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [64]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [HUGE]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": ["x"] * 100, "n": 2}, "n"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"max_tokens": HUGE}, "max_tokens"),
    (EMBEDDINGS, {"input": []}, "input"),
    (EMBEDDINGS, {"input": ""}, "input"),
    (EMBEDDINGS, {"input": ["hello", ""]}, "input[1]"),
    (EMBEDDINGS, {"input": "hello " * 100}, "input"),
    (EMBEDDINGS, {"encoding_format": "int8"}, "encoding_format"),
    (RESPONSES, {"input": [{"type": "function_call_output"}]}, "input[0]"),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
]


TOOL_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
LACKING: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"role": "user"}, "messages[0].content"),
    (CHAT, {"role": "system", "content": None}, "messages[0].content"),
    (CHAT, {"role": "tool", "tool_call_id": "c"}, "messages[0].content"),
    (CHAT, {"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
    (CHAT, {"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
    (
        CHAT,
        {"role": "user", "content": [{"type": "text", "refusal": "x"}]},
        "messages[0].content[0].text",
    ),
    (RESPONSES, {"role": "user"}, "input[0].content"),
    (RESPONSES, {"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text"),
]


async def test_messages_that_lack_something_are_named(server: Server) -> None:
    for path, message, param in LACKING:
        response = await server.post(
            path, fields(path, **{"messages" if path == CHAT else "input": [message]})
        )
        assert response.status_code == 400, (message, response.text)
        error = error_of(response)
        assert (error["code"], error["param"]) == ("missing_required_parameter", param), message
    assistant = {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]}
    tool = {"role": "tool", "tool_call_id": "c", "content": "x"}
    assert (await server.chat(messages=[assistant, tool])).status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS])
async def test_unknown_fields_are_named(server: Server, path: str) -> None:
    response = await server.post(path, fields(path, banana=1))
    assert response.status_code == 400
    error = error_of(response)
    assert (error["code"], error["param"]) == ("unknown_parameter", "banana")
    assert error["type"] == "invalid_request_error"


async def test_what_is_not_supported_is_named(server: Server) -> None:
    for path, more, param in UNSUPPORTED:
        response = await server.post(path, fields(path, **more))
        assert response.status_code == 400, (path, more)
        error = error_of(response)
        assert (error["code"], error["param"]) == ("unsupported_parameter", param), more
    assert not server.model.jobs


async def test_wrong_values_are_named(server: Server) -> None:
    for path, more, param in WRONG:
        response = await server.post(path, fields(path, **more))
        assert response.status_code == 400, (path, more, response.text)
        assert error_of(response)["param"] == param, (more, response.text)
    assert not server.model.jobs


async def test_lists_of_a_wrong_length_are_told_as_such(server: Server) -> None:
    for path, more, param in (
        (CHAT, {"stop": ["a"] * 17}, "stop"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt[0]"),
        (COMPLETIONS, {"prompt": ["hello"] * 129}, "prompt"),
        (EMBEDDINGS, {"input": ["hello"] * 2049}, "input"),
        (EMBEDDINGS, {"input": [[5]] * 2049}, "input"),
        (RESPONSES, {"input": []}, "input"),
    ):
        error = error_of(await server.post(path, fields(path, **more)))
        assert (error["code"], error["param"]) == ("invalid_value", param)
        assert "it should have at" in error["message"]


async def test_fields_that_ask_for_nothing_are_accepted(server: Server) -> None:
    nothing: dict[str, Any] = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    }
    chat = {
        **nothing,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "stream_options": None,
        "reasoning_effort": None,
        "audio": None,
        "modalities": ["text"],
        "functions": [],
        "n": 1.0,
        "frequency_penalty": 0,
        "logit_bias": {},
    }
    assert (await server.post(CHAT, fields(CHAT, **chat))).status_code == 200
    response = {**nothing, "tools": [], "truncation": "disabled", "background": False}
    assert (await server.post(RESPONSES, fields(RESPONSES, **response))).status_code == 200
    assert (await server.post(COMPLETIONS, fields(COMPLETIONS, best_of=1, suffix=None))).is_success


async def test_a_missing_field_and_a_missing_model_are_told(server: Server) -> None:
    response = await server.post(CHAT, {"model": NAME})
    assert error_of(response)["code"] == "missing_required_parameter"
    assert error_of(response)["param"] == "messages"
    response = await server.post(CHAT, fields(CHAT, model="other"))
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")


BODIES = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"{}" * 2,
    b'{"model": NaN}',
    b'{"model": "a\xff"}',
    b'{"model": "\\ud800"}',
    b'{"a":' * 5000 + b"1" + b"}" * 5000,
    b"[" * 100_000,
    b'{"temperature": 1e999, "model": "scripted"}',
    b'{"model": "' + b"x" * 5000 + b'"}',
    b"\x00" * 100,
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS, "/tokenize"])
async def test_bodies_that_are_no_request_are_refused(server: Server, path: str) -> None:
    for body in BODIES:
        response = await server.client.post(path, content=body, headers=JSON)
        assert response.status_code == 400, (body[:40], response.text)
        error_of(response)


async def test_other_content_types_are_refused(server: Server) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        response = await server.client.post(
            CHAT, content=json.dumps(chat_body()), headers={"content-type": kind}
        )
        assert (response.status_code, error_of(response)["code"]) == (415, "unsupported_media_type")
    kind = "application/json; charset=utf-8"
    response = await server.client.post(
        CHAT, content=json.dumps(chat_body()), headers={"content-type": kind}
    )
    assert response.status_code == 200


async def test_large_bodies_are_refused(server: Server) -> None:
    response = await server.client.post(CHAT, content=b"x" * 10_000_000, headers=JSON)
    assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")


async def test_more_log_probabilities_than_fit_are_refused(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nesa_node.api.responses.token_logprobs.MAX_LOGPROBS", 100)
    echo = {"prompt": [5] * 9, "echo": True, "logprobs": 4}
    tops = {"logprobs": True, "top_logprobs": 4}
    kept = {"include": ["message.output_text.logprobs"], "top_logprobs": 4}
    async with serving(tokenizer) as server:
        for path, fits, more in (
            (COMPLETIONS, {**echo, "n": 2, "max_tokens": 1}, {"n": 3}),
            (COMPLETIONS, {**echo, "n": 2, "max_tokens": 1}, {"max_tokens": 2}),
            (COMPLETIONS, {**echo, "n": 2, "max_tokens": 1, "stream": True}, {"n": 3}),
            (COMPLETIONS, {"n": 3, "max_tokens": 9}, {"logprobs": 4}),
            (CHAT, {**tops, "n": 2, "max_tokens": 10}, {"max_tokens": 11}),
            (CHAT, {**tops, "n": 2, "max_tokens": 10, "stream": True}, {"n": 3}),
            (RESPONSES, {**kept, "max_output_tokens": 20}, {"max_output_tokens": 21}),
            (RESPONSES, {"max_output_tokens": 50, "stream": True}, kept),
        ):
            assert (await server.post(path, fields(path, **fits))).status_code == 200, fits
            response = await server.post(path, fields(path, **{**fits, **more}))
            assert response.status_code == 400, more
            assert error_of(response)["param"] in ("logprobs", "top_logprobs")


async def test_more_numbers_than_fit_are_refused(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nesa_node.api.endpoints.embeddings.MAX_OUTPUT_NUMBERS", 7)
    async with serving(tokenizer) as server:
        body = fields(EMBEDDINGS, input=["hello"] * 3)
        assert (await server.post(EMBEDDINGS, body)).status_code == 200
        response = await server.post(EMBEDDINGS, body | {"input": ["hello"] * 4})
        assert (response.status_code, error_of(response)["param"]) == (400, "input")
        assert "at most 3 inputs" in response.text


async def test_texts_of_many_tokens_are_refused_early(tokenizer: Any) -> None:
    async with serving(tokenizer) as server:
        text = "hello " * 600_000
        for path, body, param in (
            (COMPLETIONS, {"model": NAME, "prompt": text}, "prompt"),
            (EMBEDDINGS, {"model": NAME, "input": text}, "input"),
            (RESPONSES, {"model": NAME, "input": text}, "input"),
            (CHAT, chat_body(messages=[{"role": "user", "content": text}]), "messages"),
        ):
            response = await server.post(path, body)
            assert response.status_code == 400
            error = error_of(response)
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)


async def test_wrong_paths_and_methods_are_refused(server: Server) -> None:
    response = await server.client.get("/v1/nothing")
    assert (response.status_code, error_of(response)["code"]) == (404, "unknown_url")
    for method in ("GET", "PUT", "DELETE", "PATCH"):
        response = await server.client.request(method, CHAT)
        assert (response.status_code, response.headers["allow"]) == (405, "POST")
        error_of(response)
    assert (await server.client.post("/v1/models")).status_code == 405


async def test_heads_are_answered_as_their_pages(server: Server) -> None:
    for path, status in (("/health", 200), ("/v1/models", 200), ("/v1/nothing", 404), (CHAT, 405)):
        whole = await server.client.get(path)
        head = await server.client.head(path)
        assert (head.status_code, head.content) == (status, b"")
        assert head.headers["content-length"] == whole.headers["content-length"]


async def test_pages_leave_the_endpoints_their_own_words(tokenizer: Any) -> None:
    async def page(request: Request) -> PlainTextResponse:
        return PlainTextResponse("a page")

    pages = [Route(path, page) for path in ("/", "/playground")]
    async with serving(tokenizer, pages=pages) as server:
        for path in ("/", "/playground"):
            assert (await server.client.get(path)).text == "a page"
        for path in ("/v1/nothing", "/nothing"):
            assert error_of(await server.client.get(path))["code"] == "unknown_url"
        # Who forgets a part of the address is told so.
        mistaken = await server.post("/chat/completions", chat_body())
        assert mistaken.status_code == 404
        assert "/v1" in error_of(mistaken)["message"]
        assert (await server.client.post("/playground")).status_code == 405
        assert (await server.client.get(CHAT)).status_code == 405
        assert (await server.client.delete("/health")).status_code == 405
        assert (await server.client.get("/openapi.json")).json()["openapi"]


async def test_a_request_id_is_kept_if_it_is_well_formed(server: Server) -> None:
    mine = await server.client.get("/version", headers={"x-request-id": "my-id_1"})
    assert mine.headers["x-request-id"] == "my-id_1"
    other = await server.client.get("/version", headers={"x-request-id": "a b\tc"})
    assert other.headers["x-request-id"].startswith("req_")


async def test_garbage_on_the_wire_harms_nobody(server: Server) -> None:
    for sent in (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        b"Content-Type: application/json\r\n\r\nzz\r\nnonsense\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
        b"Content-Type: application/json\r\n\r\n{",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET " + b"/" * 20_000,
    ):
        reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
        writer.write(sent)
        await writer.drain()
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 10)
        assert not answer or answer.startswith(b"HTTP/1.1 4"), answer[:100]
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    assert (await server.chat()).status_code == 200


async def test_a_panic_of_a_library_is_told_and_logged_once(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it is no `Exception`: before an answer is computed, while it is, and in a stream."""
    panic = type("PanicException", (BaseException,), {})
    logged: list[str] = []

    class Log:
        def error(self, event: str, **_: Any) -> None:
            logged.append(event)

    monkeypatch.setattr("nesa_node.api.responses.http_responses.log", Log())

    async def fails(_job: Job) -> AsyncIterator[GenerationEvent]:
        yield PrefillDone()
        raise panic("retry-limit-in-match over")

    def tokens(*_: Any, **__: Any) -> Any:
        raise panic("retry-limit-in-match over")

    async with serving(tokenizer, fails) as server:
        assert error_of(await server.chat())["code"] == "internal_error"
        streamed = await server.chat(stream=True)
        assert "internal_error" in streamed.text
        assert logged == ["request_failed"] * 2
        monkeypatch.setattr(type(tokenizer), "__call__", tokens)
        monkeypatch.setattr(type(tokenizer), "encode", tokens)
        response = await server.post("/tokenize", {"prompt": "hello"})
        assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")
        assert logged == ["request_failed"] * 3


async def test_templates_that_refuse_are_told(tokenizer: Any) -> None:
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = "{{ raise_exception('only one role') }}"
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    for changed, code in ((strict, "template_error"), (bare, "no_chat_template")):
        async with serving(changed) as server:
            response = await server.chat()
            assert (response.status_code, error_of(response)["code"]) == (400, code)


async def test_developers_are_the_system_where_a_template_does_not_know_them(
    server: Server, tokenizer: Any
) -> None:
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "again"}]
    await server.chat(messages=[{"role": "developer", "content": parts}])
    assert tokenizer.decode(server.model.jobs[0].prompt) == "system hello again assistant"


async def test_answers_are_cut_where_the_operator_says(tokenizer: Any) -> None:
    async with serving(tokenizer, max_new_tokens=5) as server:
        for asked in ({}, {"max_tokens": 40}, {"max_tokens": 3}):
            assert (await server.chat(**asked)).status_code == 200
        assert [job.max_tokens for job in server.model.jobs] == [5, 5, 3]
    async with serving(tokenizer) as server:
        await server.chat()
        (job,) = server.model.jobs
        assert job.max_tokens == 64 - len(job.prompt)


async def test_many_answers_share_the_room_of_four_unless_they_name_their_own(
    tokenizer: Any,
) -> None:
    async with serving(tokenizer, default_new_tokens=16) as server:
        for n in (1, 4, 8, 100):
            await server.chat(n=n)
        await server.chat(n=8, max_tokens=16)
        assert [job.max_tokens for job in server.model.jobs] == [16, 16, 8, 1, 16]
