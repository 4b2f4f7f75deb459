"""Nodes that train one span together: its replicas, which share a step's micro-batches.

Each computes the gradients of its own micro-batches. The client adds them in the order of the
nodes, and either every node updates all parameters, or each updates its part of them, for which
alone it has optimizer state (ZeRO, stage 1), and the client gives it to the rest. In stage 2
gradients are handed over with each micro-batch, so that nodes do not keep them. In stage 3 nodes
keep their part of the parameters alone, and are lent the rest of a block while they run it.

With averaging every k > 1 steps nodes update all parameters by their own gradients, and then each
gets the mean of all nodes' parameters and optimizer state.

T tokens of a micro-batch's texts, D hidden.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar, get_args

import torch
from torch import Tensor

from nesa_node.client.training.training_link import TrainingLink
from nesa_node.client.training.training_span import MicroBatchPass, SpanState, gather_all
from nesa_node.compression.codecs import UNCOMPRESSED
from nesa_node.compression.error_feedback import FeedbackEncoder
from nesa_node.core.errors import ConfigError, PeerUnreachableError, ProtocolError
from nesa_node.core.ids import PeerId
from nesa_node.engine.training.training_state import ADAPTER, Partition, ZeroStage
from nesa_node.routing.chains import Hop

T = TypeVar("T")
MAX_REPLICAS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """How many nodes train each span, and what is divided among them."""

    replicas: int = 1
    """Wanted; where fewer nodes have a span's blocks, fewer train it."""
    zero_stage: ZeroStage = 0
    """Of ZeRO: 1 divides the optimizer state among replicas, 2 gradients too, 3 also parameters."""
    average_every: int = 1
    """Steps between two averagings of the replicas' parameters and optimizer states. 1: there are
    none, since the gradients of each step are added."""

    def __post_init__(self) -> None:
        """Raises `ConfigError`."""
        if not 1 <= self.replicas <= MAX_REPLICAS:
            raise ConfigError(f"replicas must be from 1 to {MAX_REPLICAS}, got {self.replicas}")
        if self.zero_stage not in get_args(ZeroStage):
            raise ConfigError(f"zero_stage must be 0, 1, 2 or 3, got {self.zero_stage}")
        if self.average_every < 1:
            raise ConfigError(f"average_every must be at least 1, got {self.average_every}")
        if self.average_every > 1 and self.zero_stage:
            raise ConfigError(
                "average_every above 1 needs zero_stage=0: each replica updates all parameters"
            )


