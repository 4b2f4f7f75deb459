"""The door between hivemind's DHT and the network.

hivemind's `DHTNode` believes a lot: that a caller may claim any DHT id, that batches are small,
that one bad entry is reason to drop a whole answer. Everything it sends or receives passes through
`DhtPeer`, which offers it the part of hivemind's `P2P` that it uses:

- a DHT id belongs to one peer id (it is its hash), in requests, answers and lists of neighbours, so
  that no peer can fill routing tables or surround a key with invented nodes;
- requests are counted per peer, and their sizes bounded;
- stored and found records are checked one by one, and the bad ones left out;
- in a private swarm both ends prove that they know the swarm key.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from nesa_node.core.errors import ProtocolError, RecordError, SwarmError
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.swarm.control import UnaryCalls
from nesa_node.swarm.hive import (
    DHTID,
    DHTProtocol,
    DictionaryDHTValue,
    MSGPackSerializer,
    P2PContext,
    PeerID,
    dht_pb2,
)
from nesa_node.swarm.private import TAG_BYTES, Membership
from nesa_node.swarm.validator import RecordValidator

log = get_logger(__name__)

PROTOCOL_PREFIX = "/nesa/1/dht/"
MAX_KEYS_PER_FIND = 16
MAX_KEYS_PER_STORE = 512
MAX_RECORDS_PER_CALL = 4096
MAX_NEIGHBOURS = 20
MAX_KNOWN_PEERS = 4096

_CALLS_PER_S = 50.0
_BURST = 500.0
_RECORDS_PER_CALL_UNIT = 16
_CHECKS_PER_TURN = 16
_UNWINDING_TURNS = 20
_CLOSE_TIMEOUT_S = 5.0

T = TypeVar("T")


class DhtPeer:
    """What `DHTNode` takes for its `P2P`. `protocol` is set once the node exists."""

    def __init__(
        self, own: PeerId, unary: UnaryCalls, validator: RecordValidator, membership: Membership
    ) -> None:
        self.peer_id = PeerID.from_base58(own)
        self.protocol: Any = None
        self._own = own
        self._unary = unary
        self._validator = validator
        self._membership = membership
        self._budget = _CallBudget(time.monotonic)
        self._closed = asyncio.Event()
        self._in_flight = 0
        self._operations: set[asyncio.Task[Any]] = set()

    async def add_protobuf_handler(
        self, name: str, handler: Callable[..., Awaitable[Any]], input_type: Any, **_: Any
    ) -> None:
        protocol = PROTOCOL_PREFIX + name.rpartition(".")[2]

        async def answer(peer: PeerId, data: bytes) -> bytes:
            body = self._accept(peer, protocol, data)
            request = input_type.FromString(body)
            response = await self._answer(protocol, handler, request, peer)
            content = bytes(response.SerializeToString())
            return self._tag("response", self._own, peer, protocol, content, body) + content

        await self._unary.add_handler(protocol, answer)

    async def remove_protobuf_handler(self, name: str, **_: Any) -> None:
        await self._unary.remove_handler(PROTOCOL_PREFIX + name.rpartition(".")[2])

    async def call_protobuf_handler(
        self, peer_id: PeerID, name: str, request: Any, output_type: Any
    ) -> Any:
        """Raises `SwarmError` or `ProtocolError`; hivemind takes any failure as no answer."""
        if self._closed.is_set():
            raise SwarmError("this node has left the DHT")
        peer = PeerId(peer_id.to_base58())
        protocol = PROTOCOL_PREFIX + name.rpartition(".")[2]
        body = bytes(request.SerializeToString())
        self._in_flight += 1
        try:
            content = await self._unary_call(peer, protocol, body)
            response = output_type.FromString(content)
            _forget_foreign_id(response, peer)
            if protocol.endswith("rpc_find"):
                await self._filter_found(request, response)
            return response
        finally:
            self._in_flight -= 1

    async def run(self, operation: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Await a `DHTNode` operation. Raises `TimeoutError`.

        hivemind leaves tasks behind that never end when an operation is cancelled, so that it goes
        on in the background if the caller gives up. It is soon over: each of its calls has a
        timeout, and `close` fails them all.
        """
        task = asyncio.create_task(operation, name="dht-operation")
        self._operations.add(task)
        task.add_done_callback(self._operation_ended)
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(task)

    async def close(self) -> None:
        """End the calls in flight and let hivemind's own tasks, which wait for them, unwind."""
        self._closed.set()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        while (self._in_flight or self._operations) and time.monotonic() < deadline:
            self._unary.fail_pending()
            await asyncio.sleep(0)
        for task in self._operations:
            task.cancel()
        for _ in range(_UNWINDING_TURNS):
            await asyncio.sleep(0)

    def _operation_ended(self, task: asyncio.Task[Any]) -> None:
        self._operations.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("dht_operation_failed", error=repr(error))

    async def _unary_call(self, peer: PeerId, protocol: str, body: bytes) -> bytes:
        tag = self._tag("request", self._own, peer, protocol, body)
        answer = await self._unary.call(peer, protocol, tag + body)
        if not self._membership.is_private:
            return answer
        content = answer[TAG_BYTES:]
        if answer[:TAG_BYTES] != self._tag("response", peer, self._own, protocol, content, body):
            raise ProtocolError("not_a_member", f"{peer} is not of this private swarm")
        return content

    def _accept(self, peer: PeerId, protocol: str, data: bytes) -> bytes:
        self._budget.spend(peer, 1.0)
        if not self._membership.is_private:
            return data
        body = data[TAG_BYTES:]
        if data[:TAG_BYTES] != self._tag("request", peer, self._own, protocol, body):
            self._validator.dropped["foreign"] += 1
            raise ProtocolError("not_a_member", f"{peer} is not of this private swarm")
        return body

    def _tag(self, kind: str, sender: PeerId, receiver: PeerId, *parts: str | bytes) -> bytes:
        encoded = [part.encode() if isinstance(part, str) else part for part in parts]
        return self._membership.tag(
            b"dht-" + kind.encode(), sender.encode(), receiver.encode(), *encoded
        )

    async def _answer(
        self, protocol: str, handler: Callable[..., Awaitable[Any]], request: Any, peer: PeerId
    ) -> Any:
        _forget_foreign_id(request, peer)
        if self.protocol is None:
            raise SwarmError("this node is still starting")
        if len(self.protocol.routing_table.uid_to_peer_id) >= MAX_KNOWN_PEERS:
            request.ClearField("peer")
        if protocol.endswith("rpc_store"):
            return await self._store(request, peer)
        if protocol.endswith("rpc_find") and len(request.keys) > MAX_KEYS_PER_FIND:
            raise ProtocolError("too_large", f"{len(request.keys)} keys in one call")
        context = P2PContext(protocol, self.peer_id, PeerID.from_base58(peer))
        return await handler(request, context)

    async def _store(self, request: Any, peer: PeerId) -> Any:
        """Instead of hivemind's own: each record on its own, and none kept as a cache entry."""
        response = dht_pb2.StoreResponse(peer=self.protocol.node_info)
        if len(request.keys) > MAX_KEYS_PER_STORE:
            raise ProtocolError("too_large", f"{len(request.keys)} keys in one call")
        fields = (request.keys, request.subkeys, request.values, request.expiration_time)
        for key, subkey, value, expiration in zip(*fields, strict=True):
            if subkey == DHTProtocol.IS_DICTIONARY:
                items = list(_unpack(value))
            else:
                items = [(subkey, value, expiration)]
            self._budget.spend(peer, len(items) / _RECORDS_PER_CALL_UNIT)
            accepted = await self._check_all(key, items)
            stored = [
                self.protocol.storage.store_subkey(DHTID.from_bytes(key), *item)
                for item in accepted
            ]
            response.store_ok.append(len(stored) == len(items) and all(stored))
        if request.peer.node_id:
            node_id = DHTID.from_bytes(request.peer.node_id)
            await self.protocol.update_routing_table(node_id, PeerID.from_base58(peer))
        return response

    async def _filter_found(self, request: Any, response: Any) -> None:
        if len(response.results) != len(request.keys):
            raise ProtocolError("bad_answer", "results do not match the keys asked for")
        for key, result in zip(request.keys, response.results, strict=True):
            _forget_invented_neighbours(result)
            if result.type == dht_pb2.FOUND_DICTIONARY:
                items = await self._check_all(key, list(_unpack(result.value)))
                found = DictionaryDHTValue()
                for subkey, value, expiration in items:
                    found.store(subkey, value, expiration)
                result.value = MSGPackSerializer.dumps(found)
                result.expiration_time = max(found.latest_expiration_time, 0.0)
            if result.type == dht_pb2.FOUND_REGULAR or result.expiration_time == 0.0:
                result.type = dht_pb2.NOT_FOUND

    async def _check_all(
        self, key: bytes, items: list[tuple[bytes, bytes, float]]
    ) -> list[tuple[str, bytes, float]]:
        """The good ones, with subkeys decoded. One forged signature discredits the rest."""
        good: list[tuple[str, bytes, float]] = []
        for index, (subkey, value, expiration) in enumerate(items):
            if index % _CHECKS_PER_TURN == _CHECKS_PER_TURN - 1:
                await asyncio.sleep(0)
            try:
                record = self._validator.check(key, subkey, value, expiration)
            except RecordError as error:
                self._validator.dropped[error.reason] += 1
                if error.reason in ("signature", "oversized"):
                    return good
                continue
            good.append((record.peer_id, value, expiration))
        return good


