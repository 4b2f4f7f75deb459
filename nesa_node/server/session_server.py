"""Answers the streams that peers open: a client's session, or an upstream's push into one."""

from __future__ import annotations

import asyncio
import hmac
import time

import structlog

from nesa_node.core.errors import (
    BusyError,
    FrameError,
    NesaError,
    PeerUnreachableError,
    ProtocolError,
    StreamClosedError,
    VersionMismatchError,
)
from nesa_node.core.ids import ModelId, PeerId, SessionId
from nesa_node.core.span import Span
from nesa_node.engine.blocks import Blocks
from nesa_node.server.admission import Admission
from nesa_node.server.control import serve_session
from nesa_node.server.executor import Executor
from nesa_node.server.session import Session
from nesa_node.swarm.messages import (
    PROTOCOL,
    VERSION,
    AnyMessage,
    Busy,
    Closed,
    Downstream,
    Error,
    Open,
    Opened,
    PushOpen,
    PushOpened,
    Step,
)
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.private import verify_membership
from nesa_node.swarm.stream import Stream, silence_is_loss

log = structlog.get_logger(__name__)

FIRST_MESSAGE_S = 10.0
NEIGHBOUR_S = 10.0
"""How long neighbours wait for each other while they link up."""


class SessionServer:
    """All sessions of one node. `drain` refuses new ones and ends the others."""

    def __init__(
        self,
        swarm: Swarm,
        model_id: ModelId,
        blocks: Blocks,
        executor: Executor,
        admission: Admission,
        *,
        swarm_key: str | None = None,
        step_timeout_s: float = 30.0,
        idle_timeout_s: float = 600.0,
    ) -> None:
        self._swarm = swarm
        self._model_id = model_id
        self._blocks = blocks
        self._executor = executor
        self._admission = admission
        self._swarm_key = swarm_key
        self._step_timeout_s = step_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._sessions: dict[SessionId, Session] = {}
        self._draining = asyncio.Event()
        self._drain_until = 0.0
        self._empty = asyncio.Event()
        self._empty.set()

    async def handle(
        self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """One incoming stream, until it ends. A peer's mistake is answered, never raised."""
        stream = Stream(peer, reader, writer)
        try:
            # Its message is read before it is refused: an answer sent while a peer still writes can
            # be lost with the stream. How many streams may wait here, the transport bounds.
            message = await self._first_message(stream)
            self._admission.check_peer(peer)
            with self._admission.stream(peer):
                await self._dispatch(stream, message)
        except StreamClosedError:
            log.debug("stream_ended", peer=peer)
        except ProtocolError as error:
            log.info("stream_refused", peer=peer, code=error.code, reason=str(error))
            await self._refuse(stream, error)
        finally:
            await stream.close()

    async def drain(self, timeout_s: float) -> None:
        """Tell every client to move on; after `timeout_s` seconds the rest is cut off."""
        self._drain_until = time.monotonic() + timeout_s
        self._draining.set()
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            log.warning("drain_timed_out", sessions=len(self._sessions))

    async def _first_message(self, stream: Stream) -> AnyMessage:
        try:
            async with asyncio.timeout(FIRST_MESSAGE_S):
                message, _ = await stream.receive()
        except TimeoutError:
            raise FrameError(f"nothing came for {FIRST_MESSAGE_S:.0f} s") from None
        return message

    async def _dispatch(self, stream: Stream, message: AnyMessage) -> None:
        if isinstance(message, Open):
            _check_version(message.version)
            await self._open(stream, message)
        elif isinstance(message, PushOpen):
            _check_version(message.version)
            await self._accept_push(stream, message)
        else:
            raise ProtocolError(
                "unexpected", f"a stream begins with open or push_open, not {_name(message)}"
            )

    async def _open(self, stream: Stream, opened: Open) -> None:
        self._check_open(stream.peer, opened)
        tokens = opened.rows * opened.max_tokens
        outbox_bytes = tokens * self._blocks.hidden_size * 4 if opened.mode == "chain" else 0
        span = Span(*opened.blocks)
        key = SessionId(opened.session)
        with self._admission.session(stream.peer, tokens=tokens, outbox_bytes=outbox_bytes):
            session = Session(opened, stream, self._blocks.part(span), self._executor, self._dial)
            self._sessions[key] = session
            self._empty.clear()
            log.info("session_opened", rows=opened.rows, max_tokens=opened.max_tokens)
            try:
                await stream.send(
                    Opened(
                        version=VERSION,
                        max_tokens=opened.max_tokens,
                        context_length=self._blocks.context_length,
                        step_timeout_s=self._step_timeout_s,
                    )
                )
                await serve_session(
                    session,
                    draining=self._draining,
                    drain_left_s=lambda: max(self._drain_until - time.monotonic(), 0.0),
                    idle_timeout_s=self._idle_timeout_s,
                )
            finally:
                lengths = session.lengths
                await session.close()
                del self._sessions[key]
                if not self._sessions:
                    self._empty.set()
                log.info("session_closed", lengths=lengths)
        # Only now, so that whoever reads it finds the room free.
        await stream.send(Closed())

    def _check_open(self, peer: PeerId, opened: Open) -> None:
        if not verify_membership(
            self._swarm_key,
            opened.membership,
            SessionId(opened.session),
            peer,
            self._swarm.identity.peer_id,
        ):
            raise ProtocolError("not_a_member", "the swarm keys of this node and its client differ")
        if opened.model != self._model_id:
            raise ProtocolError(
                "wrong_model", f"this node serves {self._model_id}, not {opened.model}"
            )
        start, end = opened.blocks
        if start >= end or not self._blocks.span.covers(Span(start, end)):
            raise ProtocolError(
                "wrong_blocks", f"this node holds {self._blocks.span}, not {start}:{end}"
            )
        limit = self._blocks.context_length
        if limit and opened.max_tokens > limit:
            raise ProtocolError(
                "context_length", f"{opened.max_tokens} tokens; the model holds {limit}"
            )
        if SessionId(opened.session) in self._sessions:
            raise ProtocolError("session_exists", "this session is open here already")
        if self._draining.is_set():
            raise ProtocolError("draining", "this node is leaving the swarm")

    async def _accept_push(self, stream: Stream, opened: PushOpen) -> None:
        session = self._sessions.get(SessionId(opened.session))
        if session is None or not hmac.compare_digest(session.opened.secret, opened.secret):
            # One answer for both: a stranger must not learn which sessions exist.
            raise ProtocolError("unknown_session", "no such session here, or another secret")
        await self._wait_for_link(session, opened.epoch)
        if session.upstream != stream.peer:
            raise ProtocolError("not_upstream", f"{stream.peer} is not upstream of this session")
        with session.being_pushed():
            await stream.send(PushOpened(epoch=opened.epoch))
            while True:
                message, payload = await stream.receive(
                    max_tensor_bytes=session.inbox.max_step_bytes
                )
                if not isinstance(message, Step):
                    raise ProtocolError("unexpected", f"{_name(message)} on a push stream")
                await session.submit(stream.peer, message, payload)

    async def _wait_for_link(self, session: Session, epoch: int) -> None:
        """An upstream can be linked, and push, before the client's `link` has come here."""
        try:
            async with asyncio.timeout(NEIGHBOUR_S):
                await session.wait_for_epoch(epoch)
        except TimeoutError:
            raise ProtocolError(
                "future_epoch", f"the client did not begin epoch {epoch} within {NEIGHBOUR_S:g} s"
            ) from None

    async def _dial(self, session: Session, downstream: Downstream) -> Stream:
        """A push stream to the next node, whose own record must say that it holds the blocks."""
        peer = PeerId(downstream.peer)
        try:
            record = self._swarm.directory.record(peer)
            if record is None or not Span(*record.span).covers(Span(*downstream.blocks)):
                await self._swarm.directory.fetch(self._model_id)
                record = self._swarm.directory.record(peer)
            if record is None or record.model_id != self._model_id:
                raise PeerUnreachableError(f"no valid record of {peer} is known")
            if not Span(*record.span).covers(Span(*downstream.blocks)):
                raise PeerUnreachableError(f"{peer} announces {record.span}")
            return await self._dial_recorded(session, peer, record.addresses)
        except (NesaError, OSError) as error:
            raise ProtocolError("downstream_lost", f"{peer}: {error}") from error

    async def _dial_recorded(
        self, session: Session, peer: PeerId, addresses: tuple[str, ...]
    ) -> Stream:
        reader, writer = await self._swarm.transport.open_stream(peer, PROTOCOL, addresses)
        stream = Stream(peer, reader, writer)
        try:
            async with silence_is_loss(peer, NEIGHBOUR_S + 2, "opening a push"):
                await stream.send(
                    PushOpen(
                        version=VERSION,
                        session=session.opened.session,
                        secret=session.opened.secret,
                        epoch=session.inbox.epoch,
                    )
                )
                answer, _ = await stream.receive()
            if not isinstance(answer, PushOpened):
                words = answer.message if isinstance(answer, Error) else type(answer).__name__
                raise PeerUnreachableError(f"it answered: {words}")
        except BaseException:
            await stream.close()
            raise
        return stream

    async def _refuse(self, stream: Stream, error: ProtocolError) -> None:
        try:
            async with asyncio.timeout(FIRST_MESSAGE_S):
                if isinstance(error, BusyError):
                    await stream.send(
                        Busy(
                            retry_after_s=error.retry_after_s,
                            free_tokens=max(self._admission.free_tokens, 0),
                            message=str(error)[:1024],
                        )
                    )
                else:
                    await stream.send(Error(code=error.code, message=str(error)[:2048]))
        except (ProtocolError, TimeoutError):
            log.debug("refusal_not_delivered", peer=stream.peer)


def _check_version(version: tuple[int, int]) -> None:
    if version[0] != VERSION[0]:
        raise VersionMismatchError(
            f"this node speaks protocol {VERSION[0]}.{VERSION[1]}, "
            f"the peer {version[0]}.{version[1]}; update the older one"
        )


def _name(message: AnyMessage) -> str:
    return type(message).__name__.lower()
