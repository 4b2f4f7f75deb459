"""Parts of a model that run in the client: embedding, final norm and head, with batching.

L tokens of one row, R rows of one token each, T packed tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from nesa_node.core.settings.choices import ClientQuantType
from nesa_node.engine.model.embedder_and_head import Embedder

MAX_SHARED_TOKENS = 64
"""Inputs above this many tokens are computed alone: callers with one token would wait for them."""
MAX_BATCH_TOKENS = 256
"""Largest batch, in tokens, so that its logits fit in memory."""
ARRIVAL_GAP_FRACTION = 0.25
"""Wait for each further call while fewer are queued than in recent bursts, as a fraction of the
compute time. Outputs that a node batched arrive within a millisecond."""
MAX_GATHER_FRACTION = 1.0
"""Upper bound of all these waits, as a fraction of the compute time: batching saves at most one
computation."""


@dataclass(frozen=True, slots=True)
class EmbeddingAndHead:
    """Embedding, final norm and head in `dtype` on `device`. Thread-safe."""

    embedder: Embedder
    head: HeadBatcher
    """Logits [T, V] of the last block's output [T, D], batched across sessions."""
    final_norm: Callable[[torch.Tensor], torch.Tensor]
    """Final norm alone: the head's input [T, D] of the last block's output [T, D]."""
    dtype: torch.dtype
    quant_type: ClientQuantType
    """How the matrices are held."""
    device: torch.device
    hidden_size: int
    lm_head: torch.nn.Module
    """The head's matrix as a torch module."""
    logits_with_gradients: Callable[[torch.Tensor], torch.Tensor]
    """Logits [T, V] of the last block's output [T, D], through which gradients reach it."""

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


