"""A session's messages: handshake on its stream, its client's messages, and what ends it.

Refused streams and messages are logged at a limited rate, so that peers cannot fill the disk. A
client that traces gets the node's part in the trace of a chain.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from nesa_node.core import tracing
from nesa_node.core.errors import BusyError, FrameError, ProtocolError, StreamClosedError
from nesa_node.core.ids import PeerId, Span
from nesa_node.core.logging import get_logger, session_name
from nesa_node.core.tracing import NO_SPAN, TraceContext, TraceSpan
from nesa_node.server.session.session import Session
from nesa_node.swarm.protocol.any_message import AnyMessage
from nesa_node.swarm.protocol.link_encoder import report_arrival
from nesa_node.swarm.protocol.messages import (
    Busy,
    Cancel,
    Close,
    ErrorMessage,
    HandedOver,
    HandOver,
    Leaving,
    Link,
    Linked,
    Open,
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
from nesa_node.swarm.protocol.seal_messages import Disclose, SealRequest
from nesa_node.swarm.protocol.stream import MessageBudget, Stream

log = get_logger(__name__)

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
        """Give sessions `timeout_s`, idle ones only `idle_s`. A second call cannot extend it."""
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
        """Seconds until to ask again about a session last active at `active_at`; 0: it ends now."""
        idle_s = math.inf if self._idle_s is None else self._idle_s
        idle_left_s = max(active_at, self._began_at) + idle_s - self._clock()
        if busy and math.isfinite(idle_s):
            idle_left_s = max(idle_left_s, BUSY_POLL_S)
        return max(min(self.remaining_s, idle_left_s), 0.0)


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
        case SealRequest():
            await session.seal()
        case Disclose():
            await session.disclose(message.rows)
        case Received():
            session.sender.client_wire.record_arrival(message)
        case Probe():
            pass
        case Close():
            session.state.publish_prefix_as(message.prefix)
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
        busy = session.is_busy or session.donor.is_busy
        left_s = drain.session_remaining_s(session.active_at, busy=busy)
        if left_s <= 0:
            raise ProtocolError("draining", "this node has given up its blocks")
        await asyncio.sleep(left_s)


FIRST_MESSAGE_TIMEOUT_S = 10.0


async def receive_first_message(stream: Stream) -> AnyMessage:
    """Receive the first message. Raises `FrameError` if none arrives within
    `FIRST_MESSAGE_TIMEOUT_S`."""
    try:
        async with asyncio.timeout(FIRST_MESSAGE_TIMEOUT_S):
            message, _ = await stream.receive()
    except TimeoutError:
        raise FrameError(f"nothing came for {FIRST_MESSAGE_TIMEOUT_S:.0f} s") from None
    return message


async def send_refusal(stream: Stream, error: ProtocolError, *, free_tokens: int = 0) -> None:
    """Send the reason of a refusal; does not raise if the peer does not receive it."""
    try:
        async with asyncio.timeout(FIRST_MESSAGE_TIMEOUT_S):
            if isinstance(error, BusyError):
                await stream.send(
                    Busy(
                        retry_after_s=error.retry_after_s,
                        free_tokens=free_tokens,
                        message=str(error)[:1024],
                    )
                )
            else:
                await stream.send(ErrorMessage(code=error.code, message=str(error)[:2048]))
    except (ProtocolError, TimeoutError):
        log.debug("refusal_not_delivered", peer=stream.peer)


REFUSAL_PERIOD_S = 10.0
MAX_LOGGED_REFUSALS = 20
"""Most refusals logged in a period, of all peers together: identities are free."""


REFUSAL_CODES = (
    "adapter_too_large", "author_full", "bad_frame", "bad_link", "bad_opening", "bad_position",
    "bad_prefix", "bad_product", "bad_residues", "bad_rows", "bad_seal", "bad_shard",
    "bad_spec", "bad_tensor", "busy", "cache_full", "context_length", "downstream_lost",
    "draining", "future_epoch", "idle_timeout", "no_attestation", "no_private", "no_room",
    "not_a_member", "not_allowed", "not_checkable", "not_computed", "not_donor", "not_finite",
    "not_kept", "not_linked", "not_listed", "not_opened", "not_star", "not_trained",
    "not_upstream", "plan_mismatch", "session_exists", "shard_exists", "stale_epoch",
    "stale_step", "step_conflict", "too_large", "too_many", "transfer_timeout", "unexpected",
    "unknown_adapter", "unknown_quality", "unknown_sequence", "unknown_session",
    "unknown_shard", "values_missing", "version_mismatch", "wrong_adapter", "wrong_blocks",
    "wrong_model",
)  # fmt: skip
"""All codes of refusals, for metrics."""


class RefusalLog:
    """Logs the first `MAX_LOGGED_REFUSALS` refusals of each period, and how many more there were.

    Counts all by code: refused `streams`, and `messages` refused in sessions that continued.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.streams: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()
        self._clock = clock
        self._period_began_at = clock()
        self._count = 0

    def record(self, *, peer: str, code: str, reason: str) -> None:
        """Record that a stream was refused or a session ended by this node."""
        self.streams[code] += 1
        now = self._clock()
        if now - self._period_began_at >= REFUSAL_PERIOD_S:
            if self._count > MAX_LOGGED_REFUSALS:
                log.warning("refusals_not_logged", count=self._count - MAX_LOGGED_REFUSALS)
            self._period_began_at, self._count = now, 0
        self._count += 1
        if self._count <= MAX_LOGGED_REFUSALS:
            log.info("stream_refused", peer=peer, code=code, reason=reason)

    @asynccontextmanager
    async def answering(
        self, stream: Stream, free_tokens: Callable[[], int] = lambda: 0
    ) -> AsyncIterator[None]:
        """Answer a peer's mistake and record it; neither it nor the stream's end is raised.

        `free_tokens` is told to peers that are refused because the node is busy.
        """
        try:
            yield
        except StreamClosedError:
            log.debug("stream_ended", peer=stream.peer)
        except ProtocolError as error:
            self.record(peer=stream.peer, code=error.code, reason=str(error))
            await send_refusal(stream, error, free_tokens=free_tokens())


