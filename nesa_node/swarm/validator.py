"""Validation of all statements that are stored at this DHT member or returned by a lookup.

Only a sealed record or notice is valid: under the subkey of its signer, under the key of its own
model (or the index of all nodes), with the signed expiry, and not older than the newest one seen. A
peer can thus neither write for another peer, nor replay what that peer has replaced or withdrawn.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import msgspec

from nesa_node.core.errors import RecordError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.swarm.hive import DHTID, DHTProtocol, DHTRecord, RecordValidatorBase
from nesa_node.swarm.notices import (
    KINDS,
    Notice,
    check_notice_age,
    notice_key,
    open_notice,
)
from nesa_node.swarm.private import Membership
from nesa_node.swarm.records import (
    MAX_RECORD_BYTES,
    NODES_KEY,
    NodeRecord,
    check_age,
    model_key,
    unseal_ageless,
)
from nesa_node.swarm.sealing import kind_of
from nesa_node.swarm.standing import Acquaintance

_MAX_REMEMBERED = 16_384
_MAX_REMEMBERED_NOTICES = 4096
_MAX_OPENED = 4096
_WRAPPING_BYTES = 8
_MAX_BYTES = max(MAX_RECORD_BYTES, *(kind.bounds.kind.max_bytes for kind in KINDS.values()))

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class RecordValidator(RecordValidatorBase):  # type: ignore[misc]
    """Validator of DHT statements, with a cache of verified ones.

    `clock` gives seconds since the epoch. `dropped` counts refused statements by reason. Each kind
    has a separate cache, so that a flood of one kind evicts no other kind.
    """

    def __init__(self, membership: Membership, clock: Callable[[], float]) -> None:
        self.dropped: Counter[str] = Counter()
        self.acquaintance = Acquaintance(clock)
        self._membership = membership
        self._clock = clock
        self.index_id = dht_id(membership.dht_key(NODES_KEY))
        self._newest: _Latest[PeerId, int] = _Latest(_MAX_REMEMBERED)
        self._opened: _Latest[bytes, NodeRecord | tuple[str, str]] = _Latest(_MAX_OPENED)
        self._notices = {name: _NoticeMemory(kind) for name, kind in KINDS.items()}

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

        Reasons beside those of `unseal`: unwanted (no subkey), subkey (not the signer's), key,
        expiry, stale, and too_soon (for kinds of notices with a minimum interval).
        """
        if subkey in DHTProtocol.RESERVED_SUBKEYS:
            raise RecordError("unwanted", "only records under a peer's own subkey are kept")
        sealed = _unwrap(value)
        kind = KINDS.get(kind_of(sealed))
        statement = self.open(sealed) if kind is None else self.open_notice(kind, sealed)
        if subkey != msgspec.msgpack.encode(statement.peer_id):
            raise RecordError("subkey", f"{statement.peer_id} may not write another peer's subkey")
        if key not in self._keys(statement):
            raise RecordError("key", f"what {statement.peer_id} says belongs elsewhere")
        if expiration != statement.expires_at:
            raise RecordError("expiry", "the expiry is not the signed one")
        if isinstance(statement, Notice):
            self._notices[statement.bounds.kind.name].remember(statement)
        else:
            self._remember(statement)
        return statement

    def open(self, sealed: bytes) -> NodeRecord:
        """Verify and parse a record as `unseal`, with the result cached for the same bytes."""

        def unseal() -> NodeRecord:
            return unseal_ageless(sealed, membership=self._membership)

        record = _once(self._opened, sealed, unseal)
        check_age(record, self._clock())
        return record

    def open_notice(self, kind: type[Notice], sealed: bytes) -> Notice:
        """Verify and parse a notice, with the result cached. Raises `RecordError`."""
        opened = self._notices[kind.bounds.kind.name].opened
        notice = _once(opened, sealed, lambda: open_notice(kind, sealed, self._membership))
        check_notice_age(notice, self._clock())
        return notice

    def newest_seq(self, peer: PeerId) -> int:
        """Highest sequence number of a record of `peer` seen so far; -1 if none is remembered."""
        return self._newest.get(peer, -1)

    def newest_notice(
        self, kind: type[Notice], model_id: ModelId, peer: PeerId
    ) -> tuple[tuple[int, int], float] | None:
        """`(epoch, seq)` and expiry of the newest such notice of `peer` seen so far."""
        latest = self._notices[kind.bounds.kind.name].latest.get((model_id, peer))
        return None if latest is None else (latest[0], latest[2])

    def _keys(self, statement: NodeRecord | Notice) -> tuple[bytes, ...]:
        model = ModelId(statement.model_id)
        if isinstance(statement, Notice):
            return (dht_id(self._membership.dht_key(notice_key(type(statement), model))),)
        return self.index_id, dht_id(self._membership.dht_key(model_key(model)))

    def _remember(self, record: NodeRecord) -> None:
        peer = PeerId(record.peer_id)
        if record.seq < self.newest_seq(peer):
            raise RecordError("stale", f"a newer record of {peer} is known")
        self._newest.put(peer, record.seq)
        self.acquaintance.seen(peer, record.expires_at)


class _Latest(OrderedDict[_Key, _Value], Generic[_Key, _Value]):
    """Mapping that keeps the `limit` entries put last."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def put(self, key: _Key, value: _Value) -> None:
        self[key] = value
        self.move_to_end(key)
        if len(self) > self._limit:
            self.popitem(last=False)


class _NoticeMemory:
    """Order, issue time and expiry of the newest notices of one kind, by model and signer."""

    def __init__(self, kind: type[Notice]) -> None:
        self.latest: _Latest[tuple[str, str], tuple[tuple[int, int], float, float]] = _Latest(
            _MAX_REMEMBERED_NOTICES
        )
        # Bounded tightly: a parsed placement takes a hundred times its packed size.
        self.opened: _Latest[bytes, Notice | tuple[str, str]] = _Latest(2 * kind.bounds.max_per_key)

    def remember(self, notice: Notice) -> None:
        at = notice.model_id, notice.peer_id
        name = notice.bounds.kind.name
        order, issued_at, _ = self.latest.get(at, (notice.order, 0.0, 0.0))
        if notice.order < order:
            raise RecordError("stale", f"a newer {name} of {notice.peer_id} is known")
        if notice.order > order and notice.issued_at < issued_at + notice.bounds.min_interval_s:
            raise RecordError("too_soon", f"{notice.peer_id} makes too many {name}s")
        self.latest.put(at, (notice.order, notice.issued_at, notice.expires_at))


def dht_id(key: str) -> bytes:
    """20-byte id of `key` in hivemind's DHT."""
    return bytes(DHTID.generate(source=key).to_bytes())


def _once(
    opened: _Latest[bytes, _Value | tuple[str, str]], sealed: bytes, opening: Callable[[], _Value]
) -> _Value:
    digest = hashlib.sha256(sealed).digest()
    result = opened.get(digest)
    if result is None:
        try:
            result = opening()
        except RecordError as error:
            # The error itself would keep its traceback's frames alive.
            result = error.reason, str(error)
        opened.put(digest, result)
    if isinstance(result, tuple):
        raise RecordError(*result)
    return result


def _unwrap(value: bytes) -> bytes:
    """Unpack a stored value, which hivemind wraps in msgpack, here of bytes."""
    if len(value) > _MAX_BYTES + _WRAPPING_BYTES:
        raise RecordError("oversized", f"a record of {len(value)} bytes is too large")
    try:
        return msgspec.msgpack.decode(value, type=bytes)
    except (msgspec.DecodeError, ValueError) as error:
        raise RecordError("malformed", "not a sealed record") from error
