"""Messages and their tensors over one libp2p stream.

A message consists of one or more frames. A frame is two little-endian uint32 (header bytes, payload
bytes), the header and the payload. The first frame of a message has its header; a tensor that does
not fit in one frame continues in frames without header. Sizes are checked before memory is
allocated.

Rate limit of session messages per peer, on all of its streams together.

A node limits its clients and neighbours, a client its hops.
"""

from __future__ import annotations

import asyncio
import math
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any

from nesa_node.compression.codecs import RAW
from nesa_node.core.errors import FrameError, PeerUnreachableError, StreamClosedError
from nesa_node.core.ids import PeerId
from nesa_node.core.lru_table import LruTable
from nesa_node.swarm.p2p.link_measurements import MIN_SAMPLE_BYTES
from nesa_node.swarm.p2p.pipe import MAX_UNREAD_BYTES, Pipe
from nesa_node.swarm.protocol.any_message import (
    AnyMessage,
    decode_message,
    encode_message,
    payload_nbytes,
    tensor_of,
)
from nesa_node.swarm.protocol.graph_messages import GraphRun, GraphValues
from nesa_node.swarm.protocol.messages import (
    Link,
    Message,
    QuantizedPages,
    Received,
    Reorder,
    Rollback,
    Sync,
)

MAX_HEADER_BYTES = 64 * 1024
MAX_CHUNK_BYTES = 1 << 20
FRAME_TIMEOUT_S = 30.0
"""Time in which a begun frame must arrive, and in which the receiver must accept a sent one: bounds
the wait for a sender that trickles or a receiver that does not read."""

_MAX_JOINED_CHUNK_BYTES = 64 * 1024
"""Chunk size up to which a frame is joined and written at once: libp2p then sends it in one piece,
which halves the transfer cost of a small step."""

_PREFIX = struct.Struct("<II")
_BROKEN_STREAM_ERRORS = (ConnectionError, BrokenPipeError, asyncio.IncompleteReadError, OSError)


Admission = Callable[[AnyMessage, int], Awaitable[None]]
Observer = Callable[[PeerId, AnyMessage, bytes], None]

received_by: ContextVar[Observer | None] = ContextVar("received_by", default=None)
"""Called with each message that the streams of this context receive, and its payload: what a node
sees, for `nesa_node/evaluation/recording_node.py`."""


