"""Members that lie about placements, leases and failures, over a real DHT: nothing changes."""

from __future__ import annotations

import asyncio
import random
import time
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nesa_node.core.errors import NesaError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.routing.reputation import blame_factor
from nesa_node.server.orchestrator.placement_filter import PlacementFilter
from nesa_node.server.orchestrator.swarm_score import (
    score_swarm,
)
from nesa_node.swarm.dht.pool_notices import NOTICE_KINDS
from nesa_node.swarm.dht.records import model_key
from nesa_node.swarm.dht.rpc import PROTOCOL_PREFIX, CallBudget
from nesa_node.swarm.dht.sealing import (
    FailureReport,
    Lease,
    Notice,
    PlacementNotice,
    ReportedFailure,
    notice_key,
    seal_statement,
)
from nesa_node.swarm.dht.validator import dht_id
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.hivemind_imports import DHTID, DHTProtocol, MSGPackSerializer, dht_pb2
from nesa_node.swarm.p2p.identity import Identity
from tests.swarm.local_swarm import dht_node, local_swarm
from tests.swarm.notice_fields import PEERS, make_notice
from tests.swarm.record_fields import MODEL_ID, make_record, make_status

MODEL = ModelId(MODEL_ID)
BLOCKS = 20
FIELDS: dict[str, Any] = {"num_blocks": BLOCKS, "max_blocks": 10, "decode_tokens_per_s": 10.0}


class _Scene:
    """`boss` orchestrates and holds one half, all others the same other one."""

    def __init__(self, members: list[Swarm], folder: Path) -> None:
        self.boss, self.node, self.other, self.attacker = members
        self.honest = (self.boss, self.node, self.other)
        self.folder = folder
        self.obedience = PlacementFilter(
            self.node.identity.peer_id,
            score_swarm,
            num_blocks=BLOCKS,
            max_blocks=10,
            allowed=frozenset({self.boss.identity.peer_id}),
        )

    async def announce(self) -> None:
        members = (*self.honest, self.attacker)
        for member, span in zip(members, ((10, 20), (0, 10), (0, 10), (0, 10)), strict=True):
            await member.directory.publish(make_status(span=span, **FIELDS))
        self.obedience.remember_snapshot(await self.node.directory.fetch(MODEL, BLOCKS))

    async def store(self, notice: Notice, sealed: bytes, **changes: Any) -> list[bool]:
        """Ask all honest members to keep it; what they answered."""
        fields: dict[str, Any] = {
            "keys": [dht_id(notice_key(type(notice), MODEL))],
            "subkeys": [MSGPackSerializer.dumps(notice.peer_id)],
            "values": [MSGPackSerializer.dumps(sealed)],
            "expiration_time": [notice.expires_at],
            "in_cache": [False],
            **changes,
        }
        request = dht_pb2.StoreRequest(**fields).SerializeToString()
        answers = []
        for target in self.honest:
            try:
                data = await self.attacker.transport.unary.call(
                    target.identity.peer_id, PROTOCOL_PREFIX + "rpc_store", request
                )
            except NesaError:
                answers.append(False)
                continue
            answers += list(dht_pb2.StoreResponse.FromString(data).store_ok)
        return answers

    async def asked(self) -> tuple[str, str] | None:
        """Whose placement the node obeys now, and why."""
        placements = await self.node.notices.fetch(PlacementNotice, MODEL)
        snapshot = await self.node.directory.fetch(MODEL, BLOCKS)
        found = self.obedience.first_accepted(placements, snapshot)
        return None if found is None else (found[0].peer_id, found[1].reason)

    def move(self, to: tuple[int, int] = (10, 20), **changes: Any) -> dict[str, Any]:
        peer = self.node.identity.peer_id
        return {"peer": peer, "was": (0, 10), "to": to, "gain": 0.1, **changes}

    def plan(self, signer: Identity, *moves: dict[str, Any], **changes: Any) -> PlacementNotice:
        made = make_notice(
            PlacementNotice,
            signer,
            time.time(),
            moves=moves or (self.move(),),
            **{
                "num_blocks": BLOCKS,
                "gain": 0.1,
                "seq": int(time.time() * 1000),
                **changes,
            },
        )
        assert isinstance(made, PlacementNotice)
        return made

    def stranger(self) -> Identity:
        return Identity.ephemeral(self.folder)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[_Scene]:
    async with local_swarm(tmp_path, 4) as members:
        scene = _Scene(members, tmp_path)
        await scene.announce()
        for member in scene.honest:
            # Spend their patience elsewhere: budgets have tests of their own.
            member.directory._dht_store._node._rpc._budget = CallBudget(
                lambda: 0.0, burst_units=1e9
            )
        yield scene


