"""Parts of a model that run in the client: embedding, final norm and head, with batching.

L tokens of one row, R rows of one token each, T packed tokens, D hidden, V vocabulary.

Batching of head computations across threads: one thread computes for all that wait.

T packed tokens, D hidden, V vocabulary.

Batched choice of greedy next tokens for all sessions of an event loop.

T packed tokens, R rows of one token each, D hidden, V vocabulary.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nesa_node.client.model.generation_options import argmax_allowed
from nesa_node.engine.model.embedder_and_head import Embedder


@dataclass(frozen=True, slots=True)
class EmbeddingAndHead:
    """Embedding, final norm and head in `dtype` on `device`. Thread-safe."""

    embedder: Embedder
    head: Callable[[torch.Tensor], torch.Tensor]
    """Logits [T, V] of the last block's output [T, D]."""
    final_norm: Callable[[torch.Tensor], torch.Tensor]
    """Final norm alone: the head's input [T, D] of the last block's output [T, D]."""
    dtype: torch.dtype
    device: torch.device
    hidden_size: int
    lm_head: torch.nn.Linear
    """The head's matrix as a torch module."""

    def embed(self, row_ids: Sequence[torch.Tensor], positions: Sequence[int]) -> torch.Tensor:
        """Embed each row's ids [L] (int64) from its position on; hidden states [T, D] by row."""
        rows = [
            self.embedder(ids_L, position)
            for ids_L, position in zip(row_ids, positions, strict=True)
            if ids_L.numel()
        ]
        if not rows:
            return torch.empty((0, self.hidden_size), dtype=self.dtype, device=self.device)
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def embed_one_per_row(self, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Embed one token of each of R rows at its position; hidden states [R, D]."""
        return self.embedder.embed_rows(
            torch.tensor(tokens, device=self.device), torch.tensor(positions, device=self.device)
        )


MAX_SHARED_TOKENS = 64
"""Inputs above this many tokens are computed alone: callers with one token would wait for them."""
MAX_BATCH_TOKENS = 256
"""Largest batch, in tokens, so that its logits fit in memory."""
GATHER_PAUSE_FRACTION = 0.1
"""Wait for further callers, as a fraction of the compute time. Outputs that a node batched arrive
within some tenths of a millisecond."""
MAX_GATHER_FRACTION = 1.0
"""Upper bound of all these waits, as a fraction of the compute time: batching saves at most one
computation."""
CONCURRENCY_WINDOW_S = 1.0
"""Seconds after a change of thread in which concurrent callers are expected."""


class _HeadCall:
    """One caller's input, and its result or error."""

    def __init__(self, hidden_TD: torch.Tensor) -> None:
        self.hidden_TD = hidden_TD
        self.result_TV: torch.Tensor | None = None
        self.error: Exception | None = None
        self.is_leader = False
        self._wake = threading.Lock()
        self._wake.acquire()

    def wait(self) -> None:
        self._wake.acquire()

    def wake(self) -> None:
        self._wake.release()


class HeadBatcher:
    """Batched version of `compute` ([T, D] -> [T, V], row by row) for any number of threads.

    While one thread computes, inputs of the rest queue up; the first of these becomes the next
    leader and computes all of them together. An error is raised only in the caller that caused it.
    Results may differ in their last bits from those of `compute` alone, as they do with the number
    of rows.
    """

    def __init__(self, compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._compute = compute
        self._guard = threading.Lock()
        self._computing = False
        self._waiting: list[_HeadCall] = []
        self._compute_s = 0.0
        self._expected_calls = 0
        """Calls in the previous burst, which ended when the queue was empty."""
        self._burst_calls = 0
        self._last_thread = 0
        self._concurrent_until = 0.0

    def __call__(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Raises what `compute` raises. The result may share memory with other callers' results."""
        if len(hidden_TD) > MAX_SHARED_TOKENS:
            return self._compute(hidden_TD)
        call = _HeadCall(hidden_TD)
        with self._guard:
            call.is_leader = not self._computing
            self._computing = True
            if call.is_leader:
                self._expected_calls, self._burst_calls = self._burst_calls, 0
            else:
                self._waiting.append(call)
            has_company = self._has_concurrent_callers()
        if not call.is_leader:
            self._wait_for_result(call)
        elif has_company:
            self._wait_for_calls()
        if call.is_leader:
            self._compute_batch(call)
        if call.error is not None:
            raise call.error
        assert call.result_TV is not None
        return call.result_TV

    def _has_concurrent_callers(self) -> bool:
        """Whether different threads have called within the last `CONCURRENCY_WINDOW_S` seconds."""
        now, thread = time.monotonic(), threading.get_ident()
        if thread != self._last_thread:
            if self._last_thread:
                self._concurrent_until = now + CONCURRENCY_WINDOW_S
            self._last_thread = thread
        return now < self._concurrent_until

    def _wait_for_calls(self) -> None:
        try:
            pause_s, until = (
                GATHER_PAUSE_FRACTION * self._compute_s,
                time.monotonic() + MAX_GATHER_FRACTION * self._compute_s,
            )
            seen = -1
            while seen < len(self._waiting) < self._expected_calls - 1 and time.monotonic() < until:
                seen = len(self._waiting)
                time.sleep(pause_s)
        except BaseException:
            # Interrupted, as in `_wait_for_result`.
            self._wake_next_leader()
            raise

    def _wait_for_result(self, call: _HeadCall) -> None:
        try:
            call.wait()
        except BaseException:
            # Interrupted: another thread must lead instead.
            with self._guard:
                if call in self._waiting:
                    self._waiting.remove(call)
            if call.is_leader:
                self._wake_next_leader()
            raise

    def _compute_batch(self, call: _HeadCall) -> None:
        calls, tokens = [call], len(call.hidden_TD)
        with self._guard:
            while self._waiting:
                tokens += len(self._waiting[0].hidden_TD)
                if tokens > MAX_BATCH_TOKENS:
                    break
                calls.append(self._waiting.pop(0))
        started = time.monotonic()
        try:
            _compute_all(self._compute, calls)
            self._compute_s = time.monotonic() - started
        finally:
            # If this thread was interrupted, its followers have no result and queue up again.
            undone = [c for c in calls[1:] if c.result_TV is None and c.error is None]
            with self._guard:
                self._burst_calls += len(calls) - len(undone)
                self._waiting[:0] = undone
            self._wake_next_leader()
            for other in calls[1:]:
                if other not in undone:
                    other.wake()

    def _wake_next_leader(self) -> None:
        """Make the first waiting thread the leader."""
        with self._guard:
            if not self._waiting:
                self._computing = False
                return
            following = self._waiting.pop(0)
            following.is_leader = True
        following.wake()


def _compute_all(
    compute: Callable[[torch.Tensor], torch.Tensor], calls: Sequence[_HeadCall]
) -> None:
    if len(calls) > 1:
        try:
            together_TV = compute(torch.cat([call.hidden_TD for call in calls]))
        except Exception:
            together_TV = None  # one input is at fault: computing each alone finds it
        if together_TV is not None:
            parts = torch.split(together_TV, [len(call.hidden_TD) for call in calls])
            for call, part_TV in zip(calls, parts, strict=True):
                call.result_TV = part_TV
            return
    for call in calls:
        try:
            call.result_TV = compute(call.hidden_TD)
        except Exception as error:
            call.error = error


ARRIVAL_GAP_FRACTION = 0.25
"""Wait for each further call while fewer are queued than in recent bursts, as a fraction of the
compute time: batching saves at most one computation."""


@dataclass(frozen=True, slots=True)
class NextToken:
    """A token, and its embedding [1, D] if a position for it was given."""

    token: int
    hidden_1D: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class _NextTokenCall:
    hidden_1D: torch.Tensor
    position: int | None
    banned: frozenset[int]
    chosen: asyncio.Future[NextToken]


class NextTokenBatcher:
    """Final norm, head, argmax and embedding, batched over the sessions of one event loop.

    Outputs that a node batched arrive within a millisecond: the first waits briefly for the rest.
    Computed in a worker thread.
    """

    def __init__(self, ends: EmbeddingAndHead) -> None:
        self._ends = ends
        self._waiting: list[_NextTokenCall] = []
        self._task: asyncio.Task[None] | None = None
        self._compute_s = 0.0
        self._arrived = asyncio.Event()
        self._burst_sizes = deque([0, 0], maxlen=2)
        """Sizes of the last two bursts: sessions form one microbatch or two."""

    async def choose_next(
        self, hidden_1D: torch.Tensor, position: int | None, banned: frozenset[int] = frozenset()
    ) -> NextToken:
        """Choose the token that follows the last block's output [1, D], excluding `banned`.

        Embeds it at `position` unless that is None. Raises what head and embedding raise.
        """
        loop = asyncio.get_running_loop()
        call = _NextTokenCall(hidden_1D, position, banned, loop.create_future())
        self._waiting.append(call)
        self._arrived.set()
        if self._task is None:
            self._task = loop.create_task(self._run_batches(), name="next-tokens")
        try:
            return await call.chosen
        finally:
            if call in self._waiting:
                self._waiting.remove(call)

    async def _run_batches(self) -> None:
        """Compute batches until no call waits."""
        came = 0
        try:
            while self._waiting:
                await self._wait_for_calls(max(self._burst_sizes) - came)
                calls = self._waiting[:MAX_SHARED_TOKENS]
                del self._waiting[: len(calls)]
                came += len(calls)
                began = time.monotonic()
                results = await asyncio.to_thread(self._choose_or_errors, calls)
                self._compute_s = time.monotonic() - began
                for call, result in zip(calls, results, strict=True):
                    _resolve(call.chosen, result)
        finally:
            self._burst_sizes.append(came)
            self._task = None

    async def _wait_for_calls(self, expected: int) -> None:
        """Wait until `expected` calls are queued, or no further one arrives in time."""
        until = time.monotonic() + MAX_GATHER_FRACTION * self._compute_s
        while len(self._waiting) < expected and (left_s := until - time.monotonic()) > 0:
            self._arrived.clear()
            try:
                async with asyncio.timeout(min(left_s, ARRIVAL_GAP_FRACTION * self._compute_s)):
                    await self._arrived.wait()
            except TimeoutError:
                return

    def _choose_or_errors(self, calls: Sequence[_NextTokenCall]) -> Sequence[NextToken | Exception]:
        """In the worker thread. If the batch fails, each call is computed alone to find the one at
        fault.
        """
        try:
            return self._choose_batch(calls)
        except Exception as error:
            if len(calls) == 1:
                return [error]
            return [self._choose_or_errors([call])[0] for call in calls]

    @torch.inference_mode()
    def _choose_batch(self, calls: Sequence[_NextTokenCall]) -> Sequence[NextToken]:
        logits_RV = self._ends.head(torch.cat([call.hidden_1D for call in calls]))
        tokens = [
            argmax_allowed(scores_V, call.banned)
            for scores_V, call in zip(logits_RV, calls, strict=True)
        ]
        positions = [0 if call.position is None else call.position for call in calls]
        hidden_RD = self._ends.embed_one_per_row(tokens, positions)
        return [
            NextToken(token, None if call.position is None else hidden_1D)
            for call, token, hidden_1D in zip(calls, tokens, torch.split(hidden_RD, 1), strict=True)
        ]


def _resolve(future: asyncio.Future[NextToken], result: NextToken | Exception) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
