"""Who comes in with a key, who does not, and what a key may do, over real connections."""

from __future__ import annotations

import asyncio
import hmac
import io
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from nesa_node.core.errors import ConfigError
from nesa_node.core.logging import setup_logging
from nesa_node.core.settings.addresses import HttpAddress
from nesa_node.web import authenticator as doorman_module
from nesa_node.web import key_store as keys_module
from nesa_node.web.key_store import KeyLimits, KeyStore
from tests.web.tiny_gateway import bearer, browser, gate, new_key


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def there(path: Path) -> bool:
    return path.exists()


def overwrite(path: Path, content: bytes, mode: int = 0o600) -> bytes:
    """What was there before."""
    before = path.read_bytes() if path.exists() else b""
    path.write_bytes(content)
    path.chmod(mode)
    return before


async def until_not(status: int, client: httpx.AsyncClient, **headers: str) -> None:
    async with asyncio.timeout(5):
        while (await models(client, **headers)).status_code == status:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def models(client: httpx.AsyncClient, **headers: str) -> httpx.Response:
    return await client.get("/v1/models", headers=headers)


async def test_without_any_key_everybody_on_this_machine_comes_in(path: Path) -> None:
    async with gate(path) as (_, address), browser(address) as client:
        assert (await models(client)).status_code == 200
        assert (await models(client, authorization="Bearer whatever")).status_code == 200
        told = (await client.get("/v1/whoami")).json()
        assert told == {"id": "anybody", "name": "anybody", "cookie": False}
    assert not there(path)


async def test_no_key_and_a_wrong_key_are_401_in_openais_words(path: Path) -> None:
    key = new_key(path)
    async with gate(path) as (_, address), browser(address) as client:
        for headers in (
            {},
            {"authorization": "Bearer"},
            {"authorization": f"Basic {key}"},
            {"authorization": f"Bearer {key}x"},
            {"authorization": f"Bearer {key[:-1]}"},
            {"authorization": "Bearer \xff\xfe"},
            {"x-api-key": "nesa-"},
            {"cookie": f"nesa_node_{address.port}=made-up"},
        ):
            raw = [(n.encode(), v.encode("latin-1")) for n, v in headers.items()]
            response = await client.get("/v1/models", headers=raw)
            assert response.status_code == 401, headers
            error = response.json()["error"]
            assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
            assert response.headers["www-authenticate"].startswith("Bearer realm=")
            assert key not in response.text
        for headers in ({"authorization": f"bearer  {key}"}, {"x-api-key": key}):
            assert (await client.get("/v1/models", headers=headers)).status_code == 200
        told = (await client.get("/v1/whoami", headers=bearer(key))).json()
        assert told == {"id": KeyStore(path).read_all()[0].id, "name": "alice", "cookie": False}


async def test_public_paths_are_read_by_anybody_and_nothing_else(path: Path) -> None:
    new_key(path)
    async with gate(path) as (_, address), browser(address) as client:
        for public in ("/health", "/static/page.js"):
            assert (await client.get(public)).status_code == 200
            assert (await client.post(public)).status_code == 401
        for private in ("/", "/health/", "/static", "/healthy", "/v1/models", "/nothing"):
            assert (await client.get(private)).status_code == 401, private


async def test_one_key_needs_no_file(path: Path) -> None:
    async with gate(path, api_key="correct-horse") as (_, address), browser(address) as client:
        assert (await models(client)).status_code == 401
        assert (await models(client, **bearer("correct-hors"))).status_code == 401
        assert (await models(client, **bearer("correct-horse"))).status_code == 200
        told = (await client.get("/v1/whoami", headers=bearer("correct-horse"))).json()
        assert told["id"] == "api-key"
    assert not there(path)


