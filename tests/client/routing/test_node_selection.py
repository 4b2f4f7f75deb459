"""Whom a session may use, by what records say of their weights."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

from nesa_node.client.routing.node_selection import MAX_INLINE_PLAN_NODES, NodeSelector
from nesa_node.client.routing.planner import ChainPlanner
from nesa_node.client.routing.request import ConnectionOptions, RouteRequest
from nesa_node.core.errors import BusyError, MissingBlocksError, PeerUnreachableError, RefusedError
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.core.settings.choices import Precision
from nesa_node.core.wait_tracking import WaitTracker
from nesa_node.routing.chains import Hop
from nesa_node.routing.search.greedy import SHIPPED_PARAMETERS
from nesa_node.routing.strategies import GreedyStrategy, make_strategy
from nesa_node.routing.tuner import Tuning
from nesa_node.swarm.dht.sealing import PlacementNotice
from nesa_node.swarm.p2p.link_measurements import LinkSpeeds, RttTable
from nesa_node.topology.snapshot import NodeState, Snapshot
from tests.swarm.notice_fields import PEERS, make_notice

MODEL = ModelId("tiny@0")


def node(name: str, span: Span, quantization: str) -> NodeState:
    return NodeState(
        PeerId(name),
        span,
        quantization=quantization,
        decode_tokens_per_s=1000.0 if quantization != "none" else 1.0,
        free_cache_tokens=1000,
        total_cache_tokens=1000,
    )


async def planned(
    precision: Precision, *nodes: NodeState, blames: Mapping[str, float] | None = None
) -> list[str]:
    snapshot = Snapshot(MODEL, 4, nodes, taken_at=0.0)
    session, _ = _nodes_of(
        snapshot, blames, max_tokens=10, options=ConnectionOptions(min_precision=precision)
    )
    hops, _ = await session.plan_hops((), frozenset())
    return [str(hop.peer_id) for hop in hops]


NODES = [
    node("nf4", Span(0, 4), "nf4"),
    node("int8", Span(0, 4), "int8"),
    node("llm", Span(0, 4), "llm_int8"),
    node("full", Span(0, 2), "none"),
    node("full too", Span(2, 4), "none"),
    node("new", Span(0, 4), "int3"),
]


@pytest.mark.parametrize(
    ("precision", "allowed"),
    [
        ("nf4", {"nf4", "int8", "llm", "full", "full too"}),
        ("int8", {"int8", "llm", "full", "full too"}),
        ("full", {"full", "full too"}),
    ],
)
async def test_no_node_is_coarser_than_asked_for(precision: Precision, allowed: set[str]) -> None:
    assert set(await planned(precision, *NODES)) <= allowed
    barred = [node for node in NODES if node.peer_id not in allowed]
    with pytest.raises(RefusedError, match="was asked for"):
        await planned(precision, *barred)


async def test_blocks_that_only_coarse_nodes_hold_are_refused_with_the_reason() -> None:
    coarse = [node("nf4", Span(2, 4), "nf4"), node("int8", Span(2, 4), "int8")]
    with pytest.raises(RefusedError, match="2:4 hold them in int8, nf4, and full was asked for"):
        await planned("full", node("full", Span(0, 2), "none"), *coarse)


async def test_next_chain_avoids_who_is_reported_to_have_failed_if_there_is_another() -> None:
    one, other = node("one", Span(0, 4), "int8"), node("other", Span(0, 4), "int8")
    assert await planned("nf4", one, other, blames={"one": 0.1}) == ["other"]
    assert await planned("nf4", one, other, blames={"other": 0.1}) == ["one"]
    assert await planned("nf4", one, blames={"one": 3.0}) == ["one"]


async def test_caches_in_8_bits_count_as_weights_in_8_bits() -> None:
    fast = replace(
        node("small cache", Span(0, 4), "none"), cache_dtype="int8", decode_tokens_per_s=1000.0
    )
    later = replace(fast, peer_id=PeerId("of a later version"), cache_dtype="int4")
    full = node("full", Span(0, 4), "none")
    assert await planned("nf4", fast, full) == ["small cache"]
    assert await planned("int8", fast, full) == ["small cache"]
    assert await planned("full", fast, full) == ["full"]
    assert await planned("nf4", later, full) == ["full"]
    with pytest.raises(RefusedError, match=r"none with a cache in int8, and full was asked for"):
        await planned("full", fast)


def _nodes_of(
    snapshot: Snapshot, blames: Mapping[str, float] | None = None, **fields: Any
) -> tuple[NodeSelector, ChainPlanner]:
    swarm: Any = SimpleNamespace(
        identity=SimpleNamespace(peer_id=PeerId("client")),
        directory=SimpleNamespace(
            fetch=AsyncMock(return_value=snapshot),
            try_fetch_one=AsyncMock(),
            snapshot=lambda *_: snapshot,
            measured_links=lambda snapshot: {},
            blames=lambda _: blames or {},
        ),
        transport=SimpleNamespace(open_stream=AsyncMock(side_effect=PeerUnreachableError("far"))),
        rtts=RttTable(),
        link_speeds=LinkSpeeds(),
        notices=SimpleNamespace(
            fetch=AsyncMock(return_value=[]), peer_ages=SimpleNamespace(known_s=lambda _: 0.0)
        ),
    )
    request = RouteRequest(
        model_id=MODEL,
        span=Span(0, 4),
        rows=1,
        hidden_size=4,
        dtype="float32",
        **({"max_tokens": 600} | fields),
    )
    planner = ChainPlanner(swarm)
    return NodeSelector(swarm, request, planner), planner


def _state(name: str, start: int, end: int, **fields: Any) -> NodeState:
    defaults = {"decode_tokens_per_s": 10.0, "free_cache_tokens": 1000, "total_cache_tokens": 1000}
    return NodeState(PeerId(name), Span(start, end), **(defaults | fields))


@pytest.mark.parametrize(
    "kept", [_state("a", 0, 2, free_cache_tokens=5), _state("a", 1, 2), _state("other", 0, 2)]
)
async def test_a_kept_hop_that_records_do_not_show_any_more_fails_no_plan(kept: NodeState) -> None:
    """Full by now, moved, or draining: the session is there, and goes on."""
    snapshot = Snapshot(MODEL, 4, (kept, _state("c", 2, 4)), taken_at=0.0)
    nodes, _ = _nodes_of(snapshot)
    keep = (Hop(PeerId("a"), Span(0, 2)),)
    hops, _ = await nodes.plan_hops(keep, frozenset({PeerId("b")}), session=b"name")
    assert hops == (*keep, Hop(PeerId("c"), Span(2, 4)))
    assert await nodes.find_peers_to_leave(hops, 1.0) == frozenset()


@pytest.mark.parametrize(
    ("gone", "far_tokens_per_s", "expected"),
    [
        ((), 30.0, "far"),
        (("far",), 30.0, "whole"),
        (("far", "whole"), 30.0, "near"),
        (("whole",), 3.0, "near"),
    ],
    ids=["far", "longer span", "none elsewhere", "far too slow"],
)
async def test_a_standby_is_outside_the_failure_domains_of_its_node(
    gone: tuple[str, ...], far_tokens_per_s: float, expected: str
) -> None:
    """The fastest is beside it; one elsewhere is taken if its blocks are those of the node."""

    def at(name: str, address: str, start: int, end: int, speed: float) -> NodeState:
        addresses = (f"/ip4/{address}/tcp/1/p2p/{name}",)
        return _state(name, start, end, addresses=addresses, decode_tokens_per_s=speed)

    states = [
        at("kept", "8.8.8.8", 0, 2, 10.0),
        at("node", "9.9.9.9", 2, 4, 10.0),
        at("near", "9.9.9.10", 2, 4, 50.0),
        at("far", "1.1.1.1", 2, 4, far_tokens_per_s),
        at("third", "1.1.2.1", 2, 3, 50.0),
        at("fourth", "1.1.3.1", 3, 4, 50.0),
        at("whole", "1.1.4.1", 0, 4, 12.0),
    ]
    there = tuple(state for state in states if state.peer_id not in gone)
    nodes, _ = _nodes_of(Snapshot(MODEL, 4, there, taken_at=0.0))
    keep, hop = (Hop(PeerId("kept"), Span(0, 2)),), Hop(PeerId("node"), Span(2, 4))
    drop = frozenset({hop.peer_id})
    hops, _ = await nodes.plan_hops(keep, drop, standby_of=hop)
    assert [str(hop.peer_id) for hop in hops] == ["kept", expected]
    assert hops[-1].span == hop.span
    assert nodes.expected_s is None, "what the session itself expects stays"


async def test_a_session_does_not_flee_from_the_load_that_it_makes_itself() -> None:
    """Of two equal nodes, one is busy with this session alone."""
    busy, idle = _state("a", 0, 4, load=0.9), _state("b", 0, 4)
    nodes, _ = _nodes_of(Snapshot(MODEL, 4, (busy, idle), taken_at=0.0))
    hops = (Hop(PeerId("a"), Span(0, 4)),)
    assert await nodes.find_peers_to_leave(hops, 0.11) == frozenset()


async def test_a_session_leaves_a_node_that_others_keep_busy_and_does_not_return() -> None:
    busy, idle = _state("a", 0, 4, load=3.0), _state("b", 0, 4)
    nodes, _ = _nodes_of(Snapshot(MODEL, 4, (busy, idle), taken_at=0.0))
    assert await nodes.find_peers_to_leave((Hop(PeerId("a"), Span(0, 4)),), 0.4) == {"a"}
    swarm: Any = nodes._swarm
    swarm.directory.fetch.return_value = Snapshot(
        MODEL, 4, (replace(busy, load=0.0), replace(idle, load=3.0)), taken_at=1.0
    )
    assert await nodes.find_peers_to_leave((Hop(PeerId("b"), Span(0, 4)),), 0.4) == frozenset()


async def test_a_session_moves_only_if_what_is_built_is_better() -> None:
    """The best chain of all is one fast node, but its place beside the kept one gains nothing."""
    now = (_state("a", 0, 2), _state("b", 2, 4))
    better = _state("c", 0, 4, decode_tokens_per_s=11.0)
    nodes, planner = _nodes_of(Snapshot(MODEL, 4, (*now, better), taken_at=0.0))
    planner.avoidance.record_failure(PeerId("c"))
    hops = (Hop(PeerId("a"), Span(0, 2)), Hop(PeerId("b"), Span(2, 4)))
    assert await nodes.find_peers_to_leave(hops, 0.2) == frozenset()


def _placement(signer: int, values: Mapping[str, float] | None) -> PlacementNotice:
    told = None if values is None else {"version": 1, "at": 1e9, "values": values, "why": "gain"}
    identity: Any = SimpleNamespace(peer_id=PEERS[signer])
    found = make_notice(PlacementNotice, identity, 1e9, exponents=told)
    assert isinstance(found, PlacementNotice)
    return found


async def test_client_tries_published_exponents_within_bounds_of_those_known_longest() -> None:
    sane = [
        Tuning(rule=replace(SHIPPED_PARAMETERS, gamma=0.4 + signer / 10)).published()
        for signer in range(5)
    ]
    placements = [_placement(signer, values) for signer, values in enumerate(sane)]
    placements += [_placement(5, sane[0] | {"gamma": 1e6}), _placement(6, None)]
    known_s = {PeerId(PEERS[signer]): float(signer) for signer in range(7)}
    snapshot = Snapshot(MODEL, 4, (NODES[1],), taken_at=0.0)
    session, planner = _nodes_of(snapshot)
    planner.strategy = make_strategy("homology-greedy", np.random.default_rng(0))
    planner._swarm.notices = SimpleNamespace(  # type: ignore[misc, assignment]
        fetch=AsyncMock(return_value=placements),
        peer_ages=SimpleNamespace(known_s=known_s.__getitem__),
    )
    planner.latencies.add_links = AsyncMock(return_value=(snapshot, {}))  # type: ignore[method-assign]
    await planner.build_view(snapshot, session._request, may_ping=True)
    assert isinstance(planner.strategy, GreedyStrategy)
    gammas = [parameters.gamma for parameters in planner.strategy.published]
    assert gammas == pytest.approx([0.8, 0.7, 0.6])


def test_node_that_announces_room_and_refuses_is_reported_after_three_records() -> None:
    session, planner = _nodes_of(Snapshot(MODEL, 4, (), taken_at=0.0))
    told: list[tuple[str, str]] = []
    swarm: Any = planner._swarm
    swarm.failure_reporter = SimpleNamespace(
        record_failure=lambda _, peer, kind: told.append((peer, kind))
    )
    room = {"roomy": 1000, "full": 10}
    for seq in range(3):
        for name, free in room.items():
            record = SimpleNamespace(seq=seq, free_cache_tokens=free)
            swarm.directory.record = lambda _, record=record: record
            session.record_refusal(PeerId(name), BusyError("no room", 1.0))
    assert told == [("roomy", "refused")]


async def test_new_chain_comes_before_the_node_that_has_just_failed() -> None:
    """The other holder of its blocks takes part with some already, and does so only once."""
    both = (_state("b", 2, 4), _state("c", 2, 4))
    snapshot = Snapshot(MODEL, 4, (_state("a", 0, 2), *both), taken_at=0.0)
    nodes, _ = _nodes_of(snapshot)
    kept = (Hop(PeerId("a"), Span(0, 2)), Hop(PeerId("b"), Span(2, 3)))
    nodes.record_failure(PeerId("c"), "it was frozen", report=False)
    hops, _ = await nodes.plan_hops(kept, frozenset())
    assert [str(hop.peer_id) for hop in hops] == ["a", "b"]


@pytest.mark.parametrize("tell", [True, False])
def test_failure_that_others_hear_of_is_noted_where_the_session_waits(tell: bool) -> None:
    nodes, planner = _nodes_of(Snapshot(MODEL, 4, (), taken_at=0.0))
    swarm: Any = planner._swarm
    swarm.failure_reporter = SimpleNamespace(record_failure=lambda *_: None)
    waits = WaitTracker()
    with waits.activate():
        nodes.record_failure(PeerId("c"), "it was frozen", report=tell)
    assert set(waits.failure_times) == ({"c"} if tell else set())


@pytest.mark.parametrize(
    ("number", "is_aside"), [(MAX_INLINE_PLAN_NODES, False), (MAX_INLINE_PLAN_NODES + 1, True)]
)
async def test_planning_over_many_nodes_leaves_the_event_loop_alone(
    number: int, is_aside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strangers' records make nodes many, and a slow one of theirs makes a session reconsider."""
    states = tuple(_state(f"{index:03}", 0, 4) for index in range(number))
    nodes, planner = _nodes_of(Snapshot(MODEL, 4, states, taken_at=0.0))
    here, elsewhere = threading.get_ident(), list[bool]()
    for name in ("plan_chain", "expected_step_s"):
        original = getattr(planner, name)

        def noting(*args: Any, original: Any = original, **options: Any) -> Any:
            elsewhere.append(threading.get_ident() != here)
            return original(*args, **options)

        monkeypatch.setattr(planner, name, noting)
    hops, _ = await nodes.plan_hops((), frozenset(), may_ping=True)
    await nodes.plan_hops((), frozenset())
    await nodes.find_peers_to_leave(hops, 100.0)
    snapshot = await nodes.fetch_from_one_member()
    assert await nodes.can_fill(snapshot, (), [states[0].peer_id])
    assert len(elsewhere) >= 7
    assert set(elsewhere) == {is_aside}


