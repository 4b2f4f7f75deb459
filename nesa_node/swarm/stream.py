"""Messages and their tensors over one libp2p stream.

A message is one frame or more. A frame is two little-endian uint32 (header bytes, payload bytes),
the header and the payload. The first frame of a message carries its header; a tensor that does
not fit in one frame goes on in frames without a header. Sizes are checked before memory is taken.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from nesa_node.compression import tensors
from nesa_node.core.errors import FrameError, PeerUnreachableError, StreamClosedError
from nesa_node.core.ids import PeerId
from nesa_node.swarm.link_speed import LEAST_BYTES
from nesa_node.swarm.messages import (
    AnyMessage,
    Message,
    Received,
    decode_message,
    encode_message,
    tensor_of,
)
from nesa_node.swarm.pipe import MAX_UNREAD_BYTES, Pipe

MAX_HEADER_BYTES = 64 * 1024
CHUNK_BYTES = 1 << 20
FRAME_TIMEOUT_S = 30.0
"""A frame that began must be complete within this, and be taken within this by who receives it:
neither a trickling sender nor a receiver that does not read holds anybody for long."""

_JOIN_BYTES = 64 * 1024
"""A frame up to this is copied together and written at once: libp2p then also sends it in one
piece, which halves what a small step costs on its way."""

_PREFIX = struct.Struct("<II")
_BROKEN = (ConnectionError, BrokenPipeError, asyncio.IncompleteReadError, OSError)


class Stream:
    """One duplex stream. Any task may send; one task receives. Close it where it was opened."""

    def __init__(self, peer: PeerId, reader: Any, writer: Any) -> None:
        self.peer = peer
        self.bytes_sent = 0
        self.messages_sent = 0
        self.bytes_received = 0
        self.arrival: Received | None = None
        """How fast the payload of the last message came, if that says something of the network."""
        self._is_late = False
        self._reader: Pipe = reader
        self._writer: Pipe = writer
        self._sending = asyncio.Lock()

    @property
    def heard_bytes(self) -> int:
        """Bytes that have come from the peer, also those of a message that is not whole yet."""
        return self._reader.received

    @property
    def unread(self) -> int:
        """Bytes that have come and belong to no message that was received yet."""
        return self._reader.unread

    @property
    def settled(self) -> bool:
        """Whether a message of one frame can be sent without waiting for anybody."""
        return self._writer.settled and not self._sending.locked()

    async def send(self, message: Message, payload: memoryview | bytearray | bytes = b"") -> None:
        """Send a message and, chunked, the tensor it describes; `payload` is free afterwards.

        Raises `StreamClosedError`, also for a peer that reads nothing for `FRAME_TIMEOUT_S`. A send
        that is cancelled leaves the stream unusable.
        """
        header = encode_message(message)
        view = memoryview(payload).cast("B")
        self.messages_sent += 1
        async with self._sending:
            try:
                for start in range(0, max(1, len(view)), CHUNK_BYTES):
                    await self._send_frame(header, view[start : start + CHUNK_BYTES])
                    header = b""
            except TimeoutError:
                raise StreamClosedError(
                    f"{self.peer} took nothing for {FRAME_TIMEOUT_S:.0f} s"
                ) from None
            except _BROKEN as error:
                raise StreamClosedError(f"the stream to {self.peer} broke: {error!r}") from None

    async def _send_frame(self, header: bytes, chunk: memoryview) -> None:
        prefix = _PREFIX.pack(len(header), len(chunk))
        if len(chunk) <= _JOIN_BYTES:
            self._writer.write(b"".join((prefix, header, chunk)))
        else:
            self._writer.write(prefix + header)
            self._writer.write(chunk)
        self.bytes_sent += len(prefix) + len(header) + len(chunk)
        if not self._writer.settled:
            async with asyncio.timeout(FRAME_TIMEOUT_S):
                await self._writer.drain()

    async def receive(self, *, max_tensor_bytes: int = 0) -> tuple[AnyMessage, bytearray]:
        """Wait for the next message; its tensor's bytes are whole and of the size described.

        The buffer is the caller's to keep. Raises `StreamClosedError` at the end of the stream,
        and `FrameError` or `ProtocolError("bad_tensor")` after which nothing more can be read.
        """
        try:
            await self._reader.readable()
            # The pipe has stopped reading: how long the rest waits already nobody knows.
            self._is_late = self._reader.unread >= MAX_UNREAD_BYTES
            return await self._receive_message(max_tensor_bytes)
        except TimeoutError:
            raise FrameError(f"a message stopped midway for {FRAME_TIMEOUT_S:.0f} s") from None
        except _BROKEN:
            raise StreamClosedError(f"{self.peer} closed the stream") from None

    async def _receive_message(self, max_tensor_bytes: int) -> tuple[AnyMessage, bytearray]:
        header_bytes, chunk_bytes = _PREFIX.unpack(await self._bytes(_PREFIX.size))
        if not 0 < header_bytes <= MAX_HEADER_BYTES:
            raise FrameError(f"a header of {header_bytes} bytes; 1 to {MAX_HEADER_BYTES} allowed")
        if chunk_bytes > CHUNK_BYTES:
            raise FrameError(f"a chunk of {chunk_bytes} bytes; at most {CHUNK_BYTES} allowed")
        message = decode_message(await self._bytes(header_bytes))
        meta = tensor_of(message)
        total = 0 if meta is None else tensors.check(meta, max_bytes=max_tensor_bytes)
        self.bytes_received += _PREFIX.size + header_bytes + total
        _check_fits(chunk_bytes, total)
        self.arrival = None
        if chunk_bytes == total:
            if total < LEAST_BYTES:
                return message, await self._bytes(total)
            with self._timed(total):
                return message, await self._bytes(total)
        with self._timed(total):
            return message, await self._chunks(chunk_bytes, total)

    async def _chunks(self, chunk_bytes: int, total: int) -> bytearray:
        payload = bytearray(total)
        view = memoryview(payload)
        await self._fill(view[:chunk_bytes])
        filled = chunk_bytes
        while filled < total:
            header_bytes, chunk_bytes = _PREFIX.unpack(await self._bytes(_PREFIX.size))
            if header_bytes or not 0 < chunk_bytes <= CHUNK_BYTES:
                raise FrameError("a tensor's frames were interrupted or have impossible sizes")
            _check_fits(filled + chunk_bytes, total)
            await self._fill(view[filled : filled + chunk_bytes])
            filled += chunk_bytes
        return payload

    @contextmanager
    def _timed(self, nbytes: int) -> Iterator[None]:
        """Around the arrival of a payload: what was here before says nothing of the network."""
        here, started = self._reader.unread, time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        if not self._is_late and nbytes - here >= LEAST_BYTES // 2:
            self.arrival = Received(nbytes=nbytes - here, seconds=seconds)

    async def _bytes(self, count: int) -> bytearray:
        """The next bytes of a message that has begun; mostly they are here already."""
        data = self._reader.take(count)
        if data is None:
            data = bytearray(count)
            await self._fill(memoryview(data))
        return data

    async def _fill(self, view: memoryview) -> None:
        async with asyncio.timeout(FRAME_TIMEOUT_S):
            await self._reader.fill(view)

    async def close(self) -> None:
        """End the stream, also where this is cancelled.

        May be called twice; never raises for a peer that is gone.
        """
        self._writer.close()
        try:
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()
        except TimeoutError:
            pass  # what matters is that our side is closed
        finally:
            self.abort()

    def abort(self) -> None:
        """Drop what was not sent yet, and end the stream; nothing happens if it has ended."""
        self._writer.abort()


def _check_fits(count: int, total: int) -> None:
    if count > total:
        raise FrameError(f"{count} bytes came for a tensor of {total}")


@asynccontextmanager
async def silence_is_loss(peer: PeerId, seconds: float, doing: str) -> AsyncIterator[None]:
    """Turn a wait for `peer` that takes longer than `seconds` into `PeerUnreachableError`."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise PeerUnreachableError(f"{peer} was silent for {seconds:g} s while {doing}") from None
