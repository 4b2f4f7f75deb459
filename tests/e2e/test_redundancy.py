"""Sessions whose blocks three nodes compute: a liar is outvoted at the token at which it lies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nesa_node.core.errors import ConfigError, MissingBlocksError, WrongActivationsError
from nesa_node.core.ids import Span
from tests.audit_outcomes import audit_outcomes
from tests.client.local_models import random_ids
from tests.e2e.joining import joined
from tests.e2e.liars import calibrate_tiny_models, lie, peer_of, scale, session_over
from tests.engine.tiny_models import BLOCKS, reference
from tests.first_is_fast import first_is_fast
from tests.same_tokens import assert_same_tokens
from tests.swarms import daemons, in_process_swarm

pytestmark = pytest.mark.timeout(180)

OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
HALVES = [Span(0, 3), Span(3, BLOCKS)]


@pytest.fixture(autouse=True)
def _calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    calibrate_tiny_models(monkeypatch)


@pytest.fixture(scope="module")
def llama(tiny: Callable[[str], Path]) -> Path:
    return tiny("llama")


@pytest.mark.parametrize("options", first_is_fast({}, {"num_beams": 3, "max_new_tokens": 10}))
def test_tokens_are_those_of_transformers(
    llama: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Also with beams, and in sessions that are rolled back."""
    prompt = random_ids(2, 40)
    with (
        in_process_swarm(llama, HALVES * 3, tmp_path) as addresses,
        joined(llama, addresses, "star", verify="2of3") as model,
    ):
        tokens = model.generate(prompt, **OPTIONS | options)
        with model.inference_session(max_length=90, batch_size=2) as session:
            assert len(session.hops) == 6
            model.generate(random_ids(2, 30, seed=5), session=session, **OPTIONS)
            if not options:
                again = model.generate(prompt, session=session, **OPTIONS)
                assert_same_tokens(reference(llama), again, prompt, **OPTIONS)
        assert_same_tokens(reference(llama), tokens, prompt, **OPTIONS | options)


@pytest.mark.parametrize("spares", first_is_fast(0, 1))
@pytest.mark.parametrize("place", first_is_fast(0, 1))
def test_a_liar_is_outvoted(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spares: int, place: int
) -> None:
    """At the token from which on it lies; a spare takes its place. It is not asked again."""
    lies_now = threading.Event()

    def scale_now(output_TD: torch.Tensor) -> None:
        if lies_now.is_set():
            scale(output_TD)

    lie(monkeypatch, HALVES[place], scale_now)
    prompt = random_ids(1, 8)
    with (
        in_process_swarm(llama, HALVES * (3 + spares), tmp_path) as addresses,
        joined(llama, addresses, "star", verify="2of3") as model,
    ):
        liar = peer_of(tmp_path / f"node-{place}.key")
        session = session_over(model, liar)
        first = model.generate(prompt, session=session, **OPTIONS | {"max_new_tokens": 4})
        lies_now.set()
        tokens = model.generate(first, session=session, **OPTIONS)
        assert [loss.lost for loss in session.failovers] == [(liar,)]
        peers = [hop.peer_id for hop in session.hops]
        assert liar not in peers
        assert len(peers) == 5 + spares
        session.finish()
        assert audit_outcomes(model) == {"outvoted": 1}
        assert_same_tokens(reference(llama), tokens, first, **OPTIONS)
        if spares:
            for _ in range(4):
                assert torch.equal(
                    model.generate(prompt, **OPTIONS), reference(llama).generate(prompt, **OPTIONS)
                )
            assert audit_outcomes(model) == {"outvoted": 1}
        else:
            with pytest.raises(MissingBlocksError, match="2 can be used"):
                model.generate(prompt, **OPTIONS)


def test_two_that_lie_alike_win_and_audits_find_them(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie(monkeypatch, HALVES[0], scale, nodes=2)
    with (
        in_process_swarm(llama, HALVES * 3, tmp_path) as addresses,
        joined(llama, addresses, "star", verify="2of3", audit=1.0) as model,
    ):
        session = model.inference_session(max_length=60)
        model.generate(random_ids(1, 8), session=session, **OPTIONS)
        with pytest.raises(WrongActivationsError) as caught:
            session.finish()
        assert caught.value.peer in {peer_of(tmp_path / f"node-{number}.key") for number in (0, 2)}
        model.close()
        found = audit_outcomes(model)
        assert (found["outvoted"], found["failed"]) == (1, 2)


def test_three_answers_are_no_answer(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disturb(output_TD: torch.Tensor) -> None:
        output_TD.add_(0.1 * torch.randn_like(output_TD))

    lie(monkeypatch, HALVES[1], disturb, nodes=2)
    with (
        in_process_swarm(llama, HALVES * 3, tmp_path) as addresses,
        joined(llama, addresses, "star", verify="2of3") as model,
        pytest.raises(WrongActivationsError, match="differently"),
        model.inference_session(max_length=60) as session,
    ):
        model.generate(random_ids(1, 8), session=session, **OPTIONS)


def test_a_node_that_dies_is_replaced(llama: Path, tmp_path: Path) -> None:
    prompt = random_ids(1, 8)
    with daemons(llama, tmp_path) as running:
        nodes = running.start_all([Span(0, BLOCKS)] * 4)
        with (
            joined(llama, running.addresses, "star", verify="2of3") as model,
            model.inference_session(max_length=60) as session,
        ):
            first = model.generate(prompt, session=session, **OPTIONS | {"max_new_tokens": 4})
            used = {hop.peer_id for hop in session.hops}
            running.kill(next(node for node in nodes[1:] if node.peer_id in used))
            tokens = model.generate(first, session=session, **OPTIONS)
            assert len(session.hops) == 3
    assert_same_tokens(reference(llama), tokens, first, **OPTIONS)


def test_too_few_nodes_are_told_before_anything_is_sent(llama: Path, tmp_path: Path) -> None:
    with (
        in_process_swarm(llama, [*HALVES * 2, HALVES[0]], tmp_path) as addresses,
        pytest.raises(MissingBlocksError, match=r"2 can be used for 3:6"),
        joined(llama, addresses, "star", verify="2of3"),
    ):
        pass


def test_unknown_rules_are_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match="2of3"):
        joined(llama, ("/ip4/127.0.0.1/tcp/1/p2p/12D3KooW",), "star", verify="3of5").__enter__()