class Stream:
    """Duplex message stream. Any task may send, one task receives, and its opener closes it."""

    def __init__(self, peer: PeerId, reader: Any, writer: Any) -> None:
        self.peer = peer
        self.bytes_sent = 0
        self.messages_sent = 0
        self.arrival: Received | None = None
        """Arrival time of the last message's payload, if it was limited by the network."""
        self._was_paused = False
        self._reader: Pipe = reader
        self._writer: Pipe = writer
        self._send_lock = asyncio.Lock()

    @property
    def raw_bytes_received(self) -> int:
        """Bytes received from the peer, including those of an incomplete message."""
        return self._reader.received_bytes

    @property
    def unread_bytes(self) -> int:
        """Bytes received that belong to messages not returned by `receive` yet."""
        return self._reader.unread_bytes

    @property
    def can_send_now(self) -> bool:
        """Whether a message of one frame can be sent without waiting."""
        return self._writer.is_flushed and not self._send_lock.locked()

    async def send(self, message: Message, payload: memoryview | bytearray | bytes = b"") -> None:
        """Send a message and, in chunks, its tensor's bytes; `payload` may be reused afterwards.

        Raises `StreamClosedError`, also if the peer reads nothing for `FRAME_TIMEOUT_S`.
        Cancellation leaves the stream unusable.
        """
        header = encode_message(message)
        view = memoryview(payload).cast("B")
        self.messages_sent += 1
        async with self._send_lock:
            try:
                for start in range(0, max(1, len(view)), MAX_CHUNK_BYTES):
                    await self._send_frame(header, view[start : start + MAX_CHUNK_BYTES])
                    header = b""
            except TimeoutError:
                raise StreamClosedError(
                    f"{self.peer} took nothing for {FRAME_TIMEOUT_S:.0f} s"
                ) from None
            except _BROKEN_STREAM_ERRORS as error:
                raise StreamClosedError(f"the stream to {self.peer} broke: {error!r}") from None

    async def _send_frame(self, header: bytes, chunk: memoryview) -> None:
        prefix = _PREFIX.pack(len(header), len(chunk))
        if len(chunk) <= _MAX_JOINED_CHUNK_BYTES:
            self._writer.write(b"".join((prefix, header, chunk)))
        else:
            self._writer.write(prefix + header)
            self._writer.write(chunk)
        self.bytes_sent += len(prefix) + len(header) + len(chunk)
        if not self._writer.is_flushed:
            async with asyncio.timeout(FRAME_TIMEOUT_S):
                await self._writer.drain()

    async def wait_readable(self) -> None:
        """Wait until a message begins to arrive. Raises `StreamClosedError` at the end."""
        try:
            await self._reader.wait_readable()
        except _BROKEN_STREAM_ERRORS:
            raise StreamClosedError(f"{self.peer} closed the stream") from None

    async def receive(
        self, *, max_tensor_bytes: int = 0, admit: Admission | None = None
    ) -> tuple[AnyMessage, bytearray]:
        """Wait for the next message and all bytes of its tensor, in a buffer that the caller owns.

        `admit` gets the message and the bytes of its tensor, which are read once it returns.
        Raises `StreamClosedError` at the end of the stream, and `FrameError` or
        `ProtocolError("bad_tensor")`, after which the stream cannot be read any more.
        """
        try:
            await self._reader.wait_readable()
            # The pipe had stopped receiving, so that the arrival cannot be timed.
            self._was_paused = self._reader.unread_bytes >= MAX_UNREAD_BYTES
            message, payload = await self._receive_message(max_tensor_bytes, admit)
            if (observe := received_by.get()) is not None:
                observe(self.peer, message, bytes(payload))
            return message, payload
        except TimeoutError:
            raise FrameError(f"a message stopped midway for {FRAME_TIMEOUT_S:.0f} s") from None
        except _BROKEN_STREAM_ERRORS:
            raise StreamClosedError(f"{self.peer} closed the stream") from None

    async def _receive_message(
        self, max_tensor_bytes: int, admit: Admission | None
    ) -> tuple[AnyMessage, bytearray]:
        header_bytes, chunk_bytes = _PREFIX.unpack(await self._read(_PREFIX.size))
        if not 0 < header_bytes <= MAX_HEADER_BYTES:
            raise FrameError(f"a header of {header_bytes} bytes; 1 to {MAX_HEADER_BYTES} allowed")
        if chunk_bytes > MAX_CHUNK_BYTES:
            raise FrameError(f"a chunk of {chunk_bytes} bytes; at most {MAX_CHUNK_BYTES} allowed")
        message = decode_message(await self._read(header_bytes))
        total = payload_nbytes(message, max_bytes=max_tensor_bytes)
        _check_fits(chunk_bytes, total)
        if admit is not None:
            await admit(message, total)
        self.arrival = None
        if chunk_bytes == total:
            if total < MIN_SAMPLE_BYTES:
                return message, await self._read(total)
            with self._time_arrival(total):
                return message, await self._read(total)
        with self._time_arrival(total):
            return message, await self._read_chunks(chunk_bytes, total)

    async def _read_chunks(self, chunk_bytes: int, total: int) -> bytearray:
        payload = bytearray(total)
        view = memoryview(payload)
        await self._read_into(view[:chunk_bytes])
        filled = chunk_bytes
        while filled < total:
            header_bytes, chunk_bytes = _PREFIX.unpack(await self._read(_PREFIX.size))
            if header_bytes or not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
                raise FrameError("a tensor's frames were interrupted or have impossible sizes")
            _check_fits(filled + chunk_bytes, total)
            await self._read_into(view[filled : filled + chunk_bytes])
            filled += chunk_bytes
        return payload

    @contextmanager
    def _time_arrival(self, nbytes: int) -> Iterator[None]:
        """Time the arrival of a payload, without the bytes that were already received."""
        here, started = self._reader.unread_bytes, time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        if not self._was_paused and nbytes - here >= MIN_SAMPLE_BYTES // 2:
            self.arrival = Received(nbytes=nbytes - here, seconds=seconds)

    async def _read(self, count: int) -> bytearray:
        """The next bytes of a begun message, mostly without waiting."""
        data = self._reader.read_nowait(count)
        if data is None:
            data = bytearray(count)
            await self._read_into(memoryview(data))
        return data

    async def _read_into(self, view: memoryview) -> None:
        async with asyncio.timeout(FRAME_TIMEOUT_S):
            await self._reader.read_into(view)

    async def close(self) -> None:
        """Close the stream, even when cancelled.

        May be called twice, and does not raise if the peer is gone.
        """
        self._writer.close()
        try:
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()
        except TimeoutError:
            pass  # `abort` closes this side all the same
        finally:
            self.abort()

    def abort(self) -> None:
        """Close the stream at once and drop unsent bytes; a no-op if it is closed."""
        self._writer.abort()


