"""Queue of one session in the scheduler: its page tables, waiting steps and outputs, and when its
next decode step is due.

T packed tokens, D hidden.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from nesa_node.compression.tensors import HiddenStates
from nesa_node.core.errors import CacheFullError, ProtocolError
from nesa_node.core.ids import PeerId, Span
from nesa_node.core.logging import get_logger
from nesa_node.engine.adapters.served_adapter import ServedAdapter
from nesa_node.engine.cache.pages import PageTable
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.server.scheduler.batch import QueuedStep, SessionBatch, take_tokens
from nesa_node.swarm.protocol.messages import Priority, Step

log = get_logger(__name__)

PRIORITIES: tuple[Priority, ...] = ("interactive", "batch", "training")
"""Most urgent first; `ScheduledSession.priority` is an index into it."""
MAX_DECODE_ROW_TOKENS = 8
"""Most tokens per row in a decode step. More than one allows speculative tokens."""
MAX_DECODE_STEP_TOKENS = 64
"""Most tokens in a decode step, all rows together; it runs in one iteration. Steps with more are
cut into chunks, as prefills are. Beams and parallel samples have one token for each row."""
DECODE_ACTIVE_S = 1.0
"""Seconds after its last decode step during which a session counts as decoding."""
OVERDUE_FACTOR = 1.25
"""A session that is away for more than this multiple of its usual gap is not waited for."""
GAP_LEARNING_RATE = 0.25
MIN_GAP_LEARNING_RATES = (0.5, 0.02)
"""Learning rates of `min_decode_gap_s` for a shorter gap and for a longer one: it follows shorter
gaps at once, longer ones slowly."""


def is_decode_step(counts: Sequence[int]) -> bool:
    """Whether a step with these tokens per row is a decode step."""
    return max(counts) <= MAX_DECODE_ROW_TOKENS and sum(counts) <= MAX_DECODE_STEP_TOKENS


@dataclass(eq=False, kw_only=True)
class ScheduledSession:
    """What the batch policy knows about one session."""

    client: PeerId
    priority: int
    """Index into `PRIORITIES`."""
    span: Span
    """Only sessions through the same blocks run in one batch."""
    is_entry_hop: bool = False
    """Whether the session enters the chain at this node."""
    queued_tokens: int = 0
    """Tokens that wait to be run."""
    has_decode_step: bool = False
    """Whether exactly one decode step waits, and nothing else."""
    waiting_since: float = 0.0
    """Arrival time of the oldest waiting step."""
    prefill_started: bool = False
    """Whether a prefill step ran since the last decode step: what waits is a later chunk of the
    same prompt."""
    paused: bool = False
    """Whether the session must not be run now."""
    scheduled_at: float = -math.inf
    decoded_at: float = -math.inf
    previous_decoded_at: float = -math.inf
    """Time of the decode step before the last."""
    last_decode_tokens: int = 0
    """Tokens of the last decode step."""
    decode_gap_s: float | None = None
    """Mean time from a decode step to the arrival of the next."""
    min_decode_gap_s: float | None = None
    """The same without contention: a prefill that delays the session at other nodes must not let
    prefills here take longer, or the delays would reinforce each other."""
    num_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_blocks = len(self.span)

    @property
    def is_runnable(self) -> bool:
        return self.queued_tokens > 0 and not self.paused

    @property
    def next_decode_at(self) -> float:
        """When the next decode step is expected."""
        return self.decoded_at + (self.decode_gap_s or 0.0)

    @property
    def earliest_decode_at(self) -> float:
        """Earliest time at which the next decode step may arrive."""
        return self.decoded_at + (self.min_decode_gap_s or 0.0)

    @property
    def overdue_at(self) -> float:
        """Time after which the next decode step is no longer waited for."""
        return self.decoded_at + OVERDUE_FACTOR * (self.decode_gap_s or 0.0)

    @property
    def recent_decode_times(self) -> tuple[float, ...]:
        """Times of the last two decode steps. Sessions with a time in common ran in one batch."""
        return tuple(filter(math.isfinite, (self.decoded_at, self.previous_decoded_at)))

    def is_decode_expected(self, now: float) -> bool:
        """Whether its next decode step is expected and not overdue."""
        return not self.is_runnable and self.overdue_at > now

    def is_decoding(self, now: float) -> bool:
        """Whether a decode step waits, or is likely within `DECODE_ACTIVE_S`."""
        return self.has_decode_step if self.is_runnable else now - self.decoded_at < DECODE_ACTIVE_S

    def set_default_gap(self, decode_gap_s: float | None) -> None:
        """Set the gap to that of comparable sessions, if none was measured yet."""
        if self.decode_gap_s is None:
            self.decode_gap_s = self.min_decode_gap_s = decode_gap_s

    def record_decode(self, now: float) -> None:
        """Record that its decode step runs at `now`, and learn the gap before it."""
        gap_s = self.waiting_since - self.decoded_at
        if gap_s < DECODE_ACTIVE_S:
            if self.decode_gap_s is None or self.min_decode_gap_s is None:
                self.decode_gap_s = self.min_decode_gap_s = gap_s
            self.decode_gap_s += GAP_LEARNING_RATE * (gap_s - self.decode_gap_s)
            self.min_decode_gap_s += MIN_GAP_LEARNING_RATES[gap_s > self.min_decode_gap_s] * (
                gap_s - self.min_decode_gap_s
            )
        self.previous_decoded_at, self.decoded_at, self.last_decode_tokens = (
            self.decoded_at,
            now,
            self.queued_tokens,
        )
        self.prefill_started = False


class FinishedStep(NamedTuple):
    """A step with its input and output [T, D]."""

    step: Step
    hidden: HiddenStates
    output: HiddenStates


class SessionQueue(ScheduledSession):
    """Queue of one session. Everything here runs on the event loop.

    The tables belong to the running iteration, if this session is in it; other code may change them
    only after `clear_and_pause` and `wait_until_idle`. All rows use `adapter`.
    """

    def __init__(
        self,
        tables: Sequence[PageTable],
        blocks: ModelBlocks,
        *,
        client: PeerId,
        priority: int,
        dtype: torch.dtype,
        session: str = "",
        adapter: ServedAdapter | None = None,
    ) -> None:
        """`dtype` is the outputs' dtype."""
        super().__init__(client=client, priority=priority, span=blocks.span)
        self.tables = tables
        self.blocks = blocks
        self.dtype = dtype
        self._adapter = adapter
        self._session = session
        self.end_positions: dict[int, int] = {}
        """Where the queued tokens of a row end."""
        self._steps: deque[QueuedStep] = deque()
        self._results: deque[FinishedStep | ProtocolError] = deque()
        self._has_results = asyncio.Event()
        """Set while there are results. After waiting for it, check again: another task may have
        taken them."""
        self._batch: SessionBatch | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def backlog(self) -> int:
        """Steps that are not done, plus outputs that were not taken."""
        return len(self._steps) + len(self._results)

    def append(self, step: Step, hidden: HiddenStates) -> None:
        """Queue a step [T, D] for `Scheduler.submit`."""
        self._steps.append(QueuedStep(hidden, self.dtype, step=step, arrived_at=time.monotonic()))
        for row_slice in step.rows:
            self.end_positions[row_slice.row] = row_slice.position + row_slice.count
        self._update_counts()

    @property
    def next_output_bytes(self) -> int | None:
        """Size of the next output in bytes; None without one."""
        result = self._results[0] if self._results else None
        return None if result is None or isinstance(result, ProtocolError) else result.output.nbytes

    @property
    def has_failed(self) -> bool:
        """Whether `wait_for_output` will raise."""
        return bool(self._results) and isinstance(self._results[-1], ProtocolError)

    def wake_receiver(self) -> None:
        """Wake the tasks that wait for outputs, if there are any outputs."""
        if self._results:
            self._has_results.set()

    async def wait_for_output(self) -> None:
        """Return when an output is ready and announced. Another task may take it first.

        Raises `ProtocolError` if the step could not be run; later steps were dropped.
        """
        while not self._results:
            await self._has_results.wait()
        if isinstance(self._results[0], ProtocolError):
            raise self._results[0]

    def take_output(self) -> FinishedStep | None:
        """Return the next finished step; None without one."""
        if self.next_output_bytes is None:
            return None
        result = self._results.popleft()
        assert not isinstance(result, ProtocolError)
        if not self._results:
            self._has_results.clear()
        return result

    def clear_and_pause(self) -> None:
        """Drop all queued steps and outputs. Steps queued later wait for `Scheduler.resume`."""
        self._batch = None
        self._clear_steps()
        self._results.clear()
        self._has_results.clear()
        self.paused = True

    async def wait_until_idle(self) -> None:
        """Wait until no iteration uses the tables, even when cancelled. Call `clear_and_pause`
        first."""
        cancelled: asyncio.CancelledError | None = None
        while not self._idle.is_set():
            try:
                await self._idle.wait()
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    def start_iteration(self, tokens: int) -> SessionBatch:
        """Take `tokens` from the queue for an iteration."""
        batch = self._batch = take_tokens(self._steps, self.tables, tokens, self._adapter)
        self._idle.clear()
        return batch

    def finish_iteration(self) -> None:
        """Mark the iteration as over, with or without success."""
        self._idle.set()

    def store_outputs(self, batch: SessionBatch) -> None:
        """Store what an iteration completed, if not dropped meanwhile. Does not wake waiters."""
        if self._batch is not batch:
            return
        self._batch = None
        if batch.error is not None:
            self.fail(batch.error)
            return
        for queued in batch.completed_steps:
            self._steps.popleft()
            assert queued.output is not None
            self._results.append(FinishedStep(queued.step, queued.hidden, queued.output))
        self._update_counts()

    def fail(self, error: Exception) -> None:
        """Drop all queued steps and let `wait_for_output` raise."""
        code = "cache_full" if isinstance(error, CacheFullError) else "not_computed"
        # Logged from the scheduler's task, which has no session bound. A full cache is not a bug.
        mistake = error if code == "not_computed" else None
        log.error(
            "step_failed", session=self._session, client=self.client, code=code, exc_info=mistake
        )
        text = str(error) if code == "cache_full" else f"this node failed: {type(error).__name__}"
        self._clear_steps()
        self.append_error(ProtocolError(code, text))

    def append_error(self, error: ProtocolError) -> None:
        """Let `wait_for_output` raise `error` after the outputs that are ready."""
        self._results.append(error)
        self.wake_receiver()

    def _clear_steps(self) -> None:
        self._steps.clear()
        self._update_counts()

    def _update_counts(self) -> None:
        self.queued_tokens = sum(queued.remaining_tokens for queued in self._steps)
        if not self._steps:
            self.end_positions.clear()
            return
        head = self._steps[0]
        whole = len(self._steps) == 1 and not head.scheduled_tokens
        self.has_decode_step = whole and is_decode_step(
            [row_slice.count for row_slice in head.step.rows]
        )
        self.waiting_since = head.arrived_at
