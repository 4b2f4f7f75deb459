"""Orchestrators that lead, stand ready, publish and explain themselves."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nesa_node.core.decision_log import DecisionLog
from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.core.settings.models import OrchestratorConfig
from nesa_node.routing.chain_request import ChainRequest
from nesa_node.routing.placement.moves import RebalancePlan
from nesa_node.routing.placement.rebalance import RebalancePolicy, rebalance
from nesa_node.routing.succession import LeaseTerms
from nesa_node.server.orchestrator.history import History, is_same_reason
from nesa_node.server.orchestrator.launch import find_model, follow_placements, orchestrate
from nesa_node.server.orchestrator.orchestrator import Orchestrator, OrchestratorIntervals
from nesa_node.server.orchestrator.placement_filter import PlacementFilter
from nesa_node.server.orchestrator.planner import (
    PLAN_TRIGGERS,
    PlacementDecision,
    Rebalancer,
    _finite,
)
from nesa_node.server.orchestrator.snapshot_store import SnapshotStore
from nesa_node.server.orchestrator.swarm_score import (
    apply_moves,
    score_swarm,
)
from nesa_node.swarm.dht.sealing import MAX_MAGNITUDE, AnnouncedMove, PlacementNotice
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.notice_store import LeaseKeeper
from nesa_node.topology.changes.triggers import Sensitivity
from nesa_node.topology.links.matrix import Links
from nesa_node.topology.snapshot import NodeState, Snapshot
from tests.swarm.local_swarm import eventually, local_swarm
from tests.swarm.notice_fields import PEERS
from tests.swarm.record_fields import MODEL_ID, make_status

MODEL = ModelId(MODEL_ID)
QUICK = LeaseTerms(ttl_s=3.0, succession_delay_s=1.5)
IDLE = PlacementDecision(
    moves=(),
    gain=0.0,
    repairs=0,
    latency_before_s=1.0,
    latency_after_s=1.0,
    steps_per_s_before=1.0,
    steps_per_s_after=1.0,
    strategy="scripted",
    trigger="none",
    reason="nothing better was found",
)


class Scripted:
    """Decides what it is told, and counts how often it was asked."""

    def __init__(self) -> None:
        self.decision = IDLE
        self.asked = 0

    def decide(self, _: Snapshot) -> PlacementDecision:
        self.asked += 1
        return self.decision


def moving(peer: PeerId, to: tuple[int, int]) -> PlacementDecision:
    move = AnnouncedMove(peer=peer, was=(0, 10), to=to, gain=0.2)
    return replace(IDLE, moves=(move,), gain=0.2, trigger="gain", reason="20% are gained")


def build(
    swarm: Swarm,
    planner: Scripted,
    decisions: DecisionLog | None = None,
    history: History | None = None,
) -> tuple[Orchestrator, LeaseKeeper]:
    lease = LeaseKeeper(swarm.notices, swarm.identity.peer_id, MODEL, clock=time.time, terms=QUICK)
    orchestrator = Orchestrator(
        swarm.notices,
        lease,
        MODEL,
        lambda: swarm.directory.fetch(MODEL),
        planner,
        decisions=decisions,
        history=history,
        intervals=OrchestratorIntervals(every_s=0.1, placement_ttl_s=20.0),
        rng=random.Random(1),
    )
    return orchestrator, lease


async def _lead(lease: LeaseKeeper) -> None:
    async def leads() -> bool:
        await lease.step()
        return lease.is_leader

    await eventually(leads)


async def test_leader_publishes_only_what_is_new(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 2) as (boss, node):
        await node.directory.publish(make_status())
        planner, log = Scripted(), DecisionLog(tmp_path / "decisions.db")
        orchestrator, lease = build(boss, planner, log)
        assert await orchestrator.step() is None
        assert planner.asked == 0  # it does not lead
        await _lead(lease)
        for _ in range(3):
            assert await orchestrator.step() is None
        assert await node.notices.fetch(PlacementNotice, MODEL) == []
        planner.decision = moving(node.identity.peer_id, (10, 20))
        first = await orchestrator.step()
        assert first is not None
        assert await orchestrator.step() is None
        assert await node.notices.fetch(PlacementNotice, MODEL) == [first]
        planner.decision = moving(node.identity.peer_id, (20, 30))
        second = await orchestrator.step()
        assert second is not None
        assert await node.notices.fetch(PlacementNotice, MODEL) == [second]
        assert len(second.based_on) == 64
        entries = log.recent(10)
        assert [entry.name for entry in entries[1:]] == [first.name, second.name]
        assert entries[0].name.startswith("none-")
        (found,) = log.find(second.name)
        assert found.kind == "placement"
        assert found.body["based_on"] == second.based_on
        assert found.body["moves"] == [
            {"peer": node.identity.peer_id, "was": [0, 10], "to": [20, 30], "gain": 0.2}
        ]


async def test_who_stands_ready_looks_without_planning(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 2) as (boss, node):
        await node.directory.publish(make_status())
        planner, history = Scripted(), History()
        orchestrator, lease = build(boss, planner, history=history)
        assert await orchestrator.step() is None
        seen = history.document()
        assert seen is not None
        assert (seen["leads"], planner.asked, len(seen["nodes"])) == (False, 0, 1)
        await _lead(lease)
        planner.decision = moving(node.identity.peer_id, (10, 20))
        placement = await orchestrator.step()
        assert placement is not None
        seen = history.document()
        assert seen is not None
        assert (seen["leads"], seen["active"]["name"]) == (True, placement.name)
        assert seen["history"]["placement"] == [None, placement.name]


async def test_those_who_stand_ready_do_not_plan_until_the_leader_is_gone(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 3) as (one, other, node):
        await node.directory.publish(make_status())
        planners = Scripted(), Scripted()
        for planner in planners:
            planner.decision = moving(node.identity.peer_id, (10, 20))
        built = [
            build(swarm, planner) for swarm, planner in zip((one, other), planners, strict=True)
        ]
        tasks = [asyncio.create_task(orchestrator.run()) for orchestrator, _ in built]
        try:

            async def planned() -> bool:
                return len(await node.notices.fetch(PlacementNotice, MODEL)) > 0

            await eventually(planned, timeout_s=20)
            leads = [lease.is_leader for _, lease in built]
            assert sorted(leads) == [False, True]
            index = leads.index(True)
            assert planners[1 - index].asked == 0
            epoch = built[index][1].epoch
            tasks[index].cancel()

            async def followed() -> bool:
                placements = await node.notices.fetch(PlacementNotice, MODEL)
                return max(placement.epoch for placement in placements) > epoch

            await eventually(followed, timeout_s=20)
            assert built[1 - index][1].is_leader
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _Wish:
    async def wait(self) -> str:
        return "moved"


class _Moves:
    """Grants everything: the node announces its new span at once."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.granted: list[Span] = []

    def request_move(self, span: Span, _: str) -> _Wish:
        self.granted.append(span)
        return _Wish()

    async def announce(self, **fields: Any) -> None:
        span = self.granted[-1]
        await self.swarm.directory.publish(make_status(span=(span.start, span.end), **fields))


