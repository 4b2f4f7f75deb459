"""Searches of the DHT where a member names contacts that do not exist, nearer than all members."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from nesa_node.core.errors import PeerUnreachableError, RemoteError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.swarm.dht import member as dht_node_module
from nesa_node.swarm.dht.iterative_lookup import (
    BUCKET_SIZE,
    MAX_CONTACTS_ASKED,
    MAX_UNANSWERED_PER_REFERRER,
    Contact,
    IterativeLookup,
)
from nesa_node.swarm.dht.member import NUM_REPLICAS, DhtStore, MemberNode
from nesa_node.swarm.dht.records import model_key
from nesa_node.swarm.dht.rpc import PROTOCOL_PREFIX, DhtRpc, node_id_of
from nesa_node.swarm.dht.sealing import seal_statement
from nesa_node.swarm.dht.validator import RecordValidator, dht_id
from nesa_node.swarm.node import _dht_node
from nesa_node.swarm.p2p.hivemind_imports import DHTID, PeerID, dht_pb2
from nesa_node.swarm.p2p.identity import Identity, Membership
from tests.swarm.local_swarm import eventually
from tests.swarm.record_fields import MODEL_ID, make_record

KEY_NAME = model_key(ModelId(MODEL_ID))
KEY = DHTID.from_bytes(dht_id(KEY_NAME))
RPC_TIMEOUT_S = 1.0
SMALL = 12
"""So few members that each asks all."""


class Network:
    """Calls between members in this process. Those to other peers fail, or with `stalls` hang."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.wires: dict[PeerId, _Wire] = {}
        self.stalls = False
        self.latency_s = 0.0
        self.calls: Counter[str] = Counter()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Network:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def add(self, count: int, *, listen: bool = True) -> list[_Member]:
        """New members that know the first and meet those near to it."""
        members = [await self._member(listen) for _ in range(count)]
        first = next(iter(self.wires.values()))
        for member in members:
            if member.wire is not first:
                await member.node.protocol.call_ping(PeerID.from_base58(first.own))
                await member.node.lookup(member.node.node_id)
        return members

    async def _member(self, listen: bool) -> _Member:
        identity = Identity.ephemeral(self.directory)
        wire: Any = _Wire(self, identity.peer_id)
        membership = Membership(None)
        validator = RecordValidator(membership, time.time)
        peer = DhtRpc(identity.peer_id, wire, validator, membership)
        node = await self._stack.enter_async_context(_dht_node(peer, validator, listen=listen))
        if listen:
            self.wires[identity.peer_id] = wire
        return _Member(identity, node, DhtStore(node, membership), wire)


class _Wire:
    """What `DhtRpc` uses of `UnaryCalls`."""

    def __init__(self, network: Network, own: PeerId) -> None:
        self.own = own
        self.handlers: dict[str, Callable[[PeerId, bytes], Awaitable[bytes]]] = {}
        self._network = network
        self._pending: set[asyncio.Future[bytes]] = set()

    async def add_handler(self, protocol: str, handler: Any) -> None:
        self.handlers[protocol] = handler

    async def remove_handler(self, protocol: str) -> None:
        self.handlers.pop(protocol, None)

    async def call(self, peer: PeerId, protocol: str, data: bytes) -> bytes:
        self._network.calls[protocol.removeprefix(PROTOCOL_PREFIX)] += 1
        await asyncio.sleep(self._network.latency_s)
        target = self._network.wires.get(peer)
        if target is not None:
            return await target.handlers[protocol](self.own, data)
        if self._network.stalls:
            await self._never()
        raise PeerUnreachableError("no such peer")

    async def _never(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._pending.add(future)
        await future

    def fail_pending(self) -> None:
        for future in self._pending:
            if not future.done():
                future.set_exception(PeerUnreachableError("this node has left the network"))


class _Member:
    def __init__(self, identity: Identity, node: MemberNode, shelf: DhtStore, wire: _Wire) -> None:
        self.identity = identity
        self.node = node
        self.shelf = shelf
        self.wire = wire

    async def put(self) -> str | None:
        record = make_record(self.identity, time.time())
        sealed = seal_statement(record, self.identity)
        return await self.shelf.put([KEY_NAME], sealed, record.expires_at, record.peer_id)

    async def find(self, **options: Any) -> int:
        return len(list(await self.shelf.find(KEY_NAME, **options)))

    def keeps(self) -> set[str]:
        return {subkey for subkey, _, _ in self.node.protocol.storage.records_of(KEY)}

    def name_ground_contacts(self) -> None:
        """Answer each search with 20 contacts that are nearer than all members."""

        async def answer(_: PeerId, data: bytes) -> bytes:
            response = dht_pb2.FindResponse()
            for key in dht_pb2.FindRequest.FromString(data).keys:
                peers = _ground(DHTID.from_bytes(key), BUCKET_SIZE)
                ids = map(node_id_of, peers)
                response.results.add(nearest_node_ids=ids, nearest_peer_ids=peers)
            return bytes(response.SerializeToString())

        self.wire.handlers[PROTOCOL_PREFIX + "rpc_find"] = answer


def _ground(key: DHTID, count: int) -> list[bytes]:
    tried = [b"\x00\x24\x08\x01\x12\x20" + os.urandom(32) for _ in range(100 * count)]
    return sorted(tried, key=lambda peer: int(key) ^ int.from_bytes(node_id_of(peer)))[:count]


@pytest.mark.parametrize("stalls", [False, True])
async def test_a_member_that_names_ground_contacts_hides_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stalls: bool
) -> None:
    monkeypatch.setattr(dht_node_module, "RPC_TIMEOUT_S", RPC_TIMEOUT_S)
    monkeypatch.setattr(dht_node_module, "_SLOW_CALL_AFTER_S", RPC_TIMEOUT_S / 3)
    async with Network(tmp_path) as network:
        members = await network.add(SMALL)
        nearest = min(members[1:], key=lambda member: member.node.node_id.xor_distance(KEY))
        nearest.name_ground_contacts()
        network.stalls = stalls
        honest = [member for member in members if member is not nearest]
        network.calls.clear()
        began = time.monotonic()
        assert await asyncio.gather(*(member.put() for member in honest)) == [None] * len(honest)
        # Each asks all other members and a few of the contacts.
        assert network.calls["rpc_find"] <= len(honest) * (SMALL + MAX_UNANSWERED_PER_REFERRER)
        for member in honest:
            others = [each for each in honest if each is not member]
            name = member.identity.peer_id
            assert sum(name in each.keeps() for each in others) >= NUM_REPLICAS - 2
        (reader,) = await network.add(1, listen=False)
        assert await reader.find() == len(honest)
        assert await reader.find(members=4) == len(honest)
        assert time.monotonic() - began < 20 * RPC_TIMEOUT_S