class _CallBudget:
    """How many calls a peer may make: a bucket per peer that fills with time."""

    def __init__(self, clock: Callable[[], float], burst: float = _BURST) -> None:
        self._clock = clock
        self._burst = burst
        self._left: OrderedDict[PeerId, tuple[float, float]] = OrderedDict()

    def spend(self, peer: PeerId, units: float) -> None:
        now = self._clock()
        left, since = self._left.get(peer, (self._burst, now))
        left = min(self._burst, left + (now - since) * _CALLS_PER_S)
        self._left[peer] = (max(left - units, 0.0), now)
        self._left.move_to_end(peer)
        if len(self._left) > MAX_KNOWN_PEERS:
            self._left.popitem(last=False)
        if left < units:
            raise ProtocolError("busy", f"{peer} calls too often")


def node_id_of(peer_id: bytes) -> bytes:
    """The DHT id that goes with a binary peer id."""
    return hashlib.sha1(b"nesa/1/dht-node/" + peer_id).digest()


def _forget_foreign_id(message: Any, peer: PeerId) -> None:
    """Take the sender's DHT id out of its message if it is not the one of its peer id."""
    claimed = message.peer.node_id
    if claimed and claimed != node_id_of(PeerID.from_base58(peer).to_bytes()):
        message.ClearField("peer")


