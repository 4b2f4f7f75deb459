"""Sessions that three whole chains compute: one that a node lies in is outvoted at that token."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from nesa_node.cli.client_model import describe_route
from nesa_node.client.verification import replicas
from nesa_node.client.verification.audit_history import AuditHistory
from nesa_node.core.decision_log import DecisionLog
from nesa_node.core.errors import (
    MissingBlocksError,
    UnsupportedFeatureError,
    WrongActivationsError,
)
from nesa_node.core.ids import PeerId, Span
from nesa_node.core.settings.choices import RouteName
from nesa_node.core.settings.declaration import default_audits_path, default_decisions_path
from tests.audit_outcomes import audit_outcomes
from tests.client.local_models import random_ids
from tests.e2e.joining import ROUTES, joined
from tests.e2e.liars import calibrate_tiny_models, lie, peer_of, scale, session_over
from tests.engine.tiny_models import BLOCKS, reference
from tests.same_tokens import assert_same_tokens
from tests.swarms import daemons, in_process_swarm

OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
HALVES = [Span(0, 3), Span(3, BLOCKS)]
CALIBRATED = 3
"""Passed audits that each node begins with: it is no newcomer."""


@pytest.fixture(autouse=True)
def _calibrated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calibrate_tiny_models(monkeypatch)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(scope="module")
def llama(tiny: Callable[[str], Path]) -> Path:
    return tiny("llama")


def peers_in(folder: Path, nodes: int) -> list[PeerId]:
    return [peer_of(folder / f"node-{number}.key") for number in range(nodes)]


def disturb(output_TD: torch.Tensor) -> None:
    output_TD.add_(0.1 * torch.randn_like(output_TD))


@pytest.mark.parametrize("route", ROUTES)
def test_tokens_are_those_of_transformers(llama: Path, tmp_path: Path, route: RouteName) -> None:
    """Also with beams, and in sessions that are rolled back."""
    prompt, beams = random_ids(2, 40), OPTIONS | {"num_beams": 3, "max_new_tokens": 10}
    with (
        in_process_swarm(llama, HALVES * 3, tmp_path) as addresses,
        joined(llama, addresses, route, verify="cdv") as model,
    ):
        tokens, found = model.generate(prompt, **OPTIONS), model.generate(prompt, **beams)
        logits = model(prompt).logits
        with model.inference_session(max_length=90, batch_size=2) as session:
            peers = [hop.peer_id for hop in session.hops]
            assert sorted(peers) == sorted(peers_in(tmp_path, 6))
            chains = describe_route(session).removeprefix("chain ").split(" | ")
            assert [chain.count(" → ") for chain in chains] == [1] * 3
            model.generate(random_ids(2, 3, seed=4), session=session, **OPTIONS)
            # Of a chain a stream between its nodes, of a star one back from each.
            assert len(session.codecs) == {"chain": 9, "star": 12}[route]
            model.generate(random_ids(2, 30, seed=5), session=session, **OPTIONS)
            again = model.generate(prompt, session=session, **OPTIONS)
            assert not session.failovers
        assert_same_tokens(reference(llama), tokens, prompt, **OPTIONS)
        assert_same_tokens(reference(llama), again, prompt, **OPTIONS)
        assert_same_tokens(reference(llama), found, prompt, **beams)
        torch.testing.assert_close(logits, reference(llama)(prompt).logits, rtol=0, atol=1e-3)
        assert not audit_outcomes(model)


def test_many_sessions_at_once_do_not_wait_for_each_other(llama: Path, tmp_path: Path) -> None:
    """More than the event loop has threads: each compares, and has its next token chosen."""
    prompts = [random_ids(1, 8, seed=number) for number in range(12)]
    with (
        in_process_swarm(llama, [Span(0, BLOCKS)] * 2, tmp_path) as addresses,
        joined(llama, addresses, "chain", verify="cdv") as model,
        ThreadPoolExecutor(len(prompts)) as threads,
    ):
        texts = list(threads.map(lambda prompt: model.generate(prompt, **OPTIONS), prompts))
    for prompt, tokens in zip(prompts, texts, strict=True):
        assert_same_tokens(reference(llama), tokens, prompt, **OPTIONS)


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("place", range(2))
def test_the_chain_of_a_liar_is_outvoted(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spares: int, place: int
) -> None:
    """At the token from which on it lies; a spare chain takes its place. No node is named."""
    lies_now = threading.Event()

    def disturb_now(output_TD: torch.Tensor) -> None:
        if lies_now.is_set():
            disturb(output_TD)

    lie(monkeypatch, HALVES[place], disturb_now)
    prompt, nodes = random_ids(1, 8), 6 + 2 * spares
    with in_process_swarm(llama, HALVES * (3 + spares), tmp_path) as addresses:
        everyone = peers_in(tmp_path, nodes)
        history = AuditHistory(default_audits_path())
        for peer in everyone * CALIBRATED:
            history.record_passed(peer)
        with joined(llama, addresses, "chain", verify="cdv") as model:
            liar = everyone[place]
            session = session_over(model, liar)
            first = model.generate(prompt, session=session, **OPTIONS | {"max_new_tokens": 4})
            lies_now.set()
            tokens = model.generate(first, session=session, **OPTIONS)
            [loss] = session.failovers
            assert liar in loss.lost
            assert len(loss.lost) == 2
            peers = [hop.peer_id for hop in session.hops]
            assert not set(peers).intersection(loss.lost)
            assert len(peers) == 4 + 2 * spares
            session.finish()
            assert_same_tokens(reference(llama), tokens, first, **OPTIONS)

            [record] = [
                decision.body
                for decision in DecisionLog(default_decisions_path()).recent(100)
                if decision.kind == "audit"
            ]
            assert (record["outcome"], record["auditor"]) == ("outvoted", "cdv")
            assert record["peer"] == ""
            assert sorted(record["chain"]) == sorted(loss.lost)
            assert record["blocks"] == [0, BLOCKS]
            assert "which node of the chain was wrong is not known" in record["reason"]
            kept = AuditHistory(default_audits_path())
            assert not kept.barred
            trusted = {peer for peer, passed in kept.passed.items() if passed}
            assert trusted == set(everyone) - set(loss.lost)

            for _ in range(3):
                assert torch.equal(
                    model.generate(prompt, **OPTIONS), reference(llama).generate(prompt, **OPTIONS)
                )
            assert audit_outcomes(model) == {"outvoted": 1}


def test_two_chains_that_lie_alike_win_and_audits_find_them(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie(monkeypatch, HALVES[0], scale, nodes=2)
    with (
        in_process_swarm(llama, HALVES * 3, tmp_path) as addresses,
        joined(llama, addresses, "chain", verify="cdv", audit=1.0) as model,
    ):
        session = model.inference_session(max_length=60)
        model.generate(random_ids(1, 8), session=session, **OPTIONS)
        liars = {peer_of(tmp_path / f"node-{number}.key") for number in (0, 2)}
        assert liars < {hop.peer_id for hop in session.hops}
        with pytest.raises(WrongActivationsError) as caught:
            session.finish()
        assert caught.value.peer in liars
        model.close()
        found = audit_outcomes(model)
        assert (found["outvoted"], found["failed"]) == (1, 2)


def test_three_answers_are_no_answer(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie(monkeypatch, HALVES[1], disturb, nodes=2)
    with (
        in_process_swarm(llama, HALVES * 3, tmp_path) as addresses,
        joined(llama, addresses, "chain", verify="cdv") as model,
        pytest.raises(WrongActivationsError, match=r"→ .* differently"),
        model.inference_session(max_length=60) as session,
    ):
        model.generate(random_ids(1, 8), session=session, **OPTIONS)


def test_two_chains_have_to_agree(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lies_now = threading.Event()
    lie(monkeypatch, HALVES[0], lambda out_TD: disturb(out_TD) if lies_now.is_set() else None)
    prompt = random_ids(1, 8)
    with (
        in_process_swarm(llama, HALVES * 2, tmp_path) as addresses,
        joined(llama, addresses, "chain", verify="cdv") as model,
    ):
        tokens = model.generate(prompt, **OPTIONS)
        assert_same_tokens(reference(llama), tokens, prompt, **OPTIONS)
        lies_now.set()
        with pytest.raises(WrongActivationsError, match="at least 2 must agree"):
            model.generate(prompt, **OPTIONS)


@pytest.mark.timeout(150)
def test_a_chain_whose_node_dies_is_replaced(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "REPLICA_TIMEOUT_S", 3.0)
    prompt = random_ids(1, 8)
    with daemons(llama, tmp_path) as running:
        *_, second_half = running.start_all([*[Span(0, BLOCKS)] * 3, *HALVES])
        with joined(llama, running.addresses, "chain", verify="cdv") as model:
            uses_halves = False
            while not uses_halves:
                session = model.inference_session(max_length=60)
                peers = [hop.peer_id for hop in session.hops]
                uses_halves = second_half.peer_id in peers
                if not uses_halves:
                    session.close()
            assert len(peers) == 4
            first = model.generate(prompt, session=session, **OPTIONS | {"max_new_tokens": 4})
            running.kill(second_half)
            tokens = model.generate(first, session=session, **OPTIONS)
            assert [len(hop.span) for hop in session.hops] == [BLOCKS] * 3
            [loss] = session.failovers
            assert second_half.peer_id in loss.lost
            session.finish()
    assert_same_tokens(reference(llama), tokens, first, **OPTIONS)


def test_too_few_nodes_are_told_before_anything_is_sent(llama: Path, tmp_path: Path) -> None:
    with (
        in_process_swarm(llama, [*HALVES, HALVES[0]], tmp_path) as addresses,
        pytest.raises(MissingBlocksError, match=r"1 nodes can be used for block 3"),
        joined(llama, addresses, "chain", verify="cdv"),
    ):
        pass


def test_distributions_need_the_last_block_and_the_nodes_dtype(llama: Path, tmp_path: Path) -> None:
    prompt = random_ids(1, 8)
    with in_process_swarm(llama, [Span(0, BLOCKS)] * 2, tmp_path) as addresses:
        with joined(llama, addresses, "chain", verify="cdv", client_blocks=(1, 0)) as model:
            tokens = model.generate(prompt, **OPTIONS)
            assert_same_tokens(reference(llama), tokens, prompt, **OPTIONS)
            with pytest.raises(UnsupportedFeatureError, match="output_hidden_states"):
                model(prompt, output_hidden_states=[3])
        for options, message in (
            ({"client_blocks": (0, 1)}, "client_blocks"),
            ({"dtype": torch.bfloat16}, "nodes' dtype"),
            ({"quality": "int4"}, "no bound was fitted"),
        ):
            with (
                pytest.raises(UnsupportedFeatureError, match=message),
                joined(llama, addresses, "chain", verify="cdv", **options),
            ):
                pass
