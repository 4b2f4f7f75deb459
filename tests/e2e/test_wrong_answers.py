"""What becomes of an answer that an audit finds to be wrong: it is computed again, or ends so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import TextStreamer

from nesa_node.client.model import reruns
from nesa_node.core.errors import RefusedError, WrongActivationsError
from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import RouteName
from tests.api.live import live_gateway
from tests.api.tokenizers import byte_level_tokenizer
from tests.audit_outcomes import audit_outcomes
from tests.client.local_models import random_ids
from tests.e2e.joining import ROUTES, joined
from tests.e2e.liars import boast, calibrate_tiny_models, lie, peer_of, scale
from tests.engine.tiny_models import BLOCKS, reference, save_tiny_model
from tests.first_is_fast import first_is_fast
from tests.same_tokens import assert_same_tokens
from tests.swarms import in_process_swarm, thirds

pytestmark = pytest.mark.timeout(180)

OPTIONS: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
SPANS = thirds(BLOCKS)


@pytest.fixture(autouse=True)
def _liar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of six nodes lies, and says that it is fast, so that it is used."""
    calibrate_tiny_models(monkeypatch)
    lie(monkeypatch, SPANS[1], scale)
    boast(monkeypatch)


@pytest.fixture(scope="module")
def llama(tiny: Callable[[str], Path]) -> Path:
    return tiny("llama")


@pytest.mark.parametrize("route", first_is_fast(*ROUTES))
def test_it_is_computed_again_without_the_liar(
    llama: Path, tmp_path: Path, route: RouteName
) -> None:
    prompt = random_ids(1, 8)
    with (
        in_process_swarm(llama, SPANS * 2, tmp_path) as addresses,
        joined(llama, addresses, route, audit=1.0) as model,
    ):
        tokens = model.generate(prompt, **OPTIONS)
        logits = model(prompt).logits
        model.close()
        # The call of the model goes past the liar at once.
        assert audit_outcomes(model) == {"failed": 1, "passed": 2 + 3 + 3}
    assert_same_tokens(reference(llama), tokens, prompt, **OPTIONS)
    with torch.no_grad():
        assert torch.allclose(logits, reference(llama)(prompt).logits, atol=1e-4)


@pytest.mark.parametrize("selection", first_is_fast(None, True))
def test_so_are_logits_and_hidden_states(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, selection: bool | None
) -> None:
    """Sessions for hidden states run parts of a node's blocks."""
    lie(monkeypatch, SPANS[1], scale, in_parts=True)
    prompt = random_ids(1, 8)
    with (
        in_process_swarm(llama, SPANS * 2, tmp_path) as addresses,
        joined(llama, addresses, "chain", audit=1.0) as model,
    ):
        found = model(prompt, output_hidden_states=selection)
        model.close()
        assert audit_outcomes(model)["failed"] == 1
    with torch.no_grad():
        expected = reference(llama)(prompt, output_hidden_states=True)
    assert torch.allclose(found.logits, expected.logits, atol=1e-4)
    for ours, theirs in zip(found.hidden_states or (), expected.hidden_states, strict=False):
        assert torch.allclose(ours, theirs, atol=1e-4)


def test_seeded_samples_are_those_of_honest_nodes(llama: Path, tmp_path: Path) -> None:
    prompt = random_ids(1, 8)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": True, "temperature": 0.8}
    with (
        in_process_swarm(llama, SPANS * 2, tmp_path) as addresses,
        joined(llama, addresses, "chain", audit=1.0) as model,
    ):
        torch.manual_seed(3)
        tokens = model.generate(prompt, **options)
        model.close()
        assert audit_outcomes(model)["failed"] == 1
    torch.manual_seed(3)
    assert torch.equal(tokens, reference(llama).generate(prompt, **options))


def test_what_was_streamed_ends_with_an_error(llama: Path, tmp_path: Path) -> None:
    streamer = TextStreamer(byte_level_tokenizer())
    with (
        in_process_swarm(llama, SPANS * 2, tmp_path) as addresses,
        joined(llama, addresses, "chain", audit=1.0) as model,
    ):
        with pytest.raises(WrongActivationsError) as caught:
            model.generate(random_ids(1, 8), streamer=streamer, **OPTIONS)
        assert caught.value.peer == peer_of(tmp_path / "node-1.key")
        assert Span(*caught.value.blocks) == SPANS[1]
        assert caught.value.position == 0


