"""Member of the DHT: hivemind's protocol with lookups, stores and replication of our own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from nesa_node.core.errors import ProtocolError, RemoteError, SwarmError
from nesa_node.core.logging import get_logger
from nesa_node.swarm.dht_codec import unpack_records
from nesa_node.swarm.dht_lookup import WIDTH, Contact, Lookup
from nesa_node.swarm.dht_peer import DhtPeer, node_id_of
from nesa_node.swarm.hive import (
    DHTID,
    Blacklist,
    DHTProtocol,
    MSGPackSerializer,
    PeerID,
    TimedStorage,
    dht_pb2,
)
from nesa_node.swarm.validator import RecordValidator

log = get_logger(__name__)

MAX_NEWCOMERS = 16
"""New members that may wait at once for the records they should replicate."""
NUM_REPLICAS = 5

_RPC_TIMEOUT_S = 3.0
_PARALLEL_CALLS = 4
_SLOW_CALL_S = 1.0
"""A call that takes longer no longer counts towards a lookup's limit of parallel calls."""
_LOOK_UP_S = 10.0
_STORE_S = 12.0
"""Until the last member of a store is called; its answer may take `_RPC_TIMEOUT_S` more."""
_BAN_S = 5.0
_BAN_GROWTH = 2.0
_BUSY_S = 0.5
_MAX_BUSY = 4096

_BATCH_BYTES = 512 * 1024
_BATCH_KEYS = 64
"""Limits of one replication call, which the receiver charges for; one key may exceed the bytes."""

Record = tuple[str, bytes, float]
"""Subkey, value and expiration."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A member's checked records under a key, and the members it knows nearest to that key."""

    records: list[Record]
    neighbours: dict[DHTID, PeerID]


