"""Questions to a node that trains, and its answers, which come in the order of the questions.

A silent node is pinged. The first failure ends all.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from nesa_node.compression.codecs import UNCOMPRESSED
from nesa_node.core.errors import (
    PeerUnreachableError,
    ProtocolError,
    RemoteError,
    StreamClosedError,
)
from nesa_node.core.ids import PeerId
from nesa_node.engine.training.training_state import StateShapes, StateTensors, block_of, hash_state
from nesa_node.swarm.p2p.tasks import wait_until_done
from nesa_node.swarm.protocol.any_message import AnyMessage
from nesa_node.swarm.protocol.link_encoder import report_arrival
from nesa_node.swarm.protocol.messages import (
    VERSION,
    ErrorMessage,
    Leaving,
    Message,
    Ping,
    Pong,
    Probe,
    Received,
)
from nesa_node.swarm.protocol.stream import MessageBudget, Stream
from nesa_node.swarm.protocol.training_messages import (
    TrainApplied,
    TrainBegan,
    TrainGradient,
    TrainGradients,
    TrainLend,
    TrainLent,
    TrainNeed,
    TrainNormed,
    TrainOutput,
    TrainParameters,
    TrainReduced,
    TrainRestored,
    TrainState,
    TrainTensor,
)

PING_AFTER_S = 2.0
"""Silence after which a node with unanswered messages is pinged."""
BUSY_LIMIT_FACTOR = 20
"""Longest time for one answer of a node that says that it computes, in `step_timeout_s`."""
M = TypeVar("M", bound=Message)
Payload = memoryview | bytearray | bytes
About = tuple[int | bytes, ...]
"""Step, micro-batch or steps that were applied, and the digest of the session's plan."""
_Notice = Pong | Probe | Received | Leaving
_WithTensors = TrainState | TrainGradients | TrainParameters | TrainLent


@dataclass(frozen=True, slots=True)
class Answer(Generic[M]):
    """A message of the node, and what came with it."""

    message: M
    payload: bytearray
    tensors: Mapping[str, Tensor]
    """Checked: those of a state, of gradients or of parameters."""


Expected = asyncio.Future[Answer[Message]]


@dataclass(frozen=True, slots=True)
class _Question:
    """A message that waits for its answer, which repeats what it is `about`."""

    answer: type[Message]
    about: About
    future: Expected


