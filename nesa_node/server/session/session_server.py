"""Server of the streams that peers open: clients' sessions, upstream pushes, and transfers."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import Any

from structlog.contextvars import bind_contextvars

from nesa_node.compression.codecs import check_quality, codec_names
from nesa_node.compression.tensors import DTYPES
from nesa_node.core.errors import (
    ConfigError,
    ProtocolError,
    VersionMismatchError,
)
from nesa_node.core.ids import ModelId, PeerId, SessionId, Span
from nesa_node.core.logging import get_logger, session_name
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.server.adapters.loaded_adapters import LoadedAdapters
from nesa_node.server.scheduler.scheduler import Scheduler
from nesa_node.server.scheduler.session_queue import PRIORITIES
from nesa_node.server.session.admission import Admission
from nesa_node.server.session.message_loop import (
    Drain,
    NodeTrace,
    RefusalLog,
    receive_first_message,
    serve_session,
)
from nesa_node.server.session.neighbours import NeighbourLookup, dial_downstream, dial_successor
from nesa_node.server.session.output_sender import OutputSender
from nesa_node.server.session.sealing import SessionSealer
from nesa_node.server.session.session import Session
from nesa_node.server.session.session_state import SessionState, check_prefix
from nesa_node.server.session.transfer import SessionDonor, TransferReceiver
from nesa_node.server.training.training_server import TrainingServer
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.identity import verify_membership
from nesa_node.swarm.protocol.any_message import AnyMessage
from nesa_node.swarm.protocol.link_encoder import LinkEncoder, get_link_speed, report_arrival
from nesa_node.swarm.protocol.messages import (
    VERSION,
    Closed,
    Computation,
    Open,
    Opened,
    Pages,
    Probe,
    PushOpen,
    PushOpened,
    QuantizedPages,
    Step,
    Sync,
    Synced,
    TransferOpen,
    TransferOpened,
)
from nesa_node.swarm.protocol.stream import Stream
from nesa_node.swarm.protocol.training_messages import TrainOpen

log = get_logger(__name__)

FINITE_OUTPUTS_SINCE = (1, 4)
"""Protocol version since which nodes check their outputs before a push, so that values which are
not finite are the sender's fault. A wrong dtype, shape or codec is not: the client chooses these
for each node separately."""
CLOSE_GRACE_S = 0.5
"""Time on closing for the last answers to clients of sessions that have just ended."""


class SessionServer:
    """All sessions of one span. `drain` ends them and refuses new ones, `close` cuts them off."""

    def __init__(
        self,
        swarm: Swarm,
        model_id: ModelId,
        blocks: ModelBlocks,
        scheduler: Scheduler,
        admission: Admission,
        training: TrainingServer,
        adapters: LoadedAdapters,
        computation: Computation,
        *,
        swarm_key: str | None = None,
        step_timeout_s: float = 30.0,
        idle_timeout_s: float = 600.0,
        refusals: RefusalLog | None = None,
        is_star_only: bool = False,
    ) -> None:
        """`is_star_only`: nodes of a session are not to know each other."""
        self._swarm = swarm
        self._model_id = model_id
        self.names = {model_id}
        """By which clients may ask for the blocks."""
        self._is_star_only = is_star_only
        self._blocks = blocks
        self._scheduler = scheduler
        self._admission = admission
        self._training = training
        self._adapters = adapters
        self._computation = computation
        self._num_trainings = 0
        self._swarm_key = swarm_key
        self._step_timeout_s = step_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._sessions: dict[tuple[PeerId, SessionId], Session] = {}
        self._refusals = refusals or RefusalLog()
        self._drain = Drain()
        self._budget = swarm.message_budget
        self._neighbours = NeighbourLookup(swarm, model_id)
        self._handler_tasks: set[asyncio.Task[Any]] = set()
        self._no_sessions = asyncio.Event()
        self._no_sessions.set()

    async def handle(
        self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one incoming stream until its final message; the caller closes it.

        A peer's mistake is answered, never raised.
        """
        await self.serve(Stream(peer, reader, writer))

    async def serve(self, stream: Stream, first: AnyMessage | None = None) -> None:
        """Serve a stream as `handle` does, whose `first` message was read before, or was not."""
        peer = stream.peer
        task = asyncio.current_task()
        assert task is not None
        self._handler_tasks.add(task)
        task.add_done_callback(self._handler_tasks.discard)
        async with self._refusals.answering(stream, lambda: self._admission.free_tokens):
            # Read the message before refusing it: an answer sent while a peer still writes can be
            # lost with the stream. The transport bounds how many streams may wait here.
            message = first or await receive_first_message(stream)
            await self._budget.wait_until_paid(stream, message)
            if isinstance(message, Open | PushOpen | TransferOpen | TrainOpen):
                # Bound for the rest of this task, which belongs to the stream.
                bind_contextvars(session=session_name(message.session))
            self._admission.check_peer(peer)
            with self._admission.admit_stream(peer):
                await self._dispatch(stream, message)

    async def drain(self, timeout_s: float, *, idle_s: float | None = None) -> None:
        """Tell every client to move off; after `timeout_s` seconds the remaining sessions are cut
        off.

        Sessions that are idle for `idle_s` are cut off earlier.
        """
        self._drain.begin(timeout_s, idle_s)
        try:
            async with asyncio.timeout(timeout_s):
                await self._no_sessions.wait()
        except TimeoutError:
            log.warning("drain_timed_out", sessions=len(self._sessions))

    async def close(self) -> None:
        """End every open stream; afterwards no session uses the blocks."""
        if self._handler_tasks:
            await asyncio.wait(self._handler_tasks, timeout=CLOSE_GRACE_S)
        while tasks := [task for task in self._handler_tasks if not task.done()]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        await self._neighbours.close()

    async def _dispatch(self, stream: Stream, message: AnyMessage) -> None:
        if not isinstance(message, Open | PushOpen | TransferOpen | TrainOpen):
            raise ProtocolError(
                "unexpected",
                "a stream begins with open, push_open, transfer_open or train_open, "
                f"not {_message_name(message)}",
            )
        _check_version(message.version)
        match message:
            case Open():
                await self._open(stream, message)
            case PushOpen():
                await self._accept_push(stream, message)
            case TransferOpen():
                await self._accept_transfer(stream, message)
            case TrainOpen():
                await self._train(stream, message)

    async def _train(self, stream: Stream, opened: TrainOpen) -> None:
        self._check_request(stream.peer, opened)
        self._num_trainings += 1
        self._no_sessions.clear()
        try:
            await self._training.serve(stream, opened, self._drain)
        finally:
            self._num_trainings -= 1
            self._note_end()
        await stream.send(Closed())

    def _note_end(self) -> None:
        if not self._sessions and not self._num_trainings:
            self._no_sessions.set()

    async def _open(self, stream: Stream, opened: Open) -> None:
        self._check_open(stream.peer, opened)
        trace = NodeTrace(opened, self._swarm.identity.peer_id)
        try:
            await self._run_session(stream, opened, trace)
        except ProtocolError as error:
            trace.end(error=error.code)
            raise
        finally:
            trace.end()
        # Sent last, so that a client which reads it finds the room free.
        await stream.send(Closed())

    async def _run_session(self, stream: Stream, opened: Open, trace: NodeTrace) -> None:
        """Run the session from its opening to its end."""
        blocks = self._blocks.select(Span(*opened.blocks))
        reach = (self._neighbours, opened)
        speed = await get_link_speed(self._swarm, stream.peer, opened.quality)
        wire = LinkEncoder(opened.quality, opened.codecs, speed)
        executor = self._scheduler.executor
        # The push stream closes after the pages are free.
        async with AsyncExitStack() as push_scope:
            adapter = await push_scope.enter_async_context(self._adapters.using(opened.adapter))
            with self._admission.admit_session(
                stream.peer, rows=opened.rows, max_tokens=opened.max_tokens
            ) as grant:
                tables = [grant.reservation.new_table() for _ in range(opened.rows)]
                async with self._scheduler.open_queue(
                    tables,
                    blocks,
                    client=stream.peer,
                    priority=PRIORITIES.index(opened.priority),
                    dtype=DTYPES[opened.dtype],
                    session=session_name(opened.session),
                    adapter=adapter,
                ) as queue:
                    sealer = SessionSealer(self._swarm.identity, opened, self._computation)
                    state = SessionState(
                        opened,
                        stream.peer,
                        queue,
                        grant.reservation,
                        self._admission.limits,
                        sealer,
                    )
                    dial = partial(dial_downstream, *reach)
                    sender = OutputSender(stream, wire, state, dial, push_scope)
                    donor = SessionDonor(partial(dial_successor, *reach), state, executor)
                    receiver = TransferReceiver(state, executor)
                    session = Session(
                        stream, state, self._scheduler, sender, grant, donor, receiver
                    )
                    try:
                        await self._serve(session, trace)
                    finally:
                        await donor.close()

    async def _serve(self, session: Session, trace: NodeTrace) -> None:
        opened, client = session.opened, session.client
        with self._registered(session):
            try:
                await client.send(
                    Opened(
                        version=VERSION,
                        max_tokens=opened.max_tokens,
                        context_length=self._blocks.context_length,
                        step_timeout_s=self._step_timeout_s,
                        held=session.state.lengths,
                        codecs=codec_names(),
                        adapter=opened.adapter,
                        nonce=session.state.sealer.nonce,
                        computation=self._computation,
                    )
                )
                trace.end_opening()
                await serve_session(
                    session,
                    drain=self._drain,
                    budget=self._budget,
                    idle_timeout_s=self._idle_timeout_s,
                    refused_messages=self._refusals.messages,
                )
            finally:
                trace.record_session(session)
                await session.close()

    @contextmanager
    def _registered(self, session: Session) -> Iterator[None]:
        """Register the session, so that pushes find it and a drain waits for it."""
        opened = session.opened
        key = (session.client.peer, SessionId(opened.session))
        # Checked again: another session may have opened under this id while this one waited.
        self._check_is_new(key)
        self._sessions[key] = session
        self._no_sessions.clear()
        log.info(
            "session_opened",
            rows=opened.rows,
            max_tokens=opened.max_tokens,
            blocks=str(Span(*opened.blocks)),
            mode=opened.mode,
        )
        try:
            yield
        finally:
            del self._sessions[key]
            self._note_end()
            log.info("session_closed", lengths=session.state.lengths)

    def _check_request(self, peer: PeerId, opened: Open | TrainOpen) -> None:
        """Check membership, model, blocks and quality."""
        if not verify_membership(
            self._swarm_key,
            opened.membership,
            SessionId(opened.session),
            peer,
            self._swarm.identity.peer_id,
        ):
            raise ProtocolError("not_a_member", "the swarm keys of this node and its client differ")
        if opened.model not in self.names:
            raise ProtocolError(
                "wrong_model", f"this node serves {self._model_id}, not {opened.model}"
            )
        start, end = opened.blocks
        if start >= end or not self._blocks.span.covers(Span(start, end)):
            raise ProtocolError(
                "wrong_blocks", f"this node holds {self._blocks.span}, not {start}:{end}"
            )
        _check_quality(opened.quality)
        if self._drain.has_begun:
            raise ProtocolError("draining", "this node is giving up its blocks")

    def _check_open(self, peer: PeerId, opened: Open) -> None:
        self._check_request(peer, opened)
        limit = self._blocks.context_length
        if limit and opened.max_tokens > limit:
            raise ProtocolError(
                "context_length", f"{opened.max_tokens} tokens; the model holds {limit}"
            )
        if self._is_star_only and opened.mode != "star":
            raise ProtocolError("not_star", "the nodes of a deployment do not know each other")
        if opened.mode == "star" and opened.donor is not None:
            raise ProtocolError("not_donor", "a star's nodes hand nothing over")
        check_prefix(opened.prefix, opened.rows)
        self._check_is_new((peer, SessionId(opened.session)))

    def _check_is_new(self, key: tuple[PeerId, SessionId]) -> None:
        if key in self._sessions:
            raise ProtocolError("session_exists", "this session is open here already")

    async def _accept_push(self, stream: Stream, opened: PushOpen) -> None:
        session = self._find_session(opened)
        await session.wait_for_epoch(opened.epoch)
        if session.upstream != stream.peer:
            raise ProtocolError("not_upstream", f"{stream.peer} is not upstream of this session")
        with session.reading_upstream(stream):
            await stream.send(PushOpened(epoch=opened.epoch, codecs=codec_names()))
            while True:
                message, payload = await stream.receive(
                    max_tensor_bytes=session.sequencer.max_step_bytes
                )
                if isinstance(message, Step):
                    try:
                        # A client that rolls back tells all nodes at once, and goes on.
                        if message.epoch > session.state.epoch:
                            await session.wait_for_epoch(message.epoch)
                        await session.submit(stream.peer, message, payload)
                    except ProtocolError as error:
                        if error.code == "not_finite" and opened.version >= FINITE_OUTPUTS_SINCE:
                            self._swarm.failure_reporter.record_failure(
                                self._model_id, stream.peer, "wrong"
                            )
                        await self._budget.wait_until_paid(stream, message, is_refused=True)
                        raise
                elif not isinstance(message, Probe):
                    raise ProtocolError("unexpected", f"{_message_name(message)} on a push stream")
                await report_arrival(stream, session.opened.quality, opened.version)
                await self._budget.wait_until_paid(stream, message)

    async def _accept_transfer(self, stream: Stream, opened: TransferOpen) -> None:
        """Receive a session from the donor that its client named, until the client links it."""
        session = self._find_session(opened)
        session.check_donor(stream.peer)
        with session.reading_upstream(stream):
            await stream.send(TransferOpened(cache_dtype=session.state.blocks.cache_dtype))
            while True:
                message, payload = await stream.receive(max_tensor_bytes=session.max_transfer_bytes)
                if not isinstance(message, Pages | QuantizedPages | Step | Sync):
                    raise ProtocolError("unexpected", f"{_message_name(message)} in a transfer")
                try:
                    held = await session.accept_transfer(message, payload)
                except ProtocolError:
                    await self._budget.wait_until_paid(stream, message, is_refused=True)
                    raise
                if isinstance(message, Sync):
                    await stream.send(Synced(lengths=held))
                await self._budget.wait_until_paid(stream, message)

    def _find_session(self, opened: PushOpen | TransferOpen) -> Session:
        """Find a session by id and secret; ids alone are not unique between clients."""
        for (_, session_id), session in self._sessions.items():
            if session_id == opened.session and hmac.compare_digest(
                session.opened.secret, opened.secret
            ):
                return session
        # One answer for both cases: a stranger must not learn which sessions exist.
        raise ProtocolError("unknown_session", "no such session here, or another secret")


def _check_quality(quality: str) -> None:
    try:
        full = check_quality(quality)
    except ConfigError as error:
        raise ProtocolError("unknown_quality", str(error)) from None
    if full != quality:
        raise ProtocolError("unknown_quality", f"{quality!r} is not complete: write {full!r}")


def _check_version(version: tuple[int, int]) -> None:
    if version[0] != VERSION[0]:
        raise VersionMismatchError(
            f"this node speaks protocol {VERSION[0]}.{VERSION[1]}, "
            f"the peer {version[0]}.{version[1]}; update the older one"
        )


def _message_name(message: AnyMessage) -> str:
    return type(message).__name__.lower()
