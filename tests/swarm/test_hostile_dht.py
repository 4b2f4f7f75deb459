"""A member of the DHT that lies, replays and sends garbage; the others keep serving records."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from nesa_node.core.errors import ProtocolError, RemoteError, SwarmError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.swarm.dht.message_codec import MAX_KEYS_PER_FIND
from nesa_node.swarm.dht.records import ALL_NODES_KEY, MAX_RECORD_BYTES, NodeRecord, model_key
from nesa_node.swarm.dht.rpc import PROTOCOL_PREFIX, CallBudget, node_id_of
from nesa_node.swarm.dht.sealing import seal_statement
from nesa_node.swarm.dht.validator import dht_id
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.control import UnaryCalls
from nesa_node.swarm.p2p.hivemind_imports import (
    DHTID,
    DHTProtocol,
    DictionaryDHTValue,
    MSGPackSerializer,
    dht_pb2,
)
from nesa_node.swarm.p2p.identity import Identity, base58_decode
from tests.swarm.local_swarm import dht_node, local_swarm
from tests.swarm.record_fields import MODEL_ID, make_record, make_status

MODEL = ModelId(MODEL_ID)
KEY = dht_id(model_key(MODEL))


class _Attack:
    """`victim` has published; `attacker` is a full member; `witness` looks."""

    def __init__(self, members: list[Swarm], directory: Path) -> None:
        self.victim, self.attacker, self.witness = members
        self.directory = directory

    async def call(self, target: Swarm, method: str, data: bytes) -> bytes:
        unary = self.attacker.transport.unary
        return await unary.call(target.identity.peer_id, PROTOCOL_PREFIX + method, data)

    async def store(
        self, sealed: bytes, name: PeerId, expires_at: float, **changes: Any
    ) -> list[bool]:
        """Ask both others to keep a record; what they answered."""
        fields: dict[str, Any] = {
            "keys": [KEY],
            "subkeys": [MSGPackSerializer.dumps(name)],
            "values": [MSGPackSerializer.dumps(sealed)],
            "expiration_time": [expires_at],
            "in_cache": [False],
            **changes,
        }
        answers = []
        for target in (self.victim, self.witness):
            request = dht_pb2.StoreRequest(**fields).SerializeToString()
            response = dht_pb2.StoreResponse.FromString(
                await self.call(target, "rpc_store", request)
            )
            answers += list(response.store_ok)
        return answers

    async def loads_seen(self) -> list[float]:
        """The load that each honest member reads from the victim's record."""
        loads = []
        for member in (self.victim, self.witness):
            node = (await member.directory.fetch(MODEL)).find_node(self.victim.identity.peer_id)
            loads.append(-1.0 if node is None else node.load)
        return loads

    def dropped(self, reason: str) -> int:
        return sum(m.directory.dropped[reason] for m in (self.victim, self.witness))


@pytest.fixture
async def attack(tmp_path: Path) -> AsyncIterator[_Attack]:
    async with local_swarm(tmp_path, 3) as members:
        attack = _Attack(members, tmp_path)
        await attack.victim.directory.publish(make_status(load=0.25))
        await attack.attacker.directory.fetch(MODEL)
        yield attack


def _record_of(swarm: Swarm) -> NodeRecord:
    record = swarm.directory.record(swarm.identity.peer_id)
    assert record is not None
    return record


