"""DHT members in one process that call each other without sockets, with all bytes counted.

Everything above the socket is the package's own: lookups, messages, checks, storage, directory.
Members know the ones nearest to them and a sample of the rest. All share one validator, since each
would verify the same signatures.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from nesa_node.core.errors import NesaError, PeerUnreachableError, RemoteError
from nesa_node.core.ids import PeerId
from nesa_node.swarm.dht.iterative_lookup import BUCKET_SIZE, Contact
from nesa_node.swarm.dht.member import NUM_REPLICAS, DhtStore, MemberNode, MemberProtocol
from nesa_node.swarm.dht.rpc import DhtRpc
from nesa_node.swarm.dht.storage import BoundedStorage
from nesa_node.swarm.dht.validator import RecordValidator
from nesa_node.swarm.directory import Directory
from nesa_node.swarm.notice_store import NoticeStore
from nesa_node.swarm.p2p.hivemind_imports import DHTID
from nesa_node.swarm.p2p.identity import Identity, Membership

_NEAR = 24
_FAR = 96
Handler = Callable[[PeerId, bytes], Awaitable[bytes]]


class Network:
    """All members' handlers, and the bytes of calls by member and by caller."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.validator = RecordValidator(Membership(None), clock)
        self.handlers: dict[PeerId, dict[str, Handler]] = {}
        self.caller_bytes: Counter[PeerId] = Counter()
        self.caller_calls: Counter[PeerId] = Counter()
        self.served_to: dict[PeerId, Counter[PeerId]] = defaultdict(Counter)
        """Bytes of answers by caller, then by member."""
        self.stores: Counter[PeerId] = Counter()
        self.store_bytes: Counter[PeerId] = Counter()

    def clear(self) -> None:
        self.served_to.clear()
        for counter in (self.caller_bytes, self.caller_calls, self.stores, self.store_bytes):
            counter.clear()


class Unary:
    """Stands for `UnaryCalls` of one member."""

    def __init__(self, network: Network, own: PeerId) -> None:
        self._network = network
        self._own = own

    async def add_handler(self, protocol: str, handler: Handler) -> None:
        self._network.handlers.setdefault(self._own, {})[protocol] = handler

    async def remove_handler(self, protocol: str) -> None:
        self._network.handlers.get(self._own, {}).pop(protocol, None)

    def fail_pending(self) -> None:
        pass

    async def call(self, peer: PeerId, protocol: str, data: bytes) -> bytes:
        network = self._network
        handler = network.handlers.get(peer, {}).get(protocol)
        if handler is None:
            raise PeerUnreachableError(f"{peer} does not answer")
        if protocol.endswith("rpc_store"):
            network.stores[peer] += 1
            network.store_bytes[peer] += len(data)
        network.caller_calls[self._own] += 1
        try:
            answer = await handler(self._own, data)
        except NesaError as error:
            raise RemoteError("unary_failed", str(error)) from error
        network.served_to[self._own][peer] += len(answer)
        network.caller_bytes[self._own] += len(data) + len(answer)
        return answer


def make_identity(rng: random.Random) -> Identity:
    key = Ed25519PrivateKey.from_private_bytes(rng.randbytes(32))
    return Identity(key, Path("memory.key"))


async def open_member(network: Network, peer: PeerId, *, reads: bool = False) -> MemberNode:
    """A member, or with `reads` a client that stores nothing."""
    validator = network.validator
    unary = cast(Any, Unary(network, peer))
    rpc = DhtRpc(peer, unary, validator, Membership(None))
    node = await MemberNode.create(rpc, validator, client_mode=reads)
    node.protocol.storage = BoundedStorage(
        str(peer),
        validator.dropped,
        validator.peer_ages.known_s,
        DHTID.from_bytes(validator.index_id),
        validator.is_shard_record,
    )
    rpc.protocol = node.protocol
    return node


def introduce(nodes: Sequence[MemberNode], members: Sequence[MemberNode], seed: int) -> None:
    """Give each of `nodes` the members nearest to it, and a sample of all, as contacts."""
    rng = random.Random(seed)
    by_id = sorted(members, key=lambda member: int(member.node_id))
    ids = [int(member.node_id) for member in by_id]
    for node in nodes:
        at = bisect_left(ids, int(node.node_id))
        around = by_id[max(0, at - 2 * _NEAR) : at + 2 * _NEAR]
        near = sorted(around, key=lambda each: each.node_id.xor_distance(node.node_id))[:_NEAR]
        for member in (*near, *rng.sample(by_id, min(_FAR, len(by_id)))):
            if member is not node:
                node.protocol.routing_table.add_or_update_node(member.node_id, member.peer_id)


@contextmanager
def known_nearest(members: Sequence[MemberNode]) -> Iterator[None]:
    """Let stores know the members nearest to a key, and what they would say of their number of
    records, without a lookup: thousands of nodes publish in a minute."""
    lookup = MemberNode.lookup
    by_id = {member.node_id: member for member in members}
    nearest: dict[DHTID, list[Contact]] = {}

    async def look_up(self: MemberNode, key: DHTID, *arguments: Any, **options: Any) -> Any:
        counts = options.get("counts")
        if counts is None:
            return await lookup(self, key, *arguments, **options)
        if key not in nearest:
            ids = heapq.nsmallest(BUCKET_SIZE, by_id, key=key.xor_distance)
            nearest[key] = [
                Contact(each, by_id[each].peer_id, each.xor_distance(key)) for each in ids
            ]
        for contact in nearest[key][:NUM_REPLICAS]:
            storage = by_id[contact.node_id].protocol.storage
            counts[contact.node_id] = storage.num_records(DHTID(int(key) ^ 1))
        return [contact for contact in nearest[key] if contact.node_id != self.node_id]

    with patch.object(MemberNode, "lookup", look_up):
        yield


@contextmanager
def direct_stores(members: Sequence[MemberNode]) -> Iterator[None]:
    """Let stores reach members without a message, which takes ten times as long; records are
    checked and bounded as ever."""
    by_peer = {member.peer_id: member for member in members}

    async def call_store(
        self: MemberProtocol, peer: Any, keys: Any, values: Any, expires_at: Any, subkeys: Any
    ) -> list[bool]:
        protocol = by_peer[peer].protocol
        return [
            protocol.store_locally(*each)
            for each in zip(keys, subkeys, values, expires_at, strict=True)
        ]

    with patch.object(MemberProtocol, "call_store", call_store):
        yield


def open_directory(network: Network, identity: Identity, node: MemberNode) -> Directory:
    """A node's directory that stores and finds by `node`."""

    async def nothing() -> None:
        pass

    store = DhtStore(node, Membership(None))
    addresses = (
        f"/ip4/203.0.113.7/tcp/31330/p2p/{identity.peer_id}",
        f"/ip6/2001:db8::7/tcp/31330/p2p/{identity.peer_id}",
    )
    transport = SimpleNamespace(addresses=addresses, refresh_addresses=nothing)
    validator = network.validator
    notices = NoticeStore(store, identity, validator, Membership(None), clock=network.clock)
    rejoiner = SimpleNamespace(is_isolated=False)
    return Directory(
        identity,
        cast(Any, transport),
        validator,
        notices,
        cast(Any, rejoiner),
        clock=network.clock,
    )
