"""What a DHT member keeps for others, within bounds."""

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
from nesa_node.swarm.dht_codec import MAX_RECORDS_PER_CALL
from nesa_node.swarm.hive import DHTID, DHTLocalStorage, DictionaryDHTValue, ValueWithExpiration
from nesa_node.swarm.notices import KINDS, Bounds
from nesa_node.swarm.sealing import kind_of

MAX_KEYS = 512
"""Of models, beside the index of all nodes."""
MAX_BYTES_PER_KEY = 2 * 1024**2
"""So that a whole key fits into one answer; room for some 1,700 nodes."""
MAX_RECORDS_PER_KEY = MAX_RECORDS_PER_CALL // 2
"""Readers refuse an answer of more than `MAX_RECORDS_PER_CALL`, and check each record of every
member within a call's timeout."""
MAX_BYTES = 64 * 1024**2
MAX_NOTICE_KEYS = 256
"""Of all kinds together."""
MAX_NOTICE_BYTES = 16 * 1024**2
"""Each counted as the largest of its kind: its signer may replace it by one."""

_HEAP_SLACK = 64
_DRAWN = 4
_DRAWN_KEYS = 8
_RECOUNT_INTERVAL_S = 1.0
"""Counting again what a full storage holds takes milliseconds, and a flood would ask for nothing
else."""


def nobody_is_known(_: PeerId) -> float:
    return 0.0