async def test_uneven_swarm_is_mended_by_an_orchestrator_and_willing_nodes(
    tmp_path: Path,
) -> None:
    """Three nodes hold the same blocks, one the others': two holders of each are wanted."""
    fields = {"num_blocks": 20, "max_blocks": 10, "decode_tokens_per_s": 10.0, "movable": True}
    spans = [(0, 10), (0, 10), (0, 10), (10, 20)]
    async with local_swarm(tmp_path, 4) as members:
        for member, span in zip(members, spans, strict=True):
            await member.directory.publish(make_status(span=span, **fields))
        config = OrchestratorConfig(
            orchestrate_every_s=0.2, lease_ttl_s=3, decisions_path=tmp_path / "decisions.db"
        )
        moves = [_Moves(member) for member in members[:3]]

        def follower(index: int) -> Any:
            swarm = members[index]

            async def look() -> Snapshot:
                return await swarm.directory.fetch(MODEL, 20)

            return follow_placements(
                swarm.notices,
                lambda: swarm.directory.snapshot(MODEL, 20),
                look,
                MODEL,
                PlacementFilter(swarm.identity.peer_id, score_swarm, num_blocks=20, max_blocks=10),
                moves[index],
                every_s=0.2,
                rng=random.Random(index),
            )

        tasks = [
            asyncio.create_task(orchestrate(config, members[3], MODEL)),
            *(asyncio.create_task(follower(index)) for index in range(3)),
        ]
        try:

            async def asked() -> bool:
                return any(each.granted for each in moves)

            await eventually(asked, timeout_s=30)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert {span for each in moves for span in each.granted} == {Span(10, 20)}
        mover = next(each for each in moves if each.granted)
        await mover.announce(**fields)
        snapshot = await members[3].directory.fetch(MODEL)
        assert min(snapshot.coverage()) == 2
        assert Rebalancer().decide(snapshot).moves == ()
        entries = DecisionLog(tmp_path / "decisions.db").recent(100)
        (entry,) = (entry for entry in entries if entry.body["trigger"] == "replicas")
        assert entry.body["published"]
        assert entry.body["moves"][0]["load_s"] > 0
        assert "replicas" in [each["name"] for each in entry.body["triggers"]]


