"""A client's stream to a node that runs pieces of a network."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from torch import Tensor

from nesa_node.core.errors import (
    BusyError,
    NesaError,
    PeerUnreachableError,
    ProtocolError,
    RemoteError,
    StreamClosedError,
)
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.core.logging import get_logger
from nesa_node.sharding.open_sizes import Sizes
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.identity import adapter_proof
from nesa_node.swarm.p2p.tasks import wait_until_done
from nesa_node.swarm.protocol.graph_messages import (
    CHAIN_VERSION,
    GRAPH_PROTOCOL,
    MAX_RUNNING,
    Exchange,
    GraphCancel,
    GraphFailed,
    GraphOpen,
    GraphOpened,
    GraphOutput,
    GraphRun,
    GraphSequence,
)
from nesa_node.swarm.protocol.graph_values import decode_values, encode_values
from nesa_node.swarm.protocol.messages import VERSION, Busy, ErrorMessage, Leaving, Ping, Pong
from nesa_node.swarm.protocol.stream import Stream, peer_timeout

log = get_logger(__name__)

OPEN_TIMEOUT_S = 10.0
PING_AFTER_S = 3.0
MAX_SILENCE_S = 10.0
"""Of a node that owes an answer."""
MAX_ANSWER_S = 300.0
"""From a request to its answer: a node may answer pings, and never compute."""
MAX_OUTPUT_BYTES = 4 << 30


class GraphLink:
    """Requests to one node, any number at once. `open_graph_link` makes it."""

    def __init__(self, stream: Stream, opened: GraphOpened) -> None:
        self.peer = stream.peer
        self.failure: NesaError | None = None
        """Why it can be used no more."""
        self.is_leaving = False
        """Whether the node has announced that it leaves."""
        self.version = opened.version
        self._stream = stream
        self._max_bytes = opened.max_bytes
        self._numbers = itertools.count()
        self._turns = asyncio.Semaphore(MAX_RUNNING)
        """A node reads no more requests of one stream at once."""
        self._waiting: dict[int, asyncio.Future[dict[int, Tensor]]] = {}
        """For each request its answer."""
        self._max_output_bytes = 0
        """Of all requests, since answers may come when their request was cancelled."""
        self._heard_at = time.monotonic()

    @property
    def running(self) -> int:
        """Requests that wait for their answers."""
        return len(self._waiting)

    async def run(
        self,
        span: Span,
        sizes: Sizes,
        values: Mapping[int, Tensor],
        output_bytes: int,
        exchange: Exchange | None = None,
        sent: asyncio.Event | None = None,
        sequence: GraphSequence | None = None,
    ) -> dict[int, Tensor]:
        """Have the node compute `span`. Its answer has at most `output_bytes`.

        With `exchange` other nodes give and get some of the values. `sent` is set once the request
        is on its way. A cancelled call tells the node that it need not answer.

        Raises `PeerUnreachableError`, `BusyError`, `RemoteError` with the node's reason, and
        `ProtocolError` for a node that breaks the protocol.
        """
        self._require_usable()
        metas, payload = await asyncio.to_thread(encode_values, values)
        if len(payload) > self._max_bytes:
            raise RemoteError(
                "too_large",
                f"a request has {len(payload) >> 20} MiB of values, and {self.peer} takes "
                f"{self._max_bytes >> 20} MiB: send a smaller batch or image",
            )
        async with self._turns:
            message = GraphRun(
                request=next(self._numbers),
                blocks=(span.start, span.end),
                sizes=sizes,
                values=metas,
                exchange=exchange,
                sequence=sequence,
            )
            return await self._run(message, payload, output_bytes, sent)

    async def _run(
        self,
        message: GraphRun,
        payload: bytearray,
        output_bytes: int,
        sent: asyncio.Event | None,
    ) -> dict[int, Tensor]:
        self._require_usable()
        number = message.request
        answer: asyncio.Future[dict[int, Tensor]] = asyncio.get_running_loop().create_future()
        if not self._waiting:
            self._heard_at = time.monotonic()
        self._waiting[number] = answer
        self._max_output_bytes = max(self._max_output_bytes, min(output_bytes, MAX_OUTPUT_BYTES))
        try:
            await self._send(message, payload)
            if sent is not None:
                sent.set()
            async with peer_timeout(
                self.peer, MAX_ANSWER_S, f"pieces {Span(*message.blocks)} were computed"
            ):
                return await answer
        except StreamClosedError as error:
            raise PeerUnreachableError(str(error)) from None
        except (asyncio.CancelledError, PeerUnreachableError):
            if self.version >= CHAIN_VERSION:
                await wait_until_done(asyncio.ensure_future(self._cancel(number)))
            raise
        finally:
            self._waiting.pop(number, None)

    async def _send(self, message: GraphRun, payload: bytearray) -> None:
        """A cancelled call sends the whole message, too: half of it would end the stream."""
        sending = asyncio.ensure_future(self._stream.send(message, payload))
        await wait_until_done(sending)
        sending.result()

    async def _cancel(self, number: int) -> None:
        with suppress(StreamClosedError):
            await self._stream.send(GraphCancel(request=number))

    def _require_usable(self) -> None:
        if self.failure is not None:
            raise PeerUnreachableError(f"{self.peer}: {self.failure}")

    async def serve(self) -> None:
        """Receive answers until the stream ends; then all requests that wait fail."""
        watching = asyncio.create_task(self._watch())
        try:
            while True:
                await self._stream.wait_readable()
                message, payload = await self._stream.receive(
                    max_tensor_bytes=self._max_output_bytes
                )
                self._heard_at = time.monotonic()
                match message:
                    case GraphOutput():
                        self._resolve(message.request, decode_values(message.values, payload))
                    case GraphFailed():
                        self._fail(message)
                    case Leaving():
                        self.is_leaving = True
                    case Pong():
                        pass
                    case Busy() | ErrorMessage():
                        raise PeerUnreachableError(f"{self.peer}: {message.message}")
                    case _:
                        raise ProtocolError("unexpected", f"{self.peer} sent another message")
        except NesaError as error:
            self._end(error)
        finally:
            watching.cancel()
            self._end(PeerUnreachableError("the stream was closed"))

    async def _watch(self) -> None:
        """Ping a node that is silent, and give it up."""
        while True:
            await asyncio.sleep(PING_AFTER_S / 2)
            silent_s = time.monotonic() - self._heard_at
            if not self._waiting or silent_s < PING_AFTER_S:
                continue
            if silent_s >= MAX_SILENCE_S:
                self._end(PeerUnreachableError(f"silent for {silent_s:.0f} s"))
                self._stream.abort()
                return
            try:
                await self._stream.send(Ping(nonce=0))
            except StreamClosedError as error:
                self._end(error)
                return

    def _resolve(self, number: int, values: dict[int, Tensor]) -> None:
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(values)

    def _fail(self, message: GraphFailed) -> None:
        waiting = self._waiting.get(message.request)
        if waiting is None or waiting.done():
            return
        text = f"{self.peer}: {message.message}"
        if message.code == "busy":
            waiting.set_exception(BusyError(text, message.retry_after_s))
        else:
            waiting.set_exception(RemoteError(message.code, text))

    def _end(self, error: NesaError) -> None:
        if self.failure is None:
            self.failure = error
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(PeerUnreachableError(f"{self.peer}: {self.failure}"))


@asynccontextmanager
async def open_graph_link(
    swarm: Swarm, model_id: ModelId, peer: PeerId, addresses: Sequence[str]
) -> AsyncIterator[GraphLink]:
    """Open a stream to a node. `GraphLink.serve` has to run beside it.

    Raises `PeerUnreachableError`, `BusyError`, and `RemoteError` for a node that refuses it.
    """
    async with peer_timeout(peer, OPEN_TIMEOUT_S, "a stream for pieces was opened"):
        pipes = await swarm.transport.open_stream(peer, GRAPH_PROTOCOL, addresses)
    stream = Stream(peer, *pipes)
    try:
        async with peer_timeout(peer, OPEN_TIMEOUT_S, "a stream for pieces was opened"):
            proof = adapter_proof(swarm.notices.membership, swarm.transport.peer_id, peer)
            try:
                await stream.send(GraphOpen(version=VERSION, model=model_id, membership=proof))
                message, _ = await stream.receive()
            except StreamClosedError as error:
                raise PeerUnreachableError(str(error)) from None
        match message:
            case GraphOpened():
                yield GraphLink(stream, message)
            case Busy():
                raise BusyError(f"{peer} is busy: {message.message}", message.retry_after_s)
            case ErrorMessage():
                raise RemoteError(message.code, f"{peer}: {message.message}")
            case _:
                raise ProtocolError("unexpected", f"{peer} does not answer graph_open")
    finally:
        await stream.close()
