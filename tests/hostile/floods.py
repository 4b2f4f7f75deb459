"""Attacks by number or by time, not by content."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

from nesa_node.swarm.protocol.any_message import encode_message
from nesa_node.swarm.protocol.messages import Close, Ping
from nesa_node.swarm.protocol.stream import FRAME_TIMEOUT_S
from tests.hostile.attacker import HUNG_UP, Attacker, Wire
from tests.hostile.frames import frame, open_message

ENDED = ("closed", "pong", "output")
"""The last thing read before the end of the stream."""


async def slow_loris(attacker: Attacker, count: int) -> None:
    """Streams that bring a byte now and then, each a byte of a frame that may become valid."""

    async def trickle() -> None:
        opening = frame(encode_message(open_message(attacker.facts, attacker.rng)))
        async with attacker.wire() as wire:
            for byte in opening[:30]:
                await wire.send(bytes([byte]))
                await asyncio.sleep(0.4)
            attacker.tally.note("slow loris", await wire.outcome(), ("bad_frame", "closed"))

    await asyncio.gather(*(trickle() for _ in range(count)))


async def half_closed_opens(attacker: Attacker, count: int) -> None:
    """Opens that end at a random byte, and sessions whose client just goes."""
    rng = attacker.rng
    for _ in range(count):
        opening = frame(encode_message(open_message(attacker.facts, rng)))
        async with attacker.wire() as wire:
            await wire.send(opening[: rng.randint(0, len(opening))])
            if rng.random() < 0.1:
                answer = await wire.outcome(may_wait=True)
                attacker.tally.note("half an open", answer, (HUNG_UP, "opened"))
            else:
                attacker.tally.note("half an open", "abandoned")


async def unread_floods(attacker: Attacker, count: int) -> None:
    """Pings, and steps whose outputs are never read, until the node stops taking more."""
    async with attacker.session(rows=1, max_tokens=1000) as session:
        await session.link(lengths=(0,), emit_from=(0,))
        pings = [frame(encode_message(Ping(nonce=nonce))) for nonce in range(count)]
        for kind, frames in (("ping flood", pings), ("step flood", session.steps_in_order(64))):
            stuck = await _flood(session.wire, frames)
            attacker.tally.note(kind, "stopped reading" if stuck else "read")
            if stuck:
                # A node does not wait for ever for somebody who takes nothing.
                await asyncio.sleep(FRAME_TIMEOUT_S + 5)
                attacker.tally.note("unread session", await session.wire.outcome(), ENDED)
                return


async def too_many_streams(attacker: Attacker, count: int) -> None:
    """Streams held open at once, more than a peer may have."""
    async with AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(attacker.wire()) for _ in range(count)]
        attacker.tally.note("many streams", "held")
        await wires[-1].send(frame(encode_message(Close())))
        allowed = ("closed", "busy", "unexpected")  # the first are dropped after 10 s
        attacker.tally.note("the last of many", await wires[-1].outcome(), allowed)


async def _flood(wire: Wire, frames: Sequence[bytes]) -> bool:
    """Whether the node stopped reading before all of it was sent."""
    try:
        async with asyncio.timeout(3.0):
            for data in frames:
                wire.writer.write(data)
                await wire.writer.drain()
    except TimeoutError:
        return True
    except OSError:
        return True
    return False
