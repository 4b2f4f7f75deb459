"""Times of a token and of a prompt through machines that hold spans of a model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nesa_node.core.ids import PeerId, Span
from nesa_node.routing.placement.building import HOP_OVERHEAD_S, HOP_S
from nesa_node.swarm.dht.records import NodeRecord


@dataclass(frozen=True, slots=True)
class TimedSpan:
    """Blocks that a machine holds, and the seconds of one token and of a prompt through all."""

    peer: PeerId
    span: Span
    step_s: float
    prefill_s: float
    hop_s: float


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
    return TimedSpan(whole.peer, span, share * whole.step_s, share * whole.prefill_s, whole.hop_s)


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
