"""Connection to p2pd over its unix socket, for a stream or a request.

asyncio's `StreamReader` copies each byte three times and wakes its reader for every received piece.
A `Pipe` receives the bytes that its reader waits for directly into the reader's memory, and wakes
it once, when all have arrived: 2.9 ms of processor time for 16 MiB instead of 9.8 ms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import cast

MAX_UNREAD_BYTES = 64 * 1024
"""Unread bytes at which a pipe stops receiving. The last received piece comes on top, so that a
hostile peer can make one stream hold twice as much."""

SCRATCH_BYTES = 64 * 1024


class Pipe(asyncio.BufferedProtocol):
    """Duplex connection. One task reads at a time, any task may write, and its opener closes it.

    `scratch` receives bytes while no reader waits. It is filled and emptied within one callback of
    the event loop, so that all pipes of a loop share one.
    """

    def __init__(
        self, scratch: bytearray, on_connected: Callable[[Pipe], None] | None = None
    ) -> None:
        self.received_bytes = 0
        """Bytes received so far."""
        self._scratch = memoryview(scratch)
        self._on_connected = on_connected
        self._transport: asyncio.Transport
        self._unread = bytearray()
        self._target: memoryview | None = None
        """Memory that the waiting reader still has to fill; never empty."""
        self._waiter: asyncio.Future[None] | None = None
        self._is_paused = False
        self._ended = False
        self._error: Exception | None = None
        self._flushed = asyncio.Event()
        self._disconnected = asyncio.Event()

    @property
    def is_flushed(self) -> bool:
        """Whether the kernel has accepted all written bytes, so that `drain` returns at once."""
        return self._flushed.is_set() and not self._closing

    @property
    def unread_bytes(self) -> int:
        return len(self._unread)

    async def wait_readable(self) -> None:
        """Wait for a byte.

        Raises `IncompleteReadError` at the end of the stream, `OSError` if the connection broke.
        """
        while not self._unread:
            await self._wait_for_data(1)

    def read_nowait(self, count: int) -> bytearray | None:
        """The next `count` bytes if all of them have been received, else None."""
        if len(self._unread) < count:
            return None
        data = self._unread[:count]
        del self._unread[:count]
        self._resume_if_drained()
        return data

    async def read_into(self, view: memoryview) -> None:
        """Read exactly `len(view)` bytes into `view`. Raises as `wait_readable` does.

        Cancellation leaves the pipe unusable for reading.
        """
        have = min(len(view), len(self._unread))
        view[:have] = self._unread[:have]
        del self._unread[:have]
        self._resume_if_drained()
        if have == len(view):
            return
        self._target = view[have:]
        try:
            while self._target is not None:
                await self._wait_for_data(len(self._target))
        finally:
            self._target = None

    async def readexactly(self, count: int) -> bytearray:
        """Read exactly `count` bytes. Raises as `wait_readable` does."""
        data = self.read_nowait(count)
        if data is None:
            data = bytearray(count)
            await self.read_into(memoryview(data))
        return data

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write `data`, which must not be modified before `drain` has returned.

        On a closed pipe this does nothing, and `drain` raises.
        """
        if not self._closing:
            self._transport.write(data)

    async def drain(self) -> None:
        """Wait until the kernel has accepted all written bytes. Raises `ConnectionError`."""
        await self._flushed.wait()
        if self._closing:
            raise ConnectionResetError("the pipe is closed") from self._error

    def write_eof(self) -> None:
        if not self._closing:
            self._transport.write_eof()

    def close(self) -> None:
        """Close after all written bytes are sent. May be called twice."""
        self._transport.close()

    def abort(self) -> None:
        if not self._disconnected.is_set():
            self._transport.abort()

    async def wait_closed(self) -> None:
        await self._disconnected.wait()

    @property
    def _closing(self) -> bool:
        return self._transport.is_closing()

    async def _wait_for_data(self, wanted: int) -> None:
        if self._ended:
            if self._error is not None:
                raise self._error
            raise asyncio.IncompleteReadError(b"", wanted)
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _resume_if_drained(self) -> None:
        if self._is_paused and len(self._unread) < MAX_UNREAD_BYTES:
            self._is_paused = False
            if not self._closing:
                self._transport.resume_reading()

    def _wake_reader(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # Callbacks of the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # `drain` waits until no written byte is left in this process.
        self._transport.set_write_buffer_limits(high=0)
        self._flushed.set()
        if self._on_connected is not None:
            self._on_connected(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._scratch if self._target is None else self._target

    def buffer_updated(self, nbytes: int) -> None:
        self.received_bytes += nbytes
        if self._target is None:
            self._unread += self._scratch[:nbytes]
            if len(self._unread) >= MAX_UNREAD_BYTES:
                self._is_paused = True
                self._transport.pause_reading()
        elif nbytes < len(self._target):
            self._target = self._target[nbytes:]
            return
        else:
            self._target = None
        self._wake_reader()

    def eof_received(self) -> bool:
        self._ended = True
        self._wake_reader()
        return True  # keeps this side open for writing

    def connection_lost(self, error: Exception | None) -> None:
        self._ended = True
        self._error = error
        self._flushed.set()
        self._disconnected.set()
        self._wake_reader()

    def pause_writing(self) -> None:
        self._flushed.clear()

    def resume_writing(self) -> None:
        self._flushed.set()


async def open_pipe(path: Path, scratch: bytearray) -> Pipe:
    """Connect to the unix socket `path`. Raises `OSError`."""
    loop = asyncio.get_running_loop()
    _, pipe = await loop.create_unix_connection(lambda: Pipe(scratch), str(path))
    return pipe


async def listen_for_pipes(
    path: Path, scratch: bytearray, on_pipe: Callable[[Pipe], None]
) -> asyncio.AbstractServer:
    """Call `on_pipe` for each connection to the unix socket `path`."""
    loop = asyncio.get_running_loop()
    return await loop.create_unix_server(lambda: Pipe(scratch, on_pipe), str(path))
