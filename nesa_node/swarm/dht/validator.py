"""Validation of all statements that are stored at this DHT member or returned by a lookup.

Only a sealed record or notice is valid: under the subkey of its signer, under the key of its own
model (or its one shard, or the index of all nodes), with the signed expiry, and not older than the
newest one seen. A peer can thus neither write for another peer, nor replay what that peer has
replaced or withdrawn.

How long this node has known each peer: a measure of trust that a peer cannot forge.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from nesa_node.core.errors import RecordError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.lru_table import LruTable
from nesa_node.swarm.dht.pool_notices import NOTICE_KINDS
from nesa_node.swarm.dht.records import ALL_NODES_KEY, NodeRecord, model_key
from nesa_node.swarm.dht.sealing import (
    RECORD_KIND,
    Notice,
    Statement,
    check_age,
    notice_key,
    open_statement,
    read_kind,
)
from nesa_node.swarm.p2p.hivemind_imports import DHTID, DHTProtocol, DHTRecord, RecordValidatorBase
from nesa_node.swarm.p2p.identity import Membership

_MAX_KNOWN_PEERS = 4096
_FORGET_AFTER_S = 600.0
_SWEEP_INTERVAL_S = 1.0
"""Minimum time between sweeps for expired peers in a full table."""


@dataclass(slots=True)
class _Presence:
    since: float
    until: float


class PeerAges:
    """Since when each peer's records have been seen, without a gap of `_FORGET_AFTER_S`.

    A full table ignores new peers: identities are free, and must not evict peers known before.
    `clock` gives seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float], max_peers: int = _MAX_KNOWN_PEERS) -> None:
        self._clock = clock
        self._max_peers = max_peers
        self._known: dict[PeerId, _Presence] = {}
        self._swept_at = -math.inf

    def record_seen(self, peer: PeerId, until: float) -> None:
        """Note a valid record of `peer` that expires at `until`."""
        now = self._clock()
        known = self._known.get(peer)
        if known is not None and known.until + _FORGET_AFTER_S > now:
            known.until = max(known.until, until)
            return
        if known is None and len(self._known) >= self._max_peers:
            self._sweep(now)
            if len(self._known) >= self._max_peers:
                return
        self._known[peer] = _Presence(now, until)

    def known_s(self, peer: PeerId) -> float:
        """Seconds since `peer` is known; 0 if unknown, or without records for ten minutes."""
        known = self._known.get(peer)
        now = self._clock()
        if known is None or known.until + _FORGET_AFTER_S <= now:
            return 0.0
        return max(now - known.since, 0.0)

    def _sweep(self, now: float) -> None:
        if abs(now - self._swept_at) < _SWEEP_INTERVAL_S:
            return
        self._swept_at = now
        self._known = {peer: known for peer, known in self._known.items() if known.until > now}


STATEMENTS_PER_LOOP_TURN = 16
"""Statements read per turn of the event loop. Signatures are verified again when there are more
statements than the validator caches."""
_MAX_REMEMBERED_RECORDS = 16_384
_MAX_REMEMBERED_NOTICES = 4096
_MAX_OPENED_RECORDS = 4096
_WRAPPING_BYTES = 8
_KINDS: dict[str, type[NodeRecord | Notice]] = {RECORD_KIND: NodeRecord, **NOTICE_KINDS}
_MAX_STATEMENT_BYTES = max(kind.bounds.max_bytes for kind in _KINDS.values())

_Kind = TypeVar("_Kind", bound=Statement)


