"""Two pipes that are connected to each other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from nesa_node.swarm.p2p.pipe import SCRATCH_BYTES, Pipe


@asynccontextmanager
async def pipe_pair() -> AsyncIterator[tuple[Pipe, Pipe]]:
    loop, scratch = asyncio.get_running_loop(), bytearray(SCRATCH_BYTES)
    pipes = []
    for end in socket.socketpair():
        end.setblocking(False)
        _, pipe = await loop.create_unix_connection(lambda: Pipe(scratch), sock=end)
        pipes.append(pipe)
    try:
        yield pipes[0], pipes[1]
    finally:
        for pipe in pipes:
            pipe.abort()
            await pipe.wait_closed()