def _check_fits(count: int, total: int) -> None:
    if count > total:
        raise FrameError(f"{count} bytes came for a tensor of {total}")


@asynccontextmanager
async def peer_timeout(peer: PeerId, seconds: float, activity: str) -> AsyncIterator[None]:
    """Raise `PeerUnreachableError` if the body waits for `peer` longer than `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise PeerUnreachableError(
            f"{peer} was silent for {seconds:g} s while {activity}"
        ) from None


MAX_BUDGET_PEERS = 4096

_MESSAGE_PRICE_S = 1 / 1000
"""Price of a message: a client with 64 sessions sends 128 pings a second if all steps are late."""
_TOKEN_PRICE_S = 1 / 10_000
"""Price of a message sent for each token: at 50 tokens/s in each of 64 sessions a client sends
3,200 steps a second and as many `Received`; a hop sends as many outputs."""
_VALUE_PRICE_S = 1 / 100_000
"""Price of each tensor of a graph: what is kept of one and decoding it take some microseconds."""
_CHANGE_PRICE_S = 1 / 400
"""Price of a change of up to `_ROWS_PER_CHANGE_PRICE` rows' caches, which takes up to a millisecond
in sessions of many pages. More rows take proportionally longer: 14 ms for 256 after 120 steps."""
_ROWS_PER_CHANGE_PRICE = 16
"""Beam search reorders with every token: with up to 16 beams up to 400 times a second."""
_DECODE_PRICE_S_PER_BYTE = 1e-9
"""Price of decoding a compressed tensor: 2 kB can stand for 64 MiB, which take 30 ms."""
_BURST_S = 2.0
"""Total price of the messages that a peer may send in one burst."""


class MessageBudget:
    """Per-peer budget in seconds of processing; delays reading from a peer that exceeds it.

    If the next message is already buffered, reading it would not yield to the event loop, so that
    `wait_until_paid` yields once before.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._paid_at: LruTable[PeerId, float] = LruTable(MAX_BUDGET_PEERS)
        """By peer: the time at which its last message is paid for."""

    async def wait_until_paid(
        self, stream: Stream, message: Message, *, is_refused: bool = False
    ) -> None:
        """Wait until `stream`, which brought `message`, may be read on."""
        wait_s = self.charge(stream.peer, message, is_refused=is_refused)
        if wait_s or stream.unread_bytes:
            await asyncio.sleep(wait_s)

    def charge(self, peer: PeerId, message: Message, *, is_refused: bool = False) -> float:
        """Count a message. Returns the seconds until it is paid for."""
        now = self._clock()
        price_s = _MESSAGE_PRICE_S
        tensor = tensor_of(message)
        if isinstance(message, GraphRun | GraphValues):
            price_s += len(message.values) * _VALUE_PRICE_S
        if isinstance(message, Link | Reorder | Rollback | Sync):
            rows = message.sources if isinstance(message, Reorder) else message.lengths
            price_s = _CHANGE_PRICE_S * max(math.ceil(len(rows) / _ROWS_PER_CHANGE_PRICE), 1)
        elif not is_refused and (
            isinstance(message, Received | QuantizedPages) or tensor is not None
        ):
            price_s = _TOKEN_PRICE_S
        if tensor is not None and tensor.codec != RAW.text:
            price_s += tensor.decoded_nbytes * _DECODE_PRICE_S_PER_BYTE
        paid_at = max(self._paid_at.get(peer, 0.0), now - _BURST_S) + price_s
        if peer in self._paid_at:
            self._paid_at[peer] = paid_at
        else:
            self._paid_at.put(peer, paid_at)
        return max(paid_at - now, 0.0)