async def test_node_that_failed_is_a_last_resort_only_where_one_must_be_found() -> None:
    names = [("kept", 0, 2), ("slow", 2, 4), ("failed", 2, 4)]
    nodes, _ = _nodes_of(Snapshot(MODEL, 4, tuple(_state(*each) for each in names), taken_at=0.0))
    nodes.exclude_for_a_while([PeerId("failed")])
    keep, drop = (Hop(PeerId("kept"), Span(0, 2)),), frozenset({PeerId("slow")})
    hops, _ = await nodes.plan_hops(keep, drop)
    assert hops == (*keep, Hop(PeerId("failed"), Span(2, 4)))
    with pytest.raises(MissingBlocksError):
        await nodes.plan_hops(keep, drop, exclude_suspects=True)


@pytest.mark.parametrize(
    ("prompt", "dropped", "expected"),
    [(20, (), "decoder"), (500, (), "reader"), (500, ("gone",), "decoder")],
    ids=["short", "long", "repair"],
)
async def test_long_prompts_choose_nodes_that_read_them_fast(
    prompt: int, dropped: tuple[str, ...], expected: str
) -> None:
    """A chain that replaces another one decodes: its cache is replayed, or handed over."""
    reader = _state("reader", 0, 4, decode_tokens_per_s=9.0, prefill_tokens_per_s=400.0)
    decoder = _state("decoder", 0, 4, prefill_tokens_per_s=40.0)
    snapshot = Snapshot(MODEL, 4, (reader, decoder), taken_at=0.0)
    nodes, _ = _nodes_of(snapshot, prompt_tokens=prompt)
    hops, _ = await nodes.plan_hops((), frozenset(map(PeerId, dropped)), may_ping=True)
    assert [str(hop.peer_id) for hop in hops] == [expected]


