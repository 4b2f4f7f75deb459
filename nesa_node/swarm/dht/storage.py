"""Bounded storage of a DHT member."""

from __future__ import annotations

import heapq
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from nesa_node.core.ids import PeerId
from nesa_node.swarm.dht.message_codec import MAX_RECORDS_PER_CALL
from nesa_node.swarm.dht.pool_notices import NOTICE_KINDS
from nesa_node.swarm.dht.sealing import StatementBounds, read_kind
from nesa_node.swarm.p2p.hivemind_imports import (
    DHTID,
    DHTLocalStorage,
    DictionaryDHTValue,
    ValueWithExpiration,
)

MAX_MODEL_KEYS = 512
"""Keys of models, beside the index of all nodes."""
MAX_BYTES_PER_KEY = 2 * 1024**2
"""Records under one key, which must fit into one answer: about 1,700 nodes."""
MAX_RECORDS_PER_KEY = MAX_RECORDS_PER_CALL // 2
"""Half of what readers accept in one answer, since they check all members' records within a call's
timeout."""
MAX_BYTES = 64 * 1024**2
MAX_SHARD_KEYS = 512
"""Keys of shards (`shards.py`), beside those of models."""
MAX_SHARD_BYTES = 32 * 1024**2
"""Records under the keys of shards, beside `MAX_BYTES`."""
MAX_NOTICE_KEYS = 256
"""Keys of notices of all kinds together."""
MAX_NOTICE_BYTES = 16 * 1024**2
"""Notices, each counted with its kind's maximum size: its signer may replace it by a larger one."""

_HEAP_SLACK = 64
_SAMPLED_SIGNERS = 4
_SAMPLED_KEYS = 8
_RECOUNT_INTERVAL_S = 1.0
"""Minimum time between recounts of a full storage: one takes milliseconds, and a flood of stores
would cause one for each."""


def zero_known_s(_: PeerId) -> float:
    return 0.0


def never_shard(_key: bytes, _value: bytes) -> bool:
    return False


