"""A node's sessions without a network: real blocks, a real scheduler, streams in memory.

T packed tokens, D hidden.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, Literal, TypeVar, cast
from unittest.mock import AsyncMock, patch

import torch
from torch import Tensor

from nesa_node.compression import tensors
from nesa_node.core.errors import StreamClosedError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.engine.cache.pages import PAGE_TOKENS, PagePool
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.server.adapters.loaded_adapters import LoadedAdapters
from nesa_node.server.scheduler.batch import open_executor
from nesa_node.server.scheduler.scheduler import Scheduler, open_scheduler
from nesa_node.server.session import session_server
from nesa_node.server.session.admission import Admission, AdmissionLimits
from nesa_node.server.session.sealing import describe_computation
from nesa_node.server.session.session_server import SessionServer
from nesa_node.swarm.p2p.link_measurements import LinkSpeeds
from nesa_node.swarm.protocol.any_message import AnyMessage
from nesa_node.swarm.protocol.messages import (
    VERSION,
    Close,
    Closed,
    Downstream,
    Link,
    Linked,
    Message,
    Mode,
    Open,
    Opened,
    Output,
    Prefix,
    Priority,
    Received,
    Reorder,
    Rollback,
    RowSlice,
    Step,
    Want,
)
from nesa_node.swarm.protocol.stream import MessageBudget

MODEL = ModelId("tiny@0")
NODE = PeerId("node")
M = TypeVar("M", bound=Message)
_numbers = itertools.count(1)


class Wire:
    """A stream in memory. The node has it as its `Stream`; `say` and `hear` are the peer's side."""

    can_send_now = True

    def __init__(self, peer: str) -> None:
        self.peer = PeerId(peer)
        self.arrival: Received | None = None
        self._to_node: asyncio.Queue[tuple[Any, bytearray] | None] = asyncio.Queue()
        self._to_peer: asyncio.Queue[tuple[Any, bytes] | None] = asyncio.Queue()

    @property
    def unread_bytes(self) -> int:
        return self._to_node.qsize()

    async def send(self, message: Message, payload: memoryview | bytes = b"") -> None:
        await asyncio.sleep(0)
        self._to_peer.put_nowait((message, bytes(payload)))

    async def receive(self, *, max_tensor_bytes: int = 0) -> tuple[AnyMessage, bytearray]:
        got = await self._to_node.get()
        if got is None:
            raise StreamClosedError("the peer is gone")
        return got

    async def close(self) -> None:
        self._to_peer.put_nowait(None)

    def say(self, message: Message, payload: bytes | memoryview = b"") -> None:
        self._to_node.put_nowait((message, bytearray(payload)))

    def hang_up(self) -> None:
        self._to_node.put_nowait(None)

    async def hear(self) -> tuple[Any, bytes]:
        """Raises `StreamClosedError` at the end."""
        async with asyncio.timeout(20):
            got = await self._to_peer.get()
        if got is None:
            raise StreamClosedError("the node has ended the stream")
        return got

    async def hear_the_end(self) -> None:
        """Drop whatever comes until the node ends the stream."""
        try:
            while True:
                await self.hear()
        except StreamClosedError:
            return

    async def hear_a(self, kind: type[M]) -> M:
        """The next message of this kind; others before it are dropped."""
        while True:
            message, _ = await self.hear()
            if isinstance(message, kind):
                return message