async def test_openais_client_turns_refusals_into_its_own_exceptions(path: Path) -> None:
    good = new_key(path)
    revoked = new_key(path, "bob")
    limited = new_key(path, "carol", requests_per_minute=2)
    ended, ended_key = KeyStore(path).add("dave", expires_at=time.time() - 1)
    assert ended.has_expired(time.time())
    KeyStore(path).revoke("bob")

    async with gate(path) as (_, address):

        def client(key: str) -> openai.AsyncOpenAI:
            return openai.AsyncOpenAI(
                api_key=key,
                base_url=f"http://{address}/v1",
                max_retries=0,
                http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
            )

        for key in ("wrong", revoked, ended_key):
            async with client(key) as asking:
                with pytest.raises(openai.AuthenticationError) as refused:
                    await asking.models.list()
                assert refused.value.code == "invalid_api_key"
        async with client(good) as asking:
            assert [model.id async for model in await asking.models.list()] == ["tiny"]
            with pytest.raises(openai.AuthenticationError):
                await asking.models.list(extra_headers={"authorization": openai.Omit()})
        async with client(limited) as asking:
            await asking.models.list()
            await asking.models.list()
            with pytest.raises(openai.RateLimitError) as over:
                await asking.models.list()
            assert over.value.code == "rate_limit_exceeded"
            assert 1 <= int(over.value.response.headers["retry-after"]) <= 60


async def test_limits_are_told_as_openai_tells_them_and_are_each_keys_own(path: Path) -> None:
    key = new_key(path, requests_per_minute=3)
    other = new_key(path, "bob")
    async with gate(path) as (_, address), browser(address) as client:
        left = []
        for _ in range(3):
            response = await models(client, **bearer(key))
            assert response.headers["x-ratelimit-limit-requests"] == "3"
            assert response.headers["x-ratelimit-reset-requests"].endswith("s")
            left.append(response.headers["x-ratelimit-remaining-requests"])
        assert left == ["2", "1", "0"]
        refused = await models(client, **bearer(key))
        assert refused.status_code == 429
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        free = await models(client, **bearer(other))
        assert free.status_code == 200
        assert "x-ratelimit-limit-requests" not in free.headers


async def test_limits_of_the_config_are_for_keys_without_their_own(path: Path) -> None:
    key = new_key(path)
    own = new_key(path, "bob", requests_per_minute=100)
    async with (
        gate(path, requests_per_minute=1) as (_, address),
        browser(address) as client,
    ):
        assert [(await models(client, **bearer(key))).status_code for _ in "ab"] == [200, 429]
        assert [(await models(client, **bearer(own))).status_code for _ in "ab"] == [200, 200]


async def test_tokens_are_paid_afterwards(path: Path) -> None:
    key = new_key(path, tokens_per_minute=100)
    async with gate(path) as (_, address), browser(address, headers=bearer(key)) as client:
        first = await client.post("/v1/spend", content=b"150")
        assert first.headers["x-ratelimit-remaining-tokens"] == "100"
        refused = await client.post("/v1/spend", content=b"1")
        assert refused.status_code == 429
        # 51 tokens until there is one again, at 100 per minute.
        assert 29 <= int(refused.headers["retry-after"]) <= 31


async def test_a_slot_is_free_again_when_its_stream_has_ended(path: Path) -> None:
    key = new_key(path, concurrent_requests=1)
    async with gate(path) as (gateway, address), browser(address, headers=bearer(key)) as client:
        async with client.stream("POST", "/v1/stream") as stream:
            assert await anext(stream.aiter_lines()) == "begin"
            refused = await models(client)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            gateway.go_on.set()
        await until_not(429, client)
        assert (await models(client)).status_code == 200


async def test_a_slot_is_free_again_when_the_client_has_vanished(path: Path) -> None:
    key = new_key(path, concurrent_requests=1)
    async with gate(path) as (gateway, address), browser(address, headers=bearer(key)) as client:
        async with (
            browser(address, headers=bearer(key)) as leaves,
            leaves.stream("GET", "/v1/stream") as stream,
        ):
            assert await anext(stream.aiter_lines()) == "begin"
            assert gateway.streams == 1
        await until_not(429, client)
        assert gateway.streams == 0


async def test_a_slot_is_free_again_when_the_application_failed(path: Path) -> None:
    key = new_key(path, concurrent_requests=1)
    async with gate(path) as (_, address), browser(address, headers=bearer(key)) as client:
        assert (await client.get("/v1/broken")).status_code == 500
        assert (await models(client)).status_code == 200