async def test_forged_placements_are_refused_by_every_member(scene: _Scene) -> None:
    boss, mine = scene.boss.identity, scene.attacker.identity
    good = scene.plan(boss)
    sealed = seal_statement(good, boss)
    own = scene.plan(mine)
    unsigned = msgspec.msgpack.decode(sealed) | {"signature": bytes(64)}
    foreign = msgspec.msgpack.decode(seal_statement(own, mine)) | {"peer_id": boss.peer_id}
    other_key = {"keys": [dht_id(notice_key(Lease, MODEL))]}
    record_key = {"keys": [dht_id(model_key(MODEL))]}
    attempts = [
        scene.store(good, msgspec.msgpack.encode(unsigned)),
        scene.store(good, msgspec.msgpack.encode(foreign)),
        scene.store(good, sealed.replace(b"plan", b"plam")),
        scene.store(good, seal_statement(own, mine)),
        scene.store(good, bytes(20_000)),
        scene.store(own, seal_statement(own, mine), **other_key),
        scene.store(own, seal_statement(own, mine), **record_key),
        scene.store(own, seal_statement(own, mine), expiration_time=[own.expires_at + 100]),
        scene.store(own, seal_statement(own, mine), subkeys=[DHTProtocol.IS_REGULAR_VALUE]),
    ]
    for attempt in attempts:
        assert await attempt == [False] * 3
    assert await scene.asked() is None


async def test_replayed_placement_of_an_older_epoch_does_not_return(scene: _Scene) -> None:
    boss = scene.boss
    old = await boss.notices.publish(
        PlacementNotice, MODEL, epoch=3, ttl_s=100, **_fields(scene.plan(boss.identity))
    )
    sealed = seal_statement(old, boss.identity)
    to_nowhere = scene.plan(boss.identity, scene.move((1, 11)), gain=0.0)
    new = await boss.notices.publish(
        PlacementNotice, MODEL, epoch=4, ttl_s=100, **_fields(to_nowhere)
    )
    for _ in range(5):
        assert await scene.store(old, sealed) == [False] * 3
    for member in scene.honest:
        assert await member.notices.fetch(PlacementNotice, MODEL) == [new]


async def test_absurd_placements_change_nothing_and_their_signers_are_ignored(
    scene: _Scene,
) -> None:
    everybody = [
        {"peer": swarm.identity.peer_id, "was": was, "to": (0, 10), "gain": 0.9}
        for swarm, was in zip(scene.honest, ((10, 20), (0, 10), (0, 10)), strict=True)
        if was != (0, 10)
    ] + [scene.move((0, 9))]
    lies: list[tuple[Sequence[dict[str, Any]], dict[str, Any]]] = [
        ((scene.move((20, 30)),), {"num_blocks": 30}),
        (everybody, {"gain": 0.9}),
        ((scene.move(),), {"gain": 1e6}),
    ]
    liars = []
    for moves, changes in lies:
        liar = scene.stranger()
        liars.append(liar)
        lie = scene.plan(liar, *moves, **changes)
        assert await scene.store(lie, seal_statement(lie, liar)) == [True] * 3
    assert await scene.asked() is None
    assert set(scene.obedience.distrusted) == {liar.peer_id for liar in liars}
    assert scene.obedience.refused["absurd"] == len(lies)
    # What they say truly is not heard either.
    for liar in liars:
        true = scene.plan(liar, epoch=4, expires_at=time.time() + 90)
        assert await scene.store(true, seal_statement(true, liar)) == [True] * 3
    assert await scene.asked() is None
    honest = scene.stranger()
    true = scene.plan(honest)
    await scene.store(true, seal_statement(true, honest))
    assert await scene.asked() == (honest.peer_id, "recomputed")


async def test_ten_thousand_moves_are_refused_before_they_are_read(scene: _Scene) -> None:
    mine = scene.attacker.identity
    fields = scene.plan(mine).model_dump()
    for count in (65, 10_000):
        moves = [scene.move() | {"peer": f"{PEERS[0][:-6]}{i:06d}"} for i in range(count)]
        body = msgspec.msgpack.encode({"version": 1, **fields, "moves": moves})
        sealed = msgspec.msgpack.encode(
            {
                "record": body,
                "signature": mine.sign(b"nesa-node placement 1\0" + body),
                "peer_id": mine.peer_id,
                "kind": "placement",
            }
        )
        assert await scene.store(scene.plan(mine), sealed) == [False] * 3
    assert await scene.asked() is None


