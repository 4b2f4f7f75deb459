"""Speeds of machines and of chains of them, against computations by hand."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from nesa_node.core.ids import PeerId, Span
from nesa_node.routing.placement.building import HOP_OVERHEAD_S, HOP_S, ModelShape
from nesa_node.server.pool.speeds import CLIENT_S, MIN_SERVING_S, SLOWDOWNS, MachineSpeeds
from nesa_node.swarm.dht.pool_notices import POOL, AssignedSpan, MeasuredFigures, Offer
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.p2p.link_measurements import RttTable
from nesa_node.topology.roofline import BlockWork
from nesa_node.topology.snapshot import NodeState
from tests.swarm.notice_fields import make_notice

SHAPE = ModelShape(
    "org/one",
    {"none": (10**9,) * 4, "int8": (5 * 10**8,) * 4},
    {"none": (BlockWork(1e9, 1e9),) * 4, "int8": (BlockWork(5e8, 1e9),) * 4},
    cache_tokens=64,
    cache_bytes=0,
    head=BlockWork(2e9, 0.0),
)


def offer(identity: Identity, **gb_per_s: float) -> Offer:
    figures = {
        kind: MeasuredFigures(block_overhead_s=0.0, read_bytes_per_s=rate * 1e9, flop_per_s=1e15)
        for kind, rate in gb_per_s.items()
    }
    notice = make_notice(
        Offer, identity, time.time(), model_id=POOL, memory_total_bytes=1, memory_free_bytes=1,
        figures=figures,
    )  # fmt: skip
    assert isinstance(notice, Offer)
    return notice


def span(first: int, last: int, **fields: Any) -> AssignedSpan:
    return AssignedSpan(model="org/one", span=(first, last), cache_tokens=64, **fields)


@pytest.fixture
def speeds() -> MachineSpeeds:
    swarm: Any = SimpleNamespace(rtts=RttTable(), transport=None)
    return MachineSpeeds(swarm)


def test_a_chain_takes_its_spans_its_hops_and_the_clients_head(
    speeds: MachineSpeeds, tmp_path: Any
) -> None:
    one, other = PeerId("one"), PeerId("other")
    identity = Identity.ephemeral(tmp_path)
    offers = {one: offer(identity, bfloat16=100), other: offer(identity, bfloat16=50, int8=25)}
    assigned = {one: span(0, 1), other: span(1, 4, quant_type="int8")}
    # 1 GB at 100 GB/s, three times 0.5 GB at 25 GB/s; heads of 2 GB at 100 and 50 GB/s.
    seconds = 0.01 + 3 * 0.02 + 2 * HOP_S + (0.02 + 0.04) / 2 + CLIENT_S
    found = speeds.predict_tokens_per_s(SHAPE, assigned, offers)
    assert found == pytest.approx(1 / seconds)
    speeds._rtts.record_ping(one, 4.0)
    assert speeds.hop_s(one) == pytest.approx(HOP_OVERHEAD_S + 0.004)


def test_what_a_node_measured_corrects_the_figures_within_bounds(
    speeds: MachineSpeeds, tmp_path: Any
) -> None:
    peer, claimed = PeerId("one"), offer(Identity.ephemeral(tmp_path), bfloat16=1000)
    alone = {peer: span(0, 4)}
    before = speeds.predict_tokens_per_s(SHAPE, alone, {peer: claimed})
    for now in (0.0, MIN_SERVING_S - 1):
        busy = NodeState(PeerId("node"), Span(0, 4), decode_tokens_per_s=1.0)
        speeds.observe(peer, claimed, SHAPE, "none", busy, now)
    assert speeds.slowdown(peer, "bfloat16") == 1.0, "others of its computer may load"
    for rate, expected in ((25.0, 10.0), (250.0, 1.0), (1e-9, SLOWDOWNS[1]), (1e9, SLOWDOWNS[0])):
        node = NodeState(PeerId("node"), Span(0, 4), decode_tokens_per_s=rate)
        speeds.observe(peer, claimed, SHAPE, "none", node, 100.0)
        assert speeds.slowdown(peer, "bfloat16") == pytest.approx(expected)
    speeds.observe(peer, claimed, SHAPE, "none", NodeState(PeerId("node"), Span(0, 4)), 100.0)
    assert speeds.slowdown(peer, "bfloat16") == SLOWDOWNS[0], "an unmeasured node tells nothing"
    assert speeds.slowdown(peer, "int8") == 1.0
    assert speeds.predict_tokens_per_s(SHAPE, alone, {peer: claimed}) > before


def test_a_machine_and_the_client_wake_up_once_a_token(
    speeds: MachineSpeeds, tmp_path: Any
) -> None:
    peer, rested = PeerId("one"), offer(Identity.ephemeral(tmp_path), bfloat16=100)
    figures = rested.figures["bfloat16"].model_copy(update={"wakeup_s": 0.003})
    waking = rested.model_copy(update={"figures": {"bfloat16": figures}})
    alone = {peer: span(0, 4)}
    seconds = [
        1 / speeds.predict_tokens_per_s(SHAPE, alone, {peer: each}) for each in (rested, waking)
    ]
    assert seconds[1] - seconds[0] == pytest.approx(2 * 0.003)
    node = NodeState(PeerId("node"), Span(0, 4), decode_tokens_per_s=1 / 0.043)
    for now in (0.0, MIN_SERVING_S):
        speeds.observe(peer, waking, SHAPE, "none", node, now)
    assert speeds.slowdown(peer, "bfloat16") == pytest.approx(1.0)


def test_nothing_is_predicted_for_a_hole_or_without_figures(
    speeds: MachineSpeeds, tmp_path: Any
) -> None:
    peer, identity = PeerId("one"), Identity.ephemeral(tmp_path)
    for assigned, figures in (({}, 1.0), ({peer: span(0, 3)}, 1.0), ({peer: span(0, 4)}, None)):
        offers = {peer: offer(identity, **({} if figures is None else {"bfloat16": figures}))}
        assert speeds.predict_tokens_per_s(SHAPE, assigned, offers) == 0.0
