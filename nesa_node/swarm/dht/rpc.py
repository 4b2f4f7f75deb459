"""RPC layer between hivemind's DHT and the network, which validates and bounds all messages.

hivemind's `DHTProtocol` lets a caller claim any DHT id, does not bound batches, and drops a whole
answer for one bad entry. `DhtRpc` implements the part of hivemind's `P2P` that `DHTProtocol` uses:

- a DHT id is the hash of a peer id, in requests, answers and lists of neighbours, so that one peer
  cannot fill routing tables; invented peer ids with matching hashes cost lookups little
  (`iterative_lookup.py`);
- requests are bounded and charged, by bytes and by work, before they are parsed
(`message_codec.py`, `rpc.py`);
- stored and found records are checked one by one, and invalid ones left out;
- in a private swarm both ends prove that they know the swarm key.

Rate limit of DHT calls: one token bucket per peer.

A unit stands for 20 ms of a peer's share of this node's time. A call itself costs units, and so do
its request's bytes before they are parsed, its records before they are checked, and its answer's
bytes before they are packed.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from itertools import islice
from typing import Any, TypeVar

import msgspec

from nesa_node.core.errors import ProtocolError, RecordError, SwarmError
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.core.lru_table import LruTable
from nesa_node.swarm.dht.digests import (
    MAX_UNASKED_BYTES,
    FindMode,
    FindOption,
    KeySummary,
    digest_parts,
    read_option,
    select_parts,
    unpack_summary,
)
from nesa_node.swarm.dht.message_codec import (
    KEY_BYTES,
    MAX_KEYS_PER_FIND,
    MAX_KEYS_PER_STORE,
    MAX_RECORDS_PER_CALL,
    pack_records,
    parse_message,
    unpack_records,
)
from nesa_node.swarm.dht.validator import RecordValidator
from nesa_node.swarm.p2p.control import MAX_UNARY_MESSAGE_BYTES, UnaryCalls
from nesa_node.swarm.p2p.hivemind_imports import DHTID, DHTProtocol, P2PContext, PeerID, dht_pb2
from nesa_node.swarm.p2p.identity import TAG_BYTES, Membership

log = get_logger(__name__)

MAX_KNOWN_PEERS = 4096

_UNITS_PER_S = 50.0
_BURST_UNITS = 500.0
_REQUEST_BYTES_PER_UNIT = 16 * 1024
_RECORDS_PER_UNIT = 16
_ANSWER_BYTES_PER_UNIT = 64 * 1024
_DIGEST_SHARE = 1 / 16
"""What digests of records cost a member, as a share of packing and sending these records."""


class CallBudget:
    """Token buckets by peer; raises `ProtocolError` (busy) when a peer's bucket is exhausted.

    An exhausted bucket is emptied by the call that it refuses. At most `MAX_KNOWN_PEERS` buckets
    are kept, those used last.
    """

    def __init__(self, clock: Callable[[], float], burst_units: float = _BURST_UNITS) -> None:
        self._clock = clock
        self._burst_units = burst_units
        self._balances: LruTable[PeerId, tuple[float, float]] = LruTable(MAX_KNOWN_PEERS)

    def charge_call(self, peer: PeerId, num_bytes: int) -> None:
        self.charge(peer, 1.0 + num_bytes / _REQUEST_BYTES_PER_UNIT)

    def charge_checks(self, peer: PeerId, num_records: int) -> None:
        self.charge(peer, num_records / _RECORDS_PER_UNIT)

    def charge_answer(self, peer: PeerId, num_bytes: int) -> None:
        self.charge(peer, num_bytes / _ANSWER_BYTES_PER_UNIT)

    def charge(self, peer: PeerId, units: float) -> None:
        now = self._clock()
        left, since = self._balances.get(peer, (self._burst_units, now))
        left = min(self._burst_units, left + (now - since) * _UNITS_PER_S)
        self._balances.put(peer, (max(left - units, 0.0), now))
        if left < units:
            raise ProtocolError("busy", f"{peer} calls too often, or asks for too much")


PROTOCOL_PREFIX = "/nesa/1/dht/"
MAX_NEIGHBOURS_PER_RESULT = 20
_MAX_PEER_ID_BYTES = 64
"""libp2p's peer ids have at most 42. To encode one of 200 kB in base 58 takes 40 s."""

