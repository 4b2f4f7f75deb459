"""Rounds of a pool's orchestrator over scripted notices: what it assigns, and what it says."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.core.settings.models import OrchestratorConfig
from nesa_node.routing.placement.building import ModelShape
from nesa_node.server.pool import assignments, demand, speeds
from nesa_node.server.pool import builder as pool_builder
from nesa_node.server.pool.builder import PoolBuilder, _Model
from nesa_node.swarm.dht.pool_notices import (
    POOL,
    BuildRequest,
    HeldModel,
    MachineAssignment,
    MeasuredFigures,
    Offer,
    PoolStatus,
    WantedSwarm,
    assignment_topic,
)
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.p2p.link_measurements import RttTable
from nesa_node.topology.roofline import BlockWork
from nesa_node.topology.snapshot import NodeState, Snapshot
from tests.swarm.notice_fields import make_notice

BLOCKS, BLOCK_BYTES = 8, 10**9
SHAPE = ModelShape(
    "org/one",
    {"none": (BLOCK_BYTES,) * BLOCKS},
    {"none": (BlockWork(BLOCK_BYTES, 1e9),) * BLOCKS},
    cache_tokens=64,
    cache_bytes=0,
)
MODEL = _Model(SHAPE, ModelId("org/one@00"))


class Bench:
    """A builder that leads, machines by name, and what it has published last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._keys: dict[str, Identity] = {}
        self.own = self.identity("orchestrator")
        self.notices: dict[tuple[type, str], list[Any]] = {}
        self.published: dict[tuple[type, str], Any] = {}
        self.nodes: tuple[NodeState, ...] = ()
        self.nodes_of_other: tuple[NodeState, ...] = ()
        store = SimpleNamespace(
            fetch=self._fetch, publish=self._publish, pin_signers=lambda _: None
        )
        swarm: Any = SimpleNamespace(
            identity=self.own,
            notices=store,
            directory=SimpleNamespace(fetch=self._snapshot),
            rtts=RttTable(),
            transport=None,
        )
        swarm.rtts.ping_all = self._ping_all
        self.builder = PoolBuilder(OrchestratorConfig(), swarm)
        self.builder._models["org/one"] = MODEL

    def identity(self, name: str) -> Identity:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        if name not in self._keys:
            self._keys[name] = Identity.ephemeral(folder)
        return self._keys[name]

    async def _fetch(self, kind: type, topic: str) -> list[Any]:
        return self.notices.get((kind, topic), [])

    async def _publish(self, kind: type, topic: str, **fields: Any) -> None:
        for name in ("ttl_s", "epoch"):
            fields.pop(name, None)
        self.published[kind, topic] = fields

    async def _snapshot(self, model_id: ModelId, *_: object, **__: object) -> Snapshot:
        nodes = self.nodes if model_id == MODEL.model_id else self.nodes_of_other
        return Snapshot(model_id, BLOCKS, nodes, time.time())

    async def _ping_all(self, *_: object, **__: object) -> None:
        pass

    def offer(
        self, name: str, blocks: int, *held: HeldModel, gb_per_s: float = 100.0, **terms: object
    ) -> None:
        figures = MeasuredFigures(
            block_overhead_s=0.0, read_bytes_per_s=gb_per_s * 1e9, flop_per_s=1e15
        )
        offers = self.notices.setdefault((Offer, POOL), [])
        identity = self.identity(name)
        offers[:] = [each for each in offers if each.peer_id != identity.peer_id]
        held = tuple(self._with_node(name, each) for each in held)
        offers.append(
            make_notice(
                Offer,
                identity,
                time.time(),
                model_id=POOL,
                memory_total_bytes=blocks * BLOCK_BYTES,
                memory_free_bytes=blocks * BLOCK_BYTES,
                figures={"bfloat16": figures},
                models=("*",),
                obeys=(),
                held=held,
                addresses=(),
                **terms,
            )
        )

    def _with_node(self, name: str, held: HeldModel) -> HeldModel:
        """A machine that serves has a node, whose record is seen."""
        if held.state != "serving" or held.node is not None:
            return held
        node = PeerId(f"node of {name}")
        others = tuple(each for each in self.nodes if each.peer_id != node)
        self.nodes = (*others, NodeState(node, held.blocks))
        return held.model_copy(update={"node": node})

    def want(self, *swarms: WantedSwarm, signer: str = "orchestrator") -> None:
        self.notices[BuildRequest, POOL] = [
            make_notice(
                BuildRequest, self.identity(signer), time.time(), model_id=POOL, swarms=swarms
            )
        ]

    async def run_round(self) -> PoolStatus:
        await self.builder._run_round()
        fields = self.published[PoolStatus, POOL]
        status = make_notice(PoolStatus, self.own, time.time(), model_id=POOL, **fields)
        assert isinstance(status, PoolStatus)
        return status

    def assigned(self, name: str) -> list[tuple[str, Span]]:
        topic = assignment_topic(PeerId(self.identity(name).peer_id))
        found = self.published.get((MachineAssignment, topic), {"spans": ()})
        return [(each.model, each.blocks) for each in found["spans"]]


