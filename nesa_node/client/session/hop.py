"""The client's stream to one node of its session."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from nesa_node.client.recovery.suspicion import ProbeReport
from nesa_node.client.routing.request import RouteRequest
from nesa_node.client.session.base import rekey_for_peer
from nesa_node.core.errors import (
    BusyError,
    PeerUnreachableError,
    ProtocolError,
    RemoteError,
    StreamClosedError,
)
from nesa_node.core.logging import get_logger
from nesa_node.routing.chains import Hop
from nesa_node.swarm.dht.sealing import FailureKind
from nesa_node.swarm.p2p.link_measurements import PING_BYTES, LinkSpeed
from nesa_node.swarm.p2p.tasks import TaskSet
from nesa_node.swarm.protocol.any_message import AnyMessage
from nesa_node.swarm.protocol.link_encoder import HiddenStatesSpec, LinkEncoder, report_arrival
from nesa_node.swarm.protocol.messages import (
    EARLY_STEPS_SINCE,
    Busy,
    Close,
    Downstream,
    ErrorMessage,
    HandedOver,
    HandOver,
    Leaving,
    Link,
    Linked,
    Message,
    Open,
    Opened,
    Output,
    Ping,
    Pong,
    Prefix,
    Probe,
    Received,
    Reorder,
    Reordered,
    Rollback,
    RolledBack,
    RowSlice,
    Step,
)
from nesa_node.swarm.protocol.seal_messages import (
    Disclose,
    Disclosed,
    Seal,
    SealRequest,
    open_seal,
)
from nesa_node.swarm.protocol.stream import MessageBudget, Stream, peer_timeout

log = get_logger(__name__)

OPEN_TIMEOUT_S = 10.0
LINK_TIMEOUT_S = 30.0
HAND_OVER_TIMEOUT_S = 30.0
SEAL_TIMEOUT_S = 10.0
DISCLOSE_TIMEOUT_S = 30.0
PING_TIMEOUT_S = 5.0
MAX_PENDING_PINGS = 64
"""Most unanswered pings: a node that computes but answers none is not kept."""
DEFAULT_LINK_BYTES_PER_S = 125_000.0
"""Assumed rate of a link without measurements: 1 Mbit/s."""
TRANSIT_FACTOR = 4.0
"""Allowance for transfers: how many times as long as the measured rate says."""
NEW_STREAM_S = 1.0
"""Allowance for opening a separate stream for a ping, in seconds."""
MAX_KEPT_SEALS = 8
MAX_RETRY_AFTER_S = 5.0
"""Upper bound of a node's `retry_after_s`."""


_EPOCH_ANSWERS: dict[type[Message], type[Linked | RolledBack | Reordered]] = {
    Link: Linked,
    Rollback: RolledBack,
    Reorder: Reordered,
}


class LinkState(Enum):
    SERVING = "serving"
    TOO_SLOW = "too slow"
    """The session would be faster without the node, which serves until a successor is ready."""
    LEAVING = "leaving"
    """The node announced that it leaves. It serves until a successor is ready."""
    LOST = "lost"
    """The link failed: `HopLink.failure` says why."""
    CLOSED = "closed"


TRANSITIONS: dict[LinkState, frozenset[LinkState]] = {
    LinkState.SERVING: frozenset(LinkState) - {LinkState.SERVING},
    LinkState.TOO_SLOW: frozenset(LinkState) - {LinkState.TOO_SLOW},
    LinkState.LEAVING: frozenset({LinkState.LOST, LinkState.CLOSED}),
    LinkState.LOST: frozenset({LinkState.CLOSED}),
    LinkState.CLOSED: frozenset(),
}
"""Later states of a link. Events that would lead to another one are ignored."""


@dataclass(frozen=True, slots=True)
class LinkFailure:
    """`kind` is for reports to the swarm; a node that had announced its leaving has not failed."""

    reason: str
    kind: FailureKind
    had_announced: bool