async def test_a_key_that_is_revoked_or_made_meanwhile_is_known_soon(path: Path) -> None:
    key = new_key(path)
    async with gate(path) as (_, address), browser(address) as client:
        assert (await models(client, **bearer(key))).status_code == 200
        KeyStore(path).revoke("alice")
        other = new_key(path, "bob")
        began = time.monotonic()
        await until_not(200, client, **bearer(key))
        assert (await models(client, **bearer(other))).status_code == 200
        assert time.monotonic() - began < 2


@pytest.mark.parametrize("by_cookie", [True, False])
async def test_a_key_that_ends_ends_what_is_still_being_told(path: Path, by_cookie: bool) -> None:
    key = new_key(path, concurrent_requests=1)
    other = new_key(path, "bob")
    async with gate(path) as (gateway, address), browser(address) as client:
        if by_cookie:
            await client.post("/login", json={"key": key})
        headers = {} if by_cookie else bearer(key)
        async with (
            browser(address, headers=bearer(other)) as stays,
            stays.stream("GET", "/v1/feed") as goes_on,
            client.stream("GET", "/v1/feed", headers=headers) as feed,
        ):
            lines = feed.aiter_lines()
            assert await anext(lines) == "news"
            KeyStore(path).revoke("alice")
            async with asyncio.timeout(5):
                assert {line async for line in lines} <= {"news"}
            assert await anext(goes_on.aiter_lines()) == "news"
            assert gateway.streams == 1


async def test_a_whole_answer_whose_key_ends_does_not_look_complete(path: Path) -> None:
    key = new_key(path)
    async with (
        gate(path) as (_, address),
        browser(address, headers=bearer(key)) as client,
        client.stream("GET", "/v1/whole") as answer,
    ):
        lines = answer.aiter_lines()
        assert await anext(lines) == "news"
        KeyStore(path).revoke("alice")
        with pytest.raises(httpx.RemoteProtocolError):
            async with asyncio.timeout(5):
                assert {line async for line in lines} <= {"news"}


async def test_the_first_key_closes_an_open_gateway_and_the_last_does_not_open_it(
    path: Path,
) -> None:
    async with gate(path) as (_, address), browser(address) as client:
        assert (await models(client)).status_code == 200
        key = new_key(path)
        assert (await models(client)).status_code == 401
        assert (await models(client, **bearer(key))).status_code == 200
        os.unlink(path)
        await asyncio.sleep(keys_module.RELOAD_INTERVAL_S)
        assert (await models(client)).status_code == 401


async def test_keys_that_cannot_be_read_let_nobody_in_and_nobody_knows_why_but_the_log(
    path: Path,
) -> None:
    key = new_key(path)
    async with gate(path) as (_, address), browser(address) as client:
        assert (await models(client, **bearer(key))).status_code == 200
        async with asyncio.timeout(5):
            # Its first use is written down beside the answer: not over what comes next.
            while KeyStore(path).read_all()[0].used_at is None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        content = overwrite(path, b"{")
        await asyncio.sleep(keys_module.RELOAD_INTERVAL_S)
        response = await models(client, **bearer(key))
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "keys_unreadable"
        assert str(path) not in response.text
        overwrite(path, content)
        await asyncio.sleep(keys_module.RELOAD_INTERVAL_S)
        assert (await models(client, **bearer(key))).status_code == 200


async def test_wrong_keys_are_held_up_and_good_ones_are_not(path: Path) -> None:
    key = new_key(path)
    async with (
        gate(path, api_key="guessable") as (_, address),
        browser(address) as client,
    ):
        said = [(await models(client, **bearer(f"guess-{n}"))).status_code for n in range(25)]
        assert said[:20] == [401] * 20
        assert said[21:] == [429] * 4
        # It could be a guess, so it is not even looked at.
        assert (await models(client, **bearer("guessable"))).status_code == 429
        assert (await models(client, **bearer(key))).status_code == 200
    async with (
        gate(path, api_key="a" * 32) as (_, address),
        browser(address) as client,
    ):
        said = [(await models(client, **bearer(f"guess-{n}"))).status_code for n in range(22)]
        assert said[-1] == 429
        assert (await models(client, **bearer("a" * 32))).status_code == 200