class ReplicaGroup:
    """`TrainingSpan` on one node or several. The first `lanes` of them get micro-batches."""

    def __init__(
        self,
        links: Sequence[TrainingLink],
        shapes: Mapping[str, Sequence[int]],
        seconds_by_peer: dict[PeerId, float],
        *,
        zero_stage: ZeroStage,
        average_every: int,
    ) -> None:
        """`shapes` are those of the span's parameters; options are as in `ReplicaOptions`.

        `seconds_by_peer` gets the time between messages and their answers.
        """
        self.span = links[0].span
        self.links = list(links)
        self.lanes = 1
        self.is_partitioned = zero_stage > 0 and len(links) > 1
        self._is_divided = zero_stage == 3 and len(links) > 1
        self._average_every = average_every
        self._averaged_at = 0
        """Steps after which all nodes last had the same state."""
        self._seconds_by_peer = seconds_by_peer
        self._owned = [
            Partition(zero_stage, rank, len(links)).select(shapes) for rank in range(len(links))
        ]
        """Parameters that each node updates."""
        codecs = {link.gradient_codec for link in links}
        self._feedback = FeedbackEncoder(codecs.pop() if len(codecs) == 1 else UNCOMPRESSED)
        """Of sums of gradients."""
        self._loans: set[asyncio.Task[None]] = set()
        if self._is_divided:
            for link in links:
                link.on_need = partial(self._begin_loan, link)
        self._sums: dict[str, Tensor] = {}
        """Of the step's gradients over all nodes."""

    @property
    def hop(self) -> Hop:
        return self.links[0].hop

    async def begin(self, step: int) -> None:
        self._feedback.discard()
        await gather_all([link.begin(step) for link in self.links])

    async def forward(
        self, batch: MicroBatchPass, hidden_TD: Tensor, *, keep: bool = True
    ) -> Tensor:
        link, batch = self._choose(batch)
        return await self._timed(link, link.forward(batch, hidden_TD, keep=keep))

    async def backward(
        self, batch: MicroBatchPass, grad_TD: Tensor, turn: AbstractAsyncContextManager[None]
    ) -> Tensor:
        link, batch = self._choose(batch)
        return await self._timed(link, link.backward(batch, grad_TD, turn))

    async def squared_norm(self, step: int, micro_batches: int) -> float:
        if len(self.links) == 1:
            return await self.links[0].squared_norm(step)
        counts = self._count_micro_batches(micro_batches)
        busy = [(link, count) for link, count in zip(self.links, counts, strict=True) if count]
        if self._average_every > 1:
            # Mean of the squares of what each node applies: `lanes` times its own gradients.
            norms = await gather_all([link.squared_norm(step) for link, _ in busy])
            return self.lanes * sum(norms)
        parts = await gather_all([link.collect(step, count) for link, count in busy])
        self._sums = await asyncio.to_thread(_add, parts)
        return sum(float(grad.square().sum(dtype=torch.float64)) for grad in self._sums.values())

    async def apply(
        self, step: int, *, micro_batches: int, learning_rate: float, scale: float
    ) -> None:
        counts = [micro_batches] * len(self.links)
        if self._average_every > 1:
            counts, scale = self._count_micro_batches(micro_batches), scale * self.lanes
        elif len(self.links) > 1:
            sums, self._sums = self._sums, {}
            self._feedback.discard()  # a repeated call encodes again
            encoded = await asyncio.to_thread(self._feedback.encode, sums)
            await gather_all(
                [link.reduce(step, self._select(encoded, rank)) for rank, link in self._ranked]
            )
        await gather_all(
            [
                link.apply(step, micro_batches=count, learning_rate=learning_rate, scale=scale)
                for link, count in zip(self.links, counts, strict=True)
            ]
        )
        self._feedback.commit()
        if self.is_partitioned and not self._is_divided:
            await self._share_updates(step + 1)
        if self._average_every > 1 and (step + 1) % self._average_every == 0:
            await self._average(step + 1, self.links[: self.lanes])

    def _count_micro_batches(self, micro_batches: int) -> list[int]:
        """Of a step's `micro_batches` those of each node."""
        counts = [len(range(lane, micro_batches, self.lanes)) for lane in range(self.lanes)]
        return counts + [0] * (len(self.links) - self.lanes)

    def _has_one_state(self, applied: int) -> bool:
        """Whether all nodes that had `applied` steps have the same parameters."""
        return self._average_every == 1 or self._averaged_at == applied

    async def _average(self, applied: int, links: Sequence[TrainingLink]) -> None:
        """Give all nodes the mean of the states of `links`."""
        states = await gather_all([link.export(applied) for link in links])
        mean = await asyncio.to_thread(_average, [state.tensors for state in states])
        await gather_all([link.restore(SpanState(applied, mean)) for link in self.links])
        self._averaged_at = applied

    async def _share_updates(self, applied: int) -> None:
        """Give each node the parameters that the rest have updated."""
        updated = await gather_all([link.fetch_updated(applied) for link in self.links])
        for link in self.links:
            link.applied = None
        await gather_all(
            [
                link.set_parameters(
                    applied,
                    {
                        name: value
                        for other, part in enumerate(updated)
                        if other != rank
                        for name, value in part.items()
                    },
                )
                for rank, link in self._ranked
            ]
        )
        for link in self.links:
            link.applied = applied

    async def synchronize(self, applied: int) -> bool:
        up_to_date = [link for link in self.links if link.applied == applied]
        if len(up_to_date) == len(self.links):
            return True
        if not up_to_date or self.is_partitioned:
            return False
        if not self._has_one_state(applied):
            await self._average(applied, up_to_date)
            return True
        state = await up_to_date[0].export(applied)
        await gather_all([link.restore(state) for link in self.links if link not in up_to_date])
        return True

    async def export(self, applied: int) -> SpanState:
        if not self.is_partitioned:
            if not self._has_one_state(applied):
                await self._average(applied, self.links[: self.lanes])
            return await self.links[0].export(applied)
        found: dict[str, Tensor] = {}
        for state in await gather_all([link.export(applied) for link in self.links]):
            found |= state.tensors
        return SpanState(applied, found)

    async def restore(self, state: SpanState) -> None:
        self._feedback.reset()
        await gather_all(
            [
                link.restore(SpanState(state.applied, self._select_state(state.tensors, rank)))
                for rank, link in self._ranked
            ]
        )
        self._averaged_at = state.applied

    def _begin_loan(self, link: TrainingLink, block: int) -> None:
        task = asyncio.create_task(self._lend(link, block))
        self._loans.add(task)
        task.add_done_callback(self._loans.discard)

    async def _lend(self, link: TrainingLink, block: int) -> None:
        """Give a node the parameters of a block that the rest have."""
        try:
            parts = await gather_all([each.borrow(block) for each in self.links if each != link])
            await link.lend(block, {name: part[name] for part in parts for name in part})
        except (ProtocolError, PeerUnreachableError) as error:
            link.abandon(f"block {block} cannot be lent: {error}")

    @property
    def _ranked(self) -> list[tuple[int, TrainingLink]]:
        return list(enumerate(self.links))

    def _choose(self, batch: MicroBatchPass) -> tuple[TrainingLink, MicroBatchPass]:
        """The node of a micro-batch, which counts its own ones."""
        number, lane = divmod(batch.number, self.lanes)
        return self.links[lane], replace(batch, number=number)

    def _select(self, parameters: Mapping[str, T], rank: int) -> Mapping[str, T]:
        """What the node of `rank` updates."""
        owned = self._owned[rank]
        return {
            name: value for name, value in parameters.items() if name.removeprefix(ADAPTER) in owned
        }

    def _select_state(self, tensors: Mapping[str, Tensor], rank: int) -> Mapping[str, Tensor]:
        """The parameters that the node of `rank` has, and optimizer state of what it updates."""
        owned = self._owned[rank]
        found = {}
        for name, value in tensors.items():
            if name.startswith(ADAPTER):
                is_here = not self._is_divided or name.removeprefix(ADAPTER) in owned
            else:
                is_here = name.split(".", 2)[2] in owned  # after "optimizer.<key>."
            if is_here:
                found[name] = value
        return found

    async def _timed(self, link: TrainingLink, work: Awaitable[T]) -> T:
        started = time.perf_counter()
        result = await work
        spent_s = time.perf_counter() - started
        self._seconds_by_peer[link.peer] = self._seconds_by_peer.get(link.peer, 0.0) + spent_s
        return result


def _average(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Means of tensors by name. A node that has had no gradient has no optimizer state."""
    counts = Counter(name for state in states for name in state)
    return {name: total / counts[name] for name, total in _add(states).items()}


def _add(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Sums of tensors by name, in the order of `parts`."""
    found: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            found[name] = found[name] + value if name in found else value
    return found