async def test_nodes_that_do_not_attest_are_asked_once_and_not_used() -> None:
    nodes = (_state("a", 0, 2), _state("b", 0, 2), _state("c", 2, 4), _state("d", 0, 4))
    selector, planner = _nodes_of(Snapshot(MODEL, 4, nodes, taken_at=0.0))
    asked: list[str] = []

    async def require(peer: PeerId, span: Span, addresses: Sequence[str]) -> None:
        asked.append(peer)
        if peer not in ("b", "c"):
            raise RefusedError("unattested", f"{peer} is not attested")

    planner.require_attested = require
    hops, _ = await selector.plan_hops((), frozenset())
    assert [hop.peer_id for hop in hops] == ["b", "c"]
    assert (asked.count("a"), asked.count("d")) == (1, 1)
    kept = hops[:1]
    asked.clear()
    hops, _ = await selector.plan_hops(kept, frozenset())
    assert [hop.peer_id for hop in hops] == ["b", "c"]
    assert asked == ["c"]
    replicas, _ = await selector.plan_replicas(Hop(PeerId("b"), Span(0, 2)), 2, frozenset())
    assert [hop.peer_id for hop in replicas] == ["b"]


async def test_error_says_why_no_node_is_attested() -> None:
    selector, planner = _nodes_of(Snapshot(MODEL, 4, (_state("a", 0, 4),), taken_at=0.0))

    async def require(peer: PeerId, span: Span, addresses: Sequence[str]) -> None:
        raise RefusedError("unattested", "it is out of date")

    planner.require_attested = require
    with pytest.raises(RefusedError, match="out of date") as caught:
        await selector.plan_hops((), frozenset())
    assert caught.value.code == "unattested"
