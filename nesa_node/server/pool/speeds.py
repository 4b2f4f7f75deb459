"""How fast a pool's machines are: by their figures, and by what their nodes were seen to do."""

from __future__ import annotations

from collections.abc import Mapping

from nesa_node.core.ids import PeerId
from nesa_node.core.settings.choices import QuantType
from nesa_node.routing.placement.building import ModelShape, PoolMachine
from nesa_node.server.pool.chain_times import chain_s, fastest_chain, hop_s, time_span
from nesa_node.swarm.dht.pool_notices import AssignedSpan, Offer
from nesa_node.swarm.node import Swarm
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
        self._slowdowns: dict[tuple[PeerId, str], float] = {}

    async def measure_round_trips(self, offers: Mapping[PeerId, Offer]) -> None:
        """Ping the machines whose round trip is unknown or old, some in each round."""
        due = [peer for peer in offers if self._rtts.is_due(peer, PING_INTERVAL_S)]
        few = {peer: offers[peer].addresses for peer in due[:MAX_PINGS_PER_ROUND]}
        await self._rtts.ping_all(self._transport, few, timeout_s=PING_TIMEOUT_S)

    def hop_s(self, peer: PeerId) -> float:
        """Seconds of a hop to a machine: the round trip from here stands for all of its own."""
        return hop_s(self._rtts.rtt_ms(peer))

    def observe(
        self, peer: PeerId, offer: Offer, shape: ModelShape, quant_type: QuantType, node: NodeState
    ) -> None:
        """Compare what a machine's node measured of its span with the machine's figures."""
        kind = shape.kind(quant_type)
        if kind in offer.figures and node.decode_tokens_per_s > 0:
            figures = offer.figures[kind].weight_figures()
            work = shape.work[quant_type][node.span.start : node.span.end]
            expected_s = sum(figures.block_s(each, 1) for each in work)
            slower = 1 / node.decode_tokens_per_s / expected_s
            least, most = SLOWDOWNS
            self._slowdowns[peer, kind] = min(max(slower, least), most)

    def slowdown(self, peer: PeerId, kind: str) -> float:
        """Factor by which such weights take longer on a machine than its figures say."""
        return self._slowdowns.get((peer, kind), 1.0)

    def predict_tokens_per_s(
        self,
        shape: ModelShape,
        assigned: Mapping[PeerId, AssignedSpan],
        offers: Mapping[PeerId, Offer],
    ) -> float:
        """Tokens/s of one sequence through the fastest chain of `assigned` spans, with the client's
        head. 0 for a hole, or without figures.
        """
        spans = []
        for peer, each in assigned.items():
            figures = {
                kind: figure.weight_figures().slowed(self.slowdown(peer, kind))
                for kind, figure in offers[peer].figures.items()
            }
            machine = PoolMachine(peer, 0, figures, hop_s=self.hop_s(peer))
            spans.append(time_span(machine, shape, each.blocks, each.quant_type))
        chain = fastest_chain(spans, shape.num_blocks)
        return 1 / chain_s(chain) if chain else 0.0
