"""Measurement of a span's prefill and decode throughput on this machine."""

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
"""Deadlines in seconds since the start: no further steps are run to tune the number of threads, to
time decoding, to time prefill. The minimum of each runs in any case."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens per second of one sequence through the whole measured span, without network.

    It is proportional to 1 / blocks: a part runs at `tokens_per_s * len(span) / len(part)`.
    """

    prefill_tokens_per_s: float
    decode_tokens_per_s: float


def measure_throughput(
    blocks: Blocks,
    *,
    stop: Callable[[], bool] = bool,
    clock: Callable[[], float] = time.perf_counter,
) -> Throughput:
    """Time single-token steps and prefills of `PREFILL_TOKENS` for about `MEASURING_S` seconds.

    Tunes the number of threads first. Blocks the thread. Raises `MeasuringStopped` before the next
    step once `stop` returns true.
    """
    return _Measuring(blocks, stop, clock).throughput()


class MeasuringStopped(Exception):
    """The measurement was stopped, since other work needs the device."""


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
        # The first prefill of a size is slow: it counts only if there is no time for another.
        decode_s = self._decode_s()
        prefills_s: list[float] = []
        while not prefills_s or (len(prefills_s) <= REPEATS and not self._is_late(MEASURING_S)):
            prefills_s.append(self._seconds(self._new_table(len(self._hidden_LD)), self._hidden_LD))
        return Throughput(
            prefill_tokens_per_s=len(self._hidden_LD) / median(prefills_s[1:] or prefills_s),
            decode_tokens_per_s=1 / decode_s,
        )

    def _decode_s(self) -> float:
        """Seconds of a decode step after a short prefill, which also warms up all weights."""
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
        """Seconds of one decode step, always at the same position."""
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