def wanted(replicas: int = 1, most: int | None = None) -> WantedSwarm:
    return WantedSwarm(
        model="org/one",
        replicas=replicas,
        max_replicas=most or replicas,
        until=time.time() + 600,
    )


def holding(first: int, last: int, state: str = "serving", reason: str = "") -> HeldModel:
    return HeldModel.model_validate(
        {"model": "org/one", "state": state, "span": (first, last), "reason": reason}
    )


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_a_model_is_spread_over_machines_and_served(bench: Bench) -> None:
    bench.offer("a", 5)
    bench.offer("b", 4)
    bench.want(wanted())
    status = await bench.run_round()
    assert status.swarms[0].state == "building"
    [(_, one)], [(_, other)] = bench.assigned("a"), bench.assigned("b")
    assert sorted((one, other))[0].start == 0
    assert sorted((one, other))[0].end == sorted((one, other))[1].start
    assert max(one.end, other.end) == BLOCKS
    bench.offer("a", 5, holding(one.start, one.end))
    bench.offer("b", 4, holding(other.start, other.end))
    status = await bench.run_round()
    assert (status.swarms[0].state, status.swarms[0].replicas) == ("serving", 1)
    assert status.free_machines == 0


async def test_replicas_are_held_by_machines_of_different_operators(bench: Bench) -> None:
    bench.offer("a", BLOCKS, holding(0, BLOCKS), operator="one")
    bench.offer("b", BLOCKS, operator="one")
    bench.offer("c", BLOCKS, operator="two", gb_per_s=80.0)
    bench.want(wanted(2))
    await bench.run_round()
    assert bench.assigned("b") == []
    assert bench.assigned("c") == [("org/one", Span(0, BLOCKS))]


async def test_a_machine_is_not_asked_for_what_its_operator_forbids(bench: Bench) -> None:
    shape = replace(SHAPE, family="llama", block_files=({"all.safetensors": 8 * BLOCK_BYTES},) * 8)
    bench.builder._models["org/one"] = replace(MODEL, shape=shape)
    bench.offer("a", 9, families=("qwen2",))
    bench.offer("b", 9, max_download_bytes=7 * BLOCK_BYTES)
    bench.want(wanted())
    status = await bench.run_round()
    assert "none of 2 machines on offer may hold org/one" in status.swarms[0].reason
    assert bench.assigned("a") == bench.assigned("b") == []
    bench.offer("c", 9, families=("llama", "qwen2"), max_download_bytes=8 * BLOCK_BYTES)
    await bench.run_round()
    assert bench.assigned("c") == [("org/one", Span(0, 8))]


async def test_a_strangers_request_is_not_built(bench: Bench) -> None:
    bench.offer("a", 9)
    bench.want(wanted(), signer="stranger")
    status = await bench.run_round()
    assert status.swarms == ()
    assert bench.assigned("a") == []


async def test_what_does_not_fit_is_refused_with_what_would_help(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_builder, "REFUSE_AFTER_S", 0.0)
    bench.offer("a", 5)
    bench.want(wanted())
    [swarm] = (await bench.run_round()).swarms
    assert swarm.state == "refused"
    assert swarm.reason == "it does not fit: one more machine with 3.0 GB free for models"
    assert bench.assigned("a") == []