class TrainingQuestions:
    """Messages to a node that have answers, in order, on one stream."""

    def __init__(
        self,
        stream: Stream,
        budget: MessageBudget,
        shapes: StateShapes,
        held: StateShapes,
        *,
        quality: str,
        silence_limit_s: float,
        max_bytes: int,
        on_arrival: Callable[[Received], None],
        on_need: Callable[[int], None],
    ) -> None:
        """`shapes` are those of the span's state, `held` of the node's own; `max_bytes` bounds a
        tensor of an answer.

        `on_arrival` gets what the node reports of the arrival of tensors, `on_need` the block whose
        parameters a pass waits for.
        """
        self.failure: Exception | None = None
        """Why the link is lost."""
        self.is_leaving = False
        """Whether the node has announced that it leaves."""
        self.hands_over = False
        """Whether gradients of adapters come with those of micro-batches."""
        self.gradient_codec = UNCOMPRESSED
        """What gradients of adapters may be encoded in."""
        self.handed_over: dict[str, Tensor] = {}
        """Sums of the gradients of adapters that came with those of this step's micro-batches."""
        self._stream = stream
        self._budget = budget
        self._shapes = shapes
        self._held = held
        self._quality = quality
        self._silence_limit_s = silence_limit_s
        self._max_bytes = max_bytes
        self._arriving: StateTensors | None = None
        """Gradients of adapters of the micro-batch whose backward is to be answered next."""
        self._on_arrival = on_arrival
        self._on_need = on_need
        self._lent: dict[int, asyncio.Future[Mapping[str, Tensor]]] = {}
        """Parameters of blocks that were asked for, which come between answers."""
        self._expected: deque[_Question] = deque()
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
        return self._stream.peer

    def blame(self, error: Exception) -> Exception:
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
            self.fail(self.blame(group.exceptions[0]))
        except* PeerUnreachableError as group:
            self.fail(group.exceptions[0])

    async def ask(
        self, message: Message, answer: type[M], about: About, payload: Payload = b""
    ) -> Answer[M]:
        """Send a message and wait for its answer. Raises `RemoteError` for a refusal."""
        expected = await self.send([(message, payload)], answer, about)
        return await self.wait(expected, answer)

    async def send(
        self,
        parts: Sequence[tuple[Message, Payload]],
        answer: type[Message],
        about: About,
    ) -> Expected:
        """Send messages that have one answer. A cancelled call sends them to their end, too."""

        async def send_parts() -> Expected:
            async with self._send_turn:
                expected = self._expect(answer, about)
                try:
                    for message, payload in parts:
                        await self._stream.send(message, payload)
                except StreamClosedError as error:
                    raise self.fail(error) from None
                return expected

        sending = asyncio.ensure_future(send_parts())
        try:
            await wait_until_done(sending)
        except asyncio.CancelledError:
            if sending.exception() is None:
                sending.result().cancel()
            raise
        return sending.result()

    def _expect(self, answer: type[Message], about: About) -> Expected:
        if self.failure is not None:
            raise self.failure
        if not self._expected:
            self._note_answer()
        future: Expected = asyncio.get_running_loop().create_future()
        self._expected.append(_Question(answer, about, future))
        return future

    def _note_answer(self) -> None:
        self._heard_at = self._answered_at = time.monotonic()
        self._pinged_at = self._idle_since = None

    async def wait(self, expected: Expected, answer: type[M]) -> Answer[M]:
        """Wait for the answer of what `send` has sent."""
        found = await expected
        assert isinstance(found.message, answer)
        return Answer(found.message, found.payload, found.tensors)

    async def _receive(self) -> None:
        while True:
            message, payload = await self._receive_answer()
            if isinstance(message, TrainTensor):
                self._collect_handed_over(message, payload)
                continue
            if isinstance(message, TrainNeed):
                self._on_need(message.block)
                continue
            if isinstance(message, TrainLent):
                await self._receive_lent(message)
                continue
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
            if (found := _about(message)) != question.about:
                raise RemoteError(
                    "unexpected",
                    f"{self.peer} answered {type(message).__name__} for {found}, not for "
                    f"{question.about}",
                )
            if isinstance(message, TrainBegan):
                self.handed_over = {}
            elif isinstance(message, TrainGradient):
                self._add_handed_over()
            tensors: Mapping[str, Tensor] = {}
            if isinstance(message, _WithTensors):
                tensors = await self._receive_tensors(message)
            self._expected.popleft()
            if not question.future.done():
                question.future.set_result(Answer(message, payload, tensors))

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
                self._on_arrival(message)
            case Leaving():
                self.is_leaving = True

    async def borrow(self, block: int) -> Mapping[str, Tensor]:
        """The node's parameters of a block, also while it computes."""
        if self.failure is not None:
            raise self.failure
        if block not in self._lent:
            if not self._expected and not self._lent:
                self._note_answer()
            self._lent[block] = asyncio.get_running_loop().create_future()
            await self.tell([(TrainLend(block=block), b"")])
        return await asyncio.shield(self._lent[block])

    async def _receive_lent(self, head: TrainLent) -> None:
        if head.block not in self._lent:
            raise RemoteError(
                "unexpected", f"{self.peer} lent block {head.block} without being asked"
            )
        found = await self._receive_tensors(head)
        if any(block_of(name) != head.block for name in found):
            raise ProtocolError("bad_tensor", f"parameters of another block than {head.block}")
        self._lent.pop(head.block).set_result(found)

    async def tell(self, parts: Sequence[tuple[Message, Payload]]) -> None:
        """Send messages that have no answer, together."""
        async with self._send_turn:
            try:
                for message, payload in parts:
                    await self._stream.send(message, payload)
            except StreamClosedError as error:
                raise self.fail(error) from None

    def _collect_handed_over(self, message: TrainTensor, payload: bytearray) -> None:
        """Take a gradient of an adapter, which comes before the answer to a backward."""
        is_asked = self._expected and self._expected[0].answer is TrainGradient
        if not (is_asked and self.hands_over):
            raise RemoteError("unexpected", f"{self.peer} sent a tensor without a question")
        if self._arriving is None:
            self._arriving = self._new_arriving()
        self._arriving.add(message.name, message.tensor, payload)

    def _add_handed_over(self) -> None:
        found = {} if self._arriving is None else self._arriving.found
        self._arriving = None
        self._shapes.check_values(found)
        for name, grad in found.items():
            before = self.handed_over.get(name)
            self.handed_over[name] = grad if before is None else before + grad

    def _new_arriving(self) -> StateTensors:
        most = self._shapes.max_tensors
        return StateTensors(self._shapes, most, self._max_bytes, self.gradient_codec)

    async def _receive_tensors(self, head: _WithTensors) -> Mapping[str, Tensor]:
        shapes = self._held if isinstance(head, TrainState) else self._shapes
        codec = self.gradient_codec if isinstance(head, TrainGradients) else UNCOMPRESSED
        arrived = StateTensors(shapes, head.tensors, self._max_bytes, codec)
        while not arrived.is_complete:
            message, payload = await self._receive_answer()
            if not isinstance(message, TrainTensor):
                raise RemoteError("unexpected", f"{self.peer} sent a state in pieces")
            arrived.add(message.name, message.tensor, payload)
        found = arrived.found
        if not isinstance(head, TrainState):
            await asyncio.to_thread(self._shapes.check_values, found)
            return found
        if await asyncio.to_thread(hash_state, found) != head.digest:
            raise ProtocolError("bad_tensor", "a state with another digest than was announced")
        await asyncio.to_thread(self._held.check, found)
        return found

    async def _watch_silence(self) -> None:
        while True:
            await asyncio.sleep(PING_AFTER_S / 2)
            if not self._expected and not self._lent:
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

    def fail(self, error: Exception) -> Exception:
        """Mark the link as lost; later calls, and those that wait, raise the first error."""
        if self.failure is None:
            self.failure = error
        while self._expected:
            future = self._expected.popleft().future
            if not future.done():
                future.set_exception(self.failure)
                future.exception()
        for lent in self._lent.values():
            lent.set_exception(self.failure)
            lent.exception()
        self._lent.clear()
        return self.failure


def _about(message: AnyMessage) -> About:
    """What an answer repeats of its question."""
    match message:
        case TrainBegan():
            return message.step, message.plan
        case TrainOutput() | TrainGradient():
            return message.step, message.micro
        case TrainState() | TrainRestored() | TrainParameters():
            return (message.applied,)
        case TrainNormed() | TrainApplied() | TrainGradients() | TrainReduced():
            return (message.step,)
        case _:
            return ()
