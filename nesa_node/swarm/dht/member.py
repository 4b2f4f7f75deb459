"""Member of the DHT: hivemind's protocol with lookups, stores and replication of our own.

Store of sealed statements on the DHT, by the names of their keys.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from nesa_node.core.errors import ProtocolError, RemoteError, SwarmError
from nesa_node.core.logging import get_logger
from nesa_node.core.lru_table import LruTable
from nesa_node.swarm.dht.digests import (
    FetchedParts,
    FindMode,
    FindOption,
    KeySummary,
    StoredRecord,
    unpack_summary,
)
from nesa_node.swarm.dht.iterative_lookup import BUCKET_SIZE, Contact, IterativeLookup
from nesa_node.swarm.dht.message_codec import unpack_records
from nesa_node.swarm.dht.records import MAX_NODES_PER_MODEL
from nesa_node.swarm.dht.rpc import DhtRpc, node_id_of
from nesa_node.swarm.dht.validator import RecordValidator
from nesa_node.swarm.p2p.hivemind_imports import (
    DHTID,
    Blacklist,
    DHTProtocol,
    MSGPackSerializer,
    PeerID,
    TimedStorage,
    dht_pb2,
)
from nesa_node.swarm.p2p.identity import Membership

log = get_logger(__name__)

MAX_WAITING_NEWCOMERS = 16
"""New members that may wait at once for the records they should replicate."""
NUM_REPLICAS = 5

RPC_TIMEOUT_S = 3.0
_PARALLEL_CALLS = 4
_SLOW_CALL_AFTER_S = 1.0
"""A call that takes longer no longer counts towards a lookup's limit of parallel calls."""
_LOOKUP_TIMEOUT_S = 10.0
_STORE_TIMEOUT_S = 12.0
"""Until the last member of a store is called; its answer may take `RPC_TIMEOUT_S` more."""
_BAN_S = 5.0
_BAN_GROWTH = 2.0
_BUSY_BACKOFF_S = 0.5
_MAX_BUSY_PEERS = 4096

_REPLICATION_BATCH_BYTES = 512 * 1024
_REPLICATION_BATCH_KEYS = 64
"""Limits of one replication call, which the receiver charges for; one key may exceed the bytes."""
_MAX_COUNTED_KEYS = 64


@dataclass(frozen=True, slots=True)
class FindResult:
    """A member's checked records under a key, and the members it knows nearest to that key.

    A find with an option has a summary in place of records, unless the member is of an earlier
    version.
    """

    records: list[StoredRecord]
    neighbours: dict[DHTID, PeerID]
    summary: KeySummary | None = None


