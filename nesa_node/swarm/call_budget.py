"""Rate limit of DHT calls: one token bucket per peer.

A unit stands for 20 ms of a peer's share of this node's time. A call itself costs units, and so do
its request's bytes before they are parsed, its records before they are checked, and its answer's
bytes before they are packed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from nesa_node.core.errors import ProtocolError
from nesa_node.core.ids import PeerId

MAX_KNOWN_PEERS = 4096

_UNITS_PER_S = 50.0
_BURST = 500.0
_REQUEST_BYTES_PER_UNIT = 16 * 1024
_RECORDS_PER_UNIT = 16
_ANSWER_BYTES_PER_UNIT = 64 * 1024


class CallBudget:
    """Token buckets by peer; raises `ProtocolError` (busy) when a peer's bucket is exhausted.

    An exhausted bucket is emptied by the call that it refuses. At most `MAX_KNOWN_PEERS` buckets
    are kept, those used last.
    """

    def __init__(self, clock: Callable[[], float], burst: float = _BURST) -> None:
        self._clock = clock
        self._burst = burst
        self._left: OrderedDict[PeerId, tuple[float, float]] = OrderedDict()

    def spend_call(self, peer: PeerId, num_bytes: int) -> None:
        self.spend(peer, 1.0 + num_bytes / _REQUEST_BYTES_PER_UNIT)

    def spend_checks(self, peer: PeerId, num_records: int) -> None:
        self.spend(peer, num_records / _RECORDS_PER_UNIT)

    def spend_answer(self, peer: PeerId, num_bytes: int) -> None:
        self.spend(peer, num_bytes / _ANSWER_BYTES_PER_UNIT)

    def spend(self, peer: PeerId, units: float) -> None:
        now = self._clock()
        left, since = self._left.get(peer, (self._burst, now))
        left = min(self._burst, left + (now - since) * _UNITS_PER_S)
        self._left[peer] = (max(left - units, 0.0), now)
        self._left.move_to_end(peer)
        if len(self._left) > MAX_KNOWN_PEERS:
            self._left.popitem(last=False)
        if left < units:
            raise ProtocolError("busy", f"{peer} calls too often, or asks for too much")
