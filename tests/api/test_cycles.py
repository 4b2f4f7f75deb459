"""What a request took is free when it ends, and does not wait until Python looks for cycles."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from torch import Tensor

from nesa_node.api.models.discovery import AnnouncedModel
from nesa_node.client.model.activity import SessionActivity
from nesa_node.client.verification.audit_history import AuditHistory
from nesa_node.engine.model.compiled_step import CompiledDecoder
from nesa_node.server.node import span_speed
from tests.api.live import live_gateway
from tests.api.tokenizers import byte_level_tokenizer
from tests.engine.tiny_models import BLOCKS, save_tiny_model
from tests.swarms import in_process_swarm, thirds

REQUESTS = 3
"""Of each kind."""
FREE_WITHIN_S = 10.0
OURS = ("nesa_node.api.", "nesa_node.client.", "nesa_node.core.errors")
KEPT = (SessionActivity, AnnouncedModel, AuditHistory)
"""A bounded list of what was, and the gateway's last look at each model and at the audits' file,
which its dashboard reads again when an audit has written there."""

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "streamed": {"stream": True},
    "of many choices": {"stream": True, "n": 3, "temperature": 1},
    "of two prompts": {"prompt": ["the cat", "the dog"]},
    "with log probabilities": {"logprobs": 2, "echo": True},
    "that follows a schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        "max_tokens": 40,
    },
    "that is refused": {"max_tokens": 5000},
}
ENDLESS = {"max_tokens": 900, "ignore_eos": True}


def alive() -> Counter[str]:
    """Objects of gateways and clients, their errors, and tensors, by type."""
    return Counter(
        kind.__qualname__
        for kind in map(type, gc.get_objects())
        if (kind.__module__.startswith(OURS) and kind not in KEPT) or issubclass(kind, Tensor)
    )


def until(state: Callable[[], bool]) -> bool:
    """Whether it comes to be so in time."""
    deadline = time.monotonic() + FREE_WITHIN_S
    while not state():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def check_nothing_stays(ask: Callable[[], None]) -> None:
    """Of several requests, though nothing is collected. The first one fills caches."""
    ask()
    assert until(_is_idle)
    before = alive()
    gc.disable()
    try:
        for _ in range(REQUESTS):
            ask()
        is_free = until(lambda: not alive() - before)
        assert is_free, dict(alive() - before)
    finally:
        gc.enable()


def _is_idle() -> bool:
    gc.collect()
    return not alive()["HopLink"]


@contextmanager
def gateway(folder: Path, nodes: int) -> Iterator[httpx.Client]:
    """Before so many thirds of a model. It audits all their work.

    The nodes, in this process, do without what they keep for each number of tokens in a step, and
    do not measure again, which takes tensors, too: how many there will be is chance.
    """
    model = save_tiny_model("llama", folder)
    byte_level_tokenizer().save_pretrained(model)
    with (
        pytest.MonkeyPatch.context() as patch,
        in_process_swarm(model, thirds(BLOCKS)[:nodes], folder) as addresses,
        live_gateway(addresses, folder, model, audit=1.0) as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        patch.setattr(CompiledDecoder, "supports", lambda *_: False)
        patch.setattr(span_speed, "SAMPLE_INTERVAL_S", 1e6)
        yield client


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with gateway(tmp_path_factory.mktemp("cycles"), 3) as found:
        yield found


def body(**options: Any) -> dict[str, Any]:
    prompt = "the cat sat on the mat, and the dog"
    asked = {"model": "llama-6-0", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    return {**asked, **options}


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_leaves_nothing(client: httpx.Client, kind: str) -> None:
    expected = 400 if "refused" in kind else 200

    def ask() -> None:
        answer = client.post("/v1/completions", json=body(**KINDS[kind]))
        assert answer.status_code == expected, answer.text

    check_nothing_stays(ask)


def test_embeddings_leave_nothing(client: httpx.Client) -> None:
    def ask() -> None:
        asked = {"model": "llama-6-0", "input": ["the cat", "the dog"]}
        assert client.post("/v1/embeddings", json=asked).status_code == 200

    check_nothing_stays(ask)


def test_who_leaves_a_stream_leaves_nothing(client: httpx.Client) -> None:
    def leave() -> None:
        asked = body(stream=True, **ENDLESS)
        with client.stream("POST", "/v1/completions", json=asked) as answer:
            next(answer.iter_lines())

    check_nothing_stays(leave)


def test_who_leaves_before_the_answer_leaves_nothing(client: httpx.Client) -> None:
    def leave() -> None:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=body(**ENDLESS), timeout=0.3)

    check_nothing_stays(leave)


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [["the cat"], ["the cat", "the dog"]])
def test_a_request_that_fails_leaves_nothing(prompts: Sequence[str], tmp_path: Path) -> None:
    with gateway(tmp_path, 2) as client:

        def ask() -> None:
            for stream in (False, True):
                asked = body(prompt=prompts, stream=stream)
                assert client.post("/v1/completions", json=asked).status_code == 503

        check_nothing_stays(ask)