class RecordValidator(RecordValidatorBase):  # type: ignore[misc]
    """Validator of DHT statements, with a cache of verified ones.

    `clock` gives seconds since the epoch. `dropped` counts refused statements by reason. Each kind
    has a separate cache, so that a flood of one kind evicts no other kind.
    """

    def __init__(self, membership: Membership, clock: Callable[[], float]) -> None:
        self.dropped: Counter[str] = Counter()
        self.peer_ages = PeerAges(clock)
        self._membership = membership
        self._clock = clock
        self.index_id = dht_id(membership.dht_key(ALL_NODES_KEY))
        # Bounded tightly: a parsed placement takes a hundred times its packed size.
        self._memories = {
            name: _StatementMemory(_MAX_REMEMBERED_NOTICES, 2 * kind.bounds.max_per_key)
            for name, kind in NOTICE_KINDS.items()
        }
        self._memories[RECORD_KIND] = _StatementMemory(_MAX_REMEMBERED_RECORDS, _MAX_OPENED_RECORDS)

    def validate(self, record: DHTRecord) -> bool:
        try:
            self.check(record.key, record.subkey, record.value, record.expiration_time)
        except RecordError as error:
            self.dropped[error.reason] += 1
            return False
        return True

    def check(
        self, key: bytes, subkey: bytes, value: bytes, expiration: float
    ) -> NodeRecord | Notice:
        """Validate and parse a statement in hivemind's four fields. Raises `RecordError`.

        Reasons beside those of `open_statement`: unwanted (no subkey), subkey (not the signer's),
        key, expiry, stale, and too_soon (for kinds of notices with a minimum interval).
        """
        if subkey in DHTProtocol.RESERVED_SUBKEYS:
            raise RecordError("unwanted", "only records under a peer's own subkey are kept")
        sealed = _unwrap(value)
        statement = self.open(_KINDS.get(read_kind(sealed), NodeRecord), sealed)
        if subkey != msgspec.msgpack.encode(statement.peer_id):
            raise RecordError("subkey", f"{statement.peer_id} may not write another peer's subkey")
        if key not in self._keys(statement):
            raise RecordError("key", f"what {statement.peer_id} says belongs elsewhere")
        if expiration != statement.expires_at:
            raise RecordError("expiry", "the expiry is not the signed one")
        self._memory_of(type(statement)).remember(statement)
        if isinstance(statement, NodeRecord):
            self.peer_ages.record_seen(statement.signer, statement.expires_at)
        return statement

    def open(self, kind: type[_Kind], sealed: bytes) -> _Kind:
        """Verify and parse a statement that is valid now, with the result cached for the same
        bytes. Raises `RecordError`."""
        statement = self._memory_of(kind).open(kind, sealed, self._membership)
        check_age(statement, self._clock())
        return statement

    def is_shard_record(self, key: bytes, value: bytes) -> bool:
        """Whether `value`, a stored record, lies under a shard's `key`."""
        try:
            record = self._memory_of(NodeRecord).open(NodeRecord, _unwrap(value), self._membership)
        except RecordError:
            return False
        return record.shard is not None and key == self._keys(record)[-1]

    async def open_all(
        self, kind: type[_Kind], sealed_statements: Iterable[bytes]
    ) -> AsyncIterator[tuple[_Kind, bytes]]:
        """Open `sealed_statements` in turns of the event loop; refused ones are only counted.

        Yields each statement with its sealed bytes.
        """
        for number, sealed in enumerate(sealed_statements, 1):
            if number % STATEMENTS_PER_LOOP_TURN == 0:
                await asyncio.sleep(0)
            try:
                statement = self.open(kind, sealed)
            except RecordError as error:
                self.dropped[error.reason] += 1
                continue
            yield statement, sealed

    def newest_seq(self, peer: PeerId) -> int:
        """Sequence number of the newest record of `peer` seen so far; -1 if none is remembered."""
        latest = self._memory_of(NodeRecord).latest.get(("", peer))
        return -1 if latest is None else latest[0][1]

    def newest_notice(
        self, kind: type[Notice], model_id: ModelId, peer: PeerId
    ) -> tuple[tuple[int, int], float] | None:
        """`(epoch, seq)` and expiry of the newest such notice of `peer` seen so far."""
        latest = self._memory_of(kind).latest.get((model_id, peer))
        return None if latest is None else (latest[0], latest[2])

    def _memory_of(self, kind: type[Statement]) -> _StatementMemory:
        return self._memories[kind.bounds.name]

    def _keys(self, statement: NodeRecord | Notice) -> tuple[bytes, ...]:
        model = ModelId(statement.model_id)
        if isinstance(statement, Notice):
            return (dht_id(self._membership.dht_key(notice_key(type(statement), model))),)
        shard = statement.shard
        keys = [model_key(model)] if shard is None else [model_key(model), shard.key(model)]
        return self.index_id, *(dht_id(self._membership.dht_key(key)) for key in keys)


class _StatementMemory:
    """Verified statements of one kind, and the order, issue time and expiry of the newest ones."""

    def __init__(self, max_remembered: int, max_opened: int) -> None:
        self.latest = LruTable[tuple[str, str], tuple[tuple[int, int], float, float]](
            max_remembered
        )
        self._opened = LruTable[bytes, Statement | tuple[str, str]](max_opened)

    def open(self, kind: type[_Kind], sealed: bytes, membership: Membership) -> _Kind:
        """Verify and parse a statement of any age, once."""
        digest = hashlib.sha256(sealed).digest()
        result = self._opened.get(digest)
        if result is None:
            try:
                result = open_statement(kind, sealed, membership)
            except RecordError as error:
                # The error itself would keep its traceback's frames alive.
                result = error.reason, str(error)
            self._opened.put(digest, result)
        if isinstance(result, tuple):
            raise RecordError(*result)
        assert isinstance(result, kind)
        return result

    def remember(self, statement: Statement) -> None:
        """Raise `RecordError` if a newer statement is known, or the last one is too recent."""
        slot, bounds, signer = statement.slot, statement.bounds, statement.peer_id
        order, issued_at, _ = self.latest.get(slot, (statement.order, 0.0, 0.0))
        if statement.order < order:
            raise RecordError("stale", f"a newer {bounds.name} of {signer} is known")
        if statement.order > order and statement.issued_at < issued_at + bounds.min_interval_s:
            raise RecordError("too_soon", f"{signer} makes too many {bounds.name}s")
        self.latest.put(slot, (statement.order, statement.issued_at, statement.expires_at))


def dht_id(key: str) -> bytes:
    """20-byte id of `key` in hivemind's DHT."""
    return bytes(DHTID.generate(source=key).to_bytes())


def _unwrap(value: bytes) -> bytes:
    """Unpack a stored value, which hivemind wraps in msgpack, here of bytes."""
    if len(value) > _MAX_STATEMENT_BYTES + _WRAPPING_BYTES:
        raise RecordError("oversized", f"a record of {len(value)} bytes is too large")
    try:
        return msgspec.msgpack.decode(value, type=bytes)
    except (msgspec.DecodeError, ValueError) as error:
        raise RecordError("malformed", "not a sealed record") from error
