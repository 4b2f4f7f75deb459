"""Decaying penalties for peers that failed recently."""

from __future__ import annotations

from collections.abc import Callable

from nesa_node.core.ids import PeerId

_MAX_PEERS = 4096
_NEGLIGIBLE_S = 1e-3


class Avoidance:
    """Per-peer penalties in seconds: raised by each failure, halved every `half_life_s`.

    A penalty is not a ban: a chain still goes through a failed peer that alone holds a block.
    `clock` returns monotonic seconds (`time.monotonic`).
    """

    def __init__(
        self,
        clock: Callable[[], float],
        half_life_s: float = 30.0,
        *,
        failure_s: float = 10.0,
        max_penalty_s: float = 300.0,
    ) -> None:
        if half_life_s <= 0:
            raise ValueError(f"half_life_s must be positive, got {half_life_s}")
        self._clock = clock
        self._half_life_s = half_life_s
        self._failure_s = failure_s
        self._max_penalty_s = max_penalty_s
        self._penalties: dict[PeerId, tuple[float, float]] = {}

    def failed(self, peer: PeerId) -> None:
        """Record one failure of `peer`; repeated failures add up to at most `max_penalty_s`."""
        penalty_s = min(self.penalty(peer) + self._failure_s, self._max_penalty_s)
        self._penalties[peer] = (penalty_s, self._clock())
        if len(self._penalties) > _MAX_PEERS:
            self._forget_smallest()

    def succeeded(self, peer: PeerId) -> None:
        """Drop the penalty of `peer`."""
        self._penalties.pop(peer, None)

    def penalty(self, peer: PeerId) -> float:
        """Seconds to add to the cost of a hop through `peer`; 0 for a peer that never failed."""
        # Planner threads read while the event loop removes entries.
        found = self._penalties.get(peer)
        if found is None:
            return 0.0
        penalty_s, since = found
        left_s: float = penalty_s * 0.5 ** ((self._clock() - since) / self._half_life_s)
        if left_s < _NEGLIGIBLE_S:
            self._penalties.pop(peer, None)
            return 0.0
        return left_s

    def _forget_smallest(self) -> None:
        smallest = min(list(self._penalties), key=self.penalty)
        self._penalties.pop(smallest, None)