class Peer:
    """A client's session over a wire."""

    def __init__(
        self,
        wire: Wire,
        blocks: ModelBlocks,
        *,
        session: bytes | None = None,
        secret: bytes = b"s" * 32,
    ) -> None:
        self.wire = wire
        self.session = session or next(_numbers).to_bytes(16, "big")
        self.secret = secret
        self.epoch = 0
        self.lengths: list[int] = []
        self._blocks = blocks
        self._step = 0

    def open(
        self,
        *,
        rows: int = 1,
        max_tokens: int = PAGE_TOKENS,
        priority: Priority = "interactive",
        upstream: str | None = None,
        prefix: Prefix = (),
        donor: str | None = None,
        quality: str = "exact",
        codecs: Sequence[str] = (),
        model: ModelId = MODEL,
        version: tuple[int, int] = VERSION,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        mode: Mode | None = None,
    ) -> None:
        self.lengths = [0] * rows
        span = self._blocks.span
        self.wire.say(
            Open(
                version=version,
                model=model,
                session=self.session,
                secret=self.secret,
                blocks=(span.start, span.end),
                rows=rows,
                max_tokens=max_tokens,
                mode=mode or ("chain" if upstream or donor else "star"),
                dtype=dtype,
                epoch=0,
                upstream=upstream,
                priority=priority,
                prefix=prefix,
                donor=donor,
                quality=quality,
                codecs=tuple(codecs),
            )
        )

    async def begin(self, **options: Any) -> tuple[int, ...]:
        """Open, go on from what the node holds already, which is returned."""
        self.open(**options)
        opened = await self.wire.hear_a(Opened)
        self.lengths = list(opened.held)
        self.link()
        await self.wire.hear_a(Linked)
        return opened.held

    async def end(self, prefix: Prefix = ()) -> None:
        """Close, leaving what the rows hold under these digests."""
        self.wire.say(Close(prefix=prefix))
        await self.wire.hear_a(Closed)

    def link(self, upstream: str | None = None, downstream: Downstream | None = None) -> None:
        self.epoch += 1
        lengths = tuple(self.lengths)
        self.wire.say(
            Link(
                epoch=self.epoch,
                upstream=upstream,
                downstream=downstream,
                lengths=lengths,
                emit_from=(0,) * len(lengths),
            )
        )

    def rollback(self, lengths: Sequence[int]) -> None:
        self.epoch += 1
        self.lengths = list(lengths)
        self.wire.say(Rollback(epoch=self.epoch, lengths=tuple(lengths)))

    def reorder(self, sources: Sequence[int]) -> None:
        self.epoch += 1
        self.lengths = [self.lengths[source] for source in sources]
        self.wire.say(Reorder(epoch=self.epoch, sources=tuple(sources)))

    def step(
        self,
        counts: dict[int, int],
        hidden_TD: Tensor | None = None,
        *,
        want: Want = "all",
        codec: str = "none",
    ) -> Step:
        """Send a step of so many tokens for each row."""
        total = sum(counts.values())
        if hidden_TD is None:
            hidden_TD = torch.randn(total, self._blocks.hidden_size)
        meta, payload = tensors.encode(hidden_TD, codec=codec)
        self._step += 1
        slices = tuple(RowSlice(row, self.lengths[row], count) for row, count in counts.items())
        step = Step(
            session=self.session,
            epoch=self.epoch,
            step=self._step,
            rows=slices,
            tensor=meta,
            want=want,
        )
        for row, count in counts.items():
            self.lengths[row] += count
        self.wire.say(step, payload)
        return step

    async def output(self) -> tuple[Output, Tensor]:
        """The next output [T, D]."""
        while True:
            message, payload = await self.wire.hear()
            if isinstance(message, Output):
                decoded = tensors.decode(
                    message.tensor, payload, max_bytes=message.tensor.max_nbytes
                )
                return message, decoded


class Node:
    """What a daemon has once it serves."""

    def __init__(
        self,
        blocks: ModelBlocks,
        pool: PagePool,
        scheduler: Scheduler,
        limits: AdmissionLimits,
        idle_timeout_s: float,
    ) -> None:
        self.blocks = blocks
        self.pool = pool
        self.scheduler = scheduler
        self.admission = Admission(limits, pool)
        swarm = SimpleNamespace(
            identity=SimpleNamespace(peer_id=NODE, sign=lambda _: bytes(64)),
            directory=SimpleNamespace(fetch=AsyncMock(), try_fetch_one=AsyncMock()),
            link_speeds=LinkSpeeds(),
            failure_reporter=SimpleNamespace(record_failure=self._note),
            transport=SimpleNamespace(is_local=AsyncMock(return_value=False)),
            message_budget=MessageBudget(),
        )
        self.reported: list[tuple[str, str]] = []
        """Whom the node told others of, and as what."""
        self.speeds: LinkSpeeds = swarm.link_speeds
        self.server = SessionServer(
            cast(Any, swarm),
            MODEL,
            blocks,
            scheduler,
            self.admission,
            cast(Any, None),  # sessions here neither train nor name adapters
            LoadedAdapters(blocks, cast(Any, None), 0),
            describe_computation(blocks, "none"),
            idle_timeout_s=idle_timeout_s,
        )
        self._tasks: asyncio.TaskGroup | None = None

    def _note(self, _: object, peer: str, kind: str) -> None:
        self.reported.append((peer, kind))

    def connect(self, client: str) -> Wire:
        """A stream that the node serves until it ends."""
        wire = Wire(client)
        self.serve(wire)
        return wire

    def serve(self, wire: Wire) -> None:
        assert self._tasks is not None
        self._tasks.create_task(self._handle(wire))

    async def _handle(self, wire: Wire) -> None:
        try:
            await self.server.handle(wire.peer, cast(Any, wire), cast(Any, None))
        finally:
            await wire.close()

    def peer(self, client: str = "client", **options: Any) -> Peer:
        return Peer(self.connect(client), self.blocks, **options)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Node]:
        """All streams must have ended at its end."""
        async with asyncio.TaskGroup() as self._tasks:
            yield self


@asynccontextmanager
async def open_node(
    blocks: ModelBlocks,
    *,
    tokens: int = 4096,
    peer_tokens: int | None = None,
    sessions: int = 10_000,
    idle_timeout_s: float = 600.0,
    trusted: Sequence[str] = (),
) -> AsyncIterator[Node]:
    limits = AdmissionLimits(
        hidden_bytes=1 << 30,
        hidden_bytes_per_peer=1 << 30,
        hidden_bytes_per_token=blocks.hidden_size * 4,
        sessions_per_peer=sessions,
        cache_tokens_per_peer=peer_tokens or tokens,
        streams_per_peer=10_000,
        trusted=frozenset(map(PeerId, trusted)),
    )
    # The wire is the stream: nothing of the network is tested here.
    wires = patch.object(session_server, "Stream", lambda peer, reader, writer: reader)
    async with open_executor() as executor, open_scheduler(executor) as scheduler:
        node = Node(blocks, blocks.new_pool(tokens), scheduler, limits, idle_timeout_s)
        with wires:
            async with node.serving():
                yield node