async def test_a_search_that_is_not_over_in_time_returns_what_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nesa_node.swarm.dht.member.FETCH_TIMEOUT_S", 0.5)
    async with Network(tmp_path) as network:
        members = await network.add(4)
        for member in members[:3]:
            await member.put()
        (reader,) = await network.add(1, listen=False)
        del network.wires[members[3].identity.peer_id]
        network.stalls = True
        async with asyncio.timeout(2.0):  # the call ends after 3 s
            assert await reader.find() == 3


async def test_a_call_that_hangs_does_not_hold_up_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dht_node_module, "RPC_TIMEOUT_S", 60.0)
    monkeypatch.setattr(dht_node_module, "_SLOW_CALL_AFTER_S", 0.1)
    async with Network(tmp_path) as network:
        members = await network.add(4)
        for member in members:
            await member.put()
        (reader,) = await network.add(1, listen=False)
        nearest = min(members, key=lambda member: member.node.node_id.xor_distance(KEY))
        del network.wires[nearest.identity.peer_id]
        network.stalls = True
        async with asyncio.timeout(5.0):
            assert await reader.find(members=1) == 4


async def test_a_record_is_stored_where_its_publisher_gives_up(tmp_path: Path) -> None:
    async with Network(tmp_path) as network:
        first, second = await network.add(2)
        network.calls.clear()
        network.latency_s = 0.2

        async def searches() -> bool:
            return network.calls["rpc_find"] > 0

        async def is_stored() -> bool:
            return first.identity.peer_id in second.keeps()

        putting = asyncio.create_task(first.put())
        await eventually(searches)
        assert not await is_stored()
        putting.cancel()
        await eventually(is_stored)


async def refuse(*_: object) -> bytes:
    """A member's answer to a peer that has spent its budget of calls."""
    raise RemoteError("busy", "too many calls")


async def test_a_record_that_no_other_member_takes_is_not_reported_as_stored(
    tmp_path: Path,
) -> None:
    async with Network(tmp_path) as network:
        first, second = await network.add(2)
        second.wire.handlers[PROTOCOL_PREFIX + "rpc_store"] = refuse
        assert await first.put() == "unanswered"
        assert first.keeps() == {first.identity.peer_id}
    async with Network(tmp_path) as network:
        (alone,) = await network.add(1)
        assert await alone.put() is None