class BoundedStorage(DHTLocalStorage):  # type: ignore[misc]
    """hivemind's storage with limits, and without two holes of the original.

    The original lets a replayed older record shorten the life of a newer one (it re-keys its expiry
    heap before it compares), and every replay leaves an entry in that heap. Here a subkey takes
    only what expires strictly later, and heaps are compacted. Where no room is left, updates of
    known peers still pass and newcomers are refused: an attacker with many throw-away identities
    can keep newcomers out of a key, not push members out.

    A node serves one model: a later record of the same signer under another model's key replaces
    the one before. Where there are `MAX_KEYS`, a new key takes the place of one all of whose
    signers have been known for less time (`known_s`, of the peer id), if a few that are drawn by
    lot include one.

    Notices have room of their own, which records cannot take nor lose. Few peers need it, and one
    of them may well be new to a full key: there it takes the place of whoever has been known for
    the shortest time, if that is shorter than its own. In the later
    half of a full key strangers drive out one another, by lot: an orchestrator that serves nothing
    is a stranger too, and who fills a key first must not keep it out for good.

    `own_subkey` is always accepted: a node can always announce itself here. `index_key` is that of
    all nodes.
    """

    def __init__(
        self,
        own_subkey: str,
        dropped: Counter[str],
        known_s: Callable[[PeerId], float] = nobody_is_known,
        index_key: DHTID | None = None,
    ) -> None:
        super().__init__()
        self._index_key = index_key
        self._own_subkey = own_subkey
        self._dropped = dropped
        self._known_s = known_s
        self._bytes: Counter[DHTID] = Counter()
        self._counted_at = -math.inf
        self._notice_keys: dict[DHTID, Bounds] = {}

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
        bounds = _bounds_of(value)
        if bounds is None and known is None and not self._leaves(key, subkey, expiration_time):
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
        # Replaced rather than refreshed: the original only updates a key that expires later.
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
        """The bytes of the records under `key`, about: some may have expired."""
        return 0 if self._records(key) is None else self._bytes[key]

    def records_of(self, key: DHTID) -> list[tuple[str, bytes, float]]:
        """The (subkey, value, expiration) of what lies under `key`."""
        records = self._records(key)
        if records is None:
            return []
        return [(subkey, item.value, item.expiration_time) for subkey, item in records.items()]

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
        self._forget_notice_keys()
        return self._bytes.total()

    def _forget_notice_keys(self) -> None:
        self._notice_keys = {
            key: bounds for key, bounds in self._notice_keys.items() if key in self.data
        }

    def _records(self, key: DHTID) -> Any:
        item = super().get(key)
        return None if item is None else item.value

    def _leaves(self, key: DHTID, subkey: str, expiration_time: float) -> bool:
        """Remove the signer's record of another model; False if that one is as late as this."""
        if key == self._index_key:
            return True
        of_signer = {other for other, item in self.data.items() if subkey in item.value.data}
        for other in of_signer - {key, self._index_key, *self._notice_keys}:
            records = self.data[other].value
            before = records.data[subkey]
            if before.expiration_time >= expiration_time:
                return False
            del records[subkey]
            self._bytes[other] -= len(before.value)
            if not records:
                del self[other]
        return True

    def _model_keys(self) -> list[DHTID]:
        return [key for key in self.data if key not in self._notice_keys and key != self._index_key]

    def _has_room(self, key: DHTID, size: int, subkey: str) -> bool:
        """Whether a record of a newcomer to this key may be kept; makes room for a new key."""
        if not self._fits(key, size):
            now = time.monotonic()
            if now >= self._counted_at + _RECOUNT_INTERVAL_S:
                self.total_bytes()  # counts again without what has expired meanwhile
                self._counted_at = now
            if not self._fits(key, size):
                return False
        if self._key_fits(key):
            return True
        known_s = self._known_s(PeerId(subkey))
        if known_s > 0.0:
            self._drop_unknown_key(self._model_keys(), known_s)
        return self._key_fits(key)

    def _key_fits(self, key: DHTID) -> bool:
        is_known = key in self.data or key == self._index_key
        return is_known or len(self._model_keys()) < MAX_KEYS

    def _fits(self, key: DHTID, size: int) -> bool:
        notice_bytes = sum(self._bytes[key] for key in self._notice_keys)
        records = self._records(key)
        return (
            self._bytes[key] + size <= MAX_BYTES_PER_KEY
            and (records is None or len(records) < MAX_RECORDS_PER_KEY)
            and self._bytes.total() - notice_bytes + size <= MAX_BYTES
        )

    def _has_notice_room(self, key: DHTID, bounds: Bounds, subkey: str) -> bool:
        """Whether a notice of a newcomer to this key may be kept; makes room if that is due."""
        self._remove_outdated()
        self._forget_notice_keys()
        if self._notices_fit(key, bounds):
            return True
        # Also the answer to a flood: whoever cannot displace anybody costs no search.
        known_s = self._known_s(PeerId(subkey))
        records = self._records(key)
        if known_s <= 0.0:
            return self._drops_a_stranger(records, bounds) and self._notices_fit(key, bounds)
        if records is not None and len(records) >= bounds.max_per_key:
            peer = min(self._others(records), key=self._known_s)
            if self._known_s(peer) < known_s:
                del records[peer]
        else:
            self._drop_unknown_key(self._notice_keys, known_s)
        return self._notices_fit(key, bounds)

    def _drops_a_stranger(self, records: Any, bounds: Bounds) -> bool:
        """For another one, if a search of few finds it: a flood must not cost much."""
        if records is None or len(records) < bounds.max_per_key:
            return False
        others = self._others(records)[bounds.max_per_key // 2 :]
        for peer in random.sample(others, min(_DRAWN, len(others))):
            if self._known_s(peer) <= 0.0:
                del records[peer]
                self._dropped["full"] += 1
                return True
        return False

    def _notices_fit(self, key: DHTID, bounds: Bounds) -> bool:
        records = self._records(key)
        if records is not None:
            if len(records) >= bounds.max_per_key:
                return False
        elif len(self._notice_keys) >= MAX_NOTICE_KEYS:
            return False
        taken = sum(
            len(self.data[key].value) * each.kind.max_bytes
            for key, each in self._notice_keys.items()
            if key in self.data
        )
        return taken + bounds.kind.max_bytes <= MAX_NOTICE_BYTES

    def _drop_unknown_key(self, keys: Iterable[DHTID], known_s: float) -> None:
        """Of some of `keys`, forget the one whose signers are least known, if less than `known_s`.

        Some are drawn by lot: to look at all signers of all keys takes 10 ms, and a flood may ask.
        """

        def best(key: DHTID) -> float:
            return max(map(self._known_s, self._others(self.data[key].value)), default=0.0)

        others = [key for key in keys if self._own_subkey not in self.data[key].value]
        drawn = random.sample(others, min(_DRAWN_KEYS, len(others)))
        least = min(drawn, key=best, default=None)
        if least is not None and best(least) < known_s:
            del self[least]
            self._notice_keys.pop(least, None)

    def _others(self, records: Any) -> list[PeerId]:
        return [PeerId(peer) for peer, _ in records.items() if peer != self._own_subkey]


def _bounds_of(value: bytes) -> Bounds | None:
    """None for a node's record."""
    try:
        kind = KINDS.get(kind_of(msgspec.msgpack.decode(value, type=bytes)))
    except (msgspec.DecodeError, ValueError):
        return None
    return None if kind is None else kind.bounds


def _size(records: Any) -> int:
    return sum(len(item.value) for _, item in records.items())


def _compact(storage: Any) -> None:
    """Drop the heap entries of replaced items once they are the majority."""
    if len(storage.expiration_heap) > 2 * len(storage.data) + _HEAP_SLACK:
        storage.expiration_heap = list(storage.key_to_heap.values())
        heapq.heapify(storage.expiration_heap)
