"""Message loop of a session: its client's messages, its worker, and what ends it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from nesa_node.core.errors import FrameError, ProtocolError, StreamClosedError
from nesa_node.core.logging import get_logger
from nesa_node.server.drain import Drain
from nesa_node.server.session import Session
from nesa_node.swarm.message_budget import MessageBudget
from nesa_node.swarm.messages import (
    AnyMessage,
    Cancel,
    Close,
    Error,
    HandedOver,
    HandOver,
    Leaving,
    Link,
    Linked,
    Ping,
    Pong,
    Probe,
    Received,
    Reorder,
    Reordered,
    Rollback,
    RolledBack,
    Step,
)
from nesa_node.swarm.wire import report_arrival

log = get_logger(__name__)


HAND_OVERS = 2
"""Hand-overs handled at once: one in progress and one being refused. More wait, or a client that
reads no answers could make this node hold any number."""


class _Ended(Exception):
    """Raised to leave the task group when the session ended normally."""


async def serve_session(
    session: Session,
    *,
    drain: Drain,
    budget: MessageBudget,
    idle_timeout_s: float,
    refused: Counter[str] | None = None,
) -> None:
    """Run the session until its client closes or leaves, it idles, or a drain ends it.

    Returns when the client closed it; the caller answers after everything is released. `refused`
    counts refused messages by code; `budget` is shared by all sessions. Raises `ProtocolError` for
    what must be answered with a fatal error.
    """
    refused = Counter() if refused is None else refused
    failures: list[ProtocolError] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(session.run())
            tasks.create_task(_watch_idle(session, idle_timeout_s))
            tasks.create_task(_watch_drain(session, drain))
            tasks.create_task(_read(session, tasks, refused, budget))
    except* _Ended:
        pass
    except* ProtocolError as group:
        # Raising in here would give a group on Python 3.11.2 and a plain error on 3.11.7.
        failures.extend(error for error in group.exceptions if isinstance(error, ProtocolError))
    if failures:
        raise failures[0]


async def _read(
    session: Session, tasks: asyncio.TaskGroup, refused: Counter[str], budget: MessageBudget
) -> None:
    room = asyncio.Semaphore(HAND_OVERS)
    while True:
        message, payload = await session.client.receive(
            max_tensor_bytes=session.inbox.max_step_bytes
        )
        await report_arrival(session.client, session.opened.quality, session.opened.version)
        if isinstance(message, HandOver):
            # Steps continue during the hand-over.
            await room.acquire()
            task = tasks.create_task(_answered(session, message, payload, refused))
            task.add_done_callback(lambda _: room.release())
            obeyed = True
        else:
            obeyed = await _answered(session, message, payload, refused)
        await budget.pay(session.client, message, refused=not obeyed)


async def _answered(
    session: Session, message: AnyMessage, payload: bytearray, refused: Counter[str]
) -> bool:
    """Apply a message, or answer why it is refused. Returns whether it was applied."""
    try:
        await _obey(session, message, payload)
        return True
    except (FrameError, StreamClosedError):
        raise
    except ProtocolError as error:
        refused[error.code] += 1
        await session.client.send(
            Error(
                code=error.code,
                message=str(error)[:2048],
                fatal=False,
                answers=type(message).__name__.lower(),
                step=message.step if isinstance(message, Step) else None,
            )
        )
        return False


async def _obey(session: Session, message: AnyMessage, payload: bytearray) -> None:
    client = session.client
    match message:
        case Step():
            await session.submit(client.peer, message, payload)
        case Link():
            await session.link(message)
            await client.send(Linked(epoch=message.epoch))
        case Rollback():
            await session.rollback(message.epoch, message.lengths)
            await client.send(RolledBack(epoch=message.epoch))
        case Reorder():
            await session.reorder(message.epoch, message.sources)
            await client.send(Reordered(epoch=message.epoch))
        case HandOver():
            lengths = await session.hand_over(message.to)
            await client.send(HandedOver(peer=message.to.peer, lengths=lengths))
        case Ping():
            await client.send(
                Pong(
                    nonce=message.nonce,
                    epoch=session.inbox.epoch,
                    step=session.inbox.last_step,
                    busy=session.busy,
                    pushed=session.pushed_step,
                    upstream_bytes=session.upstream_bytes,
                )
            )
        case Received():
            session.client_wire.note(message)
        case Probe():
            pass
        case Close():
            session.remember(message.prefix)
            raise _Ended
        case Cancel():
            raise _Ended
        case _:
            raise ProtocolError(
                "unexpected", f"a session does not expect {type(message).__name__} from its client"
            )


async def _watch_idle(session: Session, timeout_s: float) -> None:
    while True:
        left_s = session.active_at + timeout_s - time.monotonic()
        if left_s <= 0 and not session.busy:
            raise ProtocolError("idle_timeout", f"nothing happened for {timeout_s:g} s")
        await asyncio.sleep(max(left_s, 0.1))


async def _watch_drain(session: Session, drain: Drain) -> None:
    await drain.wait()
    await session.client.send(Leaving(seconds=drain.left_s))
    while True:
        busy = session.busy or session.is_handed_over
        left_s = drain.left_s_after(session.active_at, busy=busy)
        if left_s <= 0:
            raise ProtocolError("draining", "this node has given up its blocks")
        await asyncio.sleep(left_s)
