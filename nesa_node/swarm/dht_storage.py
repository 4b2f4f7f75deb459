"""What a DHT member keeps for others, within bounds."""

from __future__ import annotations

import heapq
from collections import Counter
from typing import Any

from nesa_node.swarm.hive import DHTID, DHTLocalStorage, DictionaryDHTValue, ValueWithExpiration

MAX_KEYS = 512
MAX_BYTES_PER_KEY = 2 * 1024**2
"""So that a whole key fits into one answer; room for some 3,000 nodes."""
MAX_BYTES = 64 * 1024**2

_HEAP_SLACK = 64


class BoundedStorage(DHTLocalStorage):  # type: ignore[misc]
    """hivemind's storage with limits, and without two holes of the original.

    The original lets a replayed older record shorten the life of a newer one (it re-keys its expiry
    heap before it compares), and every replay leaves an entry in that heap. Here a subkey takes
    only what expires strictly later, and heaps are compacted. Where no room is left, updates of
    known peers still pass and newcomers are refused: an attacker with many throw-away identities
    can keep newcomers out of a key, not push members out.

    `own_subkey` is always accepted: a node can always announce itself here.
    """

    def __init__(self, own_subkey: str, dropped: Counter[str]) -> None:
        super().__init__()
        self._own_subkey = own_subkey
        self._dropped = dropped
        self._bytes: Counter[DHTID] = Counter()

    def store(
        self, key: DHTID, value: Any, expiration_time: float, subkey: str | None = None
    ) -> bool:
        """Records only: a regular value would erase all of a key's records."""
        if subkey is None:
            self._dropped["unwanted"] += 1
            return False
        return self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: DHTID, subkey: str, value: bytes, expiration_time: float) -> bool:
        records = self._records(key)
        known = None if records is None else records.get(subkey)
        if known is not None and known.expiration_time >= expiration_time:
            return False
        if subkey != self._own_subkey and known is None and not self._has_room(key, len(value)):
            self._dropped["full"] += 1
            return False
        if records is None:
            records = DictionaryDHTValue()
        latest = max(records.latest_expiration_time, expiration_time)
        if not records.store(subkey, value, expiration_time):
            return False
        # Replaced rather than refreshed: the original only updates a key that expires later.
        del self[key]
        stored: bool = super(DHTLocalStorage, self).store(key, records, latest)
        _compact(records)
        _compact(self)
        self._bytes[key] = _size(records)
        return stored

    def get(self, key: DHTID) -> ValueWithExpiration | None:
        """A copy: hivemind merges what others answer into the object it gets here."""
        records = self._records(key)
        if records is None:
            return None
        copy = DictionaryDHTValue()
        for subkey, item in records.items():
            copy.store(subkey, item.value, item.expiration_time)
        return ValueWithExpiration(copy, records.latest_expiration_time) if copy.data else None

    def total_bytes(self) -> int:
        """The bytes of all records kept, without Python's own overhead."""
        self._remove_outdated()
        self._bytes = Counter({key: _size(item.value) for key, item in self.data.items()})
        return self._bytes.total()

    def _records(self, key: DHTID) -> Any:
        item = super().get(key)
        return None if item is None else item.value

    def _has_room(self, key: DHTID, size: int) -> bool:
        if self._fits(key, size):
            return True
        self.total_bytes()  # counts again without what has expired meanwhile
        return self._fits(key, size)

    def _fits(self, key: DHTID, size: int) -> bool:
        return (
            self._bytes[key] + size <= MAX_BYTES_PER_KEY
            and self._bytes.total() + size <= MAX_BYTES
            and (key in self.data or len(self.data) < MAX_KEYS)
        )


def _size(records: Any) -> int:
    return sum(len(item.value) for _, item in records.items())


def _compact(storage: Any) -> None:
    """Drop the heap entries of replaced items once they are the majority."""
    if len(storage.expiration_heap) > 2 * len(storage.data) + _HEAP_SLACK:
        storage.expiration_heap = list(storage.key_to_heap.values())
        heapq.heapify(storage.expiration_heap)