async def test_foreign_and_forged_records_are_refused(attack: _Attack) -> None:
    name, attacker = attack.victim.identity.peer_id, attack.attacker.identity.peer_id
    now = time.time()
    mine = make_record(attack.attacker.identity, now, load=9.0)
    sealed = seal_statement(mine, attack.attacker.identity)
    forged = seal_statement(_record_of(attack.victim), attack.victim.identity).replace(
        b"tiny", b"tina"
    )
    unwanted = {"subkeys": [DHTProtocol.IS_REGULAR_VALUE]}
    elsewhere = {"keys": [dht_id("nesa/1/model/other@0")]}
    huge = bytes(MAX_RECORD_BYTES + 100)
    attempts = {
        "subkey": attack.store(sealed, name, mine.expires_at),
        "signature": attack.store(forged, name, _record_of(attack.victim).expires_at),
        "malformed": attack.store(b"poison", name, now + 60),
        "oversized": attack.store(huge, name, now + 60),
        "unwanted": attack.store(sealed, name, now + 60, **unwanted),
        "key": attack.store(sealed, attacker, mine.expires_at, **elsewhere),
        "expiry": attack.store(sealed, attacker, mine.expires_at + 100),
    }
    for reason, attempt in attempts.items():
        assert await attempt == [False, False], reason
        assert attack.dropped(reason) == 2, reason
    assert await attack.loads_seen() == [0.25, 0.25]


async def test_replayed_record_neither_returns_nor_shortens_the_new_one(attack: _Attack) -> None:
    old = _record_of(attack.victim)
    sealed = seal_statement(old, attack.victim.identity)
    await attack.victim.directory.publish(make_status(load=0.75))
    for _ in range(20):
        assert await attack.store(sealed, PeerId(old.peer_id), old.expires_at) == [False, False]
    assert attack.dropped("stale") == 40
    assert await attack.loads_seen() == [0.75, 0.75]
    await attack.victim.directory.withdraw()
    assert await attack.store(sealed, PeerId(old.peer_id), old.expires_at) == [False, False]
    assert await attack.loads_seen() == [-1.0, -1.0]


async def test_cache_entries_are_kept_as_any_other_record(attack: _Attack) -> None:
    record = _record_of(attack.victim)
    sealed = seal_statement(record, attack.victim.identity)
    for forged in (sealed.replace(b"tiny", b"tina"), b"poison"):
        stored = await attack.store(
            forged, PeerId(record.peer_id), record.expires_at, in_cache=[True]
        )
        assert stored == [False, False]
    assert await attack.loads_seen() == [0.25, 0.25]


async def test_bad_entry_of_a_dictionary_does_not_take_the_good_ones_with_it(
    attack: _Attack,
) -> None:
    now = time.time()
    others = [Identity.ephemeral(attack.directory) for _ in range(3)]
    records = DictionaryDHTValue()
    for identity in others:
        record = make_record(identity, now)
        sealed = MSGPackSerializer.dumps(seal_statement(record, identity))
        records.store(identity.peer_id, sealed, record.expires_at)
    records.store("12D3KooWNobody", sealed, record.expires_at)
    await attack.store(
        b"",
        PeerId(""),
        now,
        subkeys=[DHTProtocol.IS_DICTIONARY],
        values=[MSGPackSerializer.dumps(records)],
    )
    assert attack.dropped("subkey") == 2
    snapshot = await attack.witness.directory.fetch(MODEL)
    assert {node.peer_id for node in snapshot.nodes} == {
        attack.victim.identity.peer_id,
        *(identity.peer_id for identity in others),
    }


@pytest.mark.parametrize("lie", ["forged", "regular", "garbage", "nested", "hiding", "silent"])
async def test_lying_answers_to_a_search_change_nothing(attack: _Attack, lie: str) -> None:
    old = _record_of(attack.victim)
    await attack.victim.directory.publish(make_status(load=0.75))
    forged = DictionaryDHTValue()
    sealed = seal_statement(old, attack.victim.identity).replace(b"tiny", b"tina")
    forged.store(old.peer_id, MSGPackSerializer.dumps(sealed), time.time() + 500)
    results: dict[str, Callable[[], Any]] = {
        "forged": lambda: _found(dht_pb2.FOUND_DICTIONARY, MSGPackSerializer.dumps(forged)),
        "regular": lambda: _found(dht_pb2.FOUND_REGULAR, b"poison"),
        "garbage": lambda: _found(dht_pb2.FOUND_DICTIONARY, os.urandom(1000)),
        "nested": lambda: _found(dht_pb2.FOUND_DICTIONARY, b"\x91" * 100_000),
        "hiding": lambda: dht_pb2.FindResult(type=dht_pb2.NOT_FOUND),
    }

    async def answer(_: PeerId, data: bytes) -> bytes:
        request = dht_pb2.FindRequest.FromString(data)
        if lie == "silent":
            await asyncio.sleep(4)
        found = [results[lie]() for _ in request.keys]
        return bytes(dht_pb2.FindResponse(results=found).SerializeToString())

    attack.attacker.transport.unary._handlers[PROTOCOL_PREFIX + "rpc_find"] = answer
    assert await attack.loads_seen() == [0.75, 0.75]