class HopLink:
    """Link to one node of a session: requests one at a time, steps and outputs pipelined.

    `on_change` is called after each message from the node and when the link fails. The creator
    closes the link.
    """

    def __init__(
        self,
        hop: Hop,
        stream: Stream,
        request: RouteRequest,
        speed: LinkSpeed,
        on_change: Callable[[], None],
        session: bytes,
        secret: bytes,
        budget: MessageBudget,
        ping: Callable[[], Awaitable[object]],
        *,
        is_audited: bool = False,
    ) -> None:
        """`session` and `secret` are those of the session at this node; `budget` is shared by all
        of the client's links. `ping` pings the node on a separate stream.
        """
        self.hop = hop
        self.session = session
        self.secret = secret
        self.is_audited = is_audited
        """Whether the node's work is to be computed again; nothing tells the node."""
        self.start_lengths: Sequence[int] = [0] * request.rows
        """Tokens of each row that the node had without computing them: reused or handed over."""
        self.wire = LinkEncoder(request.options.quality, (), speed)
        """Encoding of steps to the node."""
        self.state = LinkState.SERVING
        self.failure: LinkFailure | None = None
        self.downstream_lost_reason: str | None = None
        self.unanswered_bytes = 0
        """Bytes sent to the node since the last output that it, or a hop after it, returned."""
        self.outputs: deque[tuple[Output, bytearray]] = deque()
        self._epoch = -1
        self._expected_bytes: dict[int, int] = {}
        self.opened: Opened | None = None
        self.seals: deque[Seal] = deque(maxlen=MAX_KEPT_SEALS)
        """The node's last seals; of those that it sent unasked, no signature was checked."""
        self._stream = stream
        self._request = request
        self._speed = speed
        self._budget = budget
        self._on_change = on_change
        self._pending_answer: asyncio.Future[AnyMessage] | None = None
        self._rollbacks: set[int] = set()
        """Epochs begun by `send_rollback` that the node has not confirmed."""
        self._hand_over_result: asyncio.Future[HandedOver | ErrorMessage] | None = None
        self._disclosed: list[tuple[Disclosed, bytearray]] = []
        self._undisclosed_tokens = 0
        """How many tokens a running `disclose` still expects."""
        self._pongs: dict[int, asyncio.Future[Pong]] = {}
        """Pending pings by nonce, including those of probes, which are not awaited."""
        self.probe_report: ProbeReport | None = None
        """The node's last answer to a probe."""
        self._probe_sent_at: dict[int, float] = {}
        """When each unanswered probe was sent, by nonce."""
        self._ping_on_new_stream = ping
        self._side_ping_bytes = 0
        self._tasks = TaskSet()
        self._tasks.start(self._read(), name="hop-link")

    @property
    def is_lost(self) -> bool:
        return self.state is LinkState.LOST

    @property
    def closed(self) -> bool:
        return self.state is LinkState.CLOSED

    def change_state(self, state: LinkState) -> bool:
        """Change to `state` if `TRANSITIONS` allows that; return whether it does."""
        if state not in TRANSITIONS[self.state]:
            return False
        self.state = state
        return True

    def as_downstream(self) -> Downstream:
        """The node as its neighbours are told of it."""
        span = self.hop.span
        return Downstream(peer=self.hop.peer_id, blocks=(span.start, span.end))

    def prefix_for_node(self, prefix: Prefix) -> Prefix:
        """Digests as sent to this node: in a star each node gets different ones."""
        return prefix if self._request.is_chain else rekey_for_peer(prefix, self.hop.peer_id)

    async def open(self, message: Open, timeout_s: float) -> None:
        """Open the session. Raises `BusyError`, `RemoteError` and `PeerUnreachableError`."""
        answer = await self._exchange(message, timeout_s)
        if not isinstance(answer, Opened):
            raise self._fail_unexpected(answer)
        if answer.adapter != self._request.adapter:
            reason = f"{self.hop.peer_id} serves no adapters: its version is older"
            self.fail(reason)
            raise RemoteError("unknown_adapter", reason)
        self.opened = answer
        self.wire = LinkEncoder(self._request.options.quality, answer.codecs, self._speed)

    async def link(self, message: Link) -> None:
        """Connect the node with its neighbours for an epoch. Raises `PeerUnreachableError`, and
        `RemoteError`, with "downstream_lost" where the node could not reach the next one.
        """
        await self.start_epoch(message)
        self.downstream_lost_reason = None
        if message.upstream is None:
            request = self._request
            states = HiddenStatesSpec(request.hidden_size, request.dtype, request.total_tokens)
            try:
                await self.wire.prepare(self._stream, states)
            except StreamClosedError as error:
                self.fail(str(error))
                raise PeerUnreachableError(str(error)) from error

    async def start_epoch(self, message: Link | Rollback | Reorder) -> None:
        """Send a message that begins an epoch. Raises `RemoteError`, `PeerUnreachableError`."""
        answer = await self._exchange(message, LINK_TIMEOUT_S)
        expected = _EPOCH_ANSWERS[type(message)]
        if not isinstance(answer, expected) or answer.epoch != message.epoch:
            raise self._fail_unexpected(answer)

    async def send_rollback(self, message: Rollback) -> None:
        """Send a rollback; steps of its epoch may follow at once.

        A refusal fails the link on arrival. Raises `PeerUnreachableError`.
        """
        self._raise_if_lost()
        self._rollbacks.add(message.epoch)
        try:
            async with peer_timeout(self._stream.peer, LINK_TIMEOUT_S, "reading rollback"):
                await self._stream.send(message)
        except (StreamClosedError, PeerUnreachableError) as error:
            self.fail(str(error))
            raise PeerUnreachableError(str(error)) from error

    async def hand_over(self, to: HopLink) -> tuple[int, ...]:
        """Let the node copy its cache to `to`; return the tokens per row that `to` then holds.

        Steps may run meanwhile. One hand-over at a time. Raises `RemoteError` and
        `PeerUnreachableError`, neither of which fails this link.
        """
        self._raise_if_lost()
        self._hand_over_result = asyncio.get_running_loop().create_future()
        try:
            async with peer_timeout(self._stream.peer, HAND_OVER_TIMEOUT_S, "handing over"):
                await self._stream.send(HandOver(to=to.as_downstream()))
                answer = await self._hand_over_result
        except StreamClosedError as error:
            raise PeerUnreachableError(str(error)) from error
        finally:
            self._hand_over_result = None
        if isinstance(answer, ErrorMessage):
            raise RemoteError(answer.code, answer.message)
        return answer.lengths

    @property
    def takes_early_steps(self) -> bool:
        """Whether the node waits with a pushed step of an epoch that has not begun there."""
        return self.opened is not None and self.opened.version >= EARLY_STEPS_SINCE

    @property
    def is_sealed(self) -> bool:
        """Whether the node seals what it computes."""
        return self.opened is not None and self.opened.computation is not None

    async def request_seal(self) -> Seal:
        """Have the node seal what its rows hold.

        Raises `RemoteError`, `PeerUnreachableError`, and `ProtocolError("bad_seal")` for a seal of
        another session.
        """
        assert self.opened is not None
        answer = await self._exchange(SealRequest(), SEAL_TIMEOUT_S)
        if not isinstance(answer, Seal):
            raise self._fail_unexpected(answer)
        stated, span = open_seal(answer, self.hop.peer_id), self.hop.span
        expected = self.session, self.opened.nonce, (span.start, span.end), self._request.rows
        if (stated.session, stated.nonce, stated.blocks, len(stated.rows)) != expected:
            raise ProtocolError("bad_seal", f"{self.hop.peer_id} sealed another session")
        self.seals.append(answer)
        return answer

    async def disclose(self, rows: tuple[RowSlice, ...]) -> list[tuple[Disclosed, bytearray]]:
        """Outputs of `rows` that the node pushed. Raises `RemoteError`, also for a node whose
        version knows no seals, and `PeerUnreachableError`.
        """
        if not self.is_sealed:
            raise RemoteError("unexpected", f"the version of {self.hop.peer_id} discloses nothing")
        self._disclosed, self._undisclosed_tokens = [], sum(part.count for part in rows)
        try:
            answer = await self._exchange(Disclose(rows=rows), DISCLOSE_TIMEOUT_S)
            if not isinstance(answer, Disclosed):
                raise self._fail_unexpected(answer)
            return self._disclosed
        finally:
            self._disclosed, self._undisclosed_tokens = [], 0

    @property
    def received_bytes(self) -> int:
        """Bytes received from the node so far: growth is a sign of life."""
        return self._stream.raw_bytes_received + self._side_ping_bytes

    @property
    def owes_answer(self) -> bool:
        """Whether a request other than a step is unanswered."""
        return not self.is_lost and self._pending_answer is not None

    @property
    def probe_transit_s(self) -> float:
        """Seconds that a probe may need to reach the node, behind unanswered bytes."""
        rate = self._speed.rate_bytes_per_s
        slowest = DEFAULT_LINK_BYTES_PER_S if rate is None else rate / TRANSIT_FACTOR
        return self.unanswered_bytes / slowest + (NEW_STREAM_S if self.owes_answer else 0.0)

    async def ping(self, nonce: int) -> Pong:
        """Ping the node. Silence fails the link and raises `PeerUnreachableError`."""
        try:
            async with peer_timeout(self._stream.peer, PING_TIMEOUT_S, "answering ping"):
                return await (await self._send_ping(nonce))
        except (StreamClosedError, PeerUnreachableError) as error:
            self.fail(str(error))
            raise PeerUnreachableError(str(error)) from error

    async def probe(self, nonce: int, now: float) -> None:
        """Send a ping without waiting for its answer, which becomes `probe_report`.

        `received_bytes` shows that the node answered. A node does not read the session's stream
        while it executes a request: then a separate stream is used, and there is no report.
        """
        if self.owes_answer:
            self.probe_on_new_stream()
        elif not self.is_lost and self._stream.can_send_now:
            self._probe_sent_at[nonce] = now
            try:
                await self._send_ping(nonce)
            except (StreamClosedError, PeerUnreachableError) as error:
                self.fail(str(error))

    def probe_on_new_stream(self) -> None:
        """Ping the node on a separate stream; its answer adds to `received_bytes`."""
        self._tasks.start(self._run_side_ping(), name="probe-beside")

    async def _run_side_ping(self) -> None:
        try:
            await self._ping_on_new_stream()
        except (PeerUnreachableError, OSError) as error:
            log.debug("ping_unanswered", peer=self._stream.peer, reason=str(error))
        else:
            self._side_ping_bytes += PING_BYTES

    async def _send_ping(self, nonce: int) -> asyncio.Future[Pong]:
        self._raise_if_lost()
        if len(self._pongs) >= MAX_PENDING_PINGS:
            raise PeerUnreachableError(f"{self._stream.peer} answers no pings")
        pong = self._pongs[nonce] = asyncio.get_running_loop().create_future()
        await self._stream.send(Ping(nonce=nonce))
        return pong

    async def send_step(self, step: Step, payload: memoryview | bytearray) -> None:
        """Send one step. Raises `PeerUnreachableError`."""
        try:
            await self._stream.send(step, payload)
        except StreamClosedError as error:
            self.fail(str(error))
            raise PeerUnreachableError(str(error)) from error

    def expect_output(self, epoch: int, step: int, nbytes: int) -> None:
        """Accept the output of this step, of at most `nbytes`; call it before the step is sent.

        Other outputs are dropped on arrival, so that a node cannot fill memory. A larger output
        fails the link. A new epoch forgets outputs and expectations of earlier ones.
        """
        if epoch != self._epoch:
            self._epoch = epoch
            self._expected_bytes.clear()
            self.outputs.clear()
        self._expected_bytes[step] = nbytes

    async def _read(self) -> None:
        """Handle the node's messages until the stream ends."""
        most_bytes = self._request.max_output_bytes
        try:
            while True:
                message, payload = await self._stream.receive(max_tensor_bytes=most_bytes)
                self._dispatch(message, payload)
                self._on_change()
                if self.opened is not None:
                    version = self.opened.version
                    await report_arrival(self._stream, self._request.options.quality, version)
                await self._budget.wait_until_paid(self._stream, message)
        except ProtocolError as error:
            self.fail(str(error))

    def _dispatch(self, message: AnyMessage, payload: bytearray) -> None:
        match message:
            case Output():
                if message.epoch == self._epoch and message.step in self._expected_bytes:
                    if len(payload) > self._expected_bytes.pop(message.step):
                        raise ProtocolError("bad_tensor", "an output larger than was asked for")
                    self.outputs.append((message, payload))
            case Received():
                self.wire.record_arrival(message)
            case Probe():
                pass
            case Pong() if (asked := self._pongs.pop(message.nonce, None)) is not None:
                asked_at = self._probe_sent_at.pop(message.nonce, None)
                if asked_at is not None:
                    self.probe_report = ProbeReport(message, asked_at)
                if not asked.done():
                    asked.set_result(message)
            case Disclosed() if message.rows:
                self._undisclosed_tokens -= sum(part.count for part in message.rows)
                if self._undisclosed_tokens < 0:
                    raise ProtocolError("unexpected", "more was disclosed than was asked for")
                self._disclosed.append((message, payload))
            case Seal(requested=False):
                # Those on the way commit the node; an audit asks for one of everything.
                self.seals.append(message)
            case Leaving():
                self.change_state(LinkState.LEAVING)
            case ErrorMessage(fatal=True) if self._pending_answer is None:
                raise RemoteError(message.code, message.message)
            case ErrorMessage(code="downstream_lost", answers=None):
                self.downstream_lost_reason = message.message
            case HandedOver() | ErrorMessage(answers="handover"):
                handed = self._hand_over_result
                if handed is not None and not handed.done():
                    handed.set_result(message)
            case RolledBack() if message.epoch in self._rollbacks:
                self._rollbacks.discard(message.epoch)
            case ErrorMessage(answers="rollback") if self._rollbacks:
                self.fail(f"{self._stream.peer} refused to roll back: {message.code}")
            case ErrorMessage(answers="step"):
                # The step was valid when it was sent: the refusal is the node's fault.
                self.fail(f"{self._stream.peer} refused a step: {message.code}, {message.message}")
            case _ if self._pending_answer is not None and not self._pending_answer.done():
                self._pending_answer.set_result(message)
            case ErrorMessage():
                log.info("error_received", peer=self._stream.peer, code=message.code)
            case _:
                raise ProtocolError("unexpected", f"{type(message).__name__} was not requested")

    async def _exchange(self, message: Message, timeout_s: float) -> AnyMessage:
        self._raise_if_lost()
        self._pending_answer = asyncio.get_running_loop().create_future()
        doing = f"answering {type(message).__name__.lower()}"
        try:
            async with peer_timeout(self._stream.peer, timeout_s, doing):
                await self._stream.send(message)
                answer = await self._pending_answer
        except (StreamClosedError, PeerUnreachableError) as error:
            self.fail(str(error))
            raise PeerUnreachableError(str(error)) from error
        finally:
            self._pending_answer = None
        if isinstance(answer, Busy) or (isinstance(answer, ErrorMessage) and answer.fatal):
            # The node closes the session after this answer and waits for the stream's end.
            self.fail(f"the node closed the session: {answer.message}")
        if isinstance(answer, Busy):
            pause_s = min(answer.retry_after_s, MAX_RETRY_AFTER_S)
            raise BusyError(f"{self._stream.peer}: {answer.message}", pause_s)
        if isinstance(answer, ErrorMessage):
            raise RemoteError(answer.code, f"{self._stream.peer}: {answer.message}")
        return answer

    def _fail_unexpected(self, answer: AnyMessage) -> PeerUnreachableError:
        reason = f"{self._stream.peer} answered with {type(answer).__name__}"
        self.fail(reason)
        return PeerUnreachableError(reason)

    def _raise_if_lost(self) -> None:
        if self.failure is not None:
            raise PeerUnreachableError(self.failure.reason)

    def fail(self, reason: str, kind: FailureKind = "lost") -> None:
        """Mark the link as lost, for replacement; pending requests raise `PeerUnreachableError`."""
        had_announced = self.state is LinkState.LEAVING
        if self.change_state(LinkState.LOST):
            self.failure = LinkFailure(reason, kind, had_announced)
        pongs = tuple(self._pongs.values())
        self._pongs.clear()
        for waiting in (self._pending_answer, self._hand_over_result, *pongs):
            if waiting is not None and not waiting.done():
                waiting.set_exception(PeerUnreachableError(reason))
                waiting.exception()  # retrieved: the sender may fail by itself
        self._on_change()

    async def close(self, prefix: Prefix = ()) -> None:
        """Close the session at the node and wait for its answer. Unreachable nodes raise nothing.

        `prefix` has digests of what the rows hold, for the node's prefix cache.
        """
        if self.is_lost:
            # Data in flight is of no use any more, and might never be read.
            self._stream.abort()
        try:
            if not self.is_lost and not self.closed:
                await self._exchange(Close(prefix=self.prefix_for_node(prefix)), 1.0)
        except (ProtocolError, PeerUnreachableError) as error:
            log.debug("session_close_unanswered", peer=self._stream.peer, reason=str(error))
        finally:
            self.change_state(LinkState.CLOSED)
            try:
                await self._tasks.close()
            finally:
                await self._stream.close()

    def abort(self) -> None:
        """Reset the stream at once. Idempotent."""
        self.change_state(LinkState.CLOSED)
        self._stream.abort()
