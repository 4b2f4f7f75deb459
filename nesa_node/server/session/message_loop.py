"""Message loop of a session: its client's messages, its worker, and what ends it.

Deadline of the sessions on a node that gives up its blocks.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable

from nesa_node.core.errors import FrameError, ProtocolError, StreamClosedError
from nesa_node.core.logging import get_logger
from nesa_node.server.session.session import Session
from nesa_node.swarm.protocol.link_encoder import report_arrival
from nesa_node.swarm.protocol.messages import (
    AnyMessage,
    Cancel,
    Close,
    ErrorMessage,
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
from nesa_node.swarm.protocol.stream import MessageBudget

BUSY_POLL_S = 0.5
"""Interval at which a busy session is asked whether it is still busy."""


class Drain:
    """A drain that begins once; `clock` returns seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = asyncio.Event()
        self._began_at = 0.0
        self._until = 0.0
        self._idle_s: float | None = None

    @property
    def has_begun(self) -> bool:
        return self._began.is_set()

    def begin(self, timeout_s: float, idle_s: float | None = None) -> None:
        """Give sessions `timeout_s`, and those that do nothing only `idle_s`. A second call cannot
        extend it.
        """
        now = self._clock()
        until = now + timeout_s
        self._until = min(self._until, until) if self.has_begun else until
        self._began_at, self._idle_s = now, idle_s
        self._began.set()

    async def wait(self) -> None:
        await self._began.wait()

    @property
    def remaining_s(self) -> float:
        return max(self._until - self._clock(), 0.0)

    def session_remaining_s(self, active_at: float, *, busy: bool) -> float:
        """Seconds until to ask again about a session last active at `active_at`; 0: it must end
        now.
        """
        idle_s = math.inf if self._idle_s is None else self._idle_s
        idle_left_s = max(active_at, self._began_at) + idle_s - self._clock()
        if busy and math.isfinite(idle_s):
            idle_left_s = max(idle_left_s, BUSY_POLL_S)
        return max(min(self.remaining_s, idle_left_s), 0.0)


log = get_logger(__name__)


MAX_HAND_OVERS = 2
"""Hand-overs handled at once: one in progress and one being refused. More wait, or a client that
reads no answers could make this node hold any number."""


class _SessionEnded(Exception):
    """Raised to leave the task group when the session ended normally."""


async def serve_session(
    session: Session,
    *,
    drain: Drain,
    budget: MessageBudget,
    idle_timeout_s: float,
    refused_messages: Counter[str] | None = None,
) -> None:
    """Run the session until its client closes or leaves, it idles, or a drain ends it.

    Returns when the client closed it; the caller answers after everything is released.
    `refused_messages` counts refused messages by code; `budget` is shared by all sessions. Raises
    `ProtocolError` for what must be answered with a fatal error.
    """
    refused_messages = Counter() if refused_messages is None else refused_messages
    failures: list[ProtocolError] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(session.run())
            tasks.create_task(_watch_idle(session, idle_timeout_s))
            tasks.create_task(_watch_drain(session, drain))
            tasks.create_task(_read_messages(session, tasks, refused_messages, budget))
    except* _SessionEnded:
        pass
    except* ProtocolError as group:
        # Raising in here would give a group on Python 3.11.2 and a plain error on 3.11.7.
        failures.extend(error for error in group.exceptions if isinstance(error, ProtocolError))
    if failures:
        raise failures[0]


async def _read_messages(
    session: Session, tasks: asyncio.TaskGroup, refused: Counter[str], budget: MessageBudget
) -> None:
    room = asyncio.Semaphore(MAX_HAND_OVERS)
    while True:
        message, payload = await session.client.receive(
            max_tensor_bytes=session.sequencer.max_step_bytes
        )
        await report_arrival(session.client, session.opened.quality, session.opened.version)
        if isinstance(message, HandOver):
            # Steps continue during the hand-over.
            await room.acquire()
            task = tasks.create_task(_handle_message(session, message, payload, refused))
            task.add_done_callback(lambda _: room.release())
            obeyed = True
        else:
            obeyed = await _handle_message(session, message, payload, refused)
        await budget.wait_until_paid(session.client, message, is_refused=not obeyed)


async def _handle_message(
    session: Session, message: AnyMessage, payload: bytearray, refused: Counter[str]
) -> bool:
    """Apply a message, or answer why it is refused. Returns whether it was applied."""
    try:
        await _apply_message(session, message, payload)
        return True
    except (FrameError, StreamClosedError):
        raise
    except ProtocolError as error:
        refused[error.code] += 1
        await session.client.send(
            ErrorMessage(
                code=error.code,
                message=str(error)[:2048],
                fatal=False,
                answers=type(message).__name__.lower(),
                step=message.step if isinstance(message, Step) else None,
            )
        )
        return False


async def _apply_message(session: Session, message: AnyMessage, payload: bytearray) -> None:
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
                    epoch=session.state.epoch,
                    step=session.sequencer.last_step,
                    busy=session.is_busy,
                    pushed=session.last_pushed_step,
                    upstream_bytes=session.upstream_bytes,
                )
            )
        case Received():
            session.client_wire.record_arrival(message)
        case Probe():
            pass
        case Close():
            session.publish_prefix(message.prefix)
            raise _SessionEnded
        case Cancel():
            raise _SessionEnded
        case _:
            raise ProtocolError(
                "unexpected", f"a session does not expect {type(message).__name__} from its client"
            )


async def _watch_idle(session: Session, timeout_s: float) -> None:
    while True:
        left_s = session.active_at + timeout_s - time.monotonic()
        if left_s <= 0 and not session.is_busy:
            raise ProtocolError("idle_timeout", f"nothing happened for {timeout_s:g} s")
        await asyncio.sleep(max(left_s, 0.1))


async def _watch_drain(session: Session, drain: Drain) -> None:
    await drain.wait()
    await session.client.send(Leaving(seconds=drain.remaining_s))
    while True:
        busy = session.is_busy or session.is_handing_over
        left_s = drain.session_remaining_s(session.active_at, busy=busy)
        if left_s <= 0:
            raise ProtocolError("draining", "this node has given up its blocks")
        await asyncio.sleep(left_s)
