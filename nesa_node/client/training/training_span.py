"""What a client trains through: spans of blocks in this process or on a node, by one interface.

T tokens of a micro-batch's texts, D hidden.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from torch import Tensor

from nesa_node.core.ids import Span
from nesa_node.engine.training.span_trainer import SpanTrainer, finish
from nesa_node.engine.training.text_layout import TextLayout

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MicroBatchPass:
    """One micro-batch's way through the spans."""

    step: int
    number: int
    """Within the step."""
    layout: TextLayout
    seed: int
    """Of dropout."""


@dataclass(frozen=True, slots=True)
class SpanState:
    """Adapters and optimizer state of a span after `applied` steps, as `SpanTrainer.export` names
    them."""

    applied: int
    tensors: Mapping[str, Tensor]


class TrainingSpan(Protocol):
    """A span with adapters. Calls of one step come in order, and may overlap.

    Calls raise `PeerUnreachableError`, `StreamClosedError` or `RemoteError` if the span's node is
    lost or refuses.
    """

    span: Span
    lanes: int
    """Nodes that take turns with micro-batches: n goes to node n modulo their number."""

    async def begin(self, step: int) -> None: ...

    async def forward(
        self, batch: MicroBatchPass, hidden_TD: Tensor, *, keep: bool = True
    ) -> Tensor:
        """Run the blocks. Without `keep` there is no dropout and no backward follows."""
        ...

    async def backward(
        self, batch: MicroBatchPass, grad_TD: Tensor, turn: AbstractAsyncContextManager[None]
    ) -> Tensor:
        """Add the gradients of the adapters, and return that of the input.

        What decides the order of the step's backwards happens within `turn`.
        """
        ...

    async def squared_norm(self, step: int, micro_batches: int) -> float:
        """Of the step's gradients of adapters, from `micro_batches`."""
        ...

    async def apply(
        self, step: int, *, micro_batches: int, learning_rate: float, scale: float
    ) -> None: ...

    async def export(self, applied: int) -> SpanState:
        """The state after `applied` steps."""
        ...

    async def restore(self, state: SpanState) -> None: ...

    async def synchronize(self, applied: int) -> bool:
        """Whether the span has the state after `applied` steps, if need be after copying it from
        one of its nodes to the rest."""
        ...


class LocalTrainingSpan:
    """What the client trains itself, in its `worker`'s one thread: blocks, or the first input."""

    def __init__(self, trainer: SpanTrainer, worker: ThreadPoolExecutor) -> None:
        self.span = trainer.blocks.span
        self.lanes = 1
        self._trainer = trainer
        self._worker = worker

    async def begin(self, step: int) -> None:
        await self._run(partial(self._trainer.begin, step))

    async def forward(
        self, batch: MicroBatchPass, hidden_TD: Tensor, *, keep: bool = True
    ) -> Tensor:
        def run() -> Tensor:
            hidden_RLD = batch.layout.to_rows(hidden_TD)
            inputs = batch.layout.make_batch(batch.seed)
            if keep:
                work = self._trainer.forward(batch.step, batch.number, hidden_RLD, inputs)
            else:
                work = self._trainer.evaluate(hidden_RLD, inputs)
            return batch.layout.from_rows(finish(work))

        return await self._run(run)

    async def backward(
        self, batch: MicroBatchPass, grad_TD: Tensor, turn: AbstractAsyncContextManager[None]
    ) -> Tensor:
        def run() -> Tensor:
            grad_RLD = batch.layout.to_rows(grad_TD)
            work = self._trainer.backward(batch.step, batch.number, grad_RLD)
            return batch.layout.from_rows(finish(work))

        async with turn:
            running = asyncio.ensure_future(self._run(run))
            await asyncio.sleep(0)  # it is submitted
        return await running

    async def squared_norm(self, step: int, micro_batches: int) -> float:
        return await self._run(partial(self._trainer.compute_squared_norm, step))

    async def apply(
        self, step: int, *, micro_batches: int, learning_rate: float, scale: float
    ) -> None:
        await self._run(
            partial(
                self._trainer.apply,
                step,
                micro_batches=micro_batches,
                learning_rate=learning_rate,
                scale=scale,
            )
        )

    async def export(self, applied: int) -> SpanState:
        assert self._trainer.applied == applied
        return SpanState(applied, await self._run(self._trainer.export))

    async def restore(self, state: SpanState) -> None:
        await self._run(partial(self._trainer.restore, state.applied, state.tensors))

    async def synchronize(self, applied: int) -> bool:
        return self._trainer.applied == applied

    async def _run(self, job: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, job)


async def gather_all(calls: Sequence[Awaitable[T]]) -> list[T]:
    """Results of all calls. The first failure cancels the rest, and is raised once they ended."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