def _forget_invented_neighbours(result: Any) -> None:
    pairs = list(zip(result.nearest_node_ids, result.nearest_peer_ids, strict=False))
    kept = [pair for pair in pairs[:MAX_NEIGHBOURS] if pair[0] == node_id_of(pair[1])]
    del result.nearest_node_ids[:]
    del result.nearest_peer_ids[:]
    result.nearest_node_ids.extend(node_id for node_id, _ in kept)
    result.nearest_peer_ids.extend(peer_id for _, peer_id in kept)


def _unpack(packed: bytes) -> Iterable[tuple[bytes, bytes, float]]:
    """The items of a packed dictionary with encoded subkeys. Raises `ProtocolError`."""
    try:
        records = MSGPackSerializer.loads(packed)
        items = [
            (MSGPackSerializer.dumps(subkey), item.value, item.expiration_time)
            for subkey, item in records.data.items()
        ]
    except Exception as error:  # a hostile dictionary fails in many ways
        raise ProtocolError("bad_answer", "not a dictionary of records") from error
    if len(items) > MAX_RECORDS_PER_CALL or not all(
        isinstance(value, bytes) and isinstance(expiration, float) for _, value, expiration in items
    ):
        raise ProtocolError("bad_answer", "not a dictionary of records")
    return items
