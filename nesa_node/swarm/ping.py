"""Ping protocol: measures the round-trip time to a peer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from nesa_node.core.errors import PeerUnreachableError
from nesa_node.core.ids import PeerId
from nesa_node.swarm.pipe import Pipe
from nesa_node.swarm.transport import Transport

PING_PROTOCOL = "/nesa/ping/1"
PING_BYTES = 8
PINGS = 3
"""Pings per measurement: the first one includes libp2p's protocol negotiation."""
_MAX_ANSWERS = 16
_IDLE_S = 10.0


async def answer_pings(peer: PeerId, reader: Pipe, writer: Pipe) -> None:
    """Stream handler that echoes up to `_MAX_ANSWERS` pings, each within `_IDLE_S`."""
    for _ in range(_MAX_ANSWERS):
        try:
            async with asyncio.timeout(_IDLE_S):
                writer.write(await reader.readexactly(PING_BYTES))
                await writer.drain()
        except TimeoutError:
            return


async def ping(
    transport: Transport,
    peer: PeerId,
    addresses: Sequence[str] = (),
    *,
    timeout_s: float = 5.0,
    pings: int = PINGS,
) -> float:
    """Measure the shortest of `pings` round trips to `peer`, in ms.

    Disturbances only lengthen a round trip, so the shortest is closest to the path's latency.
    `timeout_s` bounds dialling and all pings together. Raises `PeerUnreachableError` if the peer
    does not answer, or answers with other bytes.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    pipe, _ = await transport.open_stream(peer, PING_PROTOCOL, addresses, timeout_s)
    try:
        async with asyncio.timeout_at(deadline):
            return min([await _round_trip_ms(pipe, number) for number in range(pings)])
    except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
        raise PeerUnreachableError(f"{peer} does not answer pings: {error}") from error
    finally:
        pipe.close()


async def _round_trip_ms(pipe: Pipe, number: int) -> float:
    sent = number.to_bytes(PING_BYTES, "little")
    started = time.perf_counter()
    pipe.write(sent)
    if await pipe.readexactly(PING_BYTES) != sent:
        raise ConnectionError("something else came back")
    return (time.perf_counter() - started) * 1000
