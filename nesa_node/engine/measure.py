"""How fast a span runs here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from nesa_node.engine.blocks import Blocks, Run
from nesa_node.engine.pages import pages_for

PREFILL_TOKENS = 128
DECODE_TOKENS = 16
REPEATS = 3


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens per second of one sequence through the whole measured span, without any network.

    Part of the span is faster in proportion: `tokens_per_s * len(span) / len(part)`.
    """

    prefill_tokens_per_s: float
    decode_tokens_per_s: float


def measure_throughput(
    blocks: Blocks, *, clock: Callable[[], float] = time.perf_counter
) -> Throughput:
    """Time a prefill of `PREFILL_TOKENS` and steps of one token after it. Blocks for a moment.

    The medians of `REPEATS` rounds, after one to warm up.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (min(PREFILL_TOKENS, blocks.context_length // 2), blocks.hidden_size)
    hidden_LD = torch.randn(shape, generator=generator)
    rounds = [_round(blocks, hidden_LD, clock) for _ in range(REPEATS + 1)][1:]
    return Throughput(
        prefill_tokens_per_s=len(hidden_LD) / median(prefill for prefill, _ in rounds),
        decode_tokens_per_s=1 / median(decode for _, decode in rounds),
    )


def _round(blocks: Blocks, hidden_LD: Tensor, clock: Callable[[], float]) -> tuple[float, float]:
    tokens = len(hidden_LD) + DECODE_TOKENS
    table = blocks.new_pool(tokens).promise(pages_for(tokens)).new_table()
    table.reserve(tokens)
    start = clock()
    blocks.forward(hidden_LD, [Run(table, len(hidden_LD))])
    _finish(blocks)
    middle = clock()
    for index in range(DECODE_TOKENS):
        row = index % len(hidden_LD)
        blocks.forward(hidden_LD[row : row + 1], [Run(table, 1)])
    _finish(blocks)
    return middle - start, (clock() - middle) / DECODE_TOKENS


def _finish(blocks: Blocks) -> None:
    if blocks.device.type == "cuda":
        torch.cuda.synchronize(blocks.device)
