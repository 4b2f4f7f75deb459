"""The official client, with keys of all kinds, against a gateway over three nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest

from nesa_node.web.key_store import KeyLimits, KeyStore
from tests.api.live import live_gateway
from tests.cli.tiny import BLOCKS
from tests.swarms import in_process_swarm, thirds

NAME = "small"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> KeyStore:
    store = KeyStore(tmp_path_factory.mktemp("access") / "keys.json")
    store.add("first")
    return store


@pytest.fixture(scope="module")
def url(store: KeyStore, small_model: Path) -> Iterator[str]:
    folder = store.path.parent
    with (
        in_process_swarm(small_model, thirds(BLOCKS), folder) as addresses,
        live_gateway(addresses, folder, small_model) as found,
    ):
        # With its first request the gateway joins the swarm, by a p2pd that stays.
        _, key = store.add("who begins")
        with client_of(found, key) as client:
            eventually_known(client)
            complete(client)
        yield found


def client_of(url: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def eventually_known(client: openai.OpenAI) -> None:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            client.models.list()
        except openai.AuthenticationError:
            time.sleep(0.1)
        else:
            return
    pytest.fail("a new key is not known after 5 s")


def complete(client: openai.OpenAI) -> openai.types.Completion:
    return client.completions.create(model=NAME, prompt="hello again", max_tokens=4)


NewClient = Callable[[str, KeyLimits], openai.OpenAI]


@pytest.fixture
def new_client(url: str, store: KeyStore) -> Iterator[NewClient]:
    opened: list[openai.OpenAI] = []

    def new(name: str, limits: KeyLimits) -> openai.OpenAI:
        _, key = store.add(name, limits)
        # Whoever asks often enough to be known would have spent what the limits leave.
        time.sleep(1.1)
        opened.append(client_of(url, key))
        return opened[-1]

    yield new
    for client in opened:
        client.close()


def test_no_key_a_wrong_one_and_a_revoked_one_are_authentication_errors(
    url: str, store: KeyStore, new_client: NewClient
) -> None:
    revoked = new_client("revoked", KeyLimits())
    assert complete(revoked).usage is not None
    store.revoke("revoked")
    time.sleep(1.1)
    none: Any = {"Authorization": openai.Omit()}
    with closing(client_of(url, "nesa-wrong")) as wrong:
        for client, headers in ((revoked, {}), (wrong, {}), (wrong, none)):
            with pytest.raises(openai.AuthenticationError) as refused:
                client.models.list(extra_headers=headers)
            with pytest.raises(openai.AuthenticationError) as refused:
                client.completions.create(model=NAME, prompt="x", extra_headers=headers)
            assert refused.value.status_code == 401
            assert refused.value.code == "invalid_api_key"
            assert refused.value.type == "authentication_error"


def test_more_requests_than_a_key_may_make_are_a_rate_limit_error(new_client: NewClient) -> None:
    client = new_client("some", KeyLimits(requests_per_minute=2))
    complete(client)
    complete(client)
    with pytest.raises(openai.RateLimitError) as over:
        complete(client)
    assert over.value.status_code == 429
    assert over.value.code == "rate_limit_exceeded"
    assert int(over.value.response.headers["retry-after"]) >= 1
    assert over.value.response.headers["x-ratelimit-remaining-requests"] == "0"


def test_a_key_does_not_find_out_what_another_one_asked(new_client: NewClient) -> None:
    prompt = "hello again the capital " * 20
    alice, bob = new_client("alice", KeyLimits()), new_client("bob", KeyLimits())
    assert [cached(client, prompt) > 0 for client in (alice, bob)] == [False, False]
    assert cached(alice, prompt) >= 32


def cached(client: openai.OpenAI, prompt: str) -> int:
    """Tokens of `prompt` that nodes still held, by what the answer says."""
    usage = client.completions.create(model=NAME, prompt=prompt, max_tokens=1).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    time.sleep(0.5)
    return usage.prompt_tokens_details.cached_tokens or 0


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_that_answers_cost_count(new_client: NewClient, stream: bool) -> None:
    client = new_client(f"tokens-{stream}", KeyLimits(tokens_per_minute=1))
    if stream:
        for _ in client.completions.create(
            model=NAME, prompt="hello again", max_tokens=4, stream=True
        ):
            pass
    else:
        usage = complete(client).usage
        assert usage is not None
        assert usage.total_tokens > 1
    with pytest.raises(openai.RateLimitError, match="tokens per minute"):
        complete(client)


def test_an_answer_that_its_client_leaves_gives_its_slot_back(new_client: NewClient) -> None:
    client = new_client("one", KeyLimits(concurrent_requests=1))
    stream = client.completions.create(
        model=NAME,
        prompt="hello again",
        max_tokens=400,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    with pytest.raises(openai.RateLimitError, match="1 requests at once"):
        complete(client)
    stream.close()
    deadline = time.monotonic() + 5
    while True:
        try:
            complete(client)
        except openai.RateLimitError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        else:
            break