def _found(kind: int, value: bytes) -> Any:
    return dht_pb2.FindResult(type=kind, value=value, expiration_time=time.time() + 500)


async def test_stale_entry_of_an_answer_does_not_hide_the_good_ones(attack: _Attack) -> None:
    """A member that missed an update still knows others that nobody else does."""
    old = _record_of(attack.victim)
    await attack.victim.directory.publish(make_status(load=0.75))
    only_here = Identity.ephemeral(attack.directory)
    records = DictionaryDHTValue()
    for identity, record in (
        (attack.victim.identity, old),
        (only_here, make_record(only_here, time.time())),
    ):
        sealed = MSGPackSerializer.dumps(seal_statement(record, identity))
        records.store(identity.peer_id, sealed, record.expires_at)

    async def answer(_: PeerId, data: bytes) -> bytes:
        found = _found(dht_pb2.FOUND_DICTIONARY, MSGPackSerializer.dumps(records))
        num_keys = len(dht_pb2.FindRequest.FromString(data).keys)
        return bytes(dht_pb2.FindResponse(results=[found] * num_keys).SerializeToString())

    attack.attacker.transport.unary._handlers[PROTOCOL_PREFIX + "rpc_find"] = answer
    assert await attack.loads_seen() == [0.75, 0.75]
    assert attack.witness.directory.snapshot(MODEL).find_node(only_here.peer_id) is not None