async def test_model_is_found_by_name_and_ambiguity_is_refused(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 3) as members:
        await members[0].directory.publish(make_status())
        assert await find_model(members[2], None) == MODEL
        await members[1].directory.publish(make_status(model_id="other@0", model_name="other"))
        assert await find_model(members[2], "/models/other/") == "other@0"
        assert await find_model(members[2], MODEL_ID) == MODEL
        with pytest.raises(ConfigError, match="several models"):
            await find_model(members[2], None)


async def test_another_model_of_the_same_name_does_not_stop_an_orchestrator(
    tmp_path: Path,
) -> None:
    async with local_swarm(tmp_path, 3) as members:
        name = make_status().model_name
        for member in members[:2]:
            await member.directory.publish(make_status())
        await members[2].directory.publish(make_status(model_id="zzz@0", model_name=name))
        await members[0].directory.fetch_all()
        assert await find_model(members[0], name) == MODEL
        assert await find_model(members[0], "zzz@0") == "zzz@0"


def _nodes(*spans: tuple[int, int], **fields: Any) -> Snapshot:
    nodes = tuple(
        NodeState(PeerId(PEERS[i]), Span(*span), decode_tokens_per_s=10.0, movable=True, **fields)
        for i, span in enumerate(spans)
    )
    return Snapshot(MODEL, 20, nodes, taken_at=1000.0)


def test_rebalancer_mends_a_loss_at_once() -> None:
    hole = Rebalancer().decide(_nodes((0, 10), (0, 10), max_blocks=10))
    assert (hole.trigger, hole.repairs, hole.latency_before_s) == ("hole", 10, None)
    assert hole.gain == 1.0
    assert len(hole.moves) == 1
    assert Rebalancer().decide(replace(_nodes(), num_blocks=0)).moves == ()


def test_huge_costs_fit_a_placement() -> None:
    assert _finite(1e300) == MAX_MAGNITUDE
    assert _finite(math.inf) is None
    slow = _nodes((0, 10), (0, 10), (10, 20), max_blocks=10)
    slow = replace(
        slow, nodes=tuple(replace(node, decode_tokens_per_s=1e-320) for node in slow.nodes)
    )
    decision = Rebalancer().decide(slow)
    assert decision.latency_before_s is not None
    assert decision.latency_before_s <= MAX_MAGNITUDE


def _thin_at_the_end(*, slow: bool) -> Snapshot:
    """Five hold the first half, two slow ones the second; or all are alike and even."""
    spans = [(0, 10)] * (5 if slow else 3) + [(10, 20)] * (2 if slow else 4)
    snapshot = _nodes(*spans, max_blocks=10)
    speeds = [10.0 if span == (0, 10) or not slow else 2.0 for span in spans]
    nodes = tuple(
        replace(node, decode_tokens_per_s=speed)
        for node, speed in zip(snapshot.nodes, speeds, strict=True)
    )
    return replace(snapshot, nodes=nodes)


def test_rebalancer_moves_for_a_gain_that_lasts() -> None:
    rebalancer = Rebalancer(goal="throughput", sensitivity=Sensitivity(move_in_a_row=3))
    uneven = _thin_at_the_end(slow=True)
    decisions = [rebalancer.decide(replace(uneven, taken_at=float(i))) for i in range(4)]
    assert [bool(decision.moves) for decision in decisions] == [False, False, False, True]
    assert decisions[3].trigger == "gain"
    assert decisions[3].gain > 0.1
    held = Counter(move.previous_span for move in decisions[3].moves)
    assert set(held) == {Span(0, 10)}


