"""Nodes that speak the session protocol over a socket pair and add one to what they are given.

They refuse nothing: a step that does not continue what they hold stops them. T tokens, D hidden.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, cast

import torch

from nesa_node.client.recovery.failure_detector import FailureDetector, ReplacementSearch
from nesa_node.client.recovery.suspicion import SuspicionEvent
from nesa_node.client.routing.node_selection import NodeSelector
from nesa_node.client.routing.planner import ChainPlanner, Hops
from nesa_node.client.routing.request import ConnectionOptions, RouteRequest
from nesa_node.client.session.hop import HopLink
from nesa_node.client.session.route import SessionRoute
from nesa_node.compression import tensors
from nesa_node.core.errors import BusyError, PeerUnreachableError, StreamClosedError
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.routing.chains import Hop
from nesa_node.swarm.dht.sealing import FailureKind
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.link_measurements import LinkSpeed
from nesa_node.swarm.protocol.messages import (
    Close,
    Closed,
    Link,
    Linked,
    Mode,
    Output,
    Ping,
    Pong,
    Prefix,
    Reorder,
    Reordered,
    Rollback,
    RolledBack,
    Step,
)
from nesa_node.swarm.protocol.stream import MessageBudget, Stream
from tests.swarm.pipes import pipe_pair

HIDDEN = 4
NO_SWARM = cast(Swarm, SimpleNamespace(directory=None))
"""Scripted nodes need none."""
MAX_BYTES = 1 << 24

Spoil = Callable[[torch.Tensor], torch.Tensor]


def request(mode: Mode, *, rows: int, hops: int, **timeouts: float) -> RouteRequest:
    return RouteRequest(
        model_id=ModelId("scripted@0"),
        span=Span(0, hops),
        rows=rows,
        max_tokens=10_000,
        hidden_size=HIDDEN,
        dtype="float32",
        options=ConnectionOptions(routing=mode, **timeouts),  # type: ignore[arg-type]
    )


class ScriptedNode:
    """One block. It dies after `dies_after` steps; each step takes `step_s` seconds."""

    def __init__(self, block: int, rows: int, *, dies_after: int | None, step_s: float) -> None:
        self.block = block
        self.lengths = [0] * rows
        self.emit_from = [0] * rows
        self.steps: list[Step] = []
        self.kept: list[tuple[Step, torch.Tensor]] = []
        self.working = False
        self.pings = 0
        self.pings_beside = 0
        self.obeys_s = 0.0
        """How long it reads nothing while it obeys."""
        self._hangs = False
        self.after: ScriptedNode | None = None
        self.on_work: Callable[[], None] = lambda: None
        self.spoil: Spoil = lambda output_TD: output_TD
        self._dies_after = dies_after
        self._step_s = step_s
        self.cut_off: ScriptedNode | None = None
        """A node that nothing comes to from this one."""
        self.epoch = 0
        self._pushed = (-1, -1)
        self._came_bytes = 0
        self._queue: asyncio.Queue[tuple[Step, torch.Tensor]] = asyncio.Queue()
        self._pipes = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    async def link(self, on_change: Callable[[], None]) -> HopLink:
        """The client's end of a new stream to this node."""
        ours, theirs = await self._pipes.enter_async_context(pipe_pair())
        self.stream = Stream(PeerId("client"), ours, ours)
        stream = Stream(PeerId(f"node-{self.block}"), theirs, theirs)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._work())]
        hop = Hop(stream.peer, Span(self.block, self.block + 1))
        request = RouteRequest(
            model_id=ModelId("scripted"),
            span=hop.span,
            rows=len(self.lengths),
            max_tokens=MAX_BYTES // 4 // HIDDEN,
            hidden_size=HIDDEN,
            dtype="float32",
        )
        budget = MessageBudget()
        return HopLink(
            hop,
            stream,
            request,
            LinkSpeed(),
            on_change,
            b"s" * 16,
            b"k" * 32,
            budget,
            self._answer_ping,
        )

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._pipes.aclose()

    def hang(self) -> None:
        """Keep the stream open, answer nothing from now on."""
        self._hangs = True
        for task in self._tasks:
            task.cancel()

    def stop_reading(self, seconds: float) -> None:
        """Read nothing of the session for a while."""
        self._tasks[0].cancel()

        def go_on() -> None:
            self._tasks[0] = asyncio.create_task(self._read())

        asyncio.get_running_loop().call_later(seconds, go_on)

    async def _answer_ping(self) -> None:
        """Asked beside the session, which it need not read for this."""
        self.pings_beside += 1
        if self._hangs:
            raise PeerUnreachableError("no pong")

    def cut(self, epoch: int, lengths: Sequence[int]) -> None:
        self.epoch = epoch
        while not self._queue.empty():
            self._queue.get_nowait()
        assert all(new <= old for new, old in zip(lengths, self.lengths, strict=True))
        self.lengths, self.emit_from = list(lengths), list(lengths)
        self.kept = [
            (step, output_TD)
            for step, output_TD in self.kept
            if all(part.position < lengths[part.row] for part in step.rows)
        ]

    def send_again(self) -> None:
        assert self.after is not None
        for step, output_TD in self.kept:
            self.after.put(step, output_TD)

    def put(self, step: Step, hidden_TD: torch.Tensor) -> None:
        self._came_bytes += hidden_TD.nbytes
        self._queue.put_nowait((step, hidden_TD))

    async def _read(self) -> None:
        while True:
            try:
                message, payload = await self.stream.receive(max_tensor_bytes=MAX_BYTES)
            except StreamClosedError:
                return
            match message:
                case Step() if message.epoch < self.epoch:
                    pass
                case Step():
                    hidden_TD = tensors.decode(message.tensor, payload, max_bytes=MAX_BYTES)
                    self.put(message, hidden_TD)
                case Ping():
                    self.pings += 1
                    last = self.steps[-1].step if self.steps else -1
                    epoch, pushed = self._pushed
                    pong = Pong(
                        nonce=message.nonce,
                        epoch=self.epoch,
                        step=last,
                        busy=self.working,
                        pushed=pushed if epoch == self.epoch else -1,
                        upstream_bytes=self._came_bytes,
                    )
                    await self.stream.send(pong)
                case Rollback():
                    assert message.epoch > self.epoch, "steps on their way would be taken for new"
                    await asyncio.sleep(self.obeys_s)
                    self.cut(message.epoch, message.lengths)
                    await self.stream.send(RolledBack(epoch=message.epoch))
                case Reorder():
                    await self.stream.send(Reordered(epoch=message.epoch))
                case Link():
                    await asyncio.sleep(self.obeys_s)
                    await self.stream.send(Linked(epoch=message.epoch))
                case Close():
                    await self.stream.send(Closed())

    async def _work(self) -> None:
        while True:
            step, hidden_TD = await self._queue.get()
            epoch = self.epoch
            if self._dies_after == len(self.steps):
                await self.stream.close()
                return
            self.working = True
            self.on_work()
            await asyncio.sleep(self._step_s)
            self.working = False
            if epoch != self.epoch:
                continue
            self.steps.append(step)
            for part in step.rows:
                assert part.position == self.lengths[part.row], (part, self.lengths)
                self.lengths[part.row] += part.count
            if all(part.position >= self.emit_from[part.row] for part in step.rows):
                await self._emit(step, hidden_TD + 1)

    async def _emit(self, step: Step, output_TD: torch.Tensor) -> None:
        if self.after is not None:
            self.kept.append((step, output_TD))
            self._pushed = step.epoch, step.step
            if self.after is not self.cut_off:
                self.after.put(step, output_TD)
            return
        if step.want == "last":
            output_TD = output_TD[torch.tensor([p.count for p in step.rows]).cumsum(0) - 1]
        elif step.want == "none":
            output_TD = output_TD[:0]
        meta, payload = tensors.encode(self.spoil(output_TD))
        output = Output(epoch=step.epoch, step=step.step, rows=step.rows, tensor=meta)
        await self.stream.send(output, payload)


