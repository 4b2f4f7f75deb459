"""A node's answers to requests for pieces of a network."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

from torch import Tensor

from nesa_node.core.errors import BusyError, NesaError, ProtocolError, StreamClosedError
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.core.logging import get_logger
from nesa_node.server.graphs.awaited_values import AwaitedValues
from nesa_node.server.graphs.kept_sequences import SequenceUse
from nesa_node.server.graphs.piece_neighbours import PieceNeighbours
from nesa_node.server.graphs.request_room import RequestRoom
from nesa_node.server.graphs.served_pieces import ServedPieces
from nesa_node.server.scheduler.batch import Executor
from nesa_node.server.session.message_loop import RefusalLog, receive_first_message
from nesa_node.server.session.peer_access import PeerAccess
from nesa_node.sharding.graph_plan import encode_plan
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.tasks import TaskSet
from nesa_node.swarm.protocol.any_message import AnyMessage
from nesa_node.swarm.protocol.graph_messages import (
    MAX_PLAN_PART_BYTES,
    MAX_RUNNING,
    GraphCancel,
    GraphFailed,
    GraphOpen,
    GraphOpened,
    GraphOutput,
    GraphRun,
    GraphValues,
    PlanPart,
    PlanRequest,
)
from nesa_node.swarm.protocol.graph_values import decode_values, encode_values
from nesa_node.swarm.protocol.messages import VERSION, Close, Closed, Leaving, Ping, Pong
from nesa_node.swarm.protocol.stream import Stream

log = get_logger(__name__)

MAX_STREAMS_PER_PEER = 8
MAX_STREAMS = 256
BUSY_RETRY_S = 1.0
CLOSE_GRACE_S = 1.0
ALIVE_INTERVAL_S = 3.0
"""Between two messages to a client whose request waits for its turn or room."""


class _Answers:
    """Requests of one stream that are not answered yet."""

    def __init__(self) -> None:
        self.turns = asyncio.Semaphore(MAX_RUNNING)
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def add(self, number: int, task: asyncio.Task[None] | None) -> None:
        if task is not None:
            self._tasks[number] = task

    def cancel(self, number: int) -> None:
        if number in self._tasks:
            self._tasks.pop(number).cancel()

    def remove(self, number: int) -> None:
        """Take out the running task, where it is this request's: numbers may be used again."""
        if self._tasks.get(number) is asyncio.current_task():
            del self._tasks[number]


@asynccontextmanager
async def _told_alive(stream: Stream) -> AsyncIterator[None]:
    """Tell the peer now and then that this node lives, though it reads nothing."""
    is_over = asyncio.Event()

    async def tell() -> None:
        while not is_over.is_set():
            try:
                async with asyncio.timeout(ALIVE_INTERVAL_S):
                    await is_over.wait()
            except TimeoutError:
                if stream.can_send_now:
                    with suppress(StreamClosedError):
                        await stream.send(Pong(nonce=0, epoch=0, step=-1, busy=True))

    telling = asyncio.create_task(tell())
    try:
        yield
    finally:
        is_over.set()
        await telling


