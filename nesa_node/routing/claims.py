"""Announced speeds of nodes, capped by measurements from outside."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from nesa_node.core.ids import PeerId
from nesa_node.topology.snapshot import NodeState

LIE = 4.0
"""Claims above this multiple of the measured speed are reported: load alone cannot explain it."""
ENOUGH = 0.5
"""Corroboration needed to act on reports, in reporters of full standing beside the first."""
TOLERANCE = 1.25
"""Claims up to this multiple of the measured speed are accepted: load and network vary."""
REMEMBERED_S = 3600.0
"""Seconds for which a measurement caps a claim."""
_MAX_PEERS = 4096


class Claims:
    """Decode speeds of nodes measured from outside, with which their claims are capped.

    `clock` returns monotonic seconds (`time.monotonic`).
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._measured: OrderedDict[PeerId, tuple[float, float]] = OrderedDict()

    def measured(self, peer: PeerId, tokens_per_s: float) -> None:
        """Record the decode speed of `peer` through its whole span, for one session."""
        if not tokens_per_s > 0:
            raise ValueError(f"{tokens_per_s} tokens/s is no speed")
        self._measured[peer] = (tokens_per_s, self._clock())
        self._measured.move_to_end(peer)
        if len(self._measured) > _MAX_PEERS:
            self._measured.popitem(last=False)

    def unmeasurable(self, node: NodeState) -> None:
        """Halve the accepted speed of `node`, which could not be measured."""
        if node.decode_tokens_per_s > 0:
            believed = self.believed(node).decode_tokens_per_s
            self.measured(node.peer_id, believed / 2 / TOLERANCE)

    def reported(self, node: NodeState, doubt: float) -> None:
        """Cap the speed of `node`, which peers report as overstated, as if measured here.

        The cap is the claim divided by `LIE`. `doubt`: weight of the reports, as
        `reputation.corroborated` counts it; below `ENOUGH` nothing changes.
        """
        speed = node.decode_tokens_per_s
        if doubt >= ENOUGH and speed > 0 and self.age_s(node.peer_id) > REMEMBERED_S:
            self.measured(node.peer_id, speed / LIE / TOLERANCE)

    def age_s(self, peer: PeerId) -> float:
        """Seconds since `peer` was measured; inf if never."""
        known = self._measured.get(peer)
        return float("inf") if known is None else self._clock() - known[1]

    def believed(self, node: NodeState) -> NodeState:
        """`node` with capped speeds: prefill shrinks by the same ratio as decode."""
        if self.age_s(node.peer_id) > REMEMBERED_S or node.decode_tokens_per_s <= 0:
            return node
        most = TOLERANCE * self._measured[node.peer_id][0]
        share = min(most / node.decode_tokens_per_s, 1.0)
        if share == 1.0:
            return node
        return replace(
            node,
            decode_tokens_per_s=share * node.decode_tokens_per_s,
            prefill_tokens_per_s=share * node.prefill_tokens_per_s,
        )
