"""Speeds measured from outside, at real nodes, one of which lies."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nesa_node.client.recovery import suspicion as watch
from nesa_node.client.routing.request import RouteRequest
from nesa_node.client.session.connection import measure_speed
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.engine.cache.paged_attention import RowChunk
from nesa_node.engine.model.blocks import ModelBlocks, TokenSlice
from nesa_node.engine.model.devices import SpanThroughput, measure_throughput
from nesa_node.routing.reputation import SpeedClaims
from nesa_node.server.node import served_span, span_speed
from nesa_node.swarm.dht.sealing import FailureKind, ReportedFailure
from nesa_node.swarm.node import open_swarm
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.reputation import FailureReporter
from nesa_node.topology.snapshot import NodeState
from tests.client.local_models import random_ids
from tests.e2e.joining import joined
from tests.engine.tiny_models import BLOCKS, HIDDEN, reference
from tests.same_tokens import assert_same_tokens
from tests.swarm.local_swarm import local_swarm
from tests.swarms import in_process_swarm

LIE = 100.0
HONEST_TOKENS_PER_S = 50.0


@pytest.fixture(autouse=True)
def _speeds_stay_as_they_were_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_speed, "SAMPLE_INTERVAL_S", 1e6)


async def test_a_node_that_claims_a_hundred_times_its_speed_is_found_out(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[SpanThroughput] = []

    def boast(blocks: ModelBlocks) -> SpanThroughput:
        measured.append(measure_throughput(blocks))
        factor = LIE if len(measured) == 1 else 1.0
        last = measured[-1]
        return replace(
            last,
            prefill_tokens_per_s=factor * last.prefill_tokens_per_s,
            decode_tokens_per_s=factor * last.decode_tokens_per_s,
        )

    monkeypatch.setattr(served_span, "measure_throughput", boast)
    folder = tiny("llama")
    spans = [Span(0, BLOCKS), Span(0, BLOCKS)]
    with in_process_swarm(folder, spans, tmp_path) as addresses:
        async with open_swarm(
            Identity.ephemeral(tmp_path), initial_peers=addresses, listen=False
        ) as swarm:
            (record, *_) = await swarm.directory.fetch_all()
            request = _request(ModelId(record.model_id))
            snapshot = await swarm.directory.fetch(request.model_id)
            liar, other = sorted(snapshot.nodes, key=lambda node: -node.decode_tokens_per_s)
            assert liar.decode_tokens_per_s > LIE / 5 * other.decode_tokens_per_s
            claims = SpeedClaims(time.monotonic)
            for node in snapshot.nodes:
                speed = await measure_speed(swarm, node, request)
                assert speed is not None
                claims.record_measurement(node.peer_id, speed)
            assert claims.clamp(liar).decode_tokens_per_s < liar.decode_tokens_per_s / 20


async def test_steps_that_a_node_runs_together_do_not_make_it_look_fast(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen steps that wait are one forward, which takes little more time than a single step."""

    def slowed(blocks: ModelBlocks) -> SpanThroughput:
        honest = measure_throughput(blocks)
        run = blocks.forward_buffers

        def slow(pieces: Sequence[TokenSlice], runs: Sequence[RowChunk]) -> None:
            time.sleep(0.05)
            run(pieces, runs)

        monkeypatch.setattr(blocks, "forward_buffers", slow)
        return honest

    monkeypatch.setattr(served_span, "measure_throughput", slowed)
    with in_process_swarm(tiny("llama"), [Span(0, BLOCKS)], tmp_path) as addresses:
        async with open_swarm(
            Identity.ephemeral(tmp_path), initial_peers=addresses, listen=False
        ) as swarm:
            (record,) = await swarm.directory.fetch_all()
            request = _request(ModelId(record.model_id))
            (node,) = (await swarm.directory.fetch(request.model_id)).nodes
            speed = await measure_speed(swarm, node, request)
    assert speed is not None
    assert speed < 1.05 / 0.05


async def test_nobody_who_is_gone_is_measured(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 1) as (swarm,):
        ghost = NodeState(PeerId("12D3KooWghost"), Span(0, BLOCKS))
        assert await measure_speed(swarm, ghost, _request(ModelId("tiny@0"))) is None


def _request(model_id: ModelId) -> RouteRequest:
    return RouteRequest(
        model_id=model_id,
        span=Span(0, BLOCKS),
        rows=4,
        max_tokens=100,
        hidden_size=HIDDEN,
        dtype="float32",
    )


def test_a_session_leaves_a_liar_that_is_slow(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It claims most, so it is chosen; it is found out by its steps, and the text is the same."""
    monkeypatch.setattr(watch, "FIRST_CHECK_PAUSE_S", 0.5)
    made: list[ModelBlocks] = []

    def boast(blocks: ModelBlocks) -> SpanThroughput:
        made.append(blocks)
        honest = measure_throughput(blocks)
        if len(made) > 1:
            # A step of so few blocks takes less than links differ by: that must not decide.
            return replace(honest, decode_tokens_per_s=HONEST_TOKENS_PER_S)
        run = blocks.forward_buffers

        def slow(pieces: Sequence[TokenSlice], runs: Sequence[RowChunk]) -> None:
            time.sleep(5 / HONEST_TOKENS_PER_S)
            run(pieces, runs)

        monkeypatch.setattr(blocks, "forward_buffers", slow)
        speed = LIE * honest.decode_tokens_per_s
        return replace(honest, decode_tokens_per_s=speed)

    note, told = FailureReporter.record_failure, list[ReportedFailure]()

    def listen(self: FailureReporter, model_id: ModelId, peer: PeerId, kind: FailureKind) -> None:
        told.append(ReportedFailure(peer=peer, kind=kind, count=1, at=1.0))
        note(self, model_id, peer, kind)

    monkeypatch.setattr(FailureReporter, "record_failure", listen)
    monkeypatch.setattr(served_span, "measure_throughput", boast)
    folder = tiny("llama")
    spans = [Span(0, BLOCKS), Span(0, BLOCKS)]
    options: dict[str, Any] = {"max_new_tokens": 300, "do_sample": False}
    with (
        in_process_swarm(folder, spans, tmp_path) as addresses,
        joined(folder, addresses, "chain") as model,
        model.inference_session(max_length=512) as session,
    ):
        (liar,) = session.hops
        prompt = random_ids(1, 8)
        ids = model.generate(prompt, session=session, **options)
        (honest,) = session.hops
        assert honest.peer_id != liar.peer_id
        with model.inference_session(max_length=32) as later:
            assert later.hops == (honest,)
        assert {(failure.peer, failure.kind) for failure in told} == {(liar.peer_id, "slow")}
    assert_same_tokens(reference(folder), ids, prompt, **options)
