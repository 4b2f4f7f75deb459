"""Measurement of a span's prefill and decode throughput on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from nesa_node.engine.cache.pages import PageTable, pages_for
from nesa_node.engine.kernels.thread_tuner import clipped_mean
from nesa_node.engine.model.blocks import ModelBlocks, RowChunk

MAX_PREFILL_TOKENS = 128
WARMUP_TOKENS = 16
MAX_DECODE_STEPS = 16
MIN_DECODE_STEPS = 3
MAX_PREFILL_REPEATS = 3
MAX_TUNING_STEPS = 128
TUNING_DEADLINE_S, DECODE_DEADLINE_S, PREFILL_DEADLINE_S = 0.6, 0.9, 1.2
"""Deadlines in seconds since the start: no further steps are run to tune the number of threads, to
time decoding, to time prefill. The minimum of each runs in any case."""


@dataclass(frozen=True, slots=True)
class SpanThroughput:
    """Tokens per second of one sequence through the whole measured span, without network.

    It is proportional to 1 / blocks: a part runs at `tokens_per_s * len(span) / len(part)`.
    """

    prefill_tokens_per_s: float
    decode_tokens_per_s: float


def measure_throughput(
    blocks: ModelBlocks,
    *,
    stop: Callable[[], bool] = bool,
    clock: Callable[[], float] = time.perf_counter,
) -> SpanThroughput:
    """Time single-token steps and prefills of `MAX_PREFILL_TOKENS` for about `PREFILL_DEADLINE_S`
    seconds.

    Tunes the number of threads first. Blocks the thread. Raises `MeasurementCancelled` before the
    next step once `stop` returns true.
    """
    return _ThroughputMeasurement(blocks, stop, clock).throughput()


class MeasurementCancelled(Exception):
    """The measurement was stopped, since other work needs the device."""


class _ThroughputMeasurement:
    def __init__(
        self, blocks: ModelBlocks, stop: Callable[[], bool], clock: Callable[[], float]
    ) -> None:
        self._blocks = blocks
        self._stop = stop
        self._clock = clock
        self._began = clock()
        generator = torch.Generator().manual_seed(0)
        shape = (min(MAX_PREFILL_TOKENS, blocks.context_length // 2), blocks.hidden_size)
        self._hidden_LD = torch.randn(shape, generator=generator)
        self._warmup_LD = self._hidden_LD[:WARMUP_TOKENS]

    def throughput(self) -> SpanThroughput:
        # The first prefill of a size is slow: it counts only if there is no time for another.
        decode_s = self._measure_decode_s()
        prefills_s: list[float] = []
        while not prefills_s or (
            len(prefills_s) <= MAX_PREFILL_REPEATS and not self._is_past(PREFILL_DEADLINE_S)
        ):
            prefills_s.append(
                self._time_step(self._new_table(len(self._hidden_LD)), self._hidden_LD)
            )
        return SpanThroughput(
            prefill_tokens_per_s=len(self._hidden_LD) / median(prefills_s[1:] or prefills_s),
            decode_tokens_per_s=1 / decode_s,
        )

    def _measure_decode_s(self) -> float:
        """Seconds of a decode step after a short prefill, which also warms up all weights."""
        table = self._new_table(len(self._warmup_LD) + 1)
        self._time_step(table, self._warmup_LD)
        for _ in range(MAX_TUNING_STEPS):
            self._time_decode_step(table)
            settled = self._blocks.threads.is_settled(1, len(self._blocks.span))
            if settled or self._is_past(TUNING_DEADLINE_S):
                break
        steps_s: list[float] = []
        while len(steps_s) < MIN_DECODE_STEPS or not (
            len(steps_s) == MAX_DECODE_STEPS or self._is_past(DECODE_DEADLINE_S)
        ):
            steps_s.append(self._time_decode_step(table))
        return clipped_mean(steps_s)

    def _time_decode_step(self, table: PageTable) -> float:
        """Seconds of one decode step, always at the same position."""
        seconds = self._time_step(table, self._hidden_LD[:1])
        table.truncate(table.length - 1)
        return seconds

    def _new_table(self, tokens: int) -> PageTable:
        table = self._blocks.new_pool(tokens).reserve(pages_for(tokens)).new_table()
        table.reserve(tokens)
        return table

    def _time_step(self, table: PageTable, hidden_LD: Tensor) -> float:
        if self._stop():
            raise MeasurementCancelled
        start = self._clock()
        table.reserve(table.length + len(hidden_LD))
        self._blocks.forward(hidden_LD, [RowChunk(table, len(hidden_LD))])
        if self._blocks.device.type == "cuda":
            torch.cuda.synchronize(self._blocks.device)
        return self._clock() - start

    def _is_past(self, deadline_s: float) -> bool:
        return self._clock() - self._began >= deadline_s
