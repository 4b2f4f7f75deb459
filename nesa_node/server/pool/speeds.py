"""How fast a pool's machines are: by their figures, and by what their nodes were seen to do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median

from nesa_node.core.ids import PeerId, Span
from nesa_node.core.settings.choices import QuantType
from nesa_node.routing.placement.building import HOP_OVERHEAD_S, HOP_S, ModelShape
from nesa_node.swarm.dht.pool_notices import AssignedSpan, Offer
from nesa_node.swarm.node import Swarm
from nesa_node.topology.roofline import WeightFigures
from nesa_node.topology.snapshot import NodeState

PING_INTERVAL_S = 60.0
PING_TIMEOUT_S = 2.0
MAX_PINGS_PER_ROUND = 16
SLOWDOWNS = (0.05, 1000.0)
"""Least and most times its figures that a machine may take: offers and records are untrusted."""


class MachineSpeeds:
    """Round trips to machines, and how many times longer each takes than its figures say."""

    def __init__(self, swarm: Swarm) -> None:
        self._rtts, self._transport = swarm.rtts, swarm.transport
        self._slowdowns: dict[tuple[PeerId, QuantType], float] = {}

    async def measure_round_trips(self, offers: Mapping[PeerId, Offer]) -> None:
        """Ping the machines whose round trip is unknown or old, some in each round."""
        due = [peer for peer in offers if self._rtts.is_due(peer, PING_INTERVAL_S)]
        few = {peer: offers[peer].addresses for peer in due[:MAX_PINGS_PER_ROUND]}
        await self._rtts.ping_all(self._transport, few, timeout_s=PING_TIMEOUT_S)

    def hop_s(self, peer: PeerId) -> float:
        """Seconds of a hop to a machine: the round trip from here stands for all of its own."""
        rtt_ms = self._rtts.rtt_ms(peer)
        return HOP_S if math.isnan(rtt_ms) else HOP_OVERHEAD_S + 1e-3 * rtt_ms

    def observe(
        self, peer: PeerId, offer: Offer, shape: ModelShape, quant_type: QuantType, node: NodeState
    ) -> None:
        """Compare what a machine's node measured of its span with the machine's figures."""
        figures = _find_figures(offer, shape, quant_type)
        if figures is not None and node.decode_tokens_per_s > 0:
            expected_s = _step_s(figures, shape, node.span, quant_type)
            slower = 1 / node.decode_tokens_per_s / expected_s
            least, most = SLOWDOWNS
            self._slowdowns[peer, quant_type] = min(max(slower, least), most)

    def slowdown(self, peer: PeerId, quant_type: QuantType) -> float:
        """Factor by which such weights take longer on a machine than its figures say."""
        return self._slowdowns.get((peer, quant_type), 1.0)

    def corrected(self, peer: PeerId, offer: Offer) -> dict[str, WeightFigures]:
        """An offer's figures by kind of weights, with what was seen of the machine."""
        return {
            kind: each.weight_figures().slowed(self.slowdown(peer, _quant_type(kind)))
            for kind, each in offer.figures.items()
        }

    def predict_tokens_per_s(
        self,
        shape: ModelShape,
        assigned: Mapping[PeerId, AssignedSpan],
        offers: Mapping[PeerId, Offer],
    ) -> float:
        """Tokens/s of one sequence through the shortest chain of `assigned` spans, for a client
        whose head is as fast as their median machine. 0 for a hole, or without figures.
        """
        seconds, heads_s = 0.0, []
        for peer, span in shortest_chain(assigned, shape.num_blocks):
            quant_type = assigned[peer].quant_type
            figures = self.corrected(peer, offers[peer])
            kind = shape.kind(quant_type)
            if kind not in figures:
                return 0.0
            seconds += _step_s(figures[kind], shape, span, quant_type) + self.hop_s(peer)
            heads_s.append(figures.get(shape.dtype, figures[kind]).block_s(shape.head, 1))
        return 1 / (seconds + median(heads_s)) if heads_s else 0.0


def shortest_chain(
    assigned: Mapping[PeerId, AssignedSpan], num_blocks: int
) -> list[tuple[PeerId, Span]]:
    """The fewest machines that together hold all blocks, and their parts; empty for a hole."""
    chain: list[tuple[PeerId, Span]] = []
    start = 0
    while start < num_blocks:
        able = [peer for peer, each in assigned.items() if each.span[0] <= start < each.span[1]]
        if not able:
            return []
        peer = max(able, key=lambda each: assigned[each].span[1])
        chain.append((peer, Span(start, min(assigned[peer].span[1], num_blocks))))
        start = chain[-1][1].end
    return chain


def _find_figures(offer: Offer, shape: ModelShape, quant_type: QuantType) -> WeightFigures | None:
    figures = offer.figures.get(shape.kind(quant_type))
    return None if figures is None else figures.weight_figures()


def _step_s(figures: WeightFigures, shape: ModelShape, span: Span, quant_type: QuantType) -> float:
    return sum(figures.block_s(each, 1) for each in shape.work[quant_type][span.start : span.end])


def _quant_type(kind: str) -> QuantType:
    return kind if kind in ("int8", "nf4") else "none"  # type: ignore[return-value]