@pytest.mark.parametrize("kind", [Lease, PlacementNotice, FailureReport])
async def test_flood_of_notices_by_many_identities_leaves_room_for_honest_ones(
    scene: _Scene, kind: type[Notice]
) -> None:
    """The signer has a record, and so is known; the flood comes first. A stranger that comes after
    it finds room too, for a while.
    """
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(300):
        sybil = scene.stranger()
        notice = make_notice(kind, sybil, time.time())
        await scene.store(notice, seal_statement(notice, sybil))
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    limit = kind.bounds.max_per_key
    assert grown < 30 << 20
    for member in scene.honest:
        storage = dht_node(member).protocol.storage
        stored = storage.get(DHTID.from_bytes(dht_id(notice_key(kind, MODEL))))
        assert len(stored.value.data) <= limit + 1
        assert len(await member.notices.fetch(kind, MODEL)) <= limit
    late = scene.stranger()
    notice = make_notice(kind, late, time.time())
    assert any(await scene.store(notice, seal_statement(notice, late)))
    fields = _fields(make_notice(kind, scene.boss.identity, time.time()))
    honest = await scene.boss.notices.publish(kind, MODEL, epoch=9, ttl_s=60, **fields)
    for member in scene.honest:
        assert honest in await member.notices.fetch(kind, MODEL)
        # Records had no part in it.
        assert len((await member.directory.fetch(MODEL, BLOCKS)).nodes) == 4


async def test_notices_about_thousand_models_do_not_fill_a_member(scene: _Scene) -> None:
    mine = scene.attacker.identity
    for index in range(1000):
        model = f"model{index}@0"
        notice = make_notice(Lease, mine, time.time(), model_id=model)
        key = dht_id(notice_key(Lease, ModelId(model)))
        await scene.store(notice, seal_statement(notice, mine), keys=[key])
    for member in scene.honest:
        storage = dht_node(member).protocol.storage
        assert len(storage._notice_keys) <= 257
    await scene.boss.notices.publish(Lease, MODEL, epoch=1, ttl_s=60, role="leading")
    leases = await scene.node.notices.fetch(Lease, MODEL)
    assert scene.boss.identity.peer_id in {lease.peer_id for lease in leases}


async def test_slander_by_hundred_identities_is_bounded_and_honest_reports_pass(
    scene: _Scene,
) -> None:
    victim, failed = scene.node.identity.peer_id, scene.boss.identity.peer_id
    for _ in range(100):
        sybil, now = scene.stranger(), time.time()
        failure = ReportedFailure(peer=victim, kind="wrong", count=1000, at=now)
        notice = make_notice(FailureReport, sybil, now, failures=(failure,))
        await scene.store(notice, seal_statement(notice, sybil))
        # They even claim to have served for long, but are new here.
        record = make_record(sybil, now, **FIELDS, uptime_s=1e9)
        await scene.store(
            notice,
            seal_statement(record, sybil),
            keys=[dht_id(model_key(MODEL))],
            expiration_time=[record.expires_at],
        )
    scene.node.failure_reporter.record_failure(MODEL, failed, "lost")
    async with asyncio.timeout(15):
        while failed not in scene.other.directory.blames(MODEL):
            await scene.other.directory.fetch(MODEL, BLOCKS)
            await asyncio.sleep(0.1)
    blames = scene.other.directory.blames(MODEL)
    assert blame_factor(blames[victim]) >= 0.5
    assert blames[failed] > 0.0
    snapshot = await scene.other.directory.fetch(MODEL, BLOCKS)
    state = snapshot.find_node(PeerId(victim))
    assert state is not None
    assert state.reliability > 0.45


async def test_mutated_notices_leave_members_up(scene: _Scene) -> None:
    rng, mine = random.Random(5), scene.attacker.identity
    for _ in range(300):
        kind = rng.choice(list(NOTICE_KINDS.values()))
        notice = make_notice(kind, mine, time.time())
        sealed = bytearray(seal_statement(notice, mine))
        for _ in range(rng.randint(1, 4)):
            sealed[rng.randrange(len(sealed))] = rng.randrange(256)
        if rng.random() < 0.3:
            del sealed[rng.randrange(len(sealed)) :]
        await scene.store(notice, bytes(sealed))
    assert await scene.asked() is None
    assert len((await scene.other.directory.fetch(MODEL, BLOCKS)).nodes) == 4


def _fields(notice: Notice) -> dict[str, Any]:
    """Those of its kind, as `NoticeStore.publish` takes them."""
    return {
        name: getattr(notice, name)
        for name in type(notice).model_fields
        if name not in Notice.model_fields
    }
