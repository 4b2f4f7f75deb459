"""A chain of spans that trains: passes of micro-batches, optimizer steps, and recovery by replay.

After the loss of a span's last node all spans return to the last checkpoint, and the steps since
then run again from their recorded inputs and gradients: the result is the same. While each span has
a node with its state, only the step under way runs again.

T tokens of a micro-batch's texts, D hidden.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from nesa_node.client.routing.request import RouteRequest
from nesa_node.client.training.recorded_steps import RecordedPass, RecordedStep
from nesa_node.client.training.training_link import TrainingLimits
from nesa_node.client.training.training_nodes import TrainingNodes
from nesa_node.client.training.training_span import (
    LocalTrainingSpan,
    MicroBatchPass,
    SpanState,
    TrainingSpan,
    gather_all,
)
from nesa_node.core.errors import (
    BusyError,
    ConfigError,
    MissingBlocksError,
    PeerUnreachableError,
    RemoteError,
    StreamClosedError,
)
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.core.wait_tracking import track_wait
from nesa_node.engine.training.span_trainer import compute_clip_scale
from nesa_node.engine.training.text_layout import TextLayout
from nesa_node.engine.training.training_state import select_blocks
from nesa_node.routing.chains import Hop

log = get_logger(__name__)
T = TypeVar("T")

Loss = Callable[[int, Tensor], Awaitable[Tensor]]
"""Computes the gradient [T, D] of a micro-batch's output [T, D], by its number."""

RETRY_PAUSE_S = 0.5
MAX_ATTEMPTS = 20
"""Of one call, each after the chain was completed again."""
RETRYABLE = (PeerUnreachableError, StreamClosedError, RemoteError, BusyError, MissingBlocksError)


