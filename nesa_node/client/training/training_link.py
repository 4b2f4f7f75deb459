"""The client's stream to a node that trains a span of its blocks.

T tokens of a micro-batch's texts, D hidden.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from nesa_node.client.routing.request import RouteRequest
from nesa_node.client.training.training_span import MicroBatchPass, SpanState
from nesa_node.compression import tensors
from nesa_node.compression.codecs import EXACT, codec_names
from nesa_node.compression.tensors import HiddenStates, TensorMeta
from nesa_node.core.errors import (
    BusyError,
    PeerUnreachableError,
    ProtocolError,
    RemoteError,
    StreamClosedError,
)
from nesa_node.core.ids import PeerId, SessionId
from nesa_node.core.logging import get_logger
from nesa_node.engine.training.span_trainer import hash_state
from nesa_node.engine.training.training_state import StateShapes
from nesa_node.routing.chains import Hop
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.identity import membership_proof
from nesa_node.swarm.p2p.link_measurements import LinkSpeed
from nesa_node.swarm.p2p.tasks import wait_until_done
from nesa_node.swarm.protocol.any_message import AnyMessage
from nesa_node.swarm.protocol.link_encoder import (
    UNCOMPRESSED,
    HiddenStatesSpec,
    LinkEncoder,
    check_codec_allowed,
    get_link_speed,
    report_arrival,
)
from nesa_node.swarm.protocol.messages import (
    PROTOCOL,
    VERSION,
    Busy,
    Close,
    Closed,
    ErrorMessage,
    Leaving,
    Message,
    Ping,
    Pong,
    Probe,
    Received,
)
from nesa_node.swarm.protocol.stream import MessageBudget, Stream, peer_timeout
from nesa_node.swarm.protocol.training_messages import (
    TrainApplied,
    TrainApply,
    TrainBackward,
    TrainBegan,
    TrainBegin,
    TrainForward,
    TrainGradient,
    TrainNorm,
    TrainNormed,
    TrainOpen,
    TrainOpened,
    TrainOutput,
    TrainPull,
    TrainRestored,
    TrainState,
    TrainTensor,
)

log = get_logger(__name__)

OPEN_TIMEOUT_S = 60.0
"""A node builds the adapters of its span before it answers."""
DIAL_TIMEOUT_S = 10.0
PING_AFTER_S = 2.0
"""Silence after which a node with unanswered messages is pinged."""
CLOSE_TIMEOUT_S = 2.0
M = TypeVar("M", bound=Message)
Payload = memoryview | bytearray | bytes
_Expected = asyncio.Future[tuple[AnyMessage, bytearray]]
_Notice = Pong | Probe | Received | Leaving
BUSY_LIMIT_FACTOR = 20
"""Longest time for one answer of a node that says that it computes, in `step_timeout_s`."""
MAX_ABS_VALUE = 1e15
"""Above what blocks compute. The next node would get infinities of larger numbers, and be blamed:
the square root of this is far above all activations, and its square within float32."""


@dataclass(frozen=True, slots=True)
class _Question:
    """A message that waits for its answer, which repeats the numbers `about`."""

    answer: type[Message]
    about: tuple[int, ...]
    future: _Expected


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLimits:
    """Tokens that a session asks nodes to make room for."""

    max_tokens: int
    """Of one micro-batch, with padding."""
    max_kept_tokens: int
    """Of micro-batches between forward and backward."""


class TrainingLink:
    """`TrainingSpan` on a node. Answers come in the order of the messages."""

    def __init__(
        self,
        hop: Hop,
        stream: Stream,
        speed: LinkSpeed,
        request: RouteRequest,
        shapes: StateShapes,
        budget: MessageBudget,
    ) -> None:
        """`shapes` are those of the span's state."""
        self.hop = hop
        self.span = hop.span
        self.failure: Exception | None = None
        """Why the link is lost."""
        self.is_leaving = False
        """Whether the node has announced that it leaves."""
        self._stream = stream
        self._speed = speed
        self._wire = LinkEncoder(EXACT, (), speed)
        """Until the node has said what it decodes."""
        self._state_tensors: dict[str, Tensor] = {}
        """Of the state that the node sent last."""
        self._quality = request.options.quality
        self._hidden_size = request.hidden_size
        self._silence_limit_s = request.options.step_timeout_s
        self._open_timeout_s = min(OPEN_TIMEOUT_S, max(request.options.recovery_timeout_s, 10.0))
        self._shapes = shapes
        self._budget = budget
        self._expected: deque[_Question] = deque()
        self._max_bytes = 0
        self._heard_at = time.monotonic()
        """When the last answer or pong came."""
        self._answered_at = time.monotonic()
        """When the last answer came, or the first question after it was asked."""
        self._idle_since: float | None = None
        """When the node first said that it computes nothing, although it has been asked."""
        self._pinged_at: float | None = None
        self._send_turn = asyncio.Lock()

    @property
    def peer(self) -> PeerId:
        return self.hop.peer_id

    async def open(
        self, swarm: Swarm, request: RouteRequest, spec: bytes, limits: TrainingLimits
    ) -> None:
        """Open the session at the node.

        Raises `PeerUnreachableError`, `BusyError` and `RemoteError`.
        """
        session = SessionId(secrets.token_bytes(16))
        message = TrainOpen(
            version=VERSION,
            model=request.model_id,
            session=session,
            blocks=(self.span.start, self.span.end),
            spec=spec,
            max_tokens=limits.max_tokens,
            max_kept_tokens=limits.max_kept_tokens,
            membership=membership_proof(
                request.options.swarm_key, session, swarm.identity.peer_id, self.peer
            ),
            quality=self._quality,
            codecs=codec_names(),
        )
        self._max_bytes = max(limits.max_tokens * self._hidden_size * 4, 64 << 20)
        try:
            async with peer_timeout(self.peer, self._open_timeout_s, "opening a training session"):
                await self._stream.send(message)
                answer, _ = await self._stream.receive()
            if isinstance(answer, TrainOpened):
                self._wire = LinkEncoder(self._quality, answer.codecs, self._speed)
                states = HiddenStatesSpec(self._hidden_size, request.dtype, limits.max_tokens)
                await self._wire.prepare(self._stream, states)
                return
        except StreamClosedError as error:
            raise PeerUnreachableError(f"{self.peer} closed the stream: {error}") from None
        except ProtocolError as error:
            raise self._blame(error) from None
        match answer:
            case Busy():
                raise BusyError(f"{self.peer}: {answer.message}", answer.retry_after_s)
            case ErrorMessage():
                raise RemoteError(answer.code, f"{self.peer}: {answer.message}")
            case _:
                raise RemoteError("unexpected", f"{self.peer} answered {type(answer).__name__}")

    def _blame(self, error: Exception) -> Exception:
        """What the node sent is its failure: an error after which it is left out."""
        if isinstance(error, ProtocolError) and not isinstance(
            error, RemoteError | StreamClosedError
        ):
            return RemoteError(error.code, f"{self.peer} sent {error}")
        return error

    async def run(self) -> None:
        """Receive answers, and ping a silent node, until the link fails; `failure` says why."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive())
                tasks.create_task(self._watch_silence())
        except* ProtocolError as group:
            self._fail(self._blame(group.exceptions[0]))
        except* PeerUnreachableError as group:
            self._fail(group.exceptions[0])

    async def begin(self, step: int) -> None:
        await self._ask(TrainBegin(step=step), TrainBegan, (step,))

    async def forward(
        self, batch: MicroBatchPass, hidden_TD: Tensor, *, keep: bool = True
    ) -> Tensor:
        meta, payload = await self._encode(hidden_TD)
        message = TrainForward(
            step=batch.step,
            micro=batch.number,
            texts=batch.layout.texts,
            seed=batch.seed,
            tensor=meta,
            keep=keep,
        )
        answer, data = await self._ask(message, TrainOutput, (batch.step, batch.number), payload)
        return await self._decode(answer.tensor, data, batch)

    async def backward(
        self, batch: MicroBatchPass, grad_TD: Tensor, turn: AbstractAsyncContextManager[None]
    ) -> Tensor:
        meta, payload = await self._encode(grad_TD)
        message = TrainBackward(step=batch.step, micro=batch.number, tensor=meta)
        async with turn:
            expected = await self._send_request(
                [(message, payload)], TrainGradient, (batch.step, batch.number)
            )
        answer, data = await self._wait(expected, TrainGradient)
        return await self._decode(answer.tensor, data, batch)

    async def squared_norm(self, step: int) -> float:
        answer, _ = await self._ask(TrainNorm(step=step), TrainNormed, (step,))
        return answer.squared_norm

    async def apply(
        self, step: int, *, micro_batches: int, learning_rate: float, scale: float
    ) -> None:
        message = TrainApply(
            step=step, micro_batches=micro_batches, learning_rate=learning_rate, scale=scale
        )
        await self._ask(message, TrainApplied, (step,))

    async def export(self, applied: int) -> SpanState:
        answer, _ = await self._ask(TrainPull(), TrainState, (applied,))
        found, self._state_tensors = self._state_tensors, {}
        return SpanState(answer.applied, found)

    async def restore(self, state: SpanState) -> None:
        digest = await asyncio.to_thread(hash_state, state.tensors)
        head = TrainState(applied=state.applied, tensors=len(state.tensors), digest=digest)
        parts: list[tuple[Message, Payload]] = [(head, b"")]
        for name, value in state.tensors.items():
            meta, payload = tensors.encode(value)
            parts.append((TrainTensor(name=name, tensor=meta), payload))
        expected = await self._send_request(parts, TrainRestored, (state.applied,))
        await self._wait(expected, TrainRestored)

    async def close(self) -> None:
        """End the session at the node, if it is not lost, and close the stream."""
        try:
            if self.failure is None:
                self._fail(StreamClosedError("the session was closed"))
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._stream.send(Close())
                    answer: AnyMessage | None = None
                    while not isinstance(answer, Closed):
                        answer, _ = await self._stream.receive(max_tensor_bytes=self._max_bytes)
        except (ProtocolError, TimeoutError):
            log.debug("training_close_not_answered", peer=self.peer)
        finally:
            await self._stream.close()

    async def _ask(
        self, message: Message, answer: type[M], about: tuple[int, ...], payload: Payload = b""
    ) -> tuple[M, bytearray]:
        """Send a message and wait for its answer. Raises `RemoteError` for a refusal."""
        expected = await self._send_request([(message, payload)], answer, about)
        return await self._wait(expected, answer)

    async def _send_request(
        self,
        parts: Sequence[tuple[Message, Payload]],
        answer: type[Message],
        about: tuple[int, ...],
    ) -> _Expected:
        """Send messages that have one answer. A cancelled call sends them to their end, too."""

        async def send() -> _Expected:
            async with self._send_turn:
                expected = self._expect(answer, about)
                for message, payload in parts:
                    await self._send(message, payload)
                return expected

        sending = asyncio.ensure_future(send())
        try:
            await wait_until_done(sending)
        except asyncio.CancelledError:
            if sending.exception() is None:
                sending.result().cancel()
            raise
        return sending.result()

    def _expect(self, answer: type[Message], about: tuple[int, ...]) -> _Expected:
        if self.failure is not None:
            raise self.failure
        if not self._expected:
            self._note_answer()
        future: _Expected = asyncio.get_running_loop().create_future()
        self._expected.append(_Question(answer, about, future))
        return future

    def _note_answer(self) -> None:
        self._heard_at = self._answered_at = time.monotonic()
        self._pinged_at = self._idle_since = None

    async def _send(self, message: Message, payload: Payload) -> None:
        try:
            await self._stream.send(message, payload)
        except StreamClosedError as error:
            raise self._fail(error) from None

    async def _wait(self, expected: _Expected, answer: type[M]) -> tuple[M, bytearray]:
        message, payload = await expected
        assert isinstance(message, answer)
        return message, payload

    async def _receive(self) -> None:
        while True:
            message, payload = await self._receive_answer()
            if not self._expected:
                raise RemoteError(
                    "unexpected", f"{self.peer} sent {type(message).__name__} without a question"
                )
            question = self._expected[0]
            if isinstance(message, ErrorMessage):
                if question.future.done():  # its call was cancelled
                    self._expected.popleft()
                    continue
                raise RemoteError(message.code, f"{self.peer}: {message.message}")
            if not isinstance(message, question.answer):
                raise RemoteError(
                    "unexpected",
                    f"{self.peer} answered {type(message).__name__}, not "
                    f"{question.answer.__name__}",
                )
            if (found := _numbers_of(message)) != question.about:
                raise RemoteError(
                    "unexpected",
                    f"{self.peer} answered {type(message).__name__} for {found}, not for "
                    f"{question.about}",
                )
            if isinstance(message, TrainState):
                await self._receive_state(message)
            self._expected.popleft()
            if not question.future.done():
                question.future.set_result((message, payload))

    async def _receive_answer(self) -> tuple[AnyMessage, bytearray]:
        """The next message that is no notice. Raises `RemoteError` for a fatal error."""
        while True:
            message, payload = await self._stream.receive(max_tensor_bytes=self._max_bytes)
            await report_arrival(self._stream, self._quality, VERSION)
            if isinstance(message, ErrorMessage) and message.fatal:
                raise RemoteError(message.code, f"{self.peer}: {message.message}")
            if not isinstance(message, _Notice):
                self._note_answer()
                return message, payload
            self._record_notice(message)
            await self._budget.wait_until_paid(self._stream, message)

    def _record_notice(self, message: _Notice) -> None:
        match message:
            case Pong():
                self._heard_at, self._pinged_at = time.monotonic(), None
                if message.busy:
                    self._idle_since = None
                elif self._idle_since is None:
                    self._idle_since = self._heard_at
            case Received():
                self._wire.record_arrival(message)
            case Leaving():
                self.is_leaving = True

    async def _receive_state(self, state: TrainState) -> None:
        found: dict[str, Tensor] = {}
        for _ in range(state.tensors):
            message, payload = await self._receive_answer()
            if not isinstance(message, TrainTensor):
                raise RemoteError("unexpected", f"{self.peer} sent a state in pieces")
            self._shapes.check_shape(message.name, message.tensor.shape)
            if message.tensor.codec != UNCOMPRESSED or message.name in found:
                raise ProtocolError("bad_tensor", f"{message.name} is compressed, or comes twice")
            found[message.name] = tensors.decode(message.tensor, payload, max_bytes=self._max_bytes)
        if await asyncio.to_thread(hash_state, found) != state.digest:
            raise ProtocolError("bad_tensor", "a state with another digest than was announced")
        await asyncio.to_thread(self._shapes.check, found)
        self._state_tensors = found

    async def _watch_silence(self) -> None:
        while True:
            await asyncio.sleep(PING_AFTER_S / 2)
            if not self._expected:
                continue
            now = time.monotonic()
            if self._pinged_at is None and now - self._heard_at >= PING_AFTER_S:
                self._pinged_at = now
                await self._stream.send(Ping(nonce=1))
            elif self._pinged_at is not None and now - self._pinged_at >= self._silence_limit_s:
                raise PeerUnreachableError(
                    f"{self.peer} answered no ping for {self._silence_limit_s:g} s"
                )
            if self._idle_since is not None and now - self._idle_since >= self._silence_limit_s:
                raise RemoteError(
                    "not_answered",
                    f"{self.peer} computed nothing for {self._silence_limit_s:g} s, and did not "
                    "answer",
                )
            if now - self._answered_at >= BUSY_LIMIT_FACTOR * self._silence_limit_s:
                raise RemoteError(
                    "not_answered",
                    f"{self.peer} did not answer for {now - self._answered_at:.0f} s",
                )

    def _fail(self, error: Exception) -> Exception:
        """Mark the link as lost; later calls, and those that wait, raise the first error."""
        if self.failure is None:
            self.failure = error
        while self._expected:
            future = self._expected.popleft().future
            if not future.done():
                future.set_exception(self.failure)
                future.exception()
        return self.failure

    async def _encode(self, values_TD: Tensor) -> tuple[TensorMeta, bytearray | memoryview]:
        return await self._wire.encode_off_loop(HiddenStates.from_tensor(values_TD))

    async def _decode(self, meta: TensorMeta, data: bytearray, batch: MicroBatchPass) -> Tensor:
        shape = (batch.layout.num_tokens, self._hidden_size)
        try:
            if tuple(meta.shape) != shape:
                raise ProtocolError("bad_tensor", f"a tensor {list(meta.shape)}, not {list(shape)}")
            check_codec_allowed(self._quality, meta)
            values_TD = tensors.decode(meta, data, max_bytes=self._max_bytes)
            if float(values_TD.abs().max()) > MAX_ABS_VALUE:
                raise ProtocolError("bad_tensor", f"values above {MAX_ABS_VALUE:g}")
        except ProtocolError as error:
            raise self._fail(self._blame(error)) from None
        return values_TD.to(torch.float32) if values_TD.dtype == torch.float16 else values_TD


def _numbers_of(message: AnyMessage) -> tuple[int, ...]:
    """Numbers of an answer that repeat those of its question."""
    match message:
        case TrainOutput() | TrainGradient():
            return message.step, message.micro
        case TrainState() | TrainRestored():
            return (message.applied,)
        case TrainBegan() | TrainNormed() | TrainApplied():
            return (message.step,)
        case _:
            return ()


@asynccontextmanager
async def dial_training(
    swarm: Swarm,
    hop: Hop,
    addresses: tuple[str, ...],
    request: RouteRequest,
    shapes: StateShapes,
) -> AsyncIterator[TrainingLink]:
    """Open a stream to a node. On exit it is closed, if the body failed."""
    reader, writer = await swarm.transport.open_stream(
        hop.peer_id, PROTOCOL, addresses, DIAL_TIMEOUT_S
    )
    stream = Stream(hop.peer_id, reader, writer)
    try:
        speed = await get_link_speed(swarm, hop.peer_id, request.options.quality)
        yield TrainingLink(hop, stream, speed, request, shapes, swarm.message_budget)
    except BaseException:
        stream.abort()
        raise
