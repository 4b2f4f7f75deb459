"""Records that strangers make up displace neither those of honest nodes nor a node's own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from nesa_node.core.ids import ModelId, PeerId
from nesa_node.swarm.dht import records as known_records
from nesa_node.swarm.dht.member import DhtStore
from nesa_node.swarm.dht.records import NodeRecord, RecordTable, model_key
from nesa_node.swarm.dht.sealing import seal_statement
from nesa_node.swarm.dht.validator import dht_id
from nesa_node.swarm.node import Swarm, open_swarm
from nesa_node.swarm.p2p.hivemind_imports import DHTID, MSGPackSerializer
from nesa_node.swarm.p2p.identity import Identity, Membership
from tests.swarm.local_swarm import dht_node, local_swarm
from tests.swarm.record_fields import MODEL_ID, make_record, make_status

MODEL = ModelId(MODEL_ID)
ROOM = 40
NOW = 1_800_000_000.0


@pytest.fixture(autouse=True)
def _little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_records, "MAX_NODES_PER_MODEL", ROOM)
    monkeypatch.setattr(known_records, "MAX_NODES", 3 * ROOM)


def stranger() -> Identity:
    return Identity(Ed25519PrivateKey.generate(), Path("unused"))


def records(number: int, now: float = NOW, **changes: Any) -> list[NodeRecord]:
    return [make_record(stranger(), now, **changes) for _ in range(number)]


def peers(known: RecordTable) -> set[str]:
    return {record.peer_id for record in known}


def test_a_full_table_refuses_newcomers_and_takes_news_of_those_it_knows() -> None:
    own, honest = make_record(stranger(), NOW), records(ROOM)
    known = RecordTable(PeerId(own.peer_id))
    assert all(known.add(record) for record in honest)
    made_up = records(ROOM, NOW + 25, expires_at=NOW + 600)
    assert not any(known.add(record) for record in made_up)
    assert known.add(own)
    newer = honest[3].model_copy(update={"seq": 2, "load": 0.5})
    assert known.add(newer)
    assert peers(known) == {own.peer_id, *(record.peer_id for record in honest)}
    assert known.get(PeerId(newer.peer_id)) == newer


def test_what_is_dropped_makes_room() -> None:
    known = RecordTable(PeerId("own"))
    for record in records(ROOM):
        known.add(record)
    for record in list(known):
        known.drop(PeerId(record.peer_id))
    assert not list(known)
    assert not known._num_by_model, "strangers' models are not remembered for ever"
    later = records(ROOM + 1, NOW + 61)
    assert [known.add(record) for record in later] == [True] * ROOM + [False]


def test_many_models_of_strangers_leave_room_for_a_trusted_one() -> None:
    known = RecordTable(PeerId("own"))
    taken = [known.add(record) for i in range(5) for record in records(ROOM, model_id=f"m{i}@01")]
    assert taken == [True] * (3 * ROOM) + [False] * (2 * ROOM)
    mine = records(ROOM + 1)
    trusted = [known.add(record, is_trusted_model=True) for record in mine]
    assert trusted == [True] * ROOM + [False]


async def test_a_model_whose_blocks_are_known_is_trusted(tmp_path: Path) -> None:
    async with local_swarm(tmp_path, 1) as (reader,):
        directory = reader.directory
        directory.set_num_blocks(MODEL, 30)
        for model_id in (*(f"m{i}@01" for i in range(3)), "m3@01", MODEL_ID):
            sealed = []
            for _ in range(ROOM if model_id != "m3@01" else 1):
                identity = stranger()
                sealed.append(
                    seal_statement(make_record(identity, time.time(), model_id=model_id), identity)
                )
            await directory._remember(sealed)
        assert len(directory.snapshot(ModelId("m2@01")).nodes) == ROOM
        assert directory.dropped["full"] == 1, "that of m3"
        assert len(directory.snapshot(MODEL).nodes) == ROOM


def test_hearsay_of_one_member_takes_half_of_the_room() -> None:
    known = RecordTable(PeerId("own"))
    taken = [known.add(record, is_single_source=True) for record in records(ROOM)]
    assert taken == [True] * (ROOM // 2) + [False] * (ROOM // 2)
    assert sum(known.add(record) for record in records(ROOM)) == ROOM // 2


def test_a_node_that_changes_its_model_takes_room_there_and_leaves_it_here() -> None:
    known = RecordTable(PeerId("own"))
    here = records(ROOM)
    for record in (*here, *records(ROOM, model_id="other@01")):
        known.add(record)
    moved = here[0].model_copy(update={"seq": 2, "model_id": "other@01"})
    assert not known.add(moved)
    assert known.get(PeerId(moved.peer_id)) is None, "what it said before is not so any more"
    (newcomer,) = records(1)
    assert known.add(newcomer)


class Answers:
    """A DHT whose members answer with `named`, one after another."""

    def __init__(self, *named: list[str]) -> None:
        self.named = named
        own = self._records(["kept"])
        self.protocol = SimpleNamespace(storage=SimpleNamespace(records_of=lambda _: own))

    async def lookup(self, _: DHTID, take: Callable[[Any], bool], **__: Any) -> None:
        for names in self.named:
            assert not take(self._records(names))

    def _records(self, names: list[str]) -> list[tuple[str, bytes, float]]:
        return [(name, MSGPackSerializer.dumps(name.encode()), NOW) for name in names]


async def test_a_member_that_answers_first_with_much_does_not_come_first_with_all() -> None:
    liar = [f"made-up-{i}" for i in range(1000)]
    dht: Any = Answers(liar, ["a", "b", "c"], ["b", "d", "made-up-7"])
    found = [name.decode() for name in await DhtStore(dht, Membership(None)).find("key")]
    assert len(found) == 1005
    # What the reader keeps itself as a member of the DHT is one more answer.
    assert {"kept", "a", "b", "c", "d"} < set(found[:9])


def flood(member: Swarm, made: Iterator[int]) -> None:
    """Let `member` answer each look with new records, the newest there can be."""
    key = dht_id(model_key(MODEL))
    storage = dht_node(member).protocol.storage

    def records_of(asked: DHTID) -> list[tuple[str, bytes, float]]:
        if asked.to_bytes() != key:
            return []
        made_up: list[tuple[str, bytes, float]] = []
        for _ in range(2 * ROOM):
            identity = stranger()
            now = time.time() + 20
            changes = {"expires_at": now + 580, "seq": next(made)}
            record = make_record(identity, now, **changes)
            value = MSGPackSerializer.dumps(seal_statement(record, identity))
            made_up.append((identity.peer_id, value, record.expires_at))
        return made_up

    storage.size_of = lambda asked: 1
    storage.records_of = records_of


def answer_late(member: Swarm) -> None:
    """Let `member` answer each look after all that answer at once."""
    peer: Any = member.directory._dht_store._node._rpc
    find = peer._find

    async def late(*asked: Any) -> Any:
        await asyncio.sleep(0.3)
        return await find(*asked)

    peer._find = late


async def test_members_that_make_records_up_hide_no_node(tmp_path: Path) -> None:
    """Also where they answer first."""
    made = count(1)
    async with local_swarm(tmp_path, 5) as (reader, honest, *liars):
        for swarm in (reader, honest):
            await swarm.directory.publish(make_status(span=(0, 30)))
            answer_late(swarm)
        for liar in liars:
            flood(liar, made)
        both = {swarm.identity.peer_id for swarm in (reader, honest)}
        async with open_swarm(
            Identity.ephemeral(tmp_path),
            initial_peers=[each for m in (honest, *liars) for each in m.transport.addresses],
            listen=False,
        ) as client:
            # One member's word, perhaps a liar's, leaves room for what all say.
            await client.directory.fetch_one(MODEL)
            assert len(client.directory.snapshot(MODEL).nodes) <= ROOM // 2
            for _ in range(3):
                for swarm in (reader, client):
                    snapshot = await swarm.directory.fetch(MODEL)
                    found = {node.peer_id for node in snapshot.nodes}
                    assert both <= found
                    assert ROOM <= len(found) <= ROOM + 1
            # What a known node says anew is heard.
            await honest.directory.publish(make_status(span=(0, 30), load=0.5))
            await client.directory.fetch(MODEL)
            record = client.directory.record(honest.identity.peer_id)
            assert record is not None
            assert record.load == 0.5
        assert reader.directory.dropped["full"] > 0
