"""A member with a valid record that serves sessions, up to the point where it misbehaves."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import zstandard

from nesa_node.compression import tensors
from nesa_node.core.errors import NesaError
from nesa_node.core.ids import PeerId
from nesa_node.swarm.dht.records import NodeStatus
from nesa_node.swarm.node import Swarm, open_swarm
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.protocol.messages import (
    PROTOCOL,
    VERSION,
    Busy,
    Close,
    Closed,
    ErrorMessage,
    Leaving,
    Link,
    Linked,
    Message,
    Open,
    Opened,
    Output,
    Ping,
    Pong,
    Probe,
    PushOpen,
    PushOpened,
    Received,
    Step,
)
from nesa_node.swarm.protocol.stream import Stream
from tests.hostile.frames import message_frame
from tests.swarm.local_swarm import LOOPBACK

FLOOD_BYTES = 256 << 20


@dataclass
class Served:
    """One session: the client's stream and, where the fake is not the last, the next node's."""

    opened: Open
    client: Stream
    link: Link | None = None
    push: Stream | None = None
    steps: int = -1

    async def send_raw(self, stream: Stream, data: bytes) -> None:
        stream._writer.write(data)
        await stream._writer.drain()

    async def answer(
        self, to: Step, hidden_TD: torch.Tensor, *, codec: str = "none", **changes: Any
    ) -> None:
        """An output for a step that may say anything."""
        meta, payload = tensors.encode(hidden_TD, codec=codec)
        output = Output(epoch=to.epoch, step=to.step, rows=to.rows, tensor=meta)
        await self.send_raw(self.client, message_frame(output, bytes(payload), **changes))

    async def hand_on(
        self, step: Step, hidden_TD: torch.Tensor, *, codec: str = "none", **changes: Any
    ) -> None:
        """A push of `step` to the next node."""
        assert self.push is not None
        meta, payload = tensors.encode(hidden_TD, codec=codec)
        message = Step(
            session=step.session,
            epoch=step.epoch,
            step=step.step,
            rows=step.rows,
            tensor=meta,
            want=step.want,
        )
        await self.send_raw(self.push, message_frame(message, bytes(payload), **changes))


OnStep = Callable[["FakeNode", Served, Step], Awaitable[None]]


@dataclass
class Behaviour:
    """`on_*` may be replaced one by one; what is not replaced is what an honest node would do."""

    name: str
    on_step: OnStep
    on_open: Message | bytes | None = None
    on_link: Callable[[Link], Message] | None = None
    answers_pings: bool = True
    is_busy: bool = False


@dataclass
class FakeNode:
    swarm: Swarm
    behaviour: Behaviour
    hidden_size: int
    opens: int = 0
    misdeeds: int = 0
    sessions: dict[bytes, Served] = field(default_factory=dict)
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    async def handle(
        self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        stream = Stream(peer, reader, writer)
        try:
            message, _ = await stream.receive()
            if isinstance(message, Open):
                await self._serve(stream, message)
            elif isinstance(message, PushOpen):
                await stream.send(PushOpened(epoch=message.epoch))
                served = self.sessions[message.session]
                while True:
                    step, _ = await stream.receive(max_tensor_bytes=1 << 24)
                    if isinstance(step, Step):
                        await self._misbehave(served, step)
        except (NesaError, OSError):
            pass  # it was found out

    async def _serve(self, stream: Stream, opened: Open) -> None:
        self.opens += 1
        served = self.sessions[opened.session] = Served(opened, stream)
        instead = self.behaviour.on_open
        if isinstance(instead, bytes):
            await served.send_raw(stream, instead)
            return
        if instead is not None:
            await stream.send(instead)
            return
        await stream.send(
            Opened(
                version=VERSION,
                max_tokens=opened.max_tokens,
                context_length=10**6,
                step_timeout_s=1.0,
            )
        )
        try:
            while True:
                message, _ = await stream.receive(max_tensor_bytes=1 << 24)
                if isinstance(message, Close):
                    await stream.send(Closed())
                    return
                await self._obey(served, message)
        finally:
            if served.push is not None:
                await served.push.close()

    async def _obey(self, served: Served, message: object) -> None:
        match message:
            case Link():
                served.link = message
                if self.behaviour.on_link is not None:
                    await served.client.send(self.behaviour.on_link(message))
                    return
                if message.downstream is not None:
                    await self._dial(served, message)
                await served.client.send(Linked(epoch=message.epoch))
            case Ping() if self.behaviour.answers_pings:
                busy = self.behaviour.is_busy
                pong = Pong(nonce=message.nonce, epoch=0, step=served.steps, busy=busy)
                await served.client.send(pong)
            case Step():
                await self._misbehave(served, message)

    async def _dial(self, served: Served, link: Link) -> None:
        assert link.downstream is not None
        if served.push is not None:
            await served.push.close()
        peer = PeerId(link.downstream.peer)
        await self.swarm.directory.fetch_all()
        record = self.swarm.directory.record(peer)
        assert record is not None
        served.push = Stream(
            peer, *await self.swarm.transport.open_stream(peer, PROTOCOL, record.addresses)
        )
        opened = served.opened
        await served.push.send(
            PushOpen(
                version=VERSION, session=opened.session, secret=opened.secret, epoch=link.epoch
            )
        )
        await served.push.receive()

    async def _misbehave(self, served: Served, step: Step) -> None:
        self.misdeeds += 1
        served.steps = step.step
        await self.behaviour.on_step(self, served, step)

    def hidden(self, step: Step, value: float = 1.0) -> torch.Tensor:
        """Of the right shape for an answer."""
        tokens = len(step.rows) if step.want == "last" else step.tensor.shape[0]
        return torch.full((tokens, self.hidden_size), value)


async def silence(fake: FakeNode, served: Served, step: Step) -> None:
    pass


async def garbage(fake: FakeNode, served: Served, step: Step) -> None:
    await served.send_raw(served.client, fake.rng.randbytes(200))


async def gibibyte(fake: FakeNode, served: Served, step: Step) -> None:
    meta = {"dtype": "float32", "shape": (1 << 18, 1 << 10), "codec": "none"}
    await served.answer(step, fake.hidden(step), tensor=meta)
    await served.send_raw(served.client, bytes(1 << 20))


async def huge_dims(fake: FakeNode, served: Served, step: Step) -> None:
    meta = {"dtype": "float32", "shape": (1 << 31, 1 << 31, 1 << 31), "codec": "none"}
    await served.answer(step, fake.hidden(step), tensor=meta)


async def wrong_shape(fake: FakeNode, served: Served, step: Step) -> None:
    await served.answer(step, torch.ones(1, fake.hidden_size + 1))


async def wrong_dtype(fake: FakeNode, served: Served, step: Step) -> None:
    await served.answer(step, fake.hidden(step).to(torch.float16))


async def below_the_floor(fake: FakeNode, served: Served, step: Step) -> None:
    await served.answer(step, fake.hidden(step), codec="int8@2:16:8")


async def bomb(fake: FakeNode, served: Served, step: Step) -> None:
    """A gibibyte of zeros in some tens of kilobytes."""
    payload = zstandard.ZstdCompressor().compress(bytes(1 << 30))
    meta = {"dtype": "float32", "shape": (1 << 18, 1 << 10), "codec": "lossless"}
    await served.answer(step, fake.hidden(step), tensor=meta | {"size": len(payload)})
    await served.send_raw(served.client, payload)


async def many_arrivals(fake: FakeNode, served: Served, step: Step) -> None:
    """Nobody asked how fast anything came."""
    for _ in range(10_000):
        await served.client.send(Received(nbytes=1, seconds=86_400.0))
    await served.client.send(Probe(tensor=tensors.encode(torch.zeros(16))[0]), bytes(64))


async def wrong_rows(fake: FakeNode, served: Served, step: Step) -> None:
    await served.answer(step, fake.hidden(step), rows=[(9, 9, 9)])


async def not_finite(fake: FakeNode, served: Served, step: Step) -> None:
    await served.answer(step, fake.hidden(step, math.nan))


async def other_steps(fake: FakeNode, served: Served, step: Step) -> None:
    await served.answer(step, fake.hidden(step), step=step.step + 1)
    await served.answer(step, fake.hidden(step), epoch=step.epoch + 1)
    await served.answer(step, fake.hidden(step), step=0)


async def hang_up(fake: FakeNode, served: Served, step: Step) -> None:
    await served.client.close()


async def half_an_answer(fake: FakeNode, served: Served, step: Step) -> None:
    meta, payload = tensors.encode(fake.hidden(step))
    output = Output(epoch=step.epoch, step=step.step, rows=step.rows, tensor=meta)
    await served.send_raw(served.client, message_frame(output, bytes(payload))[:-10])
    await served.client.close()


def refuse(code: str) -> OnStep:
    async def on_step(fake: FakeNode, served: Served, step: Step) -> None:
        await served.client.send(
            ErrorMessage(code=code, message="yours", fatal=False, answers="step", step=step.step)
        )

    return on_step


async def unexpected(fake: FakeNode, served: Served, step: Step) -> None:
    await served.client.send(Linked(epoch=step.epoch))


async def flood_of_outputs(fake: FakeNode, served: Served, step: Step) -> None:
    """As large as the client can expect, for steps that it never took."""
    rows = served.opened.max_tokens
    hidden_TD = torch.ones(rows, fake.hidden_size)
    for number in range(FLOOD_BYTES // hidden_TD.nbytes):
        await served.answer(step, hidden_TD, step=step.step + 1 + number)


async def flood_of_notices(fake: FakeNode, served: Served, step: Step) -> None:
    for _ in range(20_000):
        await served.client.send(Leaving(seconds=1.0))
    await served.client.send(ErrorMessage(code="tired", message="bye"))


async def push_not_finite(fake: FakeNode, served: Served, step: Step) -> None:
    total = sum(part.count for part in step.rows)
    await served.hand_on(step, torch.full((total, fake.hidden_size), math.nan))


async def push_below_the_floor(fake: FakeNode, served: Served, step: Step) -> None:
    await served.hand_on(step, fake.hidden(step), codec="int8@2:16:8")


async def push_garbage(fake: FakeNode, served: Served, step: Step) -> None:
    assert served.push is not None
    await served.send_raw(served.push, fake.rng.randbytes(200))


async def push_elsewhere(fake: FakeNode, served: Served, step: Step) -> None:
    total = sum(part.count for part in step.rows)
    rows = [(part.row, part.position + 1, part.count) for part in step.rows]
    await served.hand_on(step, torch.ones(total, fake.hidden_size), rows=rows)


def blame_downstream(link: Link) -> Message:
    peer = None if link.downstream is None else link.downstream.peer
    return ErrorMessage(
        code="downstream_lost", message="not me", fatal=False, answers="link", peer=peer
    )


async def blame_during_step(fake: FakeNode, served: Served, step: Step) -> None:
    assert served.link is not None
    assert served.link.downstream is not None
    await served.client.send(
        ErrorMessage(
            code="downstream_lost",
            message="not me",
            fatal=False,
            peer=served.link.downstream.peer,
        )
    )


AS_LAST: Sequence[Behaviour] = (
    Behaviour("garbage", garbage),
    Behaviour("gibibyte", gibibyte),
    Behaviour("huge dims", huge_dims),
    Behaviour("wrong shape", wrong_shape),
    Behaviour("wrong dtype", wrong_dtype),
    Behaviour("wrong rows", wrong_rows),
    Behaviour("below the floor", below_the_floor),
    Behaviour("bomb", bomb),
    Behaviour("many arrivals", many_arrivals),
    Behaviour("not finite", not_finite),
    Behaviour("other steps", other_steps),
    Behaviour("hang up", hang_up),
    Behaviour("half an answer", half_an_answer),
    Behaviour("refuse bad_tensor", refuse("bad_tensor")),
    Behaviour("refuse not_finite", refuse("not_finite")),
    Behaviour("refuse cache_full", refuse("cache_full")),
    Behaviour("refuse future_epoch", refuse("future_epoch")),
    Behaviour("unexpected", unexpected),
    Behaviour("flood of outputs", flood_of_outputs),
    Behaviour("flood of notices", flood_of_notices),
    Behaviour("silence", silence),
    Behaviour("silence, busy for ever", silence, is_busy=True),
    Behaviour("silence, to pings too", silence, answers_pings=False),
    Behaviour("busy for a day", silence, on_open=Busy(retry_after_s=86_400, free_tokens=0)),
    Behaviour("opens with garbage", silence, on_open=b"\xff" * 64),
    Behaviour("opens with a pong", silence, on_open=Pong(nonce=1, epoch=0, step=0, busy=False)),
    Behaviour("opens with nothing", silence, on_open=b""),
    Behaviour("refuses to open", silence, on_open=ErrorMessage(code="wrong_model", message="no")),
    Behaviour(
        "refuses a length", silence, on_open=ErrorMessage(code="context_length", message="no")
    ),
    Behaviour("links another epoch", silence, on_link=lambda link: Linked(epoch=link.epoch + 1)),
    Behaviour(
        "links with an error", silence, on_link=lambda _: ErrorMessage(code="x", message="no")
    ),
)
"""For a node that answers the client: any node of a star, the last of a chain."""

AS_FIRST: Sequence[Behaviour] = (
    Behaviour("push not finite", push_not_finite),
    Behaviour("push below the floor", push_below_the_floor),
    Behaviour("push garbage", push_garbage),
    Behaviour("push elsewhere", push_elsewhere),
    Behaviour("push nothing", silence),
    Behaviour("push nothing, busy for ever", silence, is_busy=True),
    Behaviour("blame at link", silence, on_link=blame_downstream),
    Behaviour("blame during a step", blame_during_step),
    Behaviour("answers itself", wrong_shape),
    Behaviour("hang up", hang_up),
)
"""For a node in a chain before others."""


@contextmanager
def fake_node(
    folder: Path, initial_peers: Sequence[str], status: NodeStatus, hidden_size: int
) -> Iterator[FakeNode]:
    """Serves in an event loop of its own, as the first choice of every planner."""

    def make(swarm: Swarm) -> FakeNode:
        return FakeNode(swarm, AS_LAST[0], hidden_size)

    with serving_member(folder, initial_peers, status, make) as fake:
        yield fake


class Member(Protocol):
    """What answers the streams of a member."""

    async def handle(
        self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None: ...


M = TypeVar("M", bound=Member)


@contextmanager
def serving_member(
    folder: Path, initial_peers: Sequence[str], status: NodeStatus, make: Callable[[Swarm], M]
) -> Iterator[M]:
    """A member with a record, in an event loop of its own, whose streams `make` answers."""
    started: Any = threading.Event()
    loop = asyncio.new_event_loop()
    made: list[M] = []
    failures: list[BaseException] = []
    stopping = asyncio.Event()

    async def live() -> None:
        async with open_swarm(
            Identity.ephemeral(folder), host_maddrs=LOOPBACK, initial_peers=initial_peers
        ) as swarm:
            fake = make(swarm)
            await swarm.transport.serve(PROTOCOL, fake.handle)
            await swarm.directory.publish(status)
            made.append(fake)
            started.set()
            while not stopping.is_set():
                try:
                    async with asyncio.timeout(15):
                        await stopping.wait()
                except TimeoutError:
                    await swarm.directory.publish(status)
            await swarm.directory.withdraw()

    def run() -> None:
        try:
            loop.run_until_complete(live())
        except BaseException as error:
            failures.append(error)
            started.set()
        finally:
            loop.close()

    thread = threading.Thread(target=run, name="fake-node")
    thread.start()
    started.wait()
    try:
        if failures:
            raise failures[0]
        yield made[0]
    finally:
        if not failures:
            loop.call_soon_threadsafe(stopping.set)
        thread.join()
