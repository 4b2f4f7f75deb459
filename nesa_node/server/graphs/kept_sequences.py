"""What a node keeps of sequences whose further tokens clients may ask for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
class _Kept:
    values: Mapping[int, Tensor]
    nbytes: int


class KeptSequences:
    """Values of sequences, in limited memory. Where it is full, the least recently used go.

    Methods may be called from any thread.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[PeerId, bytes], _Kept] = OrderedDict()

    def find(self, use: SequenceUse) -> Mapping[int, Tensor] | None:
        """The values that are kept of a sequence; None if it is not known."""
        with self._lock:
            kept = self._kept.get((use.owner, use.key))
            return None if kept is None else kept.values

    def keep(self, use: SequenceUse, values: Mapping[int, Tensor]) -> None:
        """Keep `values` besides those of other pieces. Other sequences may go for them.

        A sequence of more than a peer's share is not kept.
        """
        if not values:
            return
        with self._lock:
            key = use.owner, use.key
            before = self._kept.pop(key, None)
            every = {**({} if before is None else before.values), **values}
            added = _Kept(every, sum(tensor.nbytes for tensor in every.values()))
            share = self._max_bytes // PEER_SHARE
            if added.nbytes > share:
                return
            own = [each for each in self._kept if each[0] == use.owner]
            self._drop_beyond(own, share - added.nbytes)
            self._drop_beyond(list(self._kept), self._max_bytes - added.nbytes)
            self._kept[key] = added

    def forget(self, owner: PeerId) -> None:
        """Drop a peer's sequences."""
        with self._lock:
            for key in [each for each in self._kept if each[0] == owner]:
                del self._kept[key]

    def _drop_beyond(self, keys: Sequence[tuple[PeerId, bytes]], max_bytes: int) -> None:
        """Drop the first of these sequences until the remaining ones have at most `max_bytes`."""
        left = sum(self._kept[key].nbytes for key in keys)
        for key in keys:
            if left <= max_bytes:
                return
            left -= self._kept.pop(key).nbytes