class MemberNode:
    """DHT lookups and stores.

    A peer that does not answer is skipped for `_BAN_S`, growing with each failure (`blacklist`);
    one that refuses a call is skipped for `_BUSY_BACKOFF_S`, in which its budget for this node
    refills.
    """

    def __init__(self, rpc: DhtRpc, protocol: MemberProtocol) -> None:
        self.node_id = protocol.node_id
        self.peer_id = rpc.peer_id
        self.protocol = protocol
        self.blacklist = Blacklist(_BAN_S, _BAN_GROWTH)
        self.num_records: LruTable[DHTID, int] = LruTable(_MAX_COUNTED_KEYS)
        """Records under each key of a store, the median of what the nearest members said."""
        self._busy_peers = TimedStorage(_MAX_BUSY_PEERS)
        self._rpc = rpc

    @classmethod
    async def create(
        cls, rpc: DhtRpc, validator: RecordValidator, *, client_mode: bool
    ) -> MemberNode:
        protocol: MemberProtocol = await MemberProtocol.create(
            rpc,
            DHTID.from_bytes(node_id_of(rpc.peer_id.to_bytes())),
            bucket_size=BUCKET_SIZE,
            depth_modulo=5,
            num_replicas=NUM_REPLICAS,
            wait_timeout=RPC_TIMEOUT_S,
            client_mode=client_mode,
            record_validator=validator,
        )
        protocol.replication_lock = asyncio.Lock()
        return cls(rpc, protocol)

    async def shutdown(self) -> None:
        await self.protocol.shutdown()

    async def lookup(
        self,
        key: DHTID,
        on_records: Callable[[list[StoredRecord]], bool] = lambda _: False,
        *,
        fetched: FetchedParts | None = None,
        counts: dict[DHTID, int] | None = None,
        parallel: int = _PARALLEL_CALLS,
        timeout_s: float = _LOOKUP_TIMEOUT_S,
    ) -> list[Contact]:
        """Find the members nearest to `key` that answer within `timeout_s`, the nearest first.

        `on_records` gets each member's records under `key`, and ends the lookup by returning True.
        With `fetched`, parts that another member has returned already are not fetched again. With
        `counts`, members only say how many records they have under the adjacent key. `parallel`
        calls are made at once. Calls in flight at the end continue in the background:
        their results update the blacklist and the routing table.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        await asyncio.sleep(0)  # hivemind records a ping's answer in a task of its own
        table = self.protocol.routing_table
        known = table.get_nearest_neighbors(key, BUCKET_SIZE, exclude=self.node_id)
        lookup = IterativeLookup(key, self.node_id, self._without_banned(known))
        calls: dict[asyncio.Task[FindResult | None], tuple[Contact, float]] = {}
        while True:
            now = clock()
            slow_at = [at for _, at in calls.values() if at > now]
            while len(slow_at) < parallel and (contact := lookup.next_contact()) is not None:
                slow_at.append(now + _SLOW_CALL_AFTER_S)
                find = self._find_at(contact.peer_id, key, fetched, counts)
                calls[self._rpc.start(find)] = contact, slow_at[-1]
            if not calls:
                return lookup.nearest()
            if now >= deadline:
                log.warning("lookup_timed_out", timeout_s=timeout_s)
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
                    lookup.mark_failed(contact)
                    continue
                lookup.mark_answered(contact, self._without_banned(answer.neighbours.items()))
                if on_records(answer.records):
                    return lookup.nearest()

    async def store(self, key: DHTID, subkey: str, value: bytes, expires_at: float) -> str | None:
        """Store a record at the `NUM_REPLICAS` members nearest to `key`.

        Returns None if a remote member keeps it, else "refused" or "unanswered". This node's own
        copy counts only if it knows no other member. Cancelling the caller does not cancel the
        store.
        """
        return await asyncio.shield(self._rpc.start(self._store(key, subkey, value, expires_at)))

    async def _store(self, key: DHTID, subkey: str, value: bytes, expires_at: float) -> str | None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + _STORE_TIMEOUT_S
        is_alone = not self.protocol.routing_table.uid_to_peer_id
        # A find also returns all records under its key. The adjacent id has the same nearest
        # members and no records.
        beside = DHTID(int(key) ^ 1)
        counts: dict[DHTID, int] = {}
        members = await self.lookup(beside, counts=counts)
        nearby = [counts[each.node_id] for each in members[:NUM_REPLICAS] if each.node_id in counts]
        if nearby:
            self.num_records.put(key, sorted(nearby)[len(nearby) // 2])
        own_distance = self.node_id.xor_distance(beside)
        missing = NUM_REPLICAS
        is_kept = False
        if sum(member.distance < own_distance for member in members) < missing:
            is_kept = self.protocol.store_locally(key, subkey, value, expires_at)
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

    async def _find_at(
        self,
        peer_id: PeerID,
        key: DHTID,
        fetched: FetchedParts | None = None,
        counts: dict[DHTID, int] | None = None,
    ) -> FindResult | None:
        """Ask `peer_id` for `key`; None if it refuses or does not answer."""
        try:
            if counts is not None:
                answer = await self.protocol.find(peer_id, key, FindOption(FindMode.COUNT))
                if answer.summary is not None:
                    node_id = DHTID.from_bytes(node_id_of(peer_id.to_bytes()))
                    counts[node_id] = answer.summary.num_records
            elif fetched is not None:
                answer = await self._find_parts(peer_id, key, fetched)
            else:
                answer = await self.protocol.find(peer_id, key)
        except RemoteError:
            self._busy_peers.store(peer_id, None, time.time() + _BUSY_BACKOFF_S)
            return None
        except (SwarmError, ProtocolError, TimeoutError):
            self.blacklist.register_failure(peer_id)
            return None
        self.blacklist.register_success(peer_id)
        return answer

    async def _find_parts(self, peer_id: PeerID, key: DHTID, fetched: FetchedParts) -> FindResult:
        """Ask for digests, then for the parts that no member has returned; a member with few
        records, or of an earlier version, returns them at once. Raises as `find`."""
        answer = await self.protocol.find(peer_id, key, FindOption(FindMode.SUMMARY))
        if answer.summary is None:
            fetched.add(answer.records)
            return answer
        async with fetched.turn():
            known = fetched.known_records(answer.summary)
            lacking = fetched.lacking(answer.summary)
            if not lacking:
                return FindResult(known, answer.neighbours)
            option = FindOption(FindMode.PARTS, lacking)
            parts = (await self.protocol.find(peer_id, key, option)).records
            fetched.add(parts)
        # Known ones first: in the order of another member's answer they must not lose their place.
        return FindResult(known + parts, answer.neighbours)

    def _without_banned(self, contacts: Iterable[tuple[DHTID, PeerID]]) -> dict[DHTID, PeerID]:
        return {
            node: peer
            for node, peer in contacts
            if peer not in self.blacklist and peer not in self._busy_peers
        }


class MemberProtocol(DHTProtocol):  # type: ignore[misc]
    """hivemind's DHT protocol with bounded replication; `DhtRpc` has checked all messages.

    hivemind sends each new member, in a single message, all records that it should replicate.
    Identities are free, so here one new member is served at a time, in calls of bounded size. When
    `MAX_WAITING_NEWCOMERS` wait, further ones only get records that are published later.
    """

    replication_lock: asyncio.Lock
    num_waiting_newcomers = 0

    def _validate_dictionary(self, key_bytes: bytes, dictionary: Any) -> bool:
        return True

    async def find(
        self, peer_id: PeerID, key: DHTID, option: FindOption | None = None
    ) -> FindResult:
        """Ask `peer_id` for its records under `key` and its nearest contacts.

        Raises `SwarmError`, `ProtocolError`, and `TimeoutError`.
        """
        options = [] if option is None else [option.pack()]
        request = dht_pb2.FindRequest(keys=[*options, key.to_bytes()], peer=self.node_info)
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
        result = response.results[-1]
        ids = map(DHTID.from_bytes, result.nearest_node_ids)
        neighbours = dict(zip(ids, map(PeerID, result.nearest_peer_ids), strict=True))
        if result.type == dht_pb2.FOUND_REGULAR:
            return FindResult([], neighbours, unpack_summary(result.value))
        return FindResult(unpack_records(result.value) if result.value else [], neighbours)

    def store_locally(self, key: DHTID, subkey: str, value: bytes, expires_at: float) -> bool:
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
        if self.num_waiting_newcomers < MAX_WAITING_NEWCOMERS:
            self.num_waiting_newcomers += 1
            self.p2p.start(self._replicate_to(node_id, peer_id))

    async def _replicate_to(self, node_id: DHTID, peer_id: PeerID) -> None:
        try:
            async with self.replication_lock:
                keys: list[DHTID] = []
                num_bytes = 0
                for key in list(self.storage.data):
                    await asyncio.sleep(0)
                    if self._should_replicate(key, node_id):
                        keys.append(key)
                        num_bytes += self.storage.size_of(key)
                    if num_bytes < _REPLICATION_BATCH_BYTES and len(keys) < _REPLICATION_BATCH_KEYS:
                        continue
                    if not await self._send_records(peer_id, keys):
                        return
                    keys, num_bytes = [], 0
                await self._send_records(peer_id, keys)
        finally:
            self.num_waiting_newcomers -= 1

    async def _send_records(self, peer_id: PeerID, keys: list[DHTID]) -> bool:
        """Send the records of `keys`; False if `peer_id` did not answer."""
        items = [(key, item) for key in keys if (item := self.storage.get(key)) is not None]
        if not items:
            return True
        values = [item.value for _, item in items]
        expirations = [item.expiration_time for _, item in items]
        given = await self.call_store(peer_id, [key for key, _ in items], values, expirations)
        return given is not None

    def _should_replicate(self, key: DHTID, node_id: DHTID) -> bool:
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


FETCH_TIMEOUT_S = 10.0


class DhtStore:
    """Stores and finds sealed statements under keys derived by `Membership.dht_key`."""

    def __init__(self, node: MemberNode, membership: Membership) -> None:
        self._node = node
        self._membership = membership

    async def put(
        self, keys: Sequence[str], sealed: bytes, expires_at: float, subkey: str
    ) -> str | None:
        """Store `sealed` under all of `keys`. Returns None, or one key's failure in a word."""
        value = msgspec.msgpack.encode(sealed)
        failures = await asyncio.gather(
            *(self._node.store(self._dht_id(key), subkey, value, expires_at) for key in keys)
        )
        return next((failure for failure in failures if failure is not None), None)

    def num_records(self, key: str) -> int | None:
        """Records under a key that this node wrote to, as its members report; None if none did."""
        return self._node.num_records.get(self._dht_id(key))

    async def find(self, key: str, *, members: int | None = None) -> Iterable[bytes]:
        """Find the valid statements under `key`; empty if no member answers.

        Returns each signer's newest statement, from all members near `key` that answer within
        `FETCH_TIMEOUT_S`. With `members`, that many are asked at once and only the first answer
        with statements counts: with one, a tenth of the traffic, but the result may be incomplete.

        A member lists what it has kept for longest first. The result has all members' first
        statements first, then all second ones, and so on, so that a member that invents thousands
        gets no more of the first places than any other member.
        """
        newest: dict[str, tuple[float, bytes]] = {}
        answers: list[list[str]] = []

        def take(records: list[StoredRecord]) -> bool:
            answers.append([subkey for subkey, _, _ in records[:MAX_NODES_PER_MODEL]])
            for subkey, value, expires_at in records:
                if subkey not in newest or newest[subkey][0] < expires_at:
                    newest[subkey] = expires_at, value
            return members is not None and bool(newest)

        key_id = self._dht_id(key)
        if not take(self._node.protocol.storage.records_of(key_id)):
            fetched = FetchedParts() if members is None else None
            await self._node.lookup(
                key_id,
                take,
                fetched=fetched,
                parallel=members or _PARALLEL_CALLS,
                timeout_s=FETCH_TIMEOUT_S,
            )
        places = _best_ranks(answers)
        subkeys = sorted(newest, key=lambda subkey: places.get(subkey, len(places)))
        return [msgspec.msgpack.decode(newest[subkey][1], type=bytes) for subkey in subkeys]

    def _dht_id(self, key: str) -> DHTID:
        return DHTID.generate(source=self._membership.dht_key(key))


def _best_ranks(answers: Iterable[Sequence[str]]) -> dict[str, int]:
    places: dict[str, int] = {}
    for names in answers:
        for place, name in enumerate(names):
            if place < places.get(name, place + 1):
                places[name] = place
    return places