async def test_invented_neighbours_are_not_asked(
    attack: _Attack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one liar could surround a key with ids that never answer."""
    asked: list[PeerId] = []
    call = UnaryCalls.call

    async def spy(self: UnaryCalls, peer: PeerId, protocol: str, data: bytes) -> bytes:
        asked.append(peer)
        return await call(self, peer, protocol, data)

    async def answer(_: PeerId, data: bytes) -> bytes:
        keys = dht_pb2.FindRequest.FromString(data).keys
        near = [bytes(key[:19]) + bytes([i]) for key in keys for i in range(200)]
        invented = [
            base58_decode(PeerId(attack.attacker.identity.peer_id))[:6] + os.urandom(32)
            for _ in near
        ]
        result = dht_pb2.FindResult(nearest_node_ids=near, nearest_peer_ids=invented)
        return bytes(dht_pb2.FindResponse(results=[result] * len(keys)).SerializeToString())

    attack.attacker.transport.unary._handlers[PROTOCOL_PREFIX + "rpc_find"] = answer
    monkeypatch.setattr(UnaryCalls, "call", spy)
    assert await attack.loads_seen() == [0.25, 0.25]
    members = (attack.victim, attack.attacker, attack.witness)
    assert set(asked) <= {member.identity.peer_id for member in members}


async def test_peer_cannot_claim_dht_ids_that_are_not_its_own(attack: _Attack) -> None:
    own = node_id_of(base58_decode(attack.attacker.identity.peer_id))
    table = dht_node(attack.witness).protocol.routing_table
    for node_id in [own, *(os.urandom(20) for _ in range(50)), b"short", bytes(300)]:
        request = dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=node_id))
        await attack.call(attack.witness, "rpc_ping", request.SerializeToString())
        find = dht_pb2.FindRequest(keys=[KEY], peer=dht_pb2.NodeInfo(node_id=node_id))
        await attack.call(attack.witness, "rpc_find", find.SerializeToString())
    await asyncio.sleep(0.1)
    assert {bytes(node.to_bytes()) for node in table.uid_to_peer_id} == {
        own,
        node_id_of(base58_decode(attack.victim.identity.peer_id)),
    }


async def test_oversized_batches_are_refused(attack: _Attack) -> None:
    find = dht_pb2.FindRequest(keys=[KEY] * (MAX_KEYS_PER_FIND + 1)).SerializeToString()
    with pytest.raises(RemoteError, match="ProtocolError"):
        await attack.call(attack.witness, "rpc_find", find)
    with pytest.raises(RemoteError, match="ProtocolError"):
        await attack.store(
            b"",
            PeerId(""),
            0.0,
            keys=[KEY] * 1000,
            subkeys=[b"x"] * 1000,
            values=[b""] * 1000,
            expiration_time=[0.0] * 1000,
        )
    with pytest.raises(RemoteError, match="ProtocolError"):
        await attack.store(b"", PeerId(""), 0.0, subkeys=[])


async def test_thousand_mutated_calls_leave_a_member_up(attack: _Attack) -> None:
    rng = random.Random(7)
    record = _record_of(attack.victim)
    sealed = MSGPackSerializer.dumps(seal_statement(record, attack.victim.identity))
    seeds = {
        "rpc_ping": dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=os.urandom(20))),
        "rpc_find": dht_pb2.FindRequest(keys=[KEY, dht_id(ALL_NODES_KEY)]),
        "rpc_store": dht_pb2.StoreRequest(
            keys=[KEY],
            subkeys=[MSGPackSerializer.dumps(record.peer_id)],
            values=[sealed],
            expiration_time=[record.expires_at],
            in_cache=[False],
        ),
    }
    # Spend the victim's patience only here: the budget itself is tested below.
    attack.witness.directory._dht_store._node._rpc._budget = CallBudget(
        lambda: 0.0, burst_units=1e9
    )
    answered = 0
    for _ in range(1000):
        method = rng.choice(list(seeds))
        data = bytearray(seeds[method].SerializeToString())
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        try:
            await attack.call(attack.witness, method, bytes(data))
            answered += 1
        except RemoteError:
            pass
    assert 0 < answered < 1000
    assert await attack.loads_seen() == [0.25, 0.25]
    assert len(attack.witness.transport.unary._tasks) == 0
    storage = dht_node(attack.witness).protocol.storage
    assert {bytes(DHTID.to_bytes(key)) for key in storage.data} == {KEY, dht_id(ALL_NODES_KEY)}


async def test_peer_that_calls_too_often_is_refused_and_others_are_not(attack: _Attack) -> None:
    find = dht_pb2.FindRequest(keys=[KEY]).SerializeToString()
    results = await asyncio.gather(
        *(attack.call(attack.witness, "rpc_find", find) for _ in range(900)),
        return_exceptions=True,
    )
    refused = [result for result in results if isinstance(result, SwarmError | ProtocolError)]
    assert 0 < len(refused) < 900
    await attack.victim.directory.publish(make_status(load=0.5))
    assert await attack.loads_seen() == [0.5, 0.5]


def test_budget_fills_with_time_and_forgets_old_peers() -> None:
    now = 0.0
    budget = CallBudget(lambda: now, burst_units=10.0)
    for _ in range(10):
        budget.charge(PeerId("p"), 1.0)
    with pytest.raises(ProtocolError, match="too often"):
        budget.charge(PeerId("p"), 1.0)
    budget.charge(PeerId("q"), 10.0)
    now = 1.0
    budget.charge(PeerId("p"), 10.0)
    for index in range(10_000):
        budget.charge(PeerId(f"p{index}"), 1.0)
    assert len(budget._balances) <= 4096
