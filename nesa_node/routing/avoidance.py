"""Peers that failed lately, and how much longer a chain through them seems for a while."""

from __future__ import annotations

from collections.abc import Callable

from nesa_node.core.ids import PeerId

_MAX_PEERS = 4096
_NEGLIGIBLE_S = 1e-3


class Avoidance:
    """A penalty in seconds per peer that every failure raises and time halves.

    It is never a ban: where a failed peer is the only one with a block, a chain still goes through
    it. `clock` returns seconds and never goes back (`time.monotonic`).
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
        """Remember one failure of `peer`; repeated ones add up to `max_penalty_s`."""
        penalty_s = min(self.penalty(peer) + self._failure_s, self._max_penalty_s)
        self._penalties[peer] = (penalty_s, self._clock())
        if len(self._penalties) > _MAX_PEERS:
            self._forget_smallest()

    def succeeded(self, peer: PeerId) -> None:
        """Forget what `peer` did before."""
        self._penalties.pop(peer, None)

    def penalty(self, peer: PeerId) -> float:
        """Seconds to add to the cost of a hop through `peer`; 0 for a peer that never failed."""
        # Planners ask in threads of their own, while the event loop forgets peers.
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