async def test_keys_are_compared_in_constant_time(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = new_key(path)
    compared: list[tuple[int, int]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return hmac.compare_digest(a, b)

    class Hmac:
        compare_digest = staticmethod(compare)

    monkeypatch.setattr(keys_module, "hmac", Hmac)
    monkeypatch.setattr(doorman_module, "hmac", Hmac)
    async with (
        gate(path, api_key="guessable") as (_, address),
        browser(address) as client,
    ):
        assert (await models(client, **bearer(key))).status_code == 200
        assert (await models(client, **bearer("guessable"))).status_code == 200
        assert (await models(client, **bearer("wrong"))).status_code == 401
    assert compared == [(32, 32)] * 3


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7"])
async def test_nobody_elses_machine_comes_in_without_a_key_unless_it_is_said(
    path: Path, host: str
) -> None:
    with pytest.raises(ConfigError, match=r"nesa-node keys add.*--allow-open"):
        async with gate(path, address=HttpAddress(host, 0)):
            pass


async def test_with_a_key_or_by_word_other_addresses_are_served(path: Path) -> None:
    anywhere = HttpAddress("0.0.0.0", 0)

    async def status(**headers: str) -> int:
        async with (
            gate(path, address=anywhere, allow_open=True) as (_, address),
            browser(HttpAddress("127.0.0.1", address.port)) as client,
        ):
            return (await models(client, **headers)).status_code

    assert await status() == 200
    key = new_key(path)
    assert await status() == 401
    assert await status(**bearer(key)) == 200


async def test_a_gateway_does_not_start_with_keys_that_it_cannot_read(path: Path) -> None:
    overwrite(path, b'{"format": "something else"}')
    with pytest.raises(ConfigError, match="no file of keys"):
        async with gate(path):
            pass
    os.unlink(path)
    new_key(path)
    os.chmod(path, 0o606)
    with pytest.raises(ConfigError, match="chmod 600"):
        async with gate(path):
            pass


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """All that is logged, at the level that says most."""
    root, ours = logging.getLogger(), logging.getLogger("nesa_node")
    before = list(root.handlers), root.level, ours.level
    stream = io.StringIO()
    setup_logging("debug", stream=stream)
    yield stream
    root.handlers[:], root.level, ours.level = before


async def test_nothing_logged_or_answered_holds_a_key(path: Path, log: io.StringIO) -> None:
    key = new_key(path)
    wrong = "nesa-" + "w" * 43
    async with gate(path, api_key="one-more-key") as (_, address), browser(address) as client:
        for shown in (key, wrong, "one-more-key"):
            for response in (
                await models(client, **bearer(shown)),
                await client.post("/login", data={"key": shown}),
                await client.post("/login", json={"key": shown}),
            ):
                assert shown not in response.text + repr(response.headers)
    said = log.getvalue()
    assert "key_refused" in said
    for secret in (key, wrong, "one-more-key"):
        assert secret not in said
    assert key.encode() not in overwrite(path, b"")


async def test_use_is_remembered_in_the_file(path: Path) -> None:
    key = new_key(path)
    assert KeyStore(path).read_all()[0].used_at is None
    before = time.time()
    async with gate(path) as (_, address), browser(address) as client:
        for _ in range(3):
            await models(client, **bearer(key))
        async with asyncio.timeout(5):
            while KeyStore(path).read_all()[0].used_at is None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        written = os.stat(path).st_mtime_ns
        await models(client, **bearer(key))
        await models(client, **bearer(key))
    assert before <= (KeyStore(path).read_all()[0].used_at or 0) <= time.time()
    assert os.stat(path).st_mtime_ns == written


def test_a_key_may_have_limits_of_its_own(path: Path) -> None:
    limits = KeyLimits(requests_per_minute=1, tokens_per_minute=2, concurrent_requests=3)
    made, _ = KeyStore(path).add("alice", limits)
    assert (made.requests_per_minute, made.tokens_per_minute, made.concurrent_requests) == (1, 2, 3)