def test_open_sessions_leave_the_liar(llama: Path, tmp_path: Path) -> None:
    """Their next step fails: what they hold may be wrong from the start."""
    prompt = random_ids(1, 8)
    with (
        in_process_swarm(llama, SPANS * 2, tmp_path) as addresses,
        joined(llama, addresses, "chain", audit=1.0) as model,
        model.inference_session(max_length=30) as session,
    ):
        session.step(prompt)
        model.generate(prompt, **OPTIONS)
        with pytest.raises(WrongActivationsError, match="not used any more"):
            session.step(prompt)


def test_nothing_that_was_cached_behind_it_is_reused(llama: Path, tmp_path: Path) -> None:
    """Nodes after the liar have its prefix under the digests of before."""
    prompt = random_ids(1, 80)
    with (
        in_process_swarm(llama, SPANS * 2, tmp_path) as addresses,
        joined(llama, addresses, "chain", audit=1.0) as model,
    ):
        with (
            pytest.raises(WrongActivationsError),
            model.inference_session(max_length=120, prompt=prompt) as session,
        ):
            model.generate(prompt, session=session, **OPTIONS)
        for held in (0, 64):
            with model.inference_session(max_length=120, prompt=prompt) as session:
                assert session.lengths == (held,)
                tokens = model.generate(prompt, session=session, **OPTIONS)
            assert_same_tokens(reference(llama), tokens, prompt, **OPTIONS)


def test_where_all_lie_the_caller_is_told(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reruns, "MAX_RERUNS", 1)
    lie(monkeypatch, SPANS[0], scale, nodes=3)
    with (
        in_process_swarm(llama, SPANS * 3, tmp_path) as addresses,
        joined(llama, addresses, "chain", audit=1.0) as model,
    ):
        with pytest.raises(WrongActivationsError):
            model.generate(random_ids(1, 8), **OPTIONS)
        with pytest.raises(RefusedError, match="wrong activations"):
            model.generate(random_ids(1, 8), **OPTIONS)


@pytest.mark.parametrize("path", first_is_fast("chat/completions", "completions", "responses"))
def test_the_gateway_answers_rightly_or_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """The second gateway has no audits yet, and answers its first request without a stream."""
    model, tokenizer = save_tiny_model("llama", tmp_path), byte_level_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(model)
    text = "the cat sat on the mat"
    asked: dict[str, Any] = {"model": "llama-6-0", "temperature": 0}
    if path == "completions":
        asked |= {"prompt": text, "max_tokens": 12}
    elif path == "responses":
        asked |= {"input": text, "max_output_tokens": 16}
    else:
        asked |= {"messages": [{"role": "user", "content": text}], "max_tokens": 12}
    with in_process_swarm(model, SPANS * 2, tmp_path) as addresses:
        texts = []
        for number in range(2):
            folder = tmp_path / f"gateway-{number}"
            folder.mkdir()
            monkeypatch.setenv("XDG_STATE_HOME", str(folder))
            with (
                live_gateway(addresses, folder, model, audit=1.0) as url,
                httpx.Client(base_url=url, timeout=60) as client,
            ):
                if number == 0:
                    with client.stream(
                        "POST", f"/v1/{path}", json=asked | {"stream": True}
                    ) as answer:
                        lines = list(answer.iter_lines())
                    assert any("wrong_activations" in line for line in lines[-4:]), lines
                for _ in range(2):
                    found = client.post(f"/v1/{path}", json=asked)
                    assert found.status_code == 200, found.text
                    texts.append(_without_ids(found.json()))
        assert texts[0] == texts[1] == texts[2] == texts[3]


def _without_ids(answer: dict[str, Any]) -> str:
    """The choices and the usage."""
    kept = {name: answer.get(name) for name in ("choices", "usage")}
    kept["output"] = [part.get("content") for part in answer.get("output", ())]
    return json.dumps(kept)
