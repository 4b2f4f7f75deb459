"""How fast a span runs here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from nesa_node.engine.blocks import Blocks, Run
from nesa_node.engine.pages import PageTable, pages_for
from nesa_node.engine.thread_tuner import typical

PREFILL_TOKENS = 128
WARM_TOKENS = 16
DECODE_TOKENS = 16
LEAST_STEPS = 3
REPEATS = 3
MOST_TUNING_STEPS = 128
TUNING_S, DECODE_S, MEASURING_S = 0.6, 0.9, 1.2
"""Since the beginning: after so long no more steps are run to find the number of threads, to time a
decode, and to time a prefill, but for the few without which nothing is known."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens per second of one sequence through the whole measured span, without any network.

    Part of the span is faster in proportion: `tokens_per_s * len(span) / len(part)`.
    """

    prefill_tokens_per_s: float
    decode_tokens_per_s: float


def measure_throughput(
    blocks: Blocks,
    *,
    stop: Callable[[], bool] = bool,
    clock: Callable[[], float] = time.perf_counter,
) -> Throughput:
    """Time steps of one token and prefills of `PREFILL_TOKENS`, as long as `MEASURING_S` allows.

    Finds out before on how many threads they run fastest. Blocks the thread. Raises
    `MeasuringStopped` after the step in which `stop` says so.
    """
    return _Measuring(blocks, stop, clock).throughput()


class MeasuringStopped(Exception):
    """Something else needs the device."""


class _Measuring:
    def __init__(
        self, blocks: Blocks, stop: Callable[[], bool], clock: Callable[[], float]
    ) -> None:
        self._blocks = blocks
        self._stop = stop
        self._clock = clock
        self._began = clock()
        generator = torch.Generator().manual_seed(0)
        shape = (min(PREFILL_TOKENS, blocks.context_length // 2), blocks.hidden_size)
        self._hidden_LD = torch.randn(shape, generator=generator)
        self._warm_LD = self._hidden_LD[:WARM_TOKENS]

    def throughput(self) -> Throughput:
        # The first prefill of a size is a slow one: it counts where there is no time for another.
        decode_s = self._decode_s()
        prefills_s: list[float] = []
        while not prefills_s or (len(prefills_s) <= REPEATS and not self._is_late(MEASURING_S)):
            prefills_s.append(self._seconds(self._new_table(len(self._hidden_LD)), self._hidden_LD))
        return Throughput(
            prefill_tokens_per_s=len(self._hidden_LD) / median(prefills_s[1:] or prefills_s),
            decode_tokens_per_s=1 / decode_s,
        )

    def _decode_s(self) -> float:
        """What a step takes after a short prefill, which also warms all of the weights."""
        table = self._new_table(len(self._warm_LD) + 1)
        self._seconds(table, self._warm_LD)
        for _ in range(MOST_TUNING_STEPS):
            self._step_s(table)
            settled = self._blocks.threads.is_settled(1, len(self._blocks.span))
            if settled or self._is_late(TUNING_S):
                break
        steps_s: list[float] = []
        while len(steps_s) < LEAST_STEPS or not (
            len(steps_s) == DECODE_TOKENS or self._is_late(DECODE_S)
        ):
            steps_s.append(self._step_s(table))
        return typical(steps_s)

    def _step_s(self, table: PageTable) -> float:
        """Of one token, each time at the same position."""
        seconds = self._seconds(table, self._hidden_LD[:1])
        table.truncate(table.length - 1)
        return seconds

    def _new_table(self, tokens: int) -> PageTable:
        table = self._blocks.new_pool(tokens).promise(pages_for(tokens)).new_table()
        table.reserve(tokens)
        return table

    def _seconds(self, table: PageTable, hidden_LD: Tensor) -> float:
        if self._stop():
            raise MeasuringStopped
        start = self._clock()
        table.reserve(table.length + len(hidden_LD))
        self._blocks.forward(hidden_LD, [Run(table, len(hidden_LD))])
        if self._blocks.device.type == "cuda":
            torch.cuda.synchronize(self._blocks.device)
        return self._clock() - start

    def _is_late(self, most_s: float) -> bool:
        return self._clock() - self._began >= most_s
