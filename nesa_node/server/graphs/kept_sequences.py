"""What a node keeps of sequences whose further tokens clients may ask for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from nesa_node.core.ids import PeerId

PEER_SHARE = 2
"""One peer's sequences may have the memory divided by this."""


@dataclass(frozen=True, slots=True)
class SequenceUse:
    """The sequence that a request belongs to."""

    owner: PeerId
    key: bytes
    rows: tuple[int, ...] = ()
    """For each row of the request the row of the last one that it goes on from; none: its own."""


class KeptSequences:
    """Values of sequences, in limited memory. Where it is full, the least recently used go.

    Methods may be called from any thread.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[PeerId, bytes], Mapping[int, Tensor]] = OrderedDict()

    @property
    def held_bytes(self) -> int:
        with self._lock:
            return sum(map(_nbytes, self._kept.values()))

    def find(self, use: SequenceUse) -> Mapping[int, Tensor] | None:
        """The values that are kept of a sequence; None if it is not known."""
        with self._lock:
            return self._kept.get((use.owner, use.key))

    def keep(self, use: SequenceUse, values: Mapping[int, Tensor]) -> None:
        """Keep `values` besides those of other pieces. Other sequences may go, or this one."""
        with self._lock:
            key = use.owner, use.key
            self._kept[key] = {**self._kept.get(key, {}), **values}
            self._kept.move_to_end(key)
            self._drop_beyond(
                [each for each in self._kept if each[0] == use.owner], self._max_bytes // PEER_SHARE
            )
            self._drop_beyond(list(self._kept), self._max_bytes)

    def forget(self, owner: PeerId) -> None:
        """Drop a peer's sequences."""
        with self._lock:
            for key in [each for each in self._kept if each[0] == owner]:
                del self._kept[key]

    def _drop_beyond(self, keys: list[tuple[PeerId, bytes]], max_bytes: int) -> None:
        sizes = [_nbytes(self._kept[key]) for key in keys]
        left = sum(sizes)
        for key, nbytes in zip(keys, sizes, strict=True):
            if left <= max_bytes:
                return
            del self._kept[key]
            left -= nbytes


def _nbytes(values: Mapping[int, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in values.values())