class NodeTrace:
    """Three trace spans per session, whatever its length: the session, its opening, its first step.

    The client's trace context is validated and used for nothing else.
    """

    def __init__(self, opened: Open, own_peer: PeerId) -> None:
        parent = TraceContext.parse(opened.trace) if opened.mode == "chain" else None
        self._span = NO_SPAN if parent is None else _session_span(opened, own_peer, parent)
        self._open_span = self._start_child("open")

    def end_opening(self) -> None:
        """End the opening span: the client is being answered."""
        self._open_span.end()

    def record_session(self, session: Session) -> None:
        """Record the session's totals before it closes."""
        if session.first_step_times is not None:
            began_at, ended_at = session.first_step_times
            self._start_child("first step", began_at).end(at=ended_at)
        self._span.set_attributes(
            {"nesa.steps": session.emitted_steps, "nesa.tokens": sum(session.state.lengths)}
        )

    def end(self, error: str | None = None) -> None:
        """End the trace. Only the first call counts."""
        self._open_span.end(error=error)
        self._span.end(error=error)

    def _start_child(self, name: str, began_at: float | None = None) -> TraceSpan:
        context = self._span.context
        return NO_SPAN if context is None else tracing.start_span(name, context, began_at=began_at)


def _session_span(opened: Open, own: PeerId, parent: TraceContext) -> TraceSpan:
    return tracing.start_span(
        "node",
        parent,
        {
            "nesa.session": session_name(opened.session),
            "nesa.peer": own,
            "nesa.blocks": str(Span(*opened.blocks)),
            "nesa.rows": opened.rows,
        },
    )