_CHECKS_PER_LOOP_TURN = 16
_MAX_FIND_RECORD_BYTES = MAX_UNARY_MESSAGE_BYTES - 64 * 1024
"""Records in one answer, with 64 KiB left for the neighbours in the same message."""
_CLOSE_LOOP_TURNS = 20
_CLOSE_TIMEOUT_S = 5.0

T = TypeVar("T")


class DhtRpc:
    """Stand-in for hivemind's `P2P`. `protocol` is set once the DHT node exists."""

    def __init__(
        self,
        own_peer_id: PeerId,
        unary: UnaryCalls,
        validator: RecordValidator,
        membership: Membership,
    ) -> None:
        self.peer_id = PeerID.from_base58(own_peer_id)
        self.protocol: Any = None
        self._own_peer_id = own_peer_id
        self._unary = unary
        self._validator = validator
        self._membership = membership
        self._budget = CallBudget(time.monotonic)
        self._check_lock = asyncio.Lock()
        self._closed = asyncio.Event()
        self._in_flight = 0
        self._operations: set[asyncio.Task[Any]] = set()

    async def add_protobuf_handler(
        self, name: str, handler: Callable[..., Awaitable[Any]], input_type: Any, **_: Any
    ) -> None:
        protocol = PROTOCOL_PREFIX + name.rpartition(".")[2]

        async def answer(peer: PeerId, data: bytes) -> bytes:
            body = self._authenticate(peer, protocol, data)
            request = parse_message(input_type, body)
            response = await self._answer(protocol, handler, request, peer)
            content = bytes(response.SerializeToString())
            return self._tag("response", self._own_peer_id, peer, protocol, content, body) + content

        await self._unary.add_handler(protocol, answer)

    async def remove_protobuf_handler(self, name: str, **_: Any) -> None:
        await self._unary.remove_handler(PROTOCOL_PREFIX + name.rpartition(".")[2])

    async def call_protobuf_handler(
        self, peer_id: PeerID, name: str, request: Any, output_type: Any
    ) -> Any:
        """Call a peer and check its response.

        Raises `SwarmError` or `ProtocolError`; hivemind treats any failure as no answer.
        """
        if self._closed.is_set():
            raise SwarmError("this node has left the DHT")
        peer = PeerId(peer_id.to_base58())
        protocol = PROTOCOL_PREFIX + name.rpartition(".")[2]
        body = bytes(request.SerializeToString())
        self._in_flight += 1
        try:
            content = await self._unary_call(peer, protocol, body)
            response = parse_message(output_type, content)
            _clear_mismatched_id(response, peer)
            if protocol.endswith("rpc_find"):
                await self._filter_found(request, response)
            return response
        finally:
            self._in_flight -= 1

    def start(self, operation: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `operation` in the background; its failure is logged.

        `operation` must end soon after its calls, each of which has a timeout; `close` fails them.
        """
        task = asyncio.create_task(operation, name="dht-operation")
        self._operations.add(task)
        task.add_done_callback(self._operation_ended)
        return task

    async def close(self) -> None:
        """Fail the calls in flight, and let hivemind's tasks that wait for them end."""
        self._closed.set()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        while (self._in_flight or self._operations) and time.monotonic() < deadline:
            self._unary.fail_pending()
            await asyncio.sleep(0)
        for task in self._operations:
            task.cancel()
        for _ in range(_CLOSE_LOOP_TURNS):
            await asyncio.sleep(0)

    def _operation_ended(self, task: asyncio.Task[Any]) -> None:
        self._operations.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("dht_operation_failed", error=repr(error))

    async def _unary_call(self, peer: PeerId, protocol: str, body: bytes) -> bytes:
        tag = self._tag("request", self._own_peer_id, peer, protocol, body)
        answer = await self._unary.call(peer, protocol, tag + body)
        if not self._membership.is_private:
            return answer
        content = answer[TAG_BYTES:]
        tag = self._tag("response", peer, self._own_peer_id, protocol, content, body)
        if not hmac.compare_digest(answer[:TAG_BYTES], tag):
            raise ProtocolError("not_a_member", f"{peer} is not of this private swarm")
        return content

    def _authenticate(self, peer: PeerId, protocol: str, data: bytes) -> bytes:
        self._budget.charge_call(peer, len(data))
        if not self._membership.is_private:
            return data
        body = data[TAG_BYTES:]
        tag = self._tag("request", peer, self._own_peer_id, protocol, body)
        if not hmac.compare_digest(data[:TAG_BYTES], tag):
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
        _clear_mismatched_id(request, peer)
        if self.protocol is None:
            raise SwarmError("this node is still starting")
        if len(self.protocol.routing_table.uid_to_peer_id) >= MAX_KNOWN_PEERS:
            request.ClearField("peer")
        if protocol.endswith("rpc_store"):
            return await self._store(request, peer)
        if protocol.endswith("rpc_find"):
            return await self._find(request, peer)
        # Asked to validate, hivemind would ping the caller and wait before it answers.
        request.validate = False
        context = P2PContext(protocol, self.peer_id, PeerID.from_base58(peer))
        return await handler(request, context)

    async def _find(self, request: Any, peer: PeerId) -> Any:
        """Answer a find like hivemind, but charge for the answer before it is packed."""
        keys = list(request.keys)
        if len(keys) > MAX_KEYS_PER_FIND or len(set(keys)) < len(keys):
            raise ProtocolError("too_large", f"{len(keys)} keys in one call, or one of them twice")
        if any(len(key) != KEY_BYTES for key in keys):
            raise ProtocolError("malformed", f"a key of the DHT has {KEY_BYTES} bytes")
        response = dht_pb2.FindResponse(peer=self.protocol.node_info)
        option = read_option(keys[0]) if keys else None
        if option is not None:
            del keys[0]
            response.results.add(type=dht_pb2.NOT_FOUND)
        left = _MAX_FIND_RECORD_BYTES
        for key in map(DHTID.from_bytes, keys):
            result = response.results.add(type=dht_pb2.NOT_FOUND)
            if option is None:
                size = self.protocol.storage.size_of(key)
                if 0 < size <= left:
                    left -= size
                    self._budget.charge_answer(peer, size)
                    _set_result(result, self.protocol.storage.records_of(key))
            else:
                left -= self._answer_option(option, key, result, peer, left)
            await asyncio.sleep(0)
            nearest = self.protocol.routing_table.get_nearest_neighbors(
                key, k=MAX_NEIGHBOURS_PER_RESULT, exclude=DHTID.from_bytes(request.peer.node_id)
            )
            for node_id, peer_id in nearest:
                result.nearest_node_ids.append(node_id.to_bytes())
                result.nearest_peer_ids.append(peer_id.to_bytes())
        await self._update_routing_table(request, peer)
        return response

    def _answer_option(
        self, option: FindOption, key: DHTID, result: Any, peer: PeerId, left: int
    ) -> int:
        """Put a summary or parts of the records of `key` into `result`, or all if they are few;
        returns the bytes of records, at most `left`."""
        storage = self.protocol.storage
        if option.mode is FindMode.COUNT:
            _set_summary(result, KeySummary(storage.num_records(DHTID(int(key) ^ 1))))
            return 0
        records = storage.records_of(key)
        if option.mode is FindMode.SUMMARY and storage.size_of(key) > MAX_UNASKED_BYTES:
            self._budget.charge_answer(peer, int(storage.size_of(key) * _DIGEST_SHARE))
            _set_summary(result, KeySummary(len(records), digest_parts(records)))
            return 0
        if option.mode is FindMode.PARTS:
            self._budget.charge_answer(peer, int(storage.size_of(key) * _DIGEST_SHARE))
            records = select_parts(records, option.parts)
        size = sum(len(value) for _, value, _ in records)
        if size > left:
            return 0
        self._budget.charge_answer(peer, size)
        _set_result(result, records)
        return size

    async def _store(self, request: Any, peer: PeerId) -> Any:
        """Answer a store like hivemind, but check each record separately and cache none."""
        response = dht_pb2.StoreResponse(peer=self.protocol.node_info)
        if len(request.keys) > MAX_KEYS_PER_STORE:
            raise ProtocolError("too_large", f"{len(request.keys)} keys in one call")
        fields = (request.keys, request.subkeys, request.values, request.expiration_time)
        if len(set(map(len, fields))) > 1:
            raise ProtocolError("malformed", "not as many values as keys")
        for key, subkey, value, expiration in zip(*fields, strict=True):
            if subkey == DHTProtocol.IS_DICTIONARY:
                items = _with_packed_subkeys(value)
            else:
                items = [(subkey, value, expiration)]
            self._budget.charge_checks(peer, len(items))
            response.store_ok.append(await self._store_valid(key, items) == len(items))
        await self._update_routing_table(request, peer)
        return response

    async def _store_valid(self, key: bytes, items: list[tuple[bytes, bytes, float]]) -> int:
        """Returns how many of `items` were stored."""
        kept = 0
        for number, accepted in enumerate(await self._check_all(key, items), 1):
            if number % _CHECKS_PER_LOOP_TURN == 0:
                await asyncio.sleep(0)
            kept += self.protocol.storage.store_subkey(DHTID.from_bytes(key), *accepted)
        return kept

    async def _update_routing_table(self, request: Any, peer: PeerId) -> None:
        """Add the sender of a request that contains its DHT id to the routing table."""
        if request.peer.node_id:
            node_id = DHTID.from_bytes(request.peer.node_id)
            await self.protocol.update_routing_table(node_id, PeerID.from_base58(peer))

    async def _filter_found(self, request: Any, response: Any) -> None:
        if len(response.results) != len(request.keys):
            raise ProtocolError("bad_answer", "results do not match the keys asked for")
        num_records = 0
        option = read_option(request.keys[0]) if request.keys else None
        for key, result in zip(request.keys, response.results, strict=True):
            _drop_mismatched_neighbours(result)
            if option is not None and result.type == dht_pb2.FOUND_REGULAR:
                unpack_summary(result.value)
                continue
            items = []
            if result.type == dht_pb2.FOUND_DICTIONARY:
                items = _with_packed_subkeys(result.value)
                num_records += len(items)
                if num_records > MAX_RECORDS_PER_CALL:
                    raise ProtocolError("too_large", f"{num_records} records in one answer")
            _set_result(result, await self._check_all(key, items))

    async def _check_all(
        self, key: bytes, items: list[tuple[bytes, bytes, float]]
    ) -> list[tuple[str, bytes, float]]:
        """The valid items, with subkeys decoded; items after a forged signature are dropped."""
        valid: list[tuple[str, bytes, float]] = []
        pending = iter(items)
        while batch := list(islice(pending, _CHECKS_PER_LOOP_TURN)):
            # One batch per turn of the event loop, however many calls wait.
            async with self._check_lock:
                for subkey, value, expiration in batch:
                    try:
                        record = self._validator.check(key, subkey, value, expiration)
                    except RecordError as error:
                        self._validator.dropped[error.reason] += 1
                        if error.reason in ("signature", "oversized"):
                            return valid
                        continue
                    valid.append((record.peer_id, value, expiration))
                await asyncio.sleep(0)
        return valid


def node_id_of(peer_id: bytes) -> bytes:
    return hashlib.sha1(b"nesa/1/dht-node/" + peer_id).digest()


def _clear_mismatched_id(message: Any, peer: PeerId) -> None:
    """Remove the sender's DHT id from its message unless it belongs to its peer id."""
    claimed = message.peer.node_id
    if claimed and claimed != node_id_of(PeerID.from_base58(peer).to_bytes()):
        message.ClearField("peer")


def _drop_mismatched_neighbours(result: Any) -> None:
    pairs = list(zip(result.nearest_node_ids, result.nearest_peer_ids, strict=False))
    kept = [
        (node_id, peer_id)
        for node_id, peer_id in pairs[:MAX_NEIGHBOURS_PER_RESULT]
        if len(peer_id) <= _MAX_PEER_ID_BYTES and node_id == node_id_of(peer_id)
    ]
    del result.nearest_node_ids[:]
    del result.nearest_peer_ids[:]
    result.nearest_node_ids.extend(node_id for node_id, _ in kept)
    result.nearest_peer_ids.extend(peer_id for _, peer_id in kept)


def _set_summary(result: Any, summary: KeySummary) -> None:
    result.type = dht_pb2.FOUND_REGULAR
    result.value = summary.pack()


def _set_result(result: Any, records: Sequence[tuple[str, bytes, float]]) -> None:
    result.type = dht_pb2.FOUND_DICTIONARY if records else dht_pb2.NOT_FOUND
    result.value = pack_records(records) if records else b""
    result.expiration_time = max((expiration for _, _, expiration in records), default=0.0)


def _with_packed_subkeys(packed: bytes) -> list[tuple[bytes, bytes, float]]:
    """Unpack a dictionary, with subkeys packed as in a store of one record."""
    return [
        (msgspec.msgpack.encode(subkey), value, expiration)
        for subkey, value, expiration in unpack_records(packed)
    ]
