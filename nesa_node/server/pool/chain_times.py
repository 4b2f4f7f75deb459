"""Times of a token and of a prompt through machines that hold spans of a model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from nesa_node.core.ids import PeerId, Span
from nesa_node.core.settings.choices import QuantType
from nesa_node.routing.placement.building import HOP_OVERHEAD_S, HOP_S, ModelShape, PoolMachine
from nesa_node.swarm.dht.records import NodeRecord

PROMPT_TOKENS = 128
"""Length of the prompt whose first token is predicted."""


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
    machine: PoolMachine, shape: ModelShape, span: Span, quant_type: QuantType
) -> TimedSpan:
    """Times of a span by the machine's figures; NaN where it has none for such weights."""
    figures = machine.figures_for(shape, quant_type)
    step_s = prefill_s = head_s = math.nan
    if figures is not None:
        work_B = shape.work[quant_type][span.start : span.end]
        step_s = sum(figures.block_s(work, 1) for work in work_B)
        prefill_s = sum(figures.block_s(work, PROMPT_TOKENS) for work in work_B)
        head_s = machine.figures.get(shape.dtype, figures).block_s(shape.head, 1)
    return TimedSpan(machine.peer, span, step_s, prefill_s, machine.hop_s, head_s)


def chain_s(chain: Sequence[TimedSpan], *, prefill: bool = False) -> float:
    """Seconds of one token, or of a prompt and its first token, for a client whose head is as fast
    as the chain's median machine. NaN for no chain.
    """
    if not chain:
        return math.nan
    spans_s = sum(each.prefill_s if prefill else each.step_s for each in chain)
    return spans_s + sum(each.hop_s for each in chain) + median(each.head_s for each in chain)


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