async def test_machines_that_obey_another_orchestrator_are_named_as_the_reason(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_builder, "REFUSE_AFTER_S", 0.0)
    bench.want(wanted())
    [swarm] = (await bench.run_round()).swarms
    assert (swarm.state, swarm.reason) == ("building", "no machine is on offer yet")
    bench.offer("a", 9)
    offers = bench.notices[Offer, POOL]
    other = PeerId(bench.identity("other").peer_id)
    offers[0] = offers[0].model_copy(update={"obeys": (other,)})
    [swarm] = (await bench.run_round()).swarms
    assert swarm.state == "refused"
    assert "none of 1 machines on offer obeys this orchestrator" in swarm.reason
    assert bench.assigned("a") == []


async def test_a_machine_that_failed_is_not_asked_again(bench: Bench) -> None:
    bench.offer("a", 9)
    bench.want(wanted())
    await bench.run_round()
    assert bench.assigned("a")
    bench.offer("a", 9, holding(0, 8, "failed", "the disk is full"))
    bench.offer("b", 9)
    await bench.run_round()
    assert bench.assigned("a") == []
    assert bench.assigned("b") == [("org/one", Span(0, 8))]
    bench.notices[Offer, POOL].clear()
    bench.offer("a", 9)
    await bench.run_round()
    assert bench.assigned("a") == [], "asked again as soon as its offer no longer says so"


async def test_why_no_machine_holds_a_model_is_still_known_when_offers_no_longer_say_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.want(wanted())
    bench.offer("a", 9)
    await bench.run_round()
    bench.notices[Offer, POOL].clear()
    bench.offer("a", 9, holding(0, 8, "failed", "the disk is full"))
    await bench.run_round()
    # It is no longer told to hold the model, and drops the reason from its offer.
    bench.notices[Offer, POOL].clear()
    bench.offer("a", 9)
    monkeypatch.setattr(pool_builder, "REFUSE_AFTER_S", 0.0)
    [swarm] = (await bench.run_round()).swarms
    assert (swarm.state, swarm.reason) == ("refused", "all machines refuse: the disk is full")


async def test_a_removed_swarm_is_released_by_a_successor_too(bench: Bench) -> None:
    bench.offer("a", 9, holding(0, 8))
    bench.want()
    await bench.run_round()
    topic = assignment_topic(PeerId(bench.identity("a").peer_id))
    assert bench.published[MachineAssignment, topic]["spans"] == ()


async def test_a_hole_is_filled_where_the_holder_left(bench: Bench) -> None:
    bench.offer("a", 4, holding(0, 4))
    bench.offer("b", 9)
    bench.want(wanted())
    await bench.run_round()
    assert bench.assigned("b") == [("org/one", Span(4, 8))]


async def test_replicas_follow_the_load(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "BUSY_S", 0.0)
    monkeypatch.setattr(demand, "IDLE_S", 0.0)
    bench.offer("a", 9, holding(0, 8))
    bench.offer("b", 9)
    bench.want(wanted(1, most=2))
    whole = ("org/one", Span(0, 8))
    for load, expected in ((0.9, [whole, whole]), (0.01, [whole])):
        bench.nodes = tuple(replace(each, load=load) for each in bench.nodes)
        for _ in range(3):
            await bench.run_round()
        assert bench.assigned("a") + bench.assigned("b") == expected


