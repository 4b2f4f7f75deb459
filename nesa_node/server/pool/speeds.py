"""Times of a token and of a prompt through machines that hold spans of a model: by their figures,
and by what their nodes were seen to do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from nesa_node.core.ids import PeerId, Span
from nesa_node.core.settings.choices import PoolQuantType
from nesa_node.routing.placement.building import HOP_OVERHEAD_S, HOP_S, ModelShape, PoolMachine
from nesa_node.swarm.dht.pool_notices import AssignedSpan, Offer
from nesa_node.swarm.dht.records import NodeRecord
from nesa_node.swarm.node import Swarm
from nesa_node.topology.snapshot import NodeState

PROMPT_TOKENS = 128
"""Length of the prompt whose first token is predicted."""
CLIENT_S = 0.0025
"""Time of a token beside head and hops: the client's loop, and its way to the chain and back."""


@dataclass(frozen=True, slots=True)
class TimedSpan:
    """Blocks that a machine holds, and the seconds of one token and of a prompt through all.

    `head_s` is what the client's head would take on that machine.
    """

    peer: PeerId
    span: Span
    step_s: float
    prefill_s: float
    hop_s: float
    head_s: float = 0.0


def time_span(
    machine: PoolMachine, shape: ModelShape, span: Span, quant_type: PoolQuantType
) -> TimedSpan:
    """Times of a span by the machine's figures; NaN where it has none for such weights."""
    figures = machine.figures_for(shape, quant_type)
    step_s = prefill_s = head_s = math.nan
    if figures is not None:
        work_B = shape.work[quant_type][span.start : span.end]
        step_s = figures.wakeup_s + sum(figures.block_s(work, 1) for work in work_B)
        prefill_s = sum(figures.block_s(work, PROMPT_TOKENS) for work in work_B)
        head = machine.figures.get(shape.dtype, figures)
        head_s = head.wakeup_s + head.block_s(shape.head, 1)
    return TimedSpan(machine.peer, span, step_s, prefill_s, machine.hop_s, head_s)


def chain_s(chain: Sequence[TimedSpan], *, prefill: bool = False) -> float:
    """Seconds of one token, or of a prompt and its first token, for a client whose head is as fast
    as the chain's median machine, and which takes `CLIENT_S` itself. NaN for no chain.
    """
    if not chain:
        return math.nan
    spans_s = sum(each.prefill_s if prefill else each.step_s for each in chain)
    hops_s = sum(each.hop_s for each in chain)
    return spans_s + hops_s + median(each.head_s for each in chain) + CLIENT_S


def fastest_chain(spans: Iterable[TimedSpan], num_blocks: int) -> tuple[TimedSpan, ...]:
    """The parts of `spans` that take one token through all blocks soonest; none if one has none.

    Dynamic programming over the block at which a part ends.
    """
    known = [each for each in spans if not math.isnan(each.step_s)]
    best: list[tuple[float, tuple[TimedSpan, ...]]] = [(0.0, ())]
    for end in range(1, num_blocks + 1):
        found: tuple[float, tuple[TimedSpan, ...]] = (math.inf, ())
        for each in known:
            for start in range(each.span.start, end if end <= each.span.end else 0):
                before_s, parts = best[start]
                share = (end - start) / len(each.span)
                total_s = before_s + share * each.step_s + each.hop_s
                if total_s < found[0]:
                    part = _part(each, Span(start, end), share)
                    found = total_s, (*parts, part)
        best.append(found)
    return best[num_blocks][1] if math.isfinite(best[num_blocks][0]) else ()


def _part(whole: TimedSpan, span: Span, share: float) -> TimedSpan:
    step_s, prefill_s = share * whole.step_s, share * whole.prefill_s
    return replace(whole, span=span, step_s=step_s, prefill_s=prefill_s)


def hop_s(rtt_ms: float) -> float:
    """Time of a hop by the round trip in ms; an assumed one where that is NaN."""
    return HOP_S if math.isnan(rtt_ms) else HOP_OVERHEAD_S + 1e-3 * rtt_ms


def measured_spans(
    records: Iterable[NodeRecord], rtts_ms: Mapping[PeerId, float]
) -> tuple[TimedSpan, ...]:
    """The spans that nodes serve, by what they measured; `rtts_ms` are round trips of nodes."""
    return tuple(
        TimedSpan(
            record.signer,
            Span(*record.span),
            1 / record.decode_tokens_per_s,
            math.nan,
            hop_s(rtts_ms.get(record.signer, math.nan)),
        )
        for record in records
        if record.state == "serving" and record.decode_tokens_per_s > 0
    )


PING_INTERVAL_S = 60.0
PING_TIMEOUT_S = 2.0
MAX_PINGS_PER_ROUND = 16
SLOWDOWNS = (0.05, 1000.0)
"""Least and most times its figures that a machine may take: offers and records are untrusted."""
MIN_SERVING_S = 40.0
"""Time for which a node must have served: at its start it may have measured while another node of
its computer loaded. It measures again when it is idle, from 30 s on."""


class MachineSpeeds:
    """Round trips to machines, and how many times longer each takes than its figures say."""

    def __init__(self, swarm: Swarm) -> None:
        self._rtts, self._transport = swarm.rtts, swarm.transport
        self._slowdowns: dict[tuple[PeerId, str], float] = {}
        self._served_since: dict[PeerId, float] = {}

    async def measure_round_trips(self, offers: Mapping[PeerId, Offer]) -> None:
        """Ping the machines whose round trip is unknown or old, some in each round."""
        due = [peer for peer in offers if self._rtts.is_due(peer, PING_INTERVAL_S)]
        few = {peer: offers[peer].addresses for peer in due[:MAX_PINGS_PER_ROUND]}
        await self._rtts.ping_all(self._transport, few, timeout_s=PING_TIMEOUT_S)

    def hop_s(self, peer: PeerId) -> float:
        """Seconds of a hop to a machine: the round trip from here stands for all of its own."""
        return hop_s(self._rtts.rtt_ms(peer))

    def observe(
        self,
        peer: PeerId,
        offer: Offer,
        shape: ModelShape,
        quant_type: PoolQuantType,
        node: NodeState,
        now: float,
    ) -> None:
        """Compare what a machine's node measured of its span with the machine's figures, at `now`
        in monotonic seconds.
        """
        kind = shape.kind(quant_type)
        served_s = now - self._served_since.setdefault(node.peer_id, now)
        is_settled = served_s >= MIN_SERVING_S and node.decode_tokens_per_s > 0
        if is_settled and kind in offer.figures:
            figures = offer.figures[kind].weight_figures()
            work = shape.work[quant_type][node.span.start : node.span.end]
            expected_s = figures.wakeup_s + sum(figures.block_s(each, 1) for each in work)
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
