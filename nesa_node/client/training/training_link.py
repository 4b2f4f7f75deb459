"""The client's stream to a node that trains a span of its blocks.

T tokens of a micro-batch's texts, D hidden.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from nesa_node.client.routing.request import RouteRequest
from nesa_node.client.training.announced_plan import AnnouncedPlan
from nesa_node.client.training.training_questions import Payload, TrainingQuestions
from nesa_node.client.training.training_span import MicroBatchPass, SpanState
from nesa_node.compression import tensors
from nesa_node.compression.codecs import EXACT, codec_names, gradient_codec
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
from nesa_node.engine.training.training_state import Partition, StateShapes, hash_state
from nesa_node.routing.chains import Hop
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.identity import membership_proof
from nesa_node.swarm.p2p.link_measurements import LinkSpeed
from nesa_node.swarm.protocol.any_message import AnyMessage
from nesa_node.swarm.protocol.link_encoder import (
    HiddenStatesSpec,
    LinkEncoder,
    check_codec_allowed,
    get_link_speed,
)
from nesa_node.swarm.protocol.messages import (
    PROTOCOL,
    VERSION,
    Busy,
    Close,
    Closed,
    ErrorMessage,
    Message,
)
from nesa_node.swarm.protocol.stream import MessageBudget, Stream, peer_timeout
from nesa_node.swarm.protocol.training_messages import (
    TrainApplied,
    TrainApply,
    TrainBackward,
    TrainBegan,
    TrainBegin,
    TrainCollect,
    TrainFetch,
    TrainForward,
    TrainGradient,
    TrainGradients,
    TrainLent,
    TrainNorm,
    TrainNormed,
    TrainOpen,
    TrainOpened,
    TrainOutput,
    TrainParameters,
    TrainPull,
    TrainReduced,
    TrainRestored,
    TrainState,
    TrainTensor,
)

log = get_logger(__name__)
_Encoded = Mapping[str, tuple[TensorMeta, Payload]]

OPEN_TIMEOUT_S = 60.0
"""A node builds the adapters of its span before it answers."""
DIAL_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0
MAX_ABS_VALUE = 1e15
"""Above what blocks compute. The next node would get infinities of larger numbers, and be blamed:
the square root of this is far above all activations, and its square within float32."""


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
        held: StateShapes,
        budget: MessageBudget,
        limits: TrainingLimits,
    ) -> None:
        """`shapes` are those of the span's state, `held` of what this node has of it."""
        self.hop = hop
        self.span = hop.span
        self.applied: int | None = 0
        """Steps that the node's adapters have had; None while that is not known."""
        self._stream = stream
        self._speed = speed
        self._wire = LinkEncoder(EXACT, (), speed)
        """Until the node has said what it decodes."""
        self._quality = request.options.quality
        self._plan = b""
        """Its digest."""
        self._hidden_size = request.hidden_size
        self._limits = limits
        self._open_timeout_s = min(OPEN_TIMEOUT_S, max(request.options.recovery_timeout_s, 10.0))
        self._max_bytes = max(
            limits.max_tokens * self._hidden_size * 4, shapes.max_tensor_bytes, 64 << 20
        )
        self._questions = TrainingQuestions(
            stream,
            budget,
            shapes,
            held,
            quality=self._quality,
            silence_limit_s=request.options.step_timeout_s,
            max_bytes=self._max_bytes,
            on_arrival=lambda received: self._wire.record_arrival(received),
            on_need=lambda block: self.on_need(block),
        )
        self.on_need: Callable[[int], None] = self._refuse_need
        """Called with a block whose parameters a pass of the node waits for."""

    @property
    def failure(self) -> Exception | None:
        """Why the link is lost."""
        return self._questions.failure

    @property
    def is_leaving(self) -> bool:
        """Whether the node has announced that it leaves."""
        return self._questions.is_leaving

    @property
    def peer(self) -> PeerId:
        return self.hop.peer_id

    async def open(
        self,
        swarm: Swarm,
        request: RouteRequest,
        spec: bytes,
        plan: AnnouncedPlan,
        partition: Partition,
    ) -> None:
        """Open the session at the node.

        Raises `PeerUnreachableError`, `BusyError` and `RemoteError`, and what `plan.seal` raises.
        """
        self._plan = plan.digest
        session = SessionId(secrets.token_bytes(16))
        message = TrainOpen(
            version=VERSION,
            model=request.model_id,
            session=session,
            blocks=(self.span.start, self.span.end),
            spec=spec,
            notice=await plan.seal(),
            plan=plan.digest,
            max_tokens=self._limits.max_tokens,
            max_kept_tokens=self._limits.max_kept_tokens,
            membership=membership_proof(
                request.options.swarm_key, session, swarm.identity.peer_id, self.peer
            ),
            quality=self._quality,
            codecs=codec_names(),
            zero_stage=partition.stage,
            partitions=partition.count,
            partition=partition.rank,
        )
        self._questions.hands_over = partition.hands_over
        try:
            async with peer_timeout(self.peer, self._open_timeout_s, "opening a training session"):
                await self._stream.send(message)
                answer, _ = await self._stream.receive()
            if isinstance(answer, TrainOpened):
                self._wire = LinkEncoder(self._quality, answer.codecs, self._speed)
                self._questions.gradient_codec = gradient_codec(self._quality, answer.codecs)
                states = HiddenStatesSpec(self._hidden_size, request.dtype, self._limits.max_tokens)
                await self._wire.prepare(self._stream, states)
                return
        except StreamClosedError as error:
            raise PeerUnreachableError(f"{self.peer} closed the stream: {error}") from None
        except ProtocolError as error:
            raise self._questions.blame(error) from None
        match answer:
            case Busy():
                raise BusyError(f"{self.peer}: {answer.message}", answer.retry_after_s)
            case ErrorMessage():
                raise RemoteError(answer.code, f"{self.peer}: {answer.message}")
            case _:
                raise RemoteError("unexpected", f"{self.peer} answered {type(answer).__name__}")

    async def run(self) -> None:
        """Receive answers, and ping a silent node, until the link fails; `failure` says why."""
        await self._questions.run()

    async def begin(self, step: int) -> None:
        message = TrainBegin(step=step, plan=self._plan)
        await self._questions.ask(message, TrainBegan, (step, self._plan))

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
        about = (batch.step, batch.number)
        answer = await self._questions.ask(message, TrainOutput, about, payload)
        return self._decode(answer.message.tensor, answer.payload, batch)

    async def backward(
        self, batch: MicroBatchPass, grad_TD: Tensor, turn: AbstractAsyncContextManager[None]
    ) -> Tensor:
        meta, payload = await self._encode(grad_TD)
        message = TrainBackward(step=batch.step, micro=batch.number, tensor=meta)
        about = (batch.step, batch.number)
        async with turn:
            expected = await self._questions.send([(message, payload)], TrainGradient, about)
        answer = await self._questions.wait(expected, TrainGradient)
        return self._decode(answer.message.tensor, answer.payload, batch)

    async def squared_norm(self, step: int) -> float:
        answer = await self._questions.ask(TrainNorm(step=step), TrainNormed, (step,))
        return answer.message.squared_norm

    async def collect(self, step: int, micro_batches: int) -> Mapping[str, Tensor]:
        """Gradients of the adapters, which the node forgets."""
        if self._questions.hands_over:
            return self._questions.handed_over
        message = TrainCollect(step=step, micro_batches=micro_batches)
        return (await self._questions.ask(message, TrainGradients, (step,))).tensors

    @property
    def gradient_codec(self) -> str:
        """What gradients of adapters may be encoded in."""
        return self._questions.gradient_codec

    async def reduce(self, step: int, grads: _Encoded) -> None:
        """Give the node the sums of all replicas' gradients that it is to apply, encoded."""
        head = TrainGradients(step=step, tensors=len(grads))
        await self._send_tensors(head, grads, TrainReduced, step)

    async def apply(
        self, step: int, *, micro_batches: int, learning_rate: float, scale: float
    ) -> None:
        message = TrainApply(
            step=step, micro_batches=micro_batches, learning_rate=learning_rate, scale=scale
        )
        self.applied = None
        await self._questions.ask(message, TrainApplied, (step,))
        self.applied = step + 1

    async def fetch_updated(self, applied: int) -> Mapping[str, Tensor]:
        """The parameters that the node's last step has changed."""
        message = TrainFetch(applied=applied)
        return (await self._questions.ask(message, TrainParameters, (applied,))).tensors

    async def set_parameters(self, applied: int, values: Mapping[str, Tensor]) -> None:
        """Give the node parameters that other nodes have updated."""
        head = TrainParameters(applied=applied, tensors=len(values))
        await self._send_tensors(head, _encode(values), TrainRestored, applied)

    async def borrow(self, block: int) -> Mapping[str, Tensor]:
        """The node's parameters of a block, also while it computes."""
        return await self._questions.borrow(block)

    async def lend(self, block: int, values: Mapping[str, Tensor]) -> None:
        """Give the node the parameters of a block that a pass waits for."""
        head = TrainLent(block=block, tensors=len(values))
        await self._questions.tell([(head, b""), *_name_tensors(_encode(values))])

    def abandon(self, reason: str) -> None:
        """Leave the node for another one's failure."""
        self._questions.is_leaving = True
        self._questions.fail(StreamClosedError(reason))

    def _refuse_need(self, block: int) -> None:
        raise RemoteError("unexpected", f"{self.peer} needs block {block}, which is not divided")

    async def export(self, applied: int) -> SpanState:
        answer = await self._questions.ask(TrainPull(), TrainState, (applied,))
        return SpanState(answer.message.applied, answer.tensors)

    async def restore(self, state: SpanState) -> None:
        digest = await asyncio.to_thread(hash_state, state.tensors)
        head = TrainState(applied=state.applied, tensors=len(state.tensors), digest=digest)
        self.applied = None
        await self._send_tensors(head, _encode(state.tensors), TrainRestored, state.applied)
        self.applied = state.applied

    async def _send_tensors(
        self, head: Message, encoded: _Encoded, answer: type[Message], about: int
    ) -> None:
        parts = [(head, b""), *_name_tensors(encoded)]
        expected = await self._questions.send(parts, answer, (about,))
        await self._questions.wait(expected, answer)

    async def close(self) -> None:
        """End the session at the node, if it is not lost, and close the stream."""
        try:
            if self.failure is None:
                self._questions.fail(StreamClosedError("the session was closed"))
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._stream.send(Close())
                    answer: AnyMessage | None = None
                    while not isinstance(answer, Closed):
                        answer, _ = await self._stream.receive(max_tensor_bytes=self._max_bytes)
        except (ProtocolError, TimeoutError):
            log.debug("training_close_not_answered", peer=self.peer)
        finally:
            await self._stream.close()

    async def _encode(self, values_TD: Tensor) -> tuple[TensorMeta, bytearray | memoryview]:
        return await self._wire.encode_off_loop(HiddenStates.from_tensor(values_TD))

    def _decode(self, meta: TensorMeta, data: bytearray, batch: MicroBatchPass) -> Tensor:
        shape = (batch.layout.num_tokens, self._hidden_size)
        try:
            if tuple(meta.shape) != shape:
                raise ProtocolError("bad_tensor", f"a tensor {list(meta.shape)}, not {list(shape)}")
            check_codec_allowed(self._quality, meta)
            values_TD = tensors.decode(meta, data, max_bytes=self._max_bytes)
            self._wire.count_received(meta, data)
            if float(values_TD.abs().max()) > MAX_ABS_VALUE:
                raise ProtocolError("bad_tensor", f"values above {MAX_ABS_VALUE:g}")
        except ProtocolError as error:
            raise self._questions.fail(self._questions.blame(error)) from None
        return values_TD.to(torch.float32) if values_TD.dtype == torch.float16 else values_TD


def _encode(values: Mapping[str, Tensor]) -> _Encoded:
    return {name: tensors.encode(value) for name, value in values.items()}


def _name_tensors(encoded: _Encoded) -> Iterator[tuple[Message, Payload]]:
    for name, (meta, payload) in encoded.items():
        yield TrainTensor(name=name, tensor=meta), payload


@asynccontextmanager
async def dial_training(
    swarm: Swarm,
    hop: Hop,
    addresses: tuple[str, ...],
    request: RouteRequest,
    shapes: StateShapes,
    held: StateShapes,
    limits: TrainingLimits,
) -> AsyncIterator[TrainingLink]:
    """Open a stream to a node. On exit it is closed, if the body failed."""
    reader, writer = await swarm.transport.open_stream(
        hop.peer_id, PROTOCOL, addresses, DIAL_TIMEOUT_S
    )
    stream = Stream(hop.peer_id, reader, writer)
    try:
        speed = await get_link_speed(swarm, hop.peer_id, request.options.quality)
        yield TrainingLink(hop, stream, speed, request, shapes, held, swarm.message_budget, limits)
    except BaseException:
        stream.abort()
        raise
