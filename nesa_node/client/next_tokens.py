"""Batched choice of greedy next tokens for all sessions of an event loop.

T packed tokens, R rows of one token each, D hidden, V vocabulary.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nesa_node.client.combined import LARGEST_SHARED_TOKENS, MOST_GATHER
from nesa_node.client.ends import Ends
from nesa_node.client.greedy import likeliest

QUIET = 0.25
"""Wait for each further call while fewer are queued than in recent bursts, as a fraction of the
compute time: batching saves at most one computation."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A token, and its embedding [1, D] if a position for it was given."""

    token: int
    hidden_1D: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    hidden_1D: torch.Tensor
    position: int | None
    banned: frozenset[int]
    chosen: asyncio.Future[Chosen]


class NextTokens:
    """Final norm, head, argmax and embedding, batched over the sessions of one event loop.

    Outputs that a node batched arrive within a millisecond: the first waits briefly for the rest.
    Computed in a worker thread.
    """

    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self._waiting: list[_Call] = []
        self._task: asyncio.Task[None] | None = None
        self._took_s = 0.0
        self._arrived = asyncio.Event()
        self._bursts = deque([0, 0], maxlen=2)
        """Sizes of the last two bursts: sessions form one microbatch or two."""

    async def after(
        self, hidden_1D: torch.Tensor, position: int | None, banned: frozenset[int] = frozenset()
    ) -> Chosen:
        """Choose the token that follows the last block's output [1, D], excluding `banned`.

        Embeds it at `position` unless that is None. Raises what head and embedding raise.
        """
        loop = asyncio.get_running_loop()
        call = _Call(hidden_1D, position, banned, loop.create_future())
        self._waiting.append(call)
        self._arrived.set()
        if self._task is None:
            self._task = loop.create_task(self._serve(), name="next-tokens")
        try:
            return await call.chosen
        finally:
            if call in self._waiting:
                self._waiting.remove(call)

    async def _serve(self) -> None:
        """Compute batches until no call waits."""
        came = 0
        try:
            while self._waiting:
                await self._gather(max(self._bursts) - came)
                calls = self._waiting[:LARGEST_SHARED_TOKENS]
                del self._waiting[: len(calls)]
                came += len(calls)
                began = time.monotonic()
                results = await asyncio.to_thread(self._choose_all, calls)
                self._took_s = time.monotonic() - began
                for call, result in zip(calls, results, strict=True):
                    _tell(call.chosen, result)
        finally:
            self._bursts.append(came)
            self._task = None

    async def _gather(self, expected: int) -> None:
        """Wait until `expected` calls are queued, or no further one arrives in time."""
        until = time.monotonic() + MOST_GATHER * self._took_s
        while len(self._waiting) < expected and (left_s := until - time.monotonic()) > 0:
            self._arrived.clear()
            try:
                async with asyncio.timeout(min(left_s, QUIET * self._took_s)):
                    await self._arrived.wait()
            except TimeoutError:
                return

    def _choose_all(self, calls: Sequence[_Call]) -> Sequence[Chosen | Exception]:
        """In the worker thread. If the batch fails, each call is computed alone to find the one at
        fault.
        """
        try:
            return self._choose(calls)
        except Exception as error:
            if len(calls) == 1:
                return [error]
            return [self._choose_all([call])[0] for call in calls]

    @torch.inference_mode()
    def _choose(self, calls: Sequence[_Call]) -> Sequence[Chosen]:
        logits_RV = self._ends.head(torch.cat([call.hidden_1D for call in calls]))
        tokens = [
            likeliest(scores_V, call.banned)
            for scores_V, call in zip(logits_RV, calls, strict=True)
        ]
        positions = [0 if call.position is None else call.position for call in calls]
        hidden_RD = self._ends.embed_each(tokens, positions)
        return [
            Chosen(token, None if call.position is None else hidden_1D)
            for call, token, hidden_1D in zip(calls, tokens, torch.split(hidden_RD, 1), strict=True)
        ]


def _tell(future: asyncio.Future[Chosen], result: Chosen | Exception) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