class ScriptedSearch(ReplacementSearch):
    """Finds at once, where there is anything to be found."""

    def __init__(self, finds: bool) -> None:
        super().__init__(cast(Swarm, None), cast(NodeSelector, None))
        self._finds = finds
        self.irreplaceable: frozenset[PeerId] = frozenset()

    def start(self, hops: Hops, *choices: frozenset[PeerId]) -> None:
        self.silent_peers = frozenset().union(*choices)
        found = [gone for gone in choices if self._finds and not gone & self.irreplaceable]
        self.replaceable = found[0] if found else frozenset()

    def exclude_unreachable(self) -> frozenset[PeerId]:
        return frozenset()


class ScriptedRoute(SessionRoute):
    """Finds a new scripted node for every one that was lost. `deaths` are of the first ones, and
    `spoils`, what they make of their outputs.
    """

    def __init__(
        self,
        request: RouteRequest,
        on_change: Callable[[], None],
        *,
        deaths: dict[int, int] | None = None,
        spoils: dict[int, Spoil] | None = None,
        step_s: float = 0.0,
        busy: int = 0,
        finds: bool = True,
        suspicions: Counter[SuspicionEvent] | None = None,
    ) -> None:
        super().__init__(NO_SWARM, request, ChainPlanner(NO_SWARM), on_change)
        self.search = ScriptedSearch(finds)
        self.detector = FailureDetector(self.search, suspicions)
        self.scripted: list[ScriptedNode] = []
        self.at_work = 0
        """The most nodes that ever worked at the same time."""
        self.rebuilds: list[list[int]] = []
        self.faults: list[tuple[PeerId, FailureKind]] = []
        """Of those who were lost."""
        self.kept_while_busy: list[int] = []
        """How many nodes it had each time when others were busy."""
        self._busy = busy
        self._wanted = request
        self._deaths = dict(deaths or {})
        self._spoils = dict(spoils or {})
        self._notify = on_change
        self._step_s = step_s
        self._everybody: list[ScriptedNode] = []

    async def rebuild(self, lengths: Sequence[int], **_: Any) -> None:
        if self.rebuilds and len(self.kept_while_busy) < self._busy:
            await self._close_links([lost for lost in self.links if lost.is_lost])
            self.kept_while_busy.append(len(self.links))
            raise BusyError("no replacement has room", 0.01)
        self.epoch += 1
        self.rebuilds.append(list(lengths))
        linked = {link.hop.span.start: link for link in self.links}
        old = {link: self.scripted[block] for block, link in linked.items()}
        links: list[HopLink] = []
        fresh: set[HopLink] = set()
        for block in range(len(self._wanted.span)):
            link = linked.get(block)
            if link is None or link.is_lost:
                if link is not None and link.failure is not None:
                    self.faults.append((link.hop.peer_id, link.failure.kind))
                    await link.close()
                node = self._new_node(block)
                link = await node.link(self._notify)
                old[link] = node
                fresh.add(link)
            else:
                old[link].cut(self.epoch, lengths)
            links.append(link)
        nodes = [old[link] for link in links]
        if self._wanted.is_chain:
            for node, after, link in zip(nodes, nodes[1:], links[1:], strict=False):
                node.after = after
                # What the next one has already is not sent to it.
                node.emit_from = [0] * self._wanted.rows if link in fresh else list(lengths)
                if link in fresh:
                    node.send_again()
        for link in fresh:
            if not self._wanted.is_chain or link is links[-1]:
                old[link].emit_from = list(lengths)
        self._set_links(links)
        self.scripted = nodes
        self.held_tokens = dict.fromkeys(fresh, (0,) * self._wanted.rows)

    async def close(self, prefix: Prefix = ()) -> None:
        await super().close(prefix)
        for node in self._everybody:
            await node.close()

    def _new_node(self, block: int) -> ScriptedNode:
        node = ScriptedNode(
            block,
            self._wanted.rows,
            dies_after=self._deaths.pop(block, None),
            step_s=self._step_s,
        )
        node.epoch = self.epoch
        node.on_work = self._count
        node.spoil = self._spoils.pop(block, node.spoil)
        self._everybody.append(node)
        return node

    def _count(self) -> None:
        self.at_work = max(self.at_work, sum(node.working for node in self.scripted))


RNG = random.Random(0)
