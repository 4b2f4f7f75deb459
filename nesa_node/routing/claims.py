"""How fast nodes are: what they claim, capped by what others have measured."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from nesa_node.core.ids import PeerId
from nesa_node.topology.snapshot import NodeState

LIE = 4.0
"""A claim so much above what was measured is told to others: no busy moment explains it."""
ENOUGH = 0.5
"""Of what others say, in reporters of long standing beside the first, to believe it."""
TOLERANCE = 1.25
"""A claim may be so much above what was measured: a busy moment, a slow network."""
REMEMBERED_S = 3600.0
_MAX_PEERS = 4096


class Claims:
    """Decoding speeds of nodes as somebody measured them from outside.

    `clock` returns seconds and never goes back (`time.monotonic`).
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._measured: OrderedDict[PeerId, tuple[float, float]] = OrderedDict()

    def measured(self, peer: PeerId, tokens_per_s: float) -> None:
        """`peer` decoded so fast, through its whole span, for one session."""
        if not tokens_per_s > 0:
            raise ValueError(f"{tokens_per_s} tokens/s is no speed")
        self._measured[peer] = (tokens_per_s, self._clock())
        self._measured.move_to_end(peer)
        if len(self._measured) > _MAX_PEERS:
            self._measured.popitem(last=False)

    def unmeasurable(self, node: NodeState) -> None:
        """`node` could not be measured: each time it is believed half of what it was."""
        if node.decode_tokens_per_s > 0:
            believed = self.believed(node).decode_tokens_per_s
            self.measured(node.peer_id, believed / 2 / TOLERANCE)

    def reported(self, node: NodeState, doubt: float) -> None:
        """Others say that `node` boasts: it is believed what is no lie, for as long as if it had
        been measured here. `doubt`: how many of them, as `reputation.corroborated` counts them.
        """
        speed = node.decode_tokens_per_s
        if doubt >= ENOUGH and speed > 0 and self.age_s(node.peer_id) > REMEMBERED_S:
            self.measured(node.peer_id, speed / LIE / TOLERANCE)

    def age_s(self, peer: PeerId) -> float:
        """Since `peer` was measured; inf if it never was."""
        known = self._measured.get(peer)
        return float("inf") if known is None else self._clock() - known[1]

    def believed(self, node: NodeState) -> NodeState:
        """`node` with the speeds that can be believed: both shrink by what decoding was over."""
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