@dataclass(frozen=True, slots=True)
class NextToken:
    """A token, and its embedding [1, D] if a position for it was given."""

    token: int
    hidden_1D: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class _LogitsCall:
    hidden_TD: torch.Tensor
    done: Future[torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _NextTokenCall:
    hidden_TD: torch.Tensor
    """One token."""
    position: int | None
    banned: frozenset[int]
    done: asyncio.Future[NextToken]


_HeadCall = _LogitsCall | _NextTokenCall
_HeadResult = torch.Tensor | NextToken | Exception


class HeadBatcher:
    """Batched version of `compute` ([T, D] -> [T, V], row by row) for all sessions of a model.

    Threads call it for logits, coroutines call `choose_next`. A thread that is alone computes by
    itself; otherwise calls queue up for one worker thread, which computes them together: one of the
    loop's executor if the first call is a coroutine's. The first of a burst waits briefly for as
    many calls as recent bursts had. An error is raised only in the caller that caused it. Results
    may differ in their last bits from those of `compute` alone, as they do with the number of rows.
    """

    def __init__(
        self,
        compute: Callable[[torch.Tensor], torch.Tensor],
        embed_rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        """`embed_rows` embeds ids [R] at positions [R]."""
        self._compute = compute
        self._embed_rows = embed_rows
        self._arrived = threading.Condition()
        self._waiting: list[_HeadCall] = []
        self._computing = False
        self._compute_s = 0.0
        self._burst_sizes = deque([0, 0], maxlen=2)
        """Calls in the last two bursts, which end when no call waits: sessions form one microbatch
        or two."""

    def __call__(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Raises what `compute` raises. The result may share memory with other callers' results."""
        if len(hidden_TD) > MAX_SHARED_TOKENS:
            return self._compute(hidden_TD)
        with self._arrived:
            if not self._computing and max(self._burst_sizes) <= 1:
                self._computing, call = True, None
            else:
                call = _LogitsCall(hidden_TD, Future())
                if self._queue(call):
                    self._start_thread(0)
        if call is None:
            return self._compute_alone(hidden_TD)
        try:
            return call.done.result()
        finally:
            self._withdraw(call)
            del call  # it refers to the raised error, and its traceback to this frame

    def compute(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """As a call, but at once and in this thread, which waits for no other caller."""
        return self._compute(hidden_TD)

    async def choose_next(
        self, hidden_1D: torch.Tensor, position: int | None, banned: frozenset[int] = frozenset()
    ) -> NextToken:
        """Choose the token that follows the last block's output [1, D], excluding `banned`.

        Embeds it at `position` unless that is None. Raises what head and embedding raise.
        """
        loop = asyncio.get_running_loop()
        call = _NextTokenCall(hidden_1D, position, banned, loop.create_future())
        if self._queue(call):
            # Once the loop's other sessions with an output have queued their calls.
            loop.call_soon(loop.run_in_executor, None, self._run_batches, 0)
        try:
            return await call.done
        finally:
            self._withdraw(call)

    def _queue(self, call: _HeadCall) -> bool:
        """Queue a call; return whether the caller has to start the worker."""
        with self._arrived:
            self._waiting.append(call)
            self._arrived.notify()
            was_idle, self._computing = not self._computing, True
            return was_idle

    def _withdraw(self, call: _HeadCall) -> None:
        """Remove the call of an interrupted or cancelled caller."""
        with self._arrived:
            if call in self._waiting:
                self._waiting.remove(call)

    def _compute_alone(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        began = time.monotonic()
        try:
            return self._compute(hidden_TD)
        finally:
            self._compute_s = time.monotonic() - began
            with self._arrived:
                if self._waiting:
                    self._start_thread(1)
                else:
                    self._end_burst(1)

    def _start_thread(self, came: int) -> None:
        """Compute the rest of a burst in a thread of its own, which ends with the burst."""
        threading.Thread(target=self._run_batches, args=(came,), name="nesa-head").start()

    def _run_batches(self, came: int) -> None:
        """In a worker thread: compute batches until no call waits. `came`: calls in the burst."""
        while calls := self._take_batch(came):
            came += len(calls)
            began = time.monotonic()
            results = self._compute_or_errors(calls)
            self._compute_s = time.monotonic() - began
            _deliver(calls, results)

    def _take_batch(self, came: int) -> Sequence[_HeadCall]:
        """Take the next calls from the queue; none: the burst has ended."""
        with self._arrived:
            if self._waiting:
                self._wait_for_calls(max(self._burst_sizes) - came)
            count = tokens = 0
            for call in self._waiting:
                tokens += len(call.hidden_TD)
                if tokens > MAX_BATCH_TOKENS:
                    break
                count += 1
            calls = self._waiting[:count]
            del self._waiting[:count]
            if not calls:
                self._end_burst(came)
            return calls

    def _end_burst(self, came: int) -> None:
        self._burst_sizes.append(came)
        self._computing = False

    def _wait_for_calls(self, expected: int) -> None:
        """Wait until `expected` calls are queued, or no further one arrives in time."""
        until = time.monotonic() + MAX_GATHER_FRACTION * self._compute_s
        while len(self._waiting) < expected and (left_s := until - time.monotonic()) > 0:
            if not self._arrived.wait(min(left_s, ARRIVAL_GAP_FRACTION * self._compute_s)):
                return

    def _compute_or_errors(self, calls: Sequence[_HeadCall]) -> Sequence[_HeadResult]:
        """If the batch fails, each call is computed alone to find the one at fault."""
        try:
            return self._compute_batch(calls)
        except Exception as error:
            if len(calls) == 1:
                return [error]
            return [self._compute_or_errors([call])[0] for call in calls]

    @torch.no_grad()
    def _compute_batch(self, calls: Sequence[_HeadCall]) -> Sequence[_HeadResult]:
        device = calls[0].hidden_TD.device
        inputs = [call.hidden_TD.to(device) for call in calls]
        logits_TV = self._compute(inputs[0] if len(inputs) == 1 else torch.cat(inputs))
        parts = torch.split(logits_TV, [len(hidden_TD) for hidden_TD in inputs])
        results: list[_HeadResult] = list(parts)
        chosen = [
            (at, argmax_allowed(part_TV[0], call.banned), call.position)
            for at, (call, part_TV) in enumerate(zip(calls, parts, strict=True))
            if isinstance(call, _NextTokenCall)
        ]
        if chosen:
            ids_R = torch.tensor([token for _, token, _ in chosen], device=logits_TV.device)
            positions_R = torch.tensor([place or 0 for *_, place in chosen], device=ids_R.device)
            rows = torch.split(self._embed_rows(ids_R, positions_R), 1)
            for (at, token, place), hidden_1D in zip(chosen, rows, strict=True):
                results[at] = NextToken(token, None if place is None else hidden_1D)
        return results


def _deliver(calls: Sequence[_HeadCall], results: Sequence[_HeadResult]) -> None:
    """Hand over results. Coroutines of one loop go on in the same iteration of it."""
    on_loops = defaultdict(list)
    for call, result in zip(calls, results, strict=True):
        if isinstance(call, _NextTokenCall):
            on_loops[call.done.get_loop()].append((call.done, result))
        else:
            _resolve(call.done, result)
    for loop, resolved in on_loops.items():
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(_resolve_all, resolved)


def _resolve_all(resolved: Sequence[tuple[asyncio.Future[NextToken], _HeadResult]]) -> None:
    for future, result in resolved:
        if not future.done():
            _resolve(future, result)


def _resolve(future: Future[Any] | asyncio.Future[Any], result: _HeadResult) -> None:
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


def argmax_allowed(scores_V: torch.Tensor, banned: frozenset[int]) -> int:
    """Index of the largest score that is not banned."""
    token = int(scores_V.argmax())
    if token not in banned:
        return token
    scores_V = scores_V.clone()
    scores_V[sorted(banned)] = -torch.inf
    return int(scores_V.argmax())