async def test_a_member_that_refuses_a_call_is_neither_banned_nor_forgotten(
    tmp_path: Path,
) -> None:
    async with Network(tmp_path) as network:
        first, second = await network.add(2)
        answer = second.wire.handlers[PROTOCOL_PREFIX + "rpc_find"]
        second.wire.handlers[PROTOCOL_PREFIX + "rpc_find"] = refuse
        network.calls.clear()
        for _ in range(3):
            assert await first.find() == 0
        assert network.calls["rpc_find"] == 1, "it is left alone for a while"
        assert PeerID.from_base58(second.identity.peer_id) in first.node.protocol.routing_table
        second.wire.handlers[PROTOCOL_PREFIX + "rpc_find"] = answer
        await second.put()
        first.node.protocol.storage.data.clear()
        first.node._busy_peers.data.clear()
        assert await first.find() == 1


async def test_few_calls_find_and_store_a_record_in_an_honest_swarm(tmp_path: Path) -> None:
    async with Network(tmp_path) as network:
        members = await network.add(2 * BUCKET_SIZE)
        network.calls.clear()
        for member in members[:10]:
            assert await member.put() is None
        assert network.calls["rpc_find"] <= 10 * (BUCKET_SIZE + 5)
        assert network.calls["rpc_store"] <= 10 * NUM_REPLICAS
        (reader,) = await network.add(1, listen=False)
        network.calls.clear()
        assert await reader.find() == 10
        assert network.calls["rpc_find"] <= BUCKET_SIZE + 10
        network.calls.clear()
        assert await reader.find(members=1) == 10
        assert network.calls["rpc_find"] <= 3


def _contacts(*distances: int) -> dict[DHTID, PeerID]:
    """Of a search for the id 0."""
    return {DHTID(each): PeerID(hashlib.sha1(b"%d" % each).digest()) for each in distances}


def _asked(lookup: IterativeLookup, most: float = math.inf) -> list[Contact]:
    asked: list[Contact] = []
    while len(asked) < most and (contact := lookup.next_contact()) is not None:
        asked.append(contact)
    return asked


def test_contacts_of_one_member_that_do_not_answer_are_few() -> None:
    lookup = IterativeLookup(DHTID(0), DHTID(1), _contacts(1000))
    (member,) = _asked(lookup)
    lookup.mark_answered(member, _contacts(*range(10, 30)))
    silent = _asked(lookup)
    assert [contact.distance for contact in silent] == [10, 11, 12, 13]
    assert len(silent) == MAX_UNANSWERED_PER_REFERRER
    for contact in silent:
        lookup.mark_failed(contact)
    assert not _asked(lookup)
    assert lookup.nearest() == [member]


def test_each_answer_makes_room_for_one_more_contact_of_a_member() -> None:
    lookup = IterativeLookup(DHTID(0), DHTID(1), _contacts(1000))
    (member,) = _asked(lookup)
    lookup.mark_answered(member, _contacts(*range(10, 29)))
    waiting = _asked(lookup)
    while waiting:
        lookup.mark_answered(waiting.pop(0), {})
        waiting += _asked(lookup)
    assert [contact.distance for contact in lookup.nearest()] == [*range(10, 29), 1000]


def test_members_take_turns() -> None:
    lookup = IterativeLookup(DHTID(0), DHTID(1), _contacts(1000, 1001))
    liar, honest = _asked(lookup)
    lookup.mark_answered(liar, _contacts(*range(10, 30)))
    lookup.mark_answered(honest, _contacts(*range(100, 120)))
    assert [contact.distance for contact in _asked(lookup, 4)] == [10, 100, 11, 101]


def test_contact_that_an_honest_member_names_too_is_asked_all_the_same() -> None:
    lookup = IterativeLookup(DHTID(0), DHTID(1), _contacts(1000, 1001))
    liar, honest = _asked(lookup)
    lookup.mark_answered(liar, _contacts(10, 11, 12, 13, 50))
    for contact in _asked(lookup):
        lookup.mark_failed(contact)
    lookup.mark_answered(honest, _contacts(50))
    assert [contact.distance for contact in _asked(lookup)] == [50]


def test_contacts_of_the_own_table_are_all_asked_but_not_beyond_the_nearest() -> None:
    lookup = IterativeLookup(DHTID(0), DHTID(1), _contacts(*range(10, 40)))
    asked = _asked(lookup)
    assert [contact.distance for contact in asked] == [*range(10, 10 + BUCKET_SIZE)]
    lookup.mark_failed(asked[0])
    assert [contact.distance for contact in _asked(lookup)] == [10 + BUCKET_SIZE]


def test_a_search_asks_few_even_if_real_contacts_lead_from_one_to_the_next() -> None:
    """And never this node itself."""
    lookup = IterativeLookup(DHTID(0), DHTID(1), _contacts(1_000_000))
    num_asked = 0
    while num_asked <= MAX_CONTACTS_ASKED and (contact := lookup.next_contact()) is not None:
        num_asked += 1
        first = contact.distance - 1000
        lookup.mark_answered(contact, _contacts(1, *range(first, first + 20)))
    assert num_asked == MAX_CONTACTS_ASKED