def test_rebalancer_does_not_move_for_a_gain_that_comes_and_goes() -> None:
    rebalancer = Rebalancer(goal="throughput", sensitivity=Sensitivity(move_in_a_row=3))
    uneven, even = (_thin_at_the_end(slow=slow) for slow in (True, False))
    for index in range(12):
        snapshot = uneven if index % 3 < 2 else even
        assert rebalancer.decide(replace(snapshot, taken_at=float(index))).moves == ()


def test_rebalancer_gives_up_a_plan_that_would_cost_a_replica_by_now() -> None:
    rebalancer = Rebalancer(goal="throughput", sensitivity=Sensitivity(move_in_a_row=3))
    uneven = _thin_at_the_end(slow=True)
    twin = Rebalancer(goal="throughput", sensitivity=Sensitivity(move_in_a_row=3))
    looks = [replace(uneven, taken_at=float(i)) for i in range(4)]
    planned = [twin.decide(look) for look in looks][-1].moves
    staying = [node.peer_id for node in uneven.nodes if node.span == Span(0, 10)]
    staying = [peer for peer in staying if peer not in {move.peer for move in planned}]
    *before, last = looks
    assert all(not rebalancer.decide(look).moves for look in before)
    for peer in staying[1:]:
        last = last.without_peers(peer)
    assert rebalancer.decide(last).trigger != "gain"


def _one_city_holds_all_of_a_half(apart_ms: float = 60.0) -> Snapshot:
    """The other half is held in both cities, so that one of its nodes can move."""
    snapshot = _nodes((0, 10), (10, 20), (0, 10), (10, 20), (10, 20), max_blocks=10)
    peers = tuple(node.peer_id for node in snapshot.nodes)
    city_N = np.array([0, 0, 0, 1, 1])
    rtt_ms_NN = np.where(city_N[:, None] == city_N, 1.0, apart_ms)
    np.fill_diagonal(rtt_ms_NN, 0.0)
    zero_NN = np.zeros_like(rtt_ms_NN)
    return replace(snapshot, links=Links(peers, rtt_ms_NN, zero_NN + 1e9, zero_NN, zero_NN))


def test_rebalancer_spreads_holders_over_cities_if_it_sees_them_often_enough() -> None:
    exposed = _one_city_holds_all_of_a_half()
    assert score_swarm(exposed).exposed == 10
    rebalancer = Rebalancer()
    decisions = [rebalancer.decide(replace(exposed, taken_at=float(i))) for i in range(4)]
    assert [bool(decision.moves) for decision in decisions] == [False, False, False, True]
    assert "10 before, 0 after, if that lasts" in decisions[0].reason
    assert (decisions[3].trigger, decisions[3].repairs) == ("spread", 0)
    assert score_swarm(apply_moves(exposed, decisions[3].moves)).exposed == 0


def test_a_gain_that_was_seen_once_does_not_keep_holders_from_being_spread() -> None:
    exposed = _one_city_holds_all_of_a_half()
    fast = replace(exposed.nodes[4], decode_tokens_per_s=30.0)
    noisy = replace(exposed, nodes=(*exposed.nodes[:4], fast))
    rebalancer = Rebalancer()
    first = rebalancer.decide(noisy)
    assert "would be gained" in first.reason
    decisions = [rebalancer.decide(replace(exposed, taken_at=float(i))) for i in range(1, 8)]
    assert [each.trigger for each in decisions if each.moves][:1] == ["spread"]


def test_a_gain_that_would_expose_blocks_by_now_is_given_up() -> None:
    """The cities show at the moment at which the gain has lasted."""
    known = _one_city_holds_all_of_a_half()
    spans = [(0, 10), (0, 10), (10, 20), (10, 20)]
    rows = [0, 3, 1, 4]
    nodes = tuple(
        replace(
            known.nodes[row],
            span=Span(*span),
            decode_tokens_per_s=100.0 if span == (0, 10) else 10.0,
        )
        for row, span in zip(rows, spans, strict=True)
    )
    known = replace(known, nodes=nodes)
    unknown = replace(known, links=None)
    for links_known, gains in ((False, True), (True, False)):
        rebalancer = Rebalancer(
            goal="throughput",
            replicas=1,
            policy=RebalancePolicy(max_moves=1),
            sensitivity=Sensitivity(move_in_a_row=3),
        )
        looks = [replace(unknown, taken_at=float(i)) for i in range(3)]
        assert not any(rebalancer.decide(look).moves for look in looks)
        last = rebalancer.decide(replace(known if links_known else unknown, taken_at=3.0))
        assert bool(last.moves) == gains