async def test_a_busy_swarm_gets_the_machine_of_an_idle_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both machines hold the idle swarm, and have no room for more; it has to keep one."""
    monkeypatch.setattr(demand, "BUSY_S", 0.0)
    other = _Model(replace(SHAPE, name="org/two"), ModelId("org/two@00"))
    bench.builder._models["org/two"] = other
    bench.offer("a", 8, holding(0, 8))
    bench.offer("b", 8, holding(0, 8))
    two = HeldModel(model="org/two", state="serving", span=(0, 8), node=PeerId("two"))
    bench.offer("c", 8, two)
    bench.nodes_of_other = (NodeState(PeerId("two"), Span(0, 8), load=0.95),)
    wishes = wanted(1, most=2), wanted(1, most=2).model_copy(update={"model": "org/two"})
    bench.want(*wishes)
    bench.builder._demand["org/one"] = demand.Demand(wishes[0], 2)
    for _ in range(3):
        await bench.run_round()
    held = [bench.assigned(name) for name in "abc"]
    assert sorted(each[0][0] for each in held) == ["org/one", "org/two", "org/two"]


async def test_an_idle_swarm_gives_one_machine_back_while_it_drains(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The released machine keeps its memory for several rounds, which need no second one."""
    monkeypatch.setattr(demand, "BUSY_S", 0.0)
    bench.builder._models["org/two"] = _Model(replace(SHAPE, name="org/two"), ModelId("org/two@00"))
    for name in "abd":
        bench.offer(name, 8, holding(0, 8))
    two = HeldModel(model="org/two", state="serving", span=(0, 8), node=PeerId("two"))
    bench.offer("c", 8, two)
    bench.nodes_of_other = (NodeState(PeerId("two"), Span(0, 8), load=0.95),)
    swarms = wanted(1, most=3), wanted(1, most=2).model_copy(update={"model": "org/two"})
    bench.want(*swarms)
    bench.builder._demand["org/one"] = demand.Demand(swarms[0], 3)
    for offer in bench.notices[Offer, POOL]:
        offer.__dict__["memory_free_bytes"] = 0
    for _ in range(6):
        await bench.run_round()
    assert bench.builder._demand["org/one"].replicas == 2
    assert sorted(len(bench.assigned(name)) for name in "abd") == [0, 1, 1]


@pytest.mark.parametrize("claim", ["no node", "another's node"])
async def test_a_machine_whose_node_is_not_seen_is_replaced(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, claim: str
) -> None:
    monkeypatch.setattr(assignments, "UNSEEN_S", 0.0)
    bench.offer("honest", 4, holding(0, 4))
    node = PeerId("nowhere" if claim == "no node" else "node of honest")
    bench.offer("liar", 4, holding(4, 8).model_copy(update={"node": node}))
    bench.offer("spare", 4)
    bench.want(wanted())
    status = await bench.run_round()
    assert status.swarms[0].replicas == 0, "blocks 4:8 are served by nothing"
    await bench.run_round()
    assert bench.assigned("spare") == [("org/one", Span(4, 8))]
    assert bench.assigned("liar") == []


async def test_an_overstated_machine_is_planned_as_it_was_measured(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It claims ten times the speed at which its node was seen to run."""
    monkeypatch.setattr(speeds, "MIN_SERVING_S", 0.0)
    node = PeerId("12D3KooWNode")
    held = holding(0, 4).model_copy(update={"node": node})
    bench.offer("liar", 4, held, gb_per_s=1000)
    bench.offer("honest", 9, gb_per_s=100)
    bench.nodes = (NodeState(node, Span(0, 4), decode_tokens_per_s=1 / (4 * 0.01)),)
    bench.want(wanted())
    await bench.run_round()
    liar = PeerId(bench.identity("liar").peer_id)
    assert bench.builder._speeds.slowdown(liar, "bfloat16") == pytest.approx(10)


@pytest.mark.parametrize(
    "change", [{"quant_type": "nf4"}, {"span": (0, 9999)}], ids=["quantization", "blocks"]
)
async def test_an_offer_of_what_the_model_cannot_be_stops_no_round(
    bench: Bench, change: dict[str, Any]
) -> None:
    """The model cannot be held in nf4, and has 8 blocks."""
    node = PeerId("12D3KooWNode")
    held = holding(0, 4).model_copy(update={"node": node, **change})
    bench.offer("liar", 4, held)
    bench.offer("a", 9)
    offers = bench.notices[Offer, POOL]
    offers[0] = offers[0].model_copy(
        update={"figures": dict.fromkeys(("bfloat16", "nf4"), offers[0].figures["bfloat16"])}
    )
    bench.nodes = (NodeState(node, Span(0, 4), decode_tokens_per_s=10.0),)
    bench.want(wanted())
    await bench.run_round()
    assert bench.assigned("a") == [("org/one", Span(0, 8))]


async def test_two_thousand_requests_leave_a_round_as_it_is(bench: Bench) -> None:
    bench.offer("a", 9)
    bench.want(wanted())
    [own] = bench.notices[BuildRequest, POOL]
    stranger = make_notice(
        BuildRequest, bench.identity("stranger"), time.time(), model_id=POOL, swarms=(wanted(9),)
    )
    bench.notices[BuildRequest, POOL] = [stranger] * 2000 + [own]
    status = await bench.run_round()
    assert [each.wanted for each in status.swarms] == [1]
