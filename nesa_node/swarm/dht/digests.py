"""Digests of the records under one key, so that a reader fetches equal ones from one member only.

The five members of a key hold mostly the same records, and a reader has to ask all of them: any one
may hide a node. So a find asks for `NUM_PARTS` digests in place of the records, if these take more
than `MAX_UNASKED_BYTES`, and then for the parts that the reader lacks.

The option is a first key in the request, which is no key: an earlier member finds nothing there,
and answers the other key in full.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import IntEnum

from nesa_node.core.errors import ProtocolError
from nesa_node.swarm.dht.message_codec import MAX_RECORDS_PER_CALL

NUM_PARTS = 16
MAX_UNASKED_BYTES = 16 * 1024
"""Records that a member returns in place of their digests: a second call would cost more."""
_MAX_WAIT_S = 0.5
_DIGEST_BYTES = 16
"""A malicious member that chose all records of two sets would need 2^64 tries for equal digests."""
_PREFIX = hashlib.sha1(b"nesa/1/find-option").digest()[:16]
_OPTION = struct.Struct(">16sBxH")
_COUNT = struct.Struct(">I")
SUMMARY_BYTES = _COUNT.size + NUM_PARTS * _DIGEST_BYTES

StoredRecord = tuple[str, bytes, float]
"""Subkey, value and expiration."""


class FindMode(IntEnum):
    """What a find asks for: the number of records under the adjacent key, which a store needs; the
    number and digests of those under its key, or these themselves if they are few; or the parts of
    them in a bit mask."""

    COUNT = 1
    SUMMARY = 2
    PARTS = 3


@dataclass(frozen=True, slots=True)
class FindOption:
    mode: FindMode
    parts: int = 0
    """Bit mask of the parts asked for."""

    def pack(self) -> bytes:
        return _OPTION.pack(_PREFIX, self.mode, self.parts)


def read_option(key: bytes) -> FindOption | None:
    """The option that a find's first key is; None if it is a key. Raises `ProtocolError`."""
    if not key.startswith(_PREFIX) or len(key) != _OPTION.size:
        return None
    _, mode, parts = _OPTION.unpack(key)
    try:
        return FindOption(FindMode(mode), parts)
    except ValueError:
        raise ProtocolError("malformed", f"a find of unknown mode {mode}") from None


@dataclass(frozen=True, slots=True)
class KeySummary:
    """A member's word on its records under a key: their number and, if asked for, their digests."""

    num_records: int
    digests: tuple[bytes, ...] = ()

    def pack(self) -> bytes:
        return _COUNT.pack(self.num_records) + b"".join(self.digests)


def unpack_summary(packed: bytes) -> KeySummary:
    """Unpack what `KeySummary.pack` packed. Raises `ProtocolError`."""
    if len(packed) not in (_COUNT.size, SUMMARY_BYTES):
        raise ProtocolError("bad_answer", f"a summary of {len(packed)} bytes")
    (count,) = _COUNT.unpack_from(packed)
    starts = range(_COUNT.size, len(packed), _DIGEST_BYTES)
    return KeySummary(count, tuple(packed[start : start + _DIGEST_BYTES] for start in starts))


def part_of(subkey: str) -> int:
    return hashlib.sha256(subkey.encode()).digest()[0] % NUM_PARTS


def digest_parts(records: Iterable[StoredRecord]) -> tuple[bytes, ...]:
    """Digest of each part: of the subkeys and expiries of its records, in order of subkeys.

    A signer's later record always expires later, so that its expiry identifies it.
    """
    return tuple(_digest(part) for part in _split(records))


def select_parts(records: Iterable[StoredRecord], parts: int) -> list[StoredRecord]:
    """The records of the parts in the bit mask `parts`, in their order."""
    return [record for record in records if parts >> part_of(record[0]) & 1]


class FetchedParts:
    """Parts that a lookup has fetched so far, by digest.

    Digests are computed here from checked records: a member's word only saves its own answer.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._records: dict[tuple[int, bytes], list[StoredRecord]] = {}
        self._newest: dict[str, StoredRecord] = {}

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for another member's parts, since they may be the same; not for long, since that
        member may be malicious."""
        try:
            async with asyncio.timeout(_MAX_WAIT_S):
                await self._lock.acquire()
        except TimeoutError:
            yield
            return
        try:
            yield
        finally:
            self._lock.release()

    def add(self, records: Sequence[StoredRecord]) -> None:
        """Remember checked records, and what they make of those that were known.

        Beyond `MAX_RECORDS_PER_CALL` in all, further ones are not remembered: their parts are
        fetched from each member, as without digests.
        """
        if len(self._newest) + len(records) > MAX_RECORDS_PER_CALL:
            return
        for record in records:
            known = self._newest.get(record[0])
            if known is None or known[2] < record[2]:
                self._newest[record[0]] = record
        for known_records in (records, self._newest.values()):
            for index, part in enumerate(_split(known_records)):
                self._records.setdefault((index, _digest(part)), part)

    def lacking(self, summary: KeySummary) -> int:
        """Bit mask of the parts of `summary` that no member has returned in this lookup."""
        return sum(
            1 << index
            for index, digest in enumerate(summary.digests)
            if digest != _EMPTY and (index, digest) not in self._records
        )

    def known_records(self, summary: KeySummary) -> list[StoredRecord]:
        """The records of all parts of `summary` that need not be fetched."""
        parts = enumerate(summary.digests)
        return [record for part in parts for record in self._records.get(part, ())]


def _split(records: Iterable[StoredRecord]) -> list[list[StoredRecord]]:
    parts: dict[int, list[StoredRecord]] = defaultdict(list)
    for record in records:
        parts[part_of(record[0])].append(record)
    return [parts[index] for index in range(NUM_PARTS)]


def _digest(records: Sequence[StoredRecord]) -> bytes:
    digest = hashlib.sha256()
    for subkey, _, expiration in sorted(records, key=lambda record: record[0]):
        digest.update(struct.pack(">dH", expiration, len(subkey)) + subkey.encode())
    return digest.digest()[:_DIGEST_BYTES]


_EMPTY = _digest(())