class TrainingChain:
    """All spans of a model, in order. One call at a time; a cancelled call leaves it unusable.

    `applied` counts optimizer steps. Calls that cannot be completed after
    `options.recovery_timeout_s` raise `MissingBlocksError`, `RefusedError` or the last error.
    """

    def __init__(
        self,
        request: RouteRequest,
        nodes: TrainingNodes,
        limits: TrainingLimits,
        local: Sequence[LocalTrainingSpan] = (),
    ) -> None:
        """`request.span` are the blocks in the swarm; `local` spans are before and after it."""
        self.applied = 0
        self._request = request
        self._limits = limits
        self._local = tuple(local)
        self._nodes = nodes
        self._checkpoint: dict[str, Tensor] | None = None
        self._checkpoint_applied = 0
        self._needs_restore = False
        """Whether nodes have to be given the checkpoint."""
        self._is_interrupted = False
        """Whether the step under way has to begin again."""
        self._wants_nodes = False
        """Whether to look for replicas that are lacking."""
        self._history: list[RecordedStep] = []
        """Steps since the checkpoint."""
        self._current = RecordedStep(0)
        self._has_begun = False
        self._kept_tokens: dict[int, int] = {}
        """Tokens that nodes keep between forward and backward, by number of the micro-batch."""

    @property
    def hops(self) -> tuple[Hop, ...]:
        return self._nodes.hops

    @property
    def recoveries(self) -> int:
        """Losses of nodes that the session survived."""
        return self._nodes.num_lost

    @property
    def seconds_by_peer(self) -> Mapping[PeerId, float]:
        """Time between messages to a node and its answers, in sum."""
        return self._nodes.seconds_by_peer

    @property
    def recorded_bytes(self) -> int:
        """Bytes that are kept to replay steps since the last checkpoint."""
        return sum(step.nbytes for step in (*self._history, self._current))

    @property
    def steps_since_checkpoint(self) -> int:
        return self.applied - self._checkpoint_applied

    @property
    def num_forwards(self) -> int:
        """Micro-batches that went forward since the last step was applied."""
        return self._current.num_forwards

    @property
    def num_backwards(self) -> int:
        """Micro-batches of the step under way that have gone backward."""
        return self._current.num_backwards

    async def open(self, state: SpanState | None = None) -> None:
        """Open a session at each node; with `state` training continues from there."""
        if state is not None:
            self._checkpoint, self._needs_restore = dict(state.tensors), True
            self.applied = self._checkpoint_applied = state.applied
            self._current = RecordedStep(self.applied)
        with track_wait("nodes that train", blocks=(self._request.span,)):
            await self._attempt(self._do_nothing)
        if self._checkpoint is None:
            await self.checkpoint()

    async def close(self) -> None:
        """Leave all nodes."""
        await self._nodes.close()

    async def evaluate(self, batches: Sequence[tuple[TextLayout, int, Tensor]]) -> list[Tensor]:
        """Run micro-batches (layout, seed, input [T, D]) through all spans, without dropout."""
        return await self._attempt(lambda: self._evaluate(batches))

    async def forward(
        self, batches: Sequence[tuple[TextLayout, int, Tensor]]
    ) -> tuple[list[Tensor], list[RecordedPass]]:
        """Run micro-batches through all spans at the same time: outputs, and passes to go backward.

        Where nodes have no room for what these need, earlier passes that did not go backward make
        it. A pass that never goes backward has no part in the step. Raises `ConfigError` for more
        tokens than nodes keep of a session.
        """
        passes = [RecordedPass(*batch) for batch in batches]
        tokens = sum(each.layout.padded_tokens for each in passes)
        if tokens > self._limits.max_kept_tokens:
            raise ConfigError(
                f"a batch of {tokens} tokens with padding; nodes keep at most "
                f"{self._limits.max_kept_tokens} of this session between forward and backward "
                "(max_kept_tokens): use smaller batches and accumulate their gradients"
            )
        outputs = await self._attempt(lambda: self._forward_all(passes))
        self._current.num_forwards += len(passes)
        return outputs, passes

    async def backward(
        self, passes: Sequence[RecordedPass], grads: Sequence[Tensor]
    ) -> list[Tensor]:
        """Run gradients [T, D] of outputs backward; return those of the inputs.

        Passes go backward in the order of these calls. Where that is not the order in which they
        went forward, they run forward again first.
        """
        return await self._attempt(lambda: self._backward_all(passes, grads))

    async def run_step(
        self, batches: Sequence[tuple[TextLayout, int, Tensor]], loss: Loss
    ) -> list[Tensor]:
        """Run a whole step's micro-batches forward and backward, pipelined (1F1B).

        Each goes backward as soon as `loss` has its gradient, so that each span has passes of
        several to work on, and no more than one for each span is kept. Returns the gradients of
        the inputs.
        """

        async def run() -> list[Tensor]:
            self._current.passes.clear()
            await self._begin()
            self._current.passes += [RecordedPass(*batch) for batch in batches]
            rooms = self._new_rooms([layout for layout, _, _ in batches])
            turns, losses = self._new_turns(0), _Turns(0, len(rooms))

            async def run_one(number: int, recorded: RecordedPass) -> Tensor:
                async with rooms[number % len(rooms)]:
                    output_TD = await self._forward(number, recorded)
                    async with losses.turn(number):
                        grad_TD = await loss(number, output_TD)
                    return await self._backward(number, grad_TD, turns)

            try:
                return await gather_all(
                    [run_one(number, each) for number, each in enumerate(self._current.passes)]
                )
            except BaseException:
                self._forget_passes()
                raise

        return await self._attempt(run)

    def _new_rooms(self, layouts: Sequence[TextLayout]) -> list[asyncio.Semaphore]:
        """For each lane, how many micro-batches nodes have room for of those that keep them busy.

        Micro-batch n takes lane n modulo their number.
        """
        largest = max((layout.padded_tokens for layout in layouts), default=1)
        bound = min(len(self._spans()) + 1, max(self._free_tokens // largest, 1))
        return [asyncio.Semaphore(bound) for _ in range(self._nodes.lanes)]

    @property
    def _free_tokens(self) -> int:
        return self._limits.max_kept_tokens - sum(self._kept_tokens.values())

    async def apply(self, learning_rate: float, max_norm: float | None) -> float:
        """Update the adapters; return the norm of all gradients before clipping."""
        step = self._current
        step.drop_pending()
        step.learning_rate, step.max_norm = learning_rate, max_norm
        norm = await self._attempt(lambda: self._apply(step))
        self._finish_step()
        return norm

    def _finish_step(self) -> None:
        self._history.append(self._current)
        self.applied += 1
        self._current = RecordedStep(self.applied)
        self._has_begun = False
        self._kept_tokens.clear()

    def _forget_passes(self) -> None:
        self._current.passes.clear()
        self._has_begun = False

    async def restart_step(self) -> None:
        """Forget the micro-batches of the step under way."""
        self._forget_passes()

    async def checkpoint(self) -> SpanState:
        """Fetch adapters and optimizer state of all spans: the point to return to after a loss.

        Not between a step's first micro-batch and its end.
        """
        states = await self._attempt(
            lambda: gather_all([span.export(self.applied) for span in self._spans()])
        )
        found: dict[str, Tensor] = {}
        for state in states:
            found |= state.tensors
        self._checkpoint, self._checkpoint_applied = found, self.applied
        self._history.clear()
        self._wants_nodes = self._nodes.lacks_replicas
        return SpanState(self.applied, found)

    def _spans(self) -> list[TrainingSpan]:
        return sorted((*self._local, *self._nodes.groups), key=lambda each: each.span.start)

    def _new_turns(self, first: int) -> list[_Turns]:
        """For each span, the last one first, in which order it gets gradients of micro-batches."""
        return [_Turns(first, span.lanes) for span in reversed(self._spans())]

    async def _begin(self) -> None:
        await gather_all([span.begin(self._current.number) for span in self._spans()])
        self._has_begun = True
        self._kept_tokens.clear()

    async def _make_room(self, tokens: int) -> None:
        """Where `tokens` more do not fit, begin the step again with what had gone backward."""
        if tokens > self._free_tokens:
            self._current.drop_pending()
            await self._replay(self._current)

    async def _forward_all(self, passes: Sequence[RecordedPass]) -> list[Tensor]:
        if not self._has_begun:
            await self._begin()
        await self._make_room(sum(each.layout.padded_tokens for each in passes))
        first = len(self._current.passes)
        self._current.passes += passes
        try:
            return await gather_all(
                [self._forward(first + at, each) for at, each in enumerate(passes)]
            )
        except BaseException:
            # Not to be replayed: the next attempt runs them.
            del self._current.passes[first:]
            raise

    async def _backward_all(
        self, passes: Sequence[RecordedPass], grads: Sequence[Tensor]
    ) -> list[Tensor]:
        first = self._current.num_backwards
        following = self._current.passes[first : first + len(passes)]
        if [id(each) for each in following] != [id(each) for each in passes]:
            self._current.drop_pending()
            passes = [replace(each, grad_TD=None) for each in passes]
            await self._forward_all(passes)
        turns = self._new_turns(first)
        try:
            return await gather_all(
                [self._backward(first + at, grad_TD, turns) for at, grad_TD in enumerate(grads)]
            )
        except BaseException:
            for each in passes:
                each.grad_TD = None
            raise

    async def _evaluate(self, batches: Sequence[tuple[TextLayout, int, Tensor]]) -> list[Tensor]:
        async def run(number: int, layout: TextLayout, seed: int, hidden_TD: Tensor) -> Tensor:
            one = MicroBatchPass(self._current.number, number, layout, seed)
            async with rooms[number % len(rooms)]:
                for span in self._spans():
                    hidden_TD = await span.forward(one, hidden_TD, keep=False)
            return hidden_TD

        layouts = [layout for layout, _, _ in batches]
        await self._make_room(max(layout.padded_tokens for layout in layouts))
        rooms = self._new_rooms(layouts)
        return await gather_all([run(number, *batch) for number, batch in enumerate(batches)])

    async def _forward(self, number: int, recorded: RecordedPass) -> Tensor:
        batch = MicroBatchPass(self._current.number, number, recorded.layout, recorded.seed)
        hidden_TD = recorded.hidden_TD
        self._kept_tokens[number] = recorded.layout.padded_tokens
        for span in self._spans():
            hidden_TD = await span.forward(batch, hidden_TD)
        return hidden_TD

    async def _backward(self, number: int, grad_TD: Tensor, turns: Sequence[_Turns]) -> Tensor:
        recorded = self._current.passes[number]
        batch = MicroBatchPass(self._current.number, number, recorded.layout, recorded.seed)
        recorded.grad_TD = grad_TD
        for span, order in zip(reversed(self._spans()), turns, strict=True):
            grad_TD = await span.backward(batch, grad_TD, order.turn(number))
        del self._kept_tokens[number]
        return grad_TD

    async def _apply(self, step: RecordedStep) -> float:
        spans, count = self._spans(), len(step.passes)
        norms = await gather_all([span.squared_norm(step.number, count) for span in spans])
        scale = compute_clip_scale(norms, step.max_norm)
        await gather_all(
            [
                span.apply(
                    step.number,
                    micro_batches=count,
                    learning_rate=step.learning_rate,
                    scale=scale,
                )
                for span in spans
            ]
        )
        return math.sqrt(sum(norms))

    async def _do_nothing(self) -> None:
        return None

    async def _attempt(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call, again after the loss of a node and the recovery from it."""
        deadline, attempts, logged = math.inf, 0, ""
        while True:
            try:
                await self._complete_chain()
                deadline, attempts = math.inf, attempts + 1
                return await call()
            except RETRYABLE as error:
                now = time.monotonic()
                deadline = min(deadline, now + self._request.options.recovery_timeout_s)
                if now >= deadline or attempts >= MAX_ATTEMPTS:
                    raise
                if str(error) != logged:
                    logged = str(error)
                    log.warning("training_interrupted", step=self.applied, reason=logged)
                self._is_interrupted = True
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _complete_chain(self) -> None:
        """Replace lost nodes, and bring all spans to the state of the step under way."""
        changed = await self._nodes.complete(grow=self._wants_nodes)
        self._wants_nodes = False
        if not changed and not self._is_interrupted:
            return
        self._is_interrupted = True
        synchronized = not self._needs_restore and all(
            await gather_all([span.synchronize(self.applied) for span in self._spans()])
        )
        if not synchronized:
            await self._restore()
        elif self._has_begun:
            await self._replay(self._current)
        self._is_interrupted = self._needs_restore = False

    async def _restore(self) -> None:
        """Bring all spans to the checkpoint, and replay what was done since then."""
        assert self._checkpoint is not None
        by_span = {span: select_blocks(self._checkpoint, span.span) for span in self._spans()}
        self._kept_tokens.clear()
        await gather_all(
            [
                span.restore(SpanState(self._checkpoint_applied, tensors))
                for span, tensors in by_span.items()
            ]
        )
        current, had_begun = self._current, self._has_begun
        try:
            for step in self._history:
                self._current = step
                await self._replay(step)
                await self._apply(step)
        finally:
            self._current, self._has_begun = current, had_begun
        if had_begun:
            await self._replay(current)
        if self._history or had_begun:
            log.info("training_replayed", steps=len(self._history), to_step=self.applied)

    async def _replay(self, step: RecordedStep) -> None:
        await self._begin()
        turns, count = self._new_turns(0), step.num_backwards
        rooms = self._new_rooms([each.layout for each in step.passes])

        async def run(number: int, recorded: RecordedPass) -> None:
            async with rooms[number % len(rooms)]:
                await self._forward(number, recorded)
                assert recorded.grad_TD is not None
                await self._backward(number, recorded.grad_TD, turns)

        await gather_all([run(number, each) for number, each in enumerate(step.passes[:count])])
        await gather_all(
            [
                self._forward(number, each)
                for number, each in enumerate(step.passes[count:], start=count)
            ]
        )


class _Turns:
    """Lets the calls of each lane pass in the order of their numbers."""

    def __init__(self, first: int, lanes: int) -> None:
        self._next = {number % lanes: number for number in range(first, first + lanes)}
        self._waiting: dict[int, asyncio.Event] = {}

    @asynccontextmanager
    async def turn(self, number: int) -> AsyncIterator[None]:
        """Enter after the body of the lane's call before, if that did not fail."""
        lane = number % len(self._next)
        if number != self._next[lane]:
            await self._waiting.setdefault(number, asyncio.Event()).wait()
        yield
        self._next[lane] = following = number + len(self._next)
        if (event := self._waiting.pop(following, None)) is not None:
            event.set()