class MemberNode:
    """DHT lookups and stores.

    A peer that does not answer is skipped for `_BAN_S`, growing with each failure (`blacklist`);
    one that refuses a call is skipped for `_BUSY_S`, in which its budget for this node refills.
    """

    def __init__(self, peer: DhtPeer, protocol: MemberProtocol) -> None:
        self.node_id = protocol.node_id
        self.peer_id = peer.peer_id
        self.protocol = protocol
        self.blacklist = Blacklist(_BAN_S, _BAN_GROWTH)
        self._busy = TimedStorage(_MAX_BUSY)
        self._peer = peer

    @classmethod
    async def create(
        cls, peer: DhtPeer, validator: RecordValidator, *, client_mode: bool
    ) -> MemberNode:
        protocol: MemberProtocol = await MemberProtocol.create(
            peer,
            DHTID.from_bytes(node_id_of(peer.peer_id.to_bytes())),
            bucket_size=WIDTH,
            depth_modulo=5,
            num_replicas=NUM_REPLICAS,
            wait_timeout=_RPC_TIMEOUT_S,
            client_mode=client_mode,
            record_validator=validator,
        )
        protocol.newcomers = Newcomers()
        return cls(peer, protocol)

    async def shutdown(self) -> None:
        await self.protocol.shutdown()

    async def look_up(
        self,
        key: DHTID,
        take: Callable[[list[Record]], bool] = lambda _: False,
        *,
        parallel: int = _PARALLEL_CALLS,
        limit_s: float = _LOOK_UP_S,
    ) -> list[Contact]:
        """Find the members nearest to `key` that answer within `limit_s`, the nearest first.

        `take` gets each member's records under `key`, and ends the lookup by returning True.
        `parallel` calls are made at once. Calls in flight at the end continue in the background:
        their results update the blacklist and the routing table.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + limit_s
        await asyncio.sleep(0)  # hivemind records a ping's answer in a task of its own
        table = self.protocol.routing_table
        known = table.get_nearest_neighbors(key, WIDTH, exclude=self.node_id)
        lookup = Lookup(key, self.node_id, self._without_banned(known))
        calls: dict[asyncio.Task[Answer | None], tuple[Contact, float]] = {}
        while True:
            now = clock()
            slow_at = [at for _, at in calls.values() if at > now]
            while len(slow_at) < parallel and (contact := lookup.next_contact()) is not None:
                slow_at.append(now + _SLOW_CALL_S)
                calls[self._peer.start(self._ask(contact.peer_id, key))] = contact, slow_at[-1]
            if not calls:
                return lookup.nearest()
            if now >= deadline:
                log.warning("lookup_timed_out", timeout_s=limit_s)
                return lookup.nearest()
            done, _ = await asyncio.wait(
                calls,
                timeout=min([deadline, *slow_at]) - now,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for call in done:
                contact, _ = calls.pop(call)
                answer = call.result()
                if answer is None:
                    lookup.failed(contact)
                    continue
                lookup.answered(contact, self._without_banned(answer.neighbours.items()))
                if take(answer.records):
                    return lookup.nearest()

    async def store(self, key: DHTID, subkey: str, value: bytes, expires_at: float) -> str | None:
        """Store a record at the `NUM_REPLICAS` members nearest to `key`.

        Returns None if a remote member keeps it, else "refused" or "unanswered". This node's own
        copy counts only if it knows no other member. Cancelling the caller does not cancel the
        store.
        """
        return await asyncio.shield(self._peer.start(self._store(key, subkey, value, expires_at)))

    async def _store(self, key: DHTID, subkey: str, value: bytes, expires_at: float) -> str | None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + _STORE_S
        is_alone = not self.protocol.routing_table.uid_to_peer_id
        # A find also returns all records under its key. The adjacent id has the same nearest
        # members and no records.
        beside = DHTID(int(key) ^ 1)
        members = await self.look_up(beside)
        own_distance = self.node_id.xor_distance(beside)
        missing = NUM_REPLICAS
        is_kept = False
        if sum(member.distance < own_distance for member in members) < missing:
            is_kept = self.protocol.keep(key, subkey, value, expires_at)
            missing -= 1
        answers: list[list[bool]] = []
        nearest = iter(members)
        while clock() < deadline and (batch := list(islice(nearest, missing))):
            calls = (
                self.protocol.call_store(
                    member.peer_id, [key], [value], [expires_at], subkeys=[subkey]
                )
                for member in batch
            )
            answered = [each for each in await asyncio.gather(*calls) if each is not None]
            missing -= len(answered)
            answers += answered
        is_alone = is_alone and not members
        if any(True in answer for answer in answers) or (is_alone and is_kept):
            return None
        return "refused" if answers or is_alone else "unanswered"

    async def _ask(self, peer_id: PeerID, key: DHTID) -> Answer | None:
        """Ask `peer_id` for `key`; None if it refuses or does not answer."""
        try:
            answer = await self.protocol.find(peer_id, key)
        except RemoteError:
            self._busy.store(peer_id, None, time.time() + _BUSY_S)
            return None
        except (SwarmError, ProtocolError, TimeoutError):
            self.blacklist.register_failure(peer_id)
            return None
        self.blacklist.register_success(peer_id)
        return answer

    def _without_banned(self, contacts: Iterable[tuple[DHTID, PeerID]]) -> dict[DHTID, PeerID]:
        return {
            node: peer
            for node, peer in contacts
            if peer not in self.blacklist and peer not in self._busy
        }


class Newcomers:
    """Queue of new members that wait for their replicas, served one at a time."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.waiting = 0