class BoundedStorage(DHTLocalStorage):  # type: ignore[misc]
    """hivemind's storage with bounds, and without two of its bugs.

    In hivemind's storage a replayed older record shortens the life of a newer one (the expiry heap
    is re-keyed before expiries are compared), and each replay leaves an entry in that heap. Here a
    record replaces only one that expires earlier, and heaps are compacted.

    Records: in a full storage, updates of stored subkeys are accepted and new subkeys refused. An
    attacker with many identities can keep new nodes out of a key, but cannot evict stored ones. A
    node serves one model, so a signer's later record under another model's key replaces its earlier
    one. When there are `MAX_MODEL_KEYS`, a new key evicts a key if all signers of that one have
    been known for less time than its own (`known_s`, by peer id), and a small random sample of keys
    contains it. Shards have a quota of their own, by the same rules: a signer has one record in all
    of them, beside the one under its model's key.

    Notices have a separate quota, which records neither use nor lose. In a full key a new signer
    evicts the signer known for the shortest time, if that is less than its own. A signer of unknown
    age evicts a random one of unknown age in the later half of the key: an orchestrator that serves
    no blocks has no age either, and a flood that came first must not exclude it.

    `own_subkey`, this node's peer id, is always accepted. `index_key` is the index of all nodes.
    `is_shard_record(key, value)` says whether a key is a shard's, by a record under it.
    """

    def __init__(
        self,
        own_subkey: str,
        dropped: Counter[str],
        known_s: Callable[[PeerId], float] = zero_known_s,
        index_key: DHTID | None = None,
        is_shard_record: Callable[[bytes, bytes], bool] = never_shard,
    ) -> None:
        super().__init__()
        self._is_shard_record = is_shard_record
        self._shard_keys: set[DHTID] = set()
        self._index_key = index_key
        self._own_subkey = own_subkey
        self._dropped = dropped
        self._known_s = known_s
        self._bytes: Counter[DHTID] = Counter()
        self._counted_at = -math.inf
        self._notice_keys: dict[DHTID, StatementBounds] = {}

    def store(
        self, key: DHTID, value: Any, expiration_time: float, subkey: str | None = None
    ) -> bool:
        """Store a record. A value without subkey, which would erase its key, is refused."""
        if subkey is None:
            self._dropped["unwanted"] += 1
            return False
        return self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: DHTID, subkey: str, value: bytes, expiration_time: float) -> bool:
        records = self._records(key)
        known = None if records is None else records.get(subkey)
        if known is not None and known.expiration_time >= expiration_time:
            # The same record may come from its author and from those that pass it on.
            return bool(known.value == value and known.expiration_time == expiration_time)
        bounds = _notice_bounds(value)
        if bounds is None and known is None:
            self._note_shard(key, value)
            if not self._remove_from_other_model(key, subkey, expiration_time):
                return False
        if subkey != self._own_subkey and known is None:
            if bounds is None:
                has_room = self._has_room(key, len(value), subkey)
            else:
                has_room = self._has_notice_room(key, bounds, subkey)
            if not has_room:
                self._dropped["full"] += 1
                return False
            records = self._records(key)
        if bounds is not None:
            self._notice_keys[key] = bounds
        if records is None:
            records = DictionaryDHTValue()
        latest = max(records.latest_expiration_time, expiration_time)
        if not records.store(subkey, value, expiration_time):
            return False
        # Deleted first: hivemind only updates a key if its expiry rises.
        del self[key]
        stored: bool = super(DHTLocalStorage, self).store(key, records, latest)
        _compact(records)
        _compact(self)
        if bounds is None:
            self._bytes[key] += len(value) - (0 if known is None else len(known.value))
        else:
            self._bytes[key] = _size(records)
        return stored

    def size_of(self, key: DHTID) -> int:
        """Bytes of the records under `key`, including some that may have expired."""
        return 0 if self._records(key) is None else self._bytes[key]

    def records_of(self, key: DHTID) -> list[tuple[str, bytes, float]]:
        """The records under `key` as (subkey, value, expiration)."""
        records = self._records(key)
        if records is None:
            return []
        return [(subkey, item.value, item.expiration_time) for subkey, item in records.items()]

    def num_records(self, key: DHTID) -> int:
        records = self._records(key)
        return 0 if records is None else len(records)

    def get(self, key: DHTID) -> ValueWithExpiration | None:
        """A copy of the records under `key`, since hivemind merges other answers into it."""
        records = self._records(key)
        if records is None:
            return None
        copy = DictionaryDHTValue()
        for subkey, item in records.items():
            copy.store(subkey, item.value, item.expiration_time)
        return ValueWithExpiration(copy, records.latest_expiration_time) if copy.data else None

    def total_bytes(self) -> int:
        """Bytes of all unexpired records, without Python's own overhead."""
        self._remove_outdated()
        self._bytes = Counter({key: _size(item.value) for key, item in self.data.items()})
        self._prune_notice_keys()
        return self._bytes.total()

    def _prune_notice_keys(self) -> None:
        self._notice_keys = {
            key: bounds for key, bounds in self._notice_keys.items() if key in self.data
        }

    def _records(self, key: DHTID) -> Any:
        item = super().get(key)
        return None if item is None else item.value

    def _remove_from_other_model(self, key: DHTID, subkey: str, expiration_time: float) -> bool:
        """Remove the signer's record of another model; False if it expires no earlier than this."""
        if key == self._index_key:
            return True
        group = self._keys_like(key)
        of_signer = [other for other in group if subkey in self.data[other].value.data]
        for other in of_signer:
            if other == key:
                continue
            records = self.data[other].value
            before = records.data[subkey]
            if before.expiration_time >= expiration_time:
                return False
            del records[subkey]
            self._bytes[other] -= len(before.value)
            if not records:
                del self[other]
        return True

    def _note_shard(self, key: DHTID, value: bytes) -> None:
        if key not in self._shard_keys and self._is_shard_record(key.to_bytes(), value):
            self._shard_keys = {each for each in self._shard_keys if each in self.data}
            self._shard_keys.add(key)

    def _keys_like(self, key: DHTID) -> list[DHTID]:
        """Stored keys of shards if `key` is one, else those of models."""
        if key in self._shard_keys:
            return [each for each in self._shard_keys if each in self.data]
        others = {self._index_key, *self._notice_keys, *self._shard_keys}
        return [each for each in self.data if each not in others]

    def _has_room(self, key: DHTID, size: int, subkey: str) -> bool:
        """Whether a record of a new subkey may be stored; a new key may evict another one."""
        if not self._fits(key, size):
            now = time.monotonic()
            if now >= self._counted_at + _RECOUNT_INTERVAL_S:
                self.total_bytes()  # recounts without expired records
                self._counted_at = now
            if not self._fits(key, size):
                return False
        if self._key_fits(key):
            return True
        known_s = self._known_s(PeerId(subkey))
        if known_s > 0.0:
            self._evict_least_known_key(self._keys_like(key), known_s)
        return self._key_fits(key)

    def _key_fits(self, key: DHTID) -> bool:
        is_known = key in self.data or key == self._index_key
        most = MAX_SHARD_KEYS if key in self._shard_keys else MAX_MODEL_KEYS
        return is_known or len(self._keys_like(key)) < most

    def _fits(self, key: DHTID, size: int) -> bool:
        records = self._records(key)
        shard_bytes = sum(self._bytes[each] for each in self._shard_keys)
        if key in self._shard_keys:
            has_memory = shard_bytes + size <= MAX_SHARD_BYTES
        else:
            notice_bytes = sum(self._bytes[each] for each in self._notice_keys)
            model_bytes = self._bytes.total() - notice_bytes - shard_bytes
            has_memory = model_bytes + size <= MAX_BYTES
        return (
            has_memory
            and self._bytes[key] + size <= MAX_BYTES_PER_KEY
            and (records is None or len(records) < MAX_RECORDS_PER_KEY)
        )

    def _has_notice_room(self, key: DHTID, bounds: StatementBounds, subkey: str) -> bool:
        """Whether a notice of a new signer may be stored; may evict another one."""
        self._remove_outdated()
        self._prune_notice_keys()
        if self._notice_fits(key, bounds):
            return True
        # A signer of unknown age costs no search through all signers, so that a flood is cheap.
        known_s = self._known_s(PeerId(subkey))
        records = self._records(key)
        if known_s <= 0.0:
            return self._evict_random_stranger(records, bounds) and self._notice_fits(key, bounds)
        if records is not None and len(records) >= bounds.max_per_key:
            peer = min(self._other_signers(records), key=self._known_s)
            if self._known_s(peer) < known_s:
                del records[peer]
        else:
            self._evict_least_known_key(self._notice_keys, known_s)
        return self._notice_fits(key, bounds)

    def _evict_random_stranger(self, records: Any, bounds: StatementBounds) -> bool:
        """Evict a random signer of unknown age, if a small sample of the later half has one."""
        if records is None or len(records) < bounds.max_per_key:
            return False
        others = self._other_signers(records)[bounds.max_per_key // 2 :]
        for peer in random.sample(others, min(_SAMPLED_SIGNERS, len(others))):
            if self._known_s(peer) <= 0.0:
                del records[peer]
                self._dropped["full"] += 1
                return True
        return False

    def _notice_fits(self, key: DHTID, bounds: StatementBounds) -> bool:
        records = self._records(key)
        if records is not None:
            if len(records) >= bounds.max_per_key:
                return False
        elif len(self._notice_keys) >= MAX_NOTICE_KEYS:
            return False
        taken = sum(
            len(self.data[key].value) * each.max_bytes
            for key, each in self._notice_keys.items()
            if key in self.data
        )
        return taken + bounds.max_bytes <= MAX_NOTICE_BYTES

    def _evict_least_known_key(self, keys: Iterable[DHTID], known_s: float) -> None:
        """Evict the key with the signers known for the shortest time, if less than `known_s`.

        Only a random sample of `keys` is considered: all signers of all keys take 10 ms.
        """

        def best(key: DHTID) -> float:
            return max(map(self._known_s, self._other_signers(self.data[key].value)), default=0.0)

        others = [key for key in keys if self._own_subkey not in self.data[key].value]
        drawn = random.sample(others, min(_SAMPLED_KEYS, len(others)))
        least = min(drawn, key=best, default=None)
        if least is not None and best(least) < known_s:
            del self[least]
            self._notice_keys.pop(least, None)

    def _other_signers(self, records: Any) -> list[PeerId]:
        return [PeerId(peer) for peer, _ in records.items() if peer != self._own_subkey]


def _notice_bounds(value: bytes) -> StatementBounds | None:
    """Bounds of a notice; None for a node's record."""
    try:
        kind = NOTICE_KINDS.get(read_kind(msgspec.msgpack.decode(value, type=bytes)))
    except (msgspec.DecodeError, ValueError):
        return None
    return None if kind is None else kind.bounds


def _size(records: Any) -> int:
    return sum(len(item.value) for _, item in records.items())


def _compact(storage: Any) -> None:
    """Drop the heap entries of replaced items once they outnumber the live ones."""
    if len(storage.expiration_heap) > 2 * len(storage.data) + _HEAP_SLACK:
        storage.expiration_heap = list(storage.key_to_heap.values())
        heapq.heapify(storage.expiration_heap)