def test_rebalancer_does_not_spread_over_cities_that_come_and_go() -> None:
    rebalancer = Rebalancer()
    seen, unseen = _one_city_holds_all_of_a_half(), _one_city_holds_all_of_a_half(apart_ms=1.0)
    for index in range(12):
        snapshot = seen if index % 4 < 3 else unseen
        assert rebalancer.decide(replace(snapshot, taken_at=float(index))).moves == ()


@pytest.fixture
def full_plans(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When the full planner ran."""
    ran: list[float] = []

    def counted(snapshot: Snapshot, *args: Any, **kwargs: Any) -> RebalancePlan:
        ran.append(snapshot.taken_at)
        return rebalance(snapshot, *args, **kwargs)

    monkeypatch.setattr("nesa_node.server.orchestrator.planner.rebalance", counted)
    return ran


EVEN = ((0, 10), (10, 20)) * 3


def _looks(rebalancer: Rebalancer, snapshot: Snapshot, *at: float) -> list[PlacementDecision]:
    return [rebalancer.decide(replace(snapshot, taken_at=when)) for when in at]


def test_full_planner_runs_first_and_then_after_ten_minutes(full_plans: list[float]) -> None:
    quiet = _nodes(*EVEN, max_blocks=10)
    decisions = _looks(Rebalancer(), quiet, *range(0, 1300, 30), 900.0)
    assert full_plans == [0.0, 600.0, 1200.0, 900.0]  # the last after a clock was set back
    assert [each.planning.split(":")[0] for each in decisions[:2]] == ["planned", "not planned"]
    assert "30 s old" in decisions[1].planning
    assert {each.reason for each in decisions} == {"nothing better was found"}
    assert decisions[1].latency_before_s == decisions[0].latency_before_s


def test_holes_are_planned_for_at_every_look(full_plans: list[float]) -> None:
    hole = _nodes((0, 10), (0, 10), max_blocks=10)
    decisions = _looks(Rebalancer(plan_triggers=frozenset()), hole, 0.0, 30.0, 60.0)
    assert full_plans == [0.0, 30.0, 60.0]
    assert all(each.trigger == "hole" and each.moves for each in decisions)


def test_repairs_stand_until_spans_change(full_plans: list[float]) -> None:
    thin = _nodes((0, 10), (0, 10), (0, 10), (10, 20), max_blocks=10)
    rebalancer = Rebalancer()
    first, second = _looks(rebalancer, thin, 0.0, 30.0)
    assert first.trigger == "replicas"
    assert (second.moves, full_plans) == (first.moves, [0.0])
    # Another node comes; replicas are still missing.
    more = _nodes((0, 10), (0, 10), (0, 10), (10, 20), (0, 10), max_blocks=10)
    assert _looks(rebalancer, more, 60.0)[0].planning.endswith("spans have changed")
    # The node that was asked loads its new span, which counts: nothing is missing, nothing moves.
    moved = apply_moves(more, first.moves)
    assert _looks(rebalancer, moved, 90.0)[0].moves == ()


def test_missing_replicas_are_planned_for_when_nodes_have_loaded(full_plans: list[float]) -> None:
    """No repair relies on nodes that load, so that more are safe by then."""
    thin = _nodes((0, 10), (0, 10), (0, 10), (10, 20), max_blocks=10)
    loading = replace(thin, nodes=(thin.nodes[0], thin.nodes[3]), joining=thin.nodes[1:3])
    rebalancer = Rebalancer(plan_triggers=frozenset())
    for number, each in enumerate((loading, loading, thin, thin)):
        assert _looks(rebalancer, each, 30.0 * number)[0].trigger == "replicas"
    assert full_plans == [0.0, 60.0]


def test_a_region_that_leaves_is_planned_for_at_once(full_plans: list[float]) -> None:
    """Three of 60 nodes in one city: too few for the other triggers, and no replica is missing."""
    peers = tuple(PeerId(f"Qm{number + 11}") for number in range(60))
    city_N = np.array([0] * 57 + [1] * 3)
    rtt_ms_NN = np.where(city_N[:, None] == city_N, 1.0, 80.0)
    np.fill_diagonal(rtt_ms_NN, 0.0)
    zero_NN = np.zeros_like(rtt_ms_NN)
    nodes = tuple(
        NodeState(peer, Span(0, 2), decode_tokens_per_s=10.0, max_blocks=2) for peer in peers
    )
    there = Snapshot(MODEL, 2, nodes, 0.0, links=Links(peers, rtt_ms_NN, zero_NN, zero_NN, zero_NN))
    gone = there.without_peers(*peers[57:])
    for triggers, expected in ((PLAN_TRIGGERS, 150.0), (PLAN_TRIGGERS - {"region"}, 600.0)):
        full_plans.clear()
        rebalancer = Rebalancer(plan_triggers=triggers)
        _looks(rebalancer, there, *range(0, 150, 30))
        decisions = _looks(rebalancer, gone, *range(150, 630, 30))
        assert full_plans == [0.0, expected]
        assert ("region" in decisions[0].planning) == (expected == 150.0)


def test_pending_moves_of_a_node_that_left_are_planned_anew(full_plans: list[float]) -> None:
    uneven = _thin_at_the_end(slow=True)
    rebalancer = Rebalancer(goal="throughput", sensitivity=Sensitivity(capacity_lost=0.9))
    (pending,) = _looks(rebalancer, uneven, 0.0)
    assert "if that lasts" in pending.reason
    found = rebalance(uneven, ChainRequest(span=Span(0, 20)), goal="throughput")
    assert found.trigger == "gain"
    left = uneven.without_peers(found.moves[0].peer_id)
    (after,) = _looks(rebalancer, left, 30.0)
    assert full_plans == [0.0, 30.0]
    assert "gone or have moved" in after.planning


def test_a_gain_that_is_gone_is_planned_anew_but_not_at_each_look(full_plans: list[float]) -> None:
    """In turns the second half and the first is slow, and would gain by a node of the other."""
    slow_end = _thin_at_the_end(slow=True)
    slow_start = replace(
        slow_end,
        nodes=tuple(
            replace(node, decode_tokens_per_s=20.0 if node.span.start else 2.0)
            for node in slow_end.nodes
        ),
    )
    rebalancer = Rebalancer(goal="throughput", replicas=1, plan_triggers=frozenset())
    for number in range(15):
        _looks(rebalancer, slow_start if number % 2 else slow_end, 30.0 * number)
    assert full_plans == [0.0, 30.0, 360.0]


def test_next_plan_follows_when_all_moves_are_made(full_plans: list[float]) -> None:
    rebalancer = Rebalancer(goal="throughput", sensitivity=Sensitivity(move_in_a_row=3))
    uneven = _thin_at_the_end(slow=True)
    *_, last = _looks(rebalancer, uneven, 0.0, 30.0, 60.0, 90.0)
    assert last.moves
    assert "stayed better" in last.planning
    (waiting,) = _looks(rebalancer, uneven, 120.0)
    assert (waiting.moves, full_plans) == ((), [0.0])
    assert "under way" in waiting.reason
    (after,) = _looks(rebalancer, apply_moves(uneven, last.moves), 150.0)
    assert full_plans == [0.0, 150.0]
    assert "no node is left" in after.planning


async def test_why_a_plan_was_not_made_is_logged_once(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 2) as (boss, node):
        await node.directory.publish(make_status())
        scripted, log = Scripted(), DecisionLog(tmp_path / "decisions.db")
        orchestrator, lease = build(boss, scripted, log)
        await _lead(lease)
        for planning in ("planned: first", "not planned: 3 s", "not planned: 6 s", "planned: old"):
            scripted.decision = replace(IDLE, planning=planning)
            await orchestrator.step()
        told = [entry.body["planning"] for entry in log.recent(10)]
        assert sorted(told) == ["not planned: 3 s", "planned: first", "planned: old"]


def test_worth_of_a_swarm_with_holes_is_nothing() -> None:
    assert score_swarm(_nodes((0, 10))).holes == 10
    assert score_swarm(_nodes((0, 10))).steps_per_s == 0.0
    assert score_swarm(replace(_nodes(), num_blocks=20)).holes == 20
    whole = score_swarm(_nodes((0, 10), (10, 20)))
    assert whole.holes == 0
    assert 0 < whole.latency_s < 10
    assert whole.steps_per_s > 0


def test_reasons_that_differ_in_numbers_only_are_told_once() -> None:
    assert is_same_reason("12% could be gained", "3.5% could be gained")
    assert not is_same_reason("12% could be gained", "replicas are missing")


EVENING_S = 10_000 * 86_400.0 + 18 * 3600.0
HOMES = PEERS[3:5]


def _evening(minutes: float, day: int = 0, *, homes: bool = True) -> Snapshot:
    """Three nodes hold the first half, two that are here until 18:00 the second."""
    snapshot = _nodes((0, 10), (0, 10), (0, 10), (10, 20), (10, 20), max_blocks=10)
    snapshot = replace(snapshot, taken_at=EVENING_S + day * 86_400.0 + minutes * 60)
    return snapshot if homes else snapshot.without_peers(*map(PeerId, HOMES))


def _history_of_evenings(path: Path, *, habits: bool = True) -> History:
    """Five days' looks from 15:00 to 21:00, at which the homes leave, or stay."""
    history = History(SnapshotStore(path))
    for day in range(-5, 0):
        for minutes in range(-180, 180, 10):
            seen = _evening(minutes, day, homes=minutes < 0 or not habits)
            history.record(seen, None, None, leads=False)
    return history


async def test_a_replica_is_placed_before_the_nodes_of_the_evening_leave(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 1) as (boss,):
        history, decisions = _history_of_evenings(tmp_path / "m.db"), DecisionLog(tmp_path / "d.db")
        snapshot = _evening(-180)
        lease = LeaseKeeper(
            boss.notices, boss.identity.peer_id, MODEL, clock=time.time, terms=QUICK
        )

        async def look() -> Snapshot:
            return snapshot

        orchestrator = Orchestrator(
            boss.notices,
            lease,
            MODEL,
            look,
            Rebalancer(forecast=history.forecast),
            decisions=decisions,
            history=history,
            rng=random.Random(1),
        )
        await _lead(lease)
        published: dict[int, PlacementNotice] = {}
        for minutes in range(-180, 0, 10):
            now = _evening(minutes)
            moved = [move for each in published.values() for move in each.moves]
            snapshot = apply_moves(now, moved)
            if (placement := await orchestrator.step()) is not None:
                published[minutes] = placement
        ((minutes, placement),) = published.items()
        assert -60 <= minutes < -20
        assert placement.trigger == "ahead"
        assert placement.reason.startswith("blocks 10:20 lose 2 of 2 holders about 1")
        (move,) = placement.moves
        assert (move.previous_span, move.span) == (Span(0, 10), Span(10, 20))
        assert min(apply_moves(_evening(0), placement.moves).coverage()) == 2
        assert min(apply_moves(_evening(0, homes=False), placement.moves).coverage()) == 1
        (entry,) = decisions.find(placement.name)
        assert entry.body["trigger"] == "ahead"


def _moves_of_an_afternoon(rebalancer: Rebalancer) -> list[PlacementDecision]:
    decided = [rebalancer.decide(_evening(minutes)) for minutes in range(-180, 0, 20)]
    return [decision for decision in decided if decision.moves]


def test_without_habits_or_history_nothing_moves_more(tmp_path: Path) -> None:
    for name, habits in (("habits", True), ("none", False)):
        history = _history_of_evenings(tmp_path / f"{name}.db", habits=habits)
        moves = _moves_of_an_afternoon(Rebalancer(forecast=history.forecast))
        assert bool(moves) == habits
    empty = History(SnapshotStore(tmp_path / "empty.db"))
    assert _moves_of_an_afternoon(Rebalancer(forecast=empty.forecast)) == []
    assert _moves_of_an_afternoon(Rebalancer()) == []


def test_moves_ahead_that_no_node_follows_take_turns_with_other_plans(
    full_plans: list[float],
) -> None:
    asked: list[float] = []

    def forecast(snapshot: Snapshot) -> dict[PeerId, float]:
        asked.append(snapshot.taken_at)
        return {PeerId(peer): 3600.0 for peer in HOMES}

    decisions = _looks(Rebalancer(forecast=forecast), _evening(0), *range(0, 1830, 30))
    planned = [each.trigger for each in decisions if each.planning.startswith("planned")]
    assert full_plans == [0.0, 600.0, 1200.0, 1800.0]
    assert planned == ["ahead", "none", "ahead", "none"]
    assert asked == [0.0, 1200.0]
    assert all(each.moves == decisions[0].moves for each in decisions[:20])