class MemberProtocol(DHTProtocol):  # type: ignore[misc]
    """hivemind's DHT protocol with bounded replication; `DhtPeer` has checked all messages.

    hivemind sends each new member, in a single message, all records that it should replicate.
    Identities are free, so here one new member is served at a time, in calls of bounded size. When
    `MAX_NEWCOMERS` wait, further ones only get records that are published later.
    """

    newcomers: Newcomers

    def _validate_dictionary(self, key_bytes: bytes, dictionary: Any) -> bool:
        return True

    async def find(self, peer_id: PeerID, key: DHTID) -> Answer:
        """Ask `peer_id` for its records under `key` and its nearest contacts.

        Raises `SwarmError`, `ProtocolError`, and `TimeoutError`.
        """
        request = dht_pb2.FindRequest(keys=[key.to_bytes()], peer=self.node_info)
        try:
            async with asyncio.timeout(self.wait_timeout):
                response = await self.p2p.call_protobuf_handler(
                    peer_id, "DHTProtocol.rpc_find", request, dht_pb2.FindResponse
                )
        except RemoteError:
            raise
        except (SwarmError, ProtocolError, TimeoutError):
            await self.update_routing_table(None, peer_id, responded=False)
            raise
        if response.peer.node_id:
            await self.update_routing_table(DHTID.from_bytes(response.peer.node_id), peer_id)
        (result,) = response.results
        ids = map(DHTID.from_bytes, result.nearest_node_ids)
        neighbours = dict(zip(ids, map(PeerID, result.nearest_peer_ids), strict=True))
        return Answer(unpack_records(result.value) if result.value else [], neighbours)

    def keep(self, key: DHTID, subkey: str, value: bytes, expires_at: float) -> bool:
        """Store a record at this node itself; False if it was refused."""
        packed = MSGPackSerializer.dumps(subkey)
        is_valid = self._validate_record(key.to_bytes(), packed, value, expires_at)
        return bool(is_valid and self.storage.store_subkey(key, subkey, value, expires_at))

    async def update_routing_table(
        self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True
    ) -> None:
        """Do as hivemind does, but queue the replication to a new member."""
        is_new = node_id is not None and node_id not in self.routing_table
        if not responded or not is_new:
            await super().update_routing_table(node_id, peer_id, responded)
            return
        to_ping = self.routing_table.add_or_update_node(node_id, peer_id)
        if to_ping is not None:
            self.p2p.start(self.call_ping(to_ping[1]))
        if self.newcomers.waiting < MAX_NEWCOMERS:
            self.newcomers.waiting += 1
            self.p2p.start(self._hand_over(node_id, peer_id))

    async def _hand_over(self, node_id: DHTID, peer_id: PeerID) -> None:
        try:
            async with self.newcomers.turn:
                keys: list[DHTID] = []
                num_bytes = 0
                for key in list(self.storage.data):
                    await asyncio.sleep(0)
                    if self._should_give(key, node_id):
                        keys.append(key)
                        num_bytes += self.storage.size_of(key)
                    if num_bytes >= _BATCH_BYTES or len(keys) >= _BATCH_KEYS:
                        if not await self._give(peer_id, keys):
                            return
                        keys, num_bytes = [], 0
                await self._give(peer_id, keys)
        finally:
            self.newcomers.waiting -= 1

    async def _give(self, peer_id: PeerID, keys: list[DHTID]) -> bool:
        """Send the records of `keys`; False if `peer_id` did not answer."""
        items = [(key, item) for key in keys if (item := self.storage.get(key)) is not None]
        if not items:
            return True
        values = [item.value for _, item in items]
        expirations = [item.expiration_time for _, item in items]
        given = await self.call_store(peer_id, [key for key, _ in items], values, expirations)
        return given is not None

    def _should_give(self, key: DHTID, node_id: DHTID) -> bool:
        """Whether the new node replicates `key` and this one was its nearest member before."""
        nearest = self.routing_table.get_nearest_neighbors(
            key, self.num_replicas + 1, exclude=self.node_id
        )
        others = [each for each, _ in nearest if each != node_id][: self.num_replicas]
        if not others:
            return True
        distances = [each.xor_distance(key) for each in others]
        return bool(
            node_id.xor_distance(key) < distances[-1]
            and self.node_id.xor_distance(key) < distances[0]
        )
