"""A request may leave the model out, the API explains itself, and the log says what was asked."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from nesa_node.api.generation.job import Delta, GenerationEvent, Job
from nesa_node.core.errors import MissingBlocksError
from nesa_node.web.key_store import KeyLimits, KeyStore
from tests.api.scripted import NAME, chat_body, serving, until

ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/embeddings": {"input": "hello"},
}


@pytest.mark.parametrize("path", ASKED)
async def test_the_only_model_need_not_be_named(tokenizer: Any, path: str) -> None:
    async with serving(tokenizer) as server:
        response = await server.post(path, ASKED[path])
        assert response.status_code == 200, response.text
        assert response.json()["model"] == NAME


@pytest.mark.parametrize("path", ASKED)
async def test_one_of_several_models_must_be_named(tokenizer: Any, path: str) -> None:
    async with serving(tokenizer, names=("one", "two")) as server:
        response = await server.post(path, ASKED[path])
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "model")
    assert error["code"] == "missing_required_parameter"
    assert "one, two" in error["message"]


def answered(logs: Sequence[Any]) -> list[Any]:
    return [line for line in logs if line["event"] == "request_answered"]


async def test_the_log_says_who_asked_what(tokenizer: Any, tmp_path: Path) -> None:
    _, secret = KeyStore(tmp_path / "keys.json").add("alice", KeyLimits())
    headers = {"authorization": f"Bearer {secret}"}
    async with serving(tokenizer, keys_path=tmp_path / "keys.json") as server:
        with capture_logs() as logs:
            await server.post("/v1/chat/completions", chat_body(n=2), headers=headers)
            await server.post("/v1/chat/completions", chat_body(stream=True), headers=headers)
            await server.post("/v1/embeddings", {"input": "hello"}, headers=headers)
            await server.post("/v1/chat/completions", chat_body(max_tokens=999), headers=headers)
            await server.client.get("/v1/models", headers=headers)
            await server.post("/v1/chat/completions", chat_body())
            await server.client.get("/health")
            # A line is written once the answer has ended, which is after the client has it.
            await until(lambda: len(answered(logs)) == 6)
    lines = answered(logs)
    assert sorted(
        (
            line["status"],
            line.get("key", ""),
            line.get("model", ""),
            line.get("completion_tokens", -1),
        )
        for line in lines
    ) == sorted(
        [
            *((200, "alice", NAME, count) for count in (4, 2, 0)),
            (400, "alice", "", -1),
            (200, "alice", "", -1),
            (401, "", "", -1),
        ]
    )
    assert all(line["prompt_tokens"] > 0 for line in lines if "model" in line)
    assert all(line["ms"] >= 0 for line in lines)
    assert secret not in json.dumps(logs, default=str)


async def breaks(job: Job) -> AsyncIterator[GenerationEvent]:
    yield Delta(index=0, text="Hi")
    raise MissingBlocksError([(2, 4)], "no node serves blocks 2:4")


async def test_the_log_says_what_failed_also_within_a_stream(tokenizer: Any) -> None:
    path = "/v1/chat/completions"
    async with serving(tokenizer, script=breaks) as server:
        with capture_logs() as logs:
            broken = await server.post(path, chat_body(stream=True))
            refused = await server.post(path, chat_body(max_tokens=10**6))
            await server.client.get("/v1/models")
            await until(lambda: len(answered(logs)) == 3)
    assert (broken.status_code, refused.status_code) == (200, 400)
    assert "missing_blocks" in broken.text
    assert [(line["status"], line.get("error")) for line in answered(logs)] == [
        (200, "missing_blocks"),
        (400, "context_length_exceeded"),
        (200, None),
    ]


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {"prompt": "hello " * 5}), ("/detokenize", {"tokens": [1] * 5})],
)
async def test_tokens_that_are_only_counted_or_joined_are_paid_for(
    tokenizer: Any, tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    store = KeyStore(tmp_path / "keys.json")
    _, secret = store.add("alice", KeyLimits(tokens_per_minute=4))
    headers = {"authorization": f"Bearer {secret}"}
    async with serving(tokenizer, keys_path=store.path) as server:
        answers = [await server.post(path, body, headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]


@pytest.mark.parametrize("path", [path for path in ASKED if path != "/v1/embeddings"])
async def test_each_key_has_a_prefix_scope_of_its_own(
    tokenizer: Any, tmp_path: Path, path: str
) -> None:
    store = KeyStore(tmp_path / "keys.json")
    secrets = [store.add(name, KeyLimits())[1] for name in ("alice", "bob")]
    async with serving(tokenizer, keys_path=store.path) as server:
        for secret in (*secrets, secrets[0]):
            headers = {"authorization": f"Bearer {secret}"}
            answer = await server.post(path, ASKED[path], headers=headers)
            assert answer.status_code == 200, answer.text
    alice, bob, again = (job.prefix_scope for job in server.model.jobs)
    assert alice == again
    assert "" != alice != bob != ""


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_the_description_names_the_last_event_of_a_stream(tokenizer: Any, path: str) -> None:
    async with serving(tokenizer) as server:
        last = (await server.stream(path, {**ASKED[path], "stream": True}))[-1]
        spec = (await server.client.get("/openapi.json")).json()
    stream = spec["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    name = last if isinstance(last, str) else last["type"]
    assert name in stream["schema"]["description"].partition("the last one is ")[2]


async def test_the_description_names_the_file_of_speech(tokenizer: Any) -> None:
    async with serving(tokenizer) as server:
        spec = (await server.client.get("/openapi.json")).json()
        page = (await server.client.get("/docs")).text
    body = spec["paths"]["/v1/audio/transcriptions"]["post"]["requestBody"]["content"]
    name = body["multipart/form-data"]["schema"]["$ref"].rpartition("/")[2]
    schema = spec["components"]["schemas"][name]
    assert schema["required"] == ["file"]
    assert schema["properties"]["file"]["format"] == "binary"
    assert schema["additionalProperties"] is False
    assert "<code>file</code><td>string<td>required" in page


class Page(HTMLParser):
    """What a page would load, and its headings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attrs if name == "src"]
        if tag in ("link", "script"):
            self.loads += [dict(attrs).get("href") or tag]


async def test_docs_show_every_endpoint_without_loading_anything(tokenizer: Any) -> None:
    async with serving(tokenizer) as server:
        page = await server.client.get("/docs")
        spec = (await server.client.get("/openapi.json")).json()
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    for path, operations in spec["paths"].items():
        for method in operations:
            assert f"<h2>{method.upper()} {path}</h2>" in page.text
    assert "<code>max_tokens</code>" in page.text
    assert "<code>audio</code><td>null: has no effect here<" in page.text
    assert "<code>service_tier</code><td>&quot;auto&quot; or &quot;default&quot;<" in page.text
    assert "None" not in page.text
    assert Page(page.text).loads == ["data:,"]
    style = re.search("<style>(.*?)</style>", page.text, re.DOTALL)
    assert style is not None
    digest = b64encode(sha256(style[1].encode()).digest()).decode()
    policy = page.headers["content-security-policy"]
    assert f"style-src 'sha256-{digest}'" in policy
    assert "script-src" not in policy
    assert "default-src 'none'" in policy