class GraphServer:
    """Serves streams of one model's clients until it is closed."""

    def __init__(
        self,
        swarm: Swarm,
        model_id: ModelId,
        pieces: ServedPieces,
        executor: Executor,
        room_bytes: int,
        *,
        idle_timeout_s: float,
        allow: frozenset[PeerId] = frozenset(),
        deny: frozenset[PeerId] = frozenset(),
        refusals: RefusalLog | None = None,
    ) -> None:
        """`executor` is the device's thread; values that come and go may take `room_bytes`.

        The caller closes it.
        """
        self.computed = 0
        """Requests that were computed."""
        self._swarm = swarm
        self._pieces = pieces
        self._executor = executor
        self._awaited = AwaitedValues()
        self._neighbours = PieceNeighbours(swarm, model_id)
        self._room = RequestRoom(room_bytes // 2)
        self._values_room = RequestRoom(room_bytes // 2)
        """Of values from other nodes, so that requests that wait for them leave room for them."""
        self._max_request_bytes = self._room.peer_bytes // 2
        self._idle_timeout_s = idle_timeout_s
        self._access = PeerAccess(swarm, model_id, allow, deny)
        self._refusals = refusals or RefusalLog()
        self._streams: Counter[PeerId] = Counter()
        self._drain_s = 0.0
        self._drain_began = asyncio.Event()
        self._running = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._handlers: set[asyncio.Task[Any]] = set()

    @property
    def streams(self) -> int:
        return self._streams.total()

    async def handle(self, peer: PeerId, reader: Any, writer: Any) -> None:
        """Serve one incoming stream until its end; the caller closes it.

        A peer's mistake is answered, never raised.
        """
        stream = Stream(peer, reader, writer)
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        task.add_done_callback(self._handlers.discard)
        async with self._refusals.answering(stream):
            # Read before it is refused: see `SessionServer.handle`.
            message = await receive_first_message(stream)
            if not isinstance(message, GraphOpen | PlanRequest):
                raise ProtocolError(
                    "unexpected", "a stream of pieces begins with graph_open or plan_request"
                )
            self._access.require(peer, message.membership, message.model)
            if isinstance(message, PlanRequest):
                await self._send_plan(stream)
            else:
                await self._serve(stream)

    async def drain(self, timeout_s: float, *, idle_s: float | None = None) -> None:
        """Refuse new requests, and wait up to `timeout_s` for those that were read."""
        self._drain_s = timeout_s if idle_s is None else min(timeout_s, idle_s)
        self._drain_began.set()
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
        except TimeoutError:
            log.warning("drain_timed_out", requests=self._running)

    async def close(self) -> None:
        """End all streams; afterwards nothing uses the pieces."""
        if self._handlers:
            await asyncio.wait(self._handlers, timeout=CLOSE_GRACE_S)
        await self._neighbours.close()  # what is still being sent to them ends
        while tasks := [task for task in self._handlers if not task.done()]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _send_plan(self, stream: Stream) -> None:
        content = encode_plan(self._pieces.plan)
        for start in range(0, len(content), MAX_PLAN_PART_BYTES):
            part = content[start : start + MAX_PLAN_PART_BYTES]
            await stream.send(PlanPart(total_bytes=len(content), data=part))

    async def _serve(self, stream: Stream) -> None:
        peer = stream.peer
        if self._drain_began.is_set():
            raise ProtocolError("draining", "this node is leaving")
        if self._streams[peer] >= MAX_STREAMS_PER_PEER or self._streams.total() >= MAX_STREAMS:
            raise BusyError("too many streams are open", BUSY_RETRY_S)
        self._streams[peer] += 1
        tasks = TaskSet()
        try:
            span = self._pieces.span
            await stream.send(
                GraphOpened(
                    version=VERSION,
                    blocks=(span.start, span.end),
                    max_bytes=self._max_request_bytes,
                )
            )
            tasks.start(self._tell_leaving(stream), name="graph-leaving")
            await self._read_requests(stream, tasks)
        finally:
            await tasks.close()
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]
                self._pieces.forget_sequences(peer)

    async def _tell_leaving(self, stream: Stream) -> None:
        await self._drain_began.wait()
        try:
            await stream.send(Leaving(seconds=self._drain_s))
        except StreamClosedError:
            log.debug("stream_ended", peer=stream.peer)

    async def _read_requests(self, stream: Stream, tasks: TaskSet) -> None:
        answers = _Answers()
        while True:
            try:
                async with asyncio.timeout(self._idle_timeout_s):
                    await stream.wait_readable()
            except TimeoutError:
                raise ProtocolError(
                    "idle_timeout", f"no request came for {self._idle_timeout_s:g} s"
                ) from None
            message, payload = await self._receive(stream, answers)
            match message:
                case GraphRun():
                    answering = self._answer(stream, message, payload, answers)
                    answers.add(message.request, tasks.start(answering, name="graph"))
                case GraphCancel():
                    answers.cancel(message.request)
                case GraphValues():
                    holding = self._hold_values(stream.peer, message, payload)
                    tasks.start(holding, name="graph-values")
                case Ping():
                    await stream.send(Pong(nonce=message.nonce, epoch=0, step=-1, busy=False))
                case Close():
                    await stream.send(Closed())
                    return
                case _:
                    raise ProtocolError("unexpected", "a stream of pieces has graph_run")
            # A task that were cancelled before it began would not release what it holds.
            await asyncio.sleep(0)
            await self._swarm.message_budget.wait_until_paid(stream, message)

    async def _receive(self, stream: Stream, answers: _Answers) -> tuple[AnyMessage, bytearray]:
        """The next message, with room for its values. A request also has its turn."""
        admitted: list[tuple[RequestRoom, int]] = []

        async def admit(message: AnyMessage, nbytes: int) -> None:
            if not isinstance(message, GraphRun | GraphValues):
                if nbytes:
                    raise ProtocolError("unexpected", "a stream of pieces has graph_run")
                return
            room = self._room if isinstance(message, GraphRun) else self._values_room
            async with _told_alive(stream):
                if isinstance(message, GraphRun):
                    await answers.turns.acquire()
                await room.acquire(stream.peer, nbytes)
            admitted.append((room, nbytes))

        try:
            return await stream.receive(max_tensor_bytes=self._max_request_bytes, admit=admit)
        except BaseException:  # a call that is cancelled gives its room back, too
            for room, nbytes in admitted:
                room.release(stream.peer, nbytes)
            raise

    async def _hold_values(self, peer: PeerId, message: GraphValues, payload: bytearray) -> None:
        try:
            await self._awaited.hold(peer, message, payload)
        except ProtocolError as error:
            self._refusals.record(peer=peer, code=error.code, reason=str(error))
        finally:
            self._values_room.release(peer, len(payload))

    async def _answer(
        self, stream: Stream, message: GraphRun, payload: bytearray, answers: _Answers
    ) -> None:
        self._running += 1
        self._is_idle.clear()
        held = len(payload)
        try:
            try:
                made = await self._compute(stream.peer, message, payload)
                del payload
                self._room.release(stream.peer, held)
                held = 0
                wanted = min(sum(each.nbytes for each in made.values()), self._room.peer_bytes)
                await self._room.acquire(stream.peer, wanted)
                held = wanted
                returned = await self._send_on(message, made)
                values, content = await asyncio.to_thread(encode_values, returned)
                answer: GraphOutput | GraphFailed = GraphOutput(
                    request=message.request, values=values
                )
            except NesaError as error:
                answer, content = self._refuse(stream.peer, message, error), bytearray()
            # From here on it is not cancelled: half a message would end the stream.
            answers.remove(message.request)
            await stream.send(answer, content)
        except StreamClosedError:
            log.debug("stream_ended", peer=stream.peer)
        finally:
            answers.remove(message.request)
            answers.turns.release()
            self._room.release(stream.peer, held)
            self._running -= 1
            if not self._running:
                self._is_idle.set()

    async def _compute(
        self, peer: PeerId, message: GraphRun, payload: bytearray
    ) -> dict[int, Tensor]:
        if self._drain_began.is_set():
            raise ProtocolError("draining", "this node is leaving")
        if message.blocks[0] > message.blocks[1]:
            raise ProtocolError("wrong_blocks", "pieces that end before they begin")
        values = decode_values(message.values, payload)
        exchange = message.exchange
        span = Span(*message.blocks)
        async with AsyncExitStack() as stack:
            if exchange is not None and exchange.sources:
                claim = self._awaited.claim(exchange.sources)
                values |= await stack.enter_async_context(claim)
            given = message.sequence
            use = None if given is None else SequenceUse(peer, given.key, given.rows)
            run = partial(self._pieces.run, span, message.sizes, values, use)
            made = await self._executor.run(run)
        self.computed += 1
        return made

    async def _send_on(self, message: GraphRun, made: dict[int, Tensor]) -> dict[int, Tensor]:
        """Send what other nodes need; what the client needs."""
        exchange = message.exchange
        if exchange is None:
            return made
        wanted = {index for target in exchange.targets for index in target.values}
        if unknown := sorted(wanted.union(exchange.returned) - made.keys()):
            raise ProtocolError("bad_tensor", f"these pieces do not give values {unknown}")
        if len({target.node.peer for target in exchange.targets}) < len(exchange.targets):
            raise ProtocolError("unexpected", "a request names a target twice")
        for target in exchange.targets:
            # One after another: what is sent is a copy.
            values = {index: made[index] for index in target.values}
            await self._neighbours.send(target, values)
        return {index: made[index] for index in exchange.returned}

    def _refuse(self, peer: PeerId, message: GraphRun, error: NesaError) -> GraphFailed:
        code = error.code if isinstance(error, ProtocolError) else "not_computed"
        self._refusals.messages[code] += 1
        log.debug("request_refused", peer=peer, code=code, reason=str(error))
        retry_after_s = error.retry_after_s if isinstance(error, BusyError) else 0.0
        return GraphFailed(
            request=message.request,
            code=code,
            message=str(error)[:1024],
            retry_after_s=retry_after_s,
        )
