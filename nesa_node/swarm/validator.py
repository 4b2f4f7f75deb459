"""Which records a DHT member keeps, and which it drops.

hivemind asks `RecordValidator.validate` for everything that somebody wants stored here or answers
to a search. Only a sealed record passes, under the subkey of its signer, under the key of its own
model (or the index of all nodes), with the expiry that was signed, and never an older one than was
seen. So nobody can write for another peer, nor bring back what a peer has replaced or withdrawn.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable

import msgspec

from nesa_node.core.errors import RecordError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.swarm.hive import DHTID, DHTProtocol, DHTRecord, RecordValidatorBase
from nesa_node.swarm.private import Membership
from nesa_node.swarm.records import (
    MAX_RECORD_BYTES,
    NODES_KEY,
    NodeRecord,
    check_age,
    model_key,
    unseal_ageless,
)

_MAX_REMEMBERED = 16_384
_MAX_OPENED = 4096
_WRAPPING_BYTES = 8


class RecordValidator(RecordValidatorBase):  # type: ignore[misc]
    """`clock` gives seconds since the epoch. `dropped` counts what was refused, by reason."""

    def __init__(self, membership: Membership, clock: Callable[[], float]) -> None:
        self.dropped: Counter[str] = Counter()
        self._membership = membership
        self._clock = clock
        self._index_id = dht_id(membership.dht_key(NODES_KEY))
        self._newest: OrderedDict[PeerId, int] = OrderedDict()
        self._opened: OrderedDict[bytes, NodeRecord | tuple[str, str]] = OrderedDict()

    def validate(self, record: DHTRecord) -> bool:
        try:
            self.check(record.key, record.subkey, record.value, record.expiration_time)
        except RecordError as error:
            self.dropped[error.reason] += 1
            return False
        return True

    def check(self, key: bytes, subkey: bytes, value: bytes, expiration: float) -> NodeRecord:
        """The record in hivemind's four fields. Raises `RecordError` with the reason to drop it.

        Beside the reasons of `unseal`: unwanted (no subkey), subkey (not the signer's), key,
        expiry and stale.
        """
        if subkey in DHTProtocol.RESERVED_SUBKEYS:
            raise RecordError("unwanted", "only records under a peer's own subkey are kept")
        record = self.open(_unwrap(value))
        if subkey != msgspec.msgpack.encode(record.peer_id):
            raise RecordError("subkey", f"{record.peer_id} may not write another peer's subkey")
        if key not in (self._index_id, self._model_id(record)):
            raise RecordError("key", f"the record of {record.peer_id} belongs elsewhere")
        if expiration != record.expires_at:
            raise RecordError("expiry", "the expiry is not the signed one")
        self._remember(record)
        return record

    def open(self, sealed: bytes) -> NodeRecord:
        """`unseal`, whose costly part is done once for the same bytes."""
        digest = hashlib.sha256(sealed).digest()
        opened = self._opened.get(digest)
        if opened is None:
            try:
                opened = unseal_ageless(sealed, membership=self._membership)
            except RecordError as error:
                # Not the error itself: its traceback would keep frames alive.
                opened = error.reason, str(error)
            self._opened[digest] = opened
            if len(self._opened) > _MAX_OPENED:
                self._opened.popitem(last=False)
        if isinstance(opened, tuple):
            raise RecordError(*opened)
        check_age(opened, self._clock())
        return opened

    def newest_seq(self, peer: PeerId) -> int:
        """The highest sequence number seen of `peer`; -1 if none is remembered."""
        return self._newest.get(peer, -1)

    def _model_id(self, record: NodeRecord) -> bytes:
        return dht_id(self._membership.dht_key(model_key(ModelId(record.model_id))))

    def _remember(self, record: NodeRecord) -> None:
        peer = PeerId(record.peer_id)
        if record.seq < self.newest_seq(peer):
            raise RecordError("stale", f"a newer record of {peer} is known")
        self._newest[peer] = record.seq
        self._newest.move_to_end(peer)
        if len(self._newest) > _MAX_REMEMBERED:
            self._newest.popitem(last=False)


def dht_id(key: str) -> bytes:
    """The 20 bytes by which hivemind's DHT knows `key`."""
    return bytes(DHTID.generate(source=key).to_bytes())


def _unwrap(value: bytes) -> bytes:
    """hivemind stores msgpack of the value it was given, here of bytes."""
    if len(value) > MAX_RECORD_BYTES + _WRAPPING_BYTES:
        raise RecordError("oversized", f"a record of {len(value)} bytes is too large")
    try:
        return msgspec.msgpack.decode(value, type=bytes)
    except (msgspec.DecodeError, ValueError) as error:
        raise RecordError("malformed", "not a sealed record") from error
