"""Members of one DHT in this process, each with its own p2pd on the loopback interface."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from nesa_node.swarm.node import Swarm, open_swarm
from nesa_node.swarm.p2p.identity import Identity

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


@asynccontextmanager
async def local_swarm(directory: Path, count: int, **options: Any) -> AsyncIterator[list[Swarm]]:
    """`count` members; the first is the initial peer of the others."""
    async with AsyncExitStack() as stack:
        members: list[Swarm] = []
        for _ in range(count):
            initial_peers = members[0].transport.addresses if members else ()
            members.append(
                await stack.enter_async_context(
                    open_swarm(
                        Identity.ephemeral(directory),
                        host_maddrs=LOOPBACK,
                        initial_peers=initial_peers,
                        **options,
                    )
                )
            )
        yield members


async def eventually(condition: Callable[[], Awaitable[bool]], timeout_s: float = 10.0) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    for _ in iter(lambda: asyncio.get_running_loop().time() < deadline, False):
        if await condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"not within {timeout_s:g} s")


def dht_node(member: Swarm) -> Any:
    """hivemind's node of the DHT, with its storage and routing table."""
    return member.directory._dht_store._node
