"""A client's training session on this node: messages, computed block by block between iterations.

T tokens of a micro-batch's texts, R rows, L tokens of the longest row, D hidden.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from torch import Tensor

from nesa_node.compression import tensors
from nesa_node.compression.codecs import UNCOMPRESSED, gradient_codec
from nesa_node.compression.error_feedback import FeedbackEncoder
from nesa_node.compression.tensors import HiddenStates, TensorMeta
from nesa_node.core.errors import FrameError, ProtocolError, StreamClosedError
from nesa_node.core.logging import get_logger
from nesa_node.engine.training.span_trainer import BlockByBlock, SpanTrainer
from nesa_node.engine.training.text_layout import TextLayout
from nesa_node.engine.training.training_state import StateTensors, hash_state
from nesa_node.server.scheduler.batch import Executor
from nesa_node.server.session.message_loop import Drain
from nesa_node.swarm.protocol.any_message import AnyMessage
from nesa_node.swarm.protocol.link_encoder import (
    LinkEncoder,
    check_codec_allowed,
)
from nesa_node.swarm.protocol.messages import (
    Cancel,
    Close,
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
    TrainApply,
    TrainBackward,
    TrainBegan,
    TrainBegin,
    TrainCollect,
    TrainFetch,
    TrainForward,
    TrainGradient,
    TrainGradients,
    TrainLend,
    TrainLent,
    TrainNeed,
    TrainNorm,
    TrainNormed,
    TrainOpen,
    TrainOutput,
    TrainParameters,
    TrainPull,
    TrainReduced,
    TrainRestored,
    TrainState,
    TrainTensor,
)

log = get_logger(__name__)
T = TypeVar("T")
_Answer = tuple[Message, memoryview | bytearray | bytes]
_Head = TrainState | TrainGradients | TrainParameters

BORROW_TIMEOUT_S = 60.0
MAX_QUEUED_MESSAGES = 4096
"""Messages that may wait; then reading stops."""


class _TrainingEnded(Exception):
    """Raised to leave the task group when the client ended the session."""


class TrainingSession:
    """Reads a client's messages and answers them in order; pings are answered at once."""

    def __init__(
        self,
        client: Stream,
        opened: TrainOpen,
        trainer: SpanTrainer,
        executor: Executor,
        wire: LinkEncoder,
        budget: MessageBudget,
    ) -> None:
        self._client = client
        self._opened = opened
        self._trainer = trainer
        self._executor = executor
        self._wire = wire
        self._budget = budget
        self._queue: asyncio.Queue[tuple[AnyMessage, bytearray]] = asyncio.Queue(
            MAX_QUEUED_MESSAGES
        )
        self._waiting_tokens = 0
        """Tokens of micro-batches that were received and are neither kept nor answered."""
        self._waiting_bytes = 0
        """Bytes of received tensors that are not answered."""
        self._has_room = asyncio.Event()
        self._kept_tokens: dict[int, int] = {}
        self._layouts: dict[int, TextLayout] = {}
        """Of kept micro-batches, by number."""
        self._incoming: tuple[_Head, StateTensors] | None = None
        """The message whose tensors arrive, and those that have."""
        self._needed: tuple[int, asyncio.Future[Mapping[str, Tensor]]] | None = None
        """The block whose parameters a pass waits for."""
        self._borrowed: StateTensors | None = None
        """Those of them that have arrived, while they do."""
        self._sending = asyncio.Lock()
        self._feedback = FeedbackEncoder(gradient_codec(opened.quality, opened.codecs))
        """Of gradients of adapters."""
        self._active_at = time.monotonic()
        self._computing = False
        sizes = [value.numel() for value in trainer.blocks.parameters.values()]
        token_bytes = trainer.blocks.hidden_size * 4
        self._max_tensor_bytes = max(
            opened.max_tokens * token_bytes, 4 * max(sizes, default=0), 4096
        )
        self._max_waiting_bytes = opened.max_kept_tokens * token_bytes + 4096

    @property
    def applied(self) -> int:
        return self._trainer.applied

    async def run(self, *, drain: Drain, idle_timeout_s: float) -> None:
        """Answer messages until the client ends the session.

        Raises `ProtocolError` for what must be answered with a fatal error.
        """
        failures: list[ProtocolError] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read_messages())
                tasks.create_task(self._answer_messages())
                tasks.create_task(self._watch_idle(idle_timeout_s))
                tasks.create_task(self._watch_drain(drain))
        except* _TrainingEnded:
            pass
        except* ProtocolError as group:
            failures.extend(error for error in group.exceptions if isinstance(error, ProtocolError))
        if failures:
            raise failures[0]

    async def _read_messages(self) -> None:
        while True:
            message, payload = await self._client.receive(max_tensor_bytes=self._max_tensor_bytes)
            self._active_at = time.monotonic()
            match message:
                case Ping():
                    await self._client.send(
                        Pong(nonce=message.nonce, epoch=0, step=self.applied, busy=self._computing)
                    )
                case Close() | Cancel():
                    raise _TrainingEnded
                case Received():
                    self._wire.record_arrival(message)
                case Probe():
                    pass
                case TrainLend():
                    lent = await asyncio.to_thread(self._trainer.lend, message.block)
                    head = TrainLent(block=message.block, tensors=len(lent))
                    await self._send([(head, b""), *_encode_state(lent)])
                case TrainLent():
                    self._begin_borrowed(message)
                case TrainTensor() if self._borrowed is not None:
                    self._borrowed.add(message.name, message.tensor, payload)
                    self._end_borrowed()
                case _:
                    await self._enqueue(message, payload)
            await self._budget.wait_until_paid(self._client, message)

    async def _enqueue(self, message: AnyMessage, payload: bytearray) -> None:
        """Queue a message; reading stops while waiting tensors fill the room.

        A client that keeps to its promise has less under way, but for a state.
        """
        self._count_received(message)
        while self._waiting_bytes and (
            self._waiting_bytes + len(payload) > self._max_waiting_bytes
        ):
            self._has_room.clear()
            await self._has_room.wait()
        self._waiting_bytes += len(payload)
        await self._queue.put((message, payload))

    def _count_received(self, message: AnyMessage) -> None:
        """Raises `ProtocolError("too_large")` for more tokens than were promised."""
        if not isinstance(message, TrainForward | TrainBackward):
            return
        if isinstance(message, TrainForward):
            layout = TextLayout(message.texts)
            if layout.padded_tokens > self._opened.max_tokens:
                raise ProtocolError(
                    "too_large",
                    f"a micro-batch of {layout.padded_tokens} tokens; {self._opened.max_tokens} "
                    "were promised",
                )
            self._waiting_tokens += layout.padded_tokens
        most = self._opened.max_kept_tokens
        if self._waiting_tokens + sum(self._kept_tokens.values()) > most:
            raise ProtocolError(
                "too_large", f"micro-batches of more than {most} tokens between their passes"
            )

    async def _answer_messages(self) -> None:
        while True:
            message, payload = await self._queue.get()
            nbytes = len(payload)
            self._computing = True
            try:
                answers = await self._apply(message, payload)
            except (FrameError, StreamClosedError):
                raise
            except ProtocolError as error:
                answers = [
                    (
                        ErrorMessage(
                            code=error.code,
                            message=str(error)[:2048],
                            fatal=False,
                            answers=type(message).__name__.lower(),
                        ),
                        b"",
                    )
                ]
            finally:
                self._computing = False
                self._waiting_bytes -= nbytes
                self._has_room.set()
                if isinstance(message, TrainForward):
                    self._waiting_tokens -= TextLayout(message.texts).padded_tokens
                self._kept_tokens = {
                    number: layout.padded_tokens for number, layout in self._layouts.items()
                }
            del message, payload
            await self._send(answers)
            self._active_at = time.monotonic()

    async def _apply(self, message: AnyMessage, payload: bytearray) -> list[_Answer]:
        trainer = self._trainer
        match message:
            case TrainBegin():
                if message.plan != self._opened.plan:
                    raise ProtocolError("plan_mismatch", "the step is of another plan")
                await self._run(partial(trainer.begin, message.step))
                self._feedback.discard()
                self._layouts.clear()
                return [(TrainBegan(step=message.step, plan=message.plan), b"")]
            case TrainForward():
                return [await self._forward(message, payload)]
            case TrainBackward():
                return [await self._backward(message, payload)]
            case TrainCollect():
                collect = partial(trainer.collect, message.step, message.micro_batches)
                found = await self._run(collect)
                head = TrainGradients(step=message.step, tensors=len(found))
                return [(head, b""), *await self._encode_gradients(found)]
            case TrainFetch():
                found = await self._run(partial(trainer.export_updated, message.applied))
                updated = TrainParameters(applied=message.applied, tensors=len(found))
                return [(updated, b""), *_encode_state(found)]
            case TrainNorm():
                squared = await self._run(partial(trainer.compute_squared_norm, message.step))
                if not squared < float("inf"):
                    raise ProtocolError("not_finite", "the step's gradients are not finite")
                return [(TrainNormed(step=message.step, squared_norm=squared), b"")]
            case TrainApply():
                await self._run(
                    partial(
                        trainer.apply,
                        message.step,
                        micro_batches=message.micro_batches,
                        learning_rate=message.learning_rate,
                        scale=message.scale,
                    )
                )
                self._layouts.clear()
                self._feedback.commit()
                return [(TrainApplied(step=message.step), b"")]
            case TrainPull():
                return await self._export()
            case TrainState() | TrainGradients() | TrainParameters():
                self._incoming = None
                arriving = StateTensors(
                    trainer.state_shapes,
                    message.tensors,
                    self._max_tensor_bytes,
                    self._feedback.codec if isinstance(message, TrainGradients) else UNCOMPRESSED,
                )
                self._incoming = message, arriving
                return await self._take_if_complete()
            case TrainTensor():
                if self._incoming is None:
                    raise ProtocolError("unexpected", "a tensor without a message before it")
                self._incoming[1].add(message.name, message.tensor, payload)
                return await self._take_if_complete()
            case _:
                raise ProtocolError(
                    "unexpected",
                    f"a training session does not expect {type(message).__name__.lower()}",
                )

    async def _forward(self, message: TrainForward, payload: bytearray) -> _Answer:
        layout = TextLayout(message.texts)
        hidden_RLD = await self._decode(message.tensor, payload, layout)
        batch = layout.make_batch(message.seed)
        if message.keep:
            work = self._trainer.forward(message.step, message.micro, hidden_RLD, batch)
        else:
            work = self._trainer.evaluate(hidden_RLD, batch)
        output_RLD = await self._run_blocks(work)
        if message.keep:
            self._layouts[message.micro] = layout
        meta, data = await self._encode(layout.from_rows(output_RLD))
        return TrainOutput(step=message.step, micro=message.micro, tensor=meta), data

    async def _backward(self, message: TrainBackward, payload: bytearray) -> _Answer:
        layout = self._layouts.get(message.micro)
        if layout is None:
            raise ProtocolError("stale_step", f"micro-batch {message.micro} went not forward")
        grad_RLD = await self._decode(message.tensor, payload, layout)
        work = self._trainer.backward(message.step, message.micro, grad_RLD)
        input_grad_RLD = await self._run_blocks(work, hand_over=self._trainer.partition.hands_over)
        del self._layouts[message.micro]
        meta, data = await self._encode(layout.from_rows(input_grad_RLD))
        return TrainGradient(step=message.step, micro=message.micro, tensor=meta), data

    async def _decode(self, meta: TensorMeta, payload: bytearray, layout: TextLayout) -> Tensor:
        shape = (layout.num_tokens, self._trainer.blocks.hidden_size)
        if tuple(meta.shape) != shape:
            raise ProtocolError("bad_tensor", f"a tensor {list(meta.shape)}, not {list(shape)}")
        check_codec_allowed(self._opened.quality, meta)
        decode = partial(tensors.decode, meta, payload, max_bytes=self._max_tensor_bytes)
        packed_TD = await asyncio.to_thread(decode)
        self._wire.count_received(meta, payload)
        return layout.to_rows(packed_TD)

    async def _encode(self, packed_TD: Tensor) -> tuple[TensorMeta, memoryview | bytearray]:
        hidden = HiddenStates.from_tensor(packed_TD.cpu())
        if not await asyncio.to_thread(lambda: hidden.is_finite):
            raise ProtocolError("not_finite", "the blocks computed values that are not finite")
        return await self._wire.encode_off_loop(hidden)

    async def _run_blocks(self, work: BlockByBlock, *, hand_over: bool = False) -> Tensor:
        """Run block after block, so that iterations of sessions run in between.

        With `hand_over` the gradients of adapters go to the client after each block.
        """
        while True:
            found = await self._run(partial(_advance, work))
            if isinstance(found, int):
                await self._borrow(found)
                continue
            if hand_over:
                grads = await self._run(self._trainer.take_gradients)
                await self._send(await self._encode_gradients(grads))
            if found is not None:
                return found

    async def _encode_gradients(self, grads: Mapping[str, Tensor]) -> list[_Answer]:
        encoded = await asyncio.to_thread(self._feedback.encode, grads)
        return [
            (TrainTensor(name=name, tensor=meta), data) for name, (meta, data) in encoded.items()
        ]

    async def _borrow(self, block: int) -> None:
        """Get the parameters of a block that other nodes have."""
        future: asyncio.Future[Mapping[str, Tensor]] = asyncio.get_running_loop().create_future()
        self._needed = block, future
        try:
            await self._send([(TrainNeed(block=block), b"")])
            async with asyncio.timeout(BORROW_TIMEOUT_S):
                values = await future
        except TimeoutError:
            raise ProtocolError("not_computed", f"no parameters of block {block} came") from None
        finally:
            self._needed = self._borrowed = None
        await self._run(partial(self._trainer.fill, block, values))

    def _begin_borrowed(self, head: TrainLent) -> None:
        if self._needed is None or self._needed[0] != head.block or self._borrowed is not None:
            raise ProtocolError("unexpected", f"parameters of block {head.block} are not needed")
        self._borrowed = StateTensors(self._trainer.shapes, head.tensors, self._max_tensor_bytes)
        self._end_borrowed()

    def _end_borrowed(self) -> None:
        assert self._borrowed is not None
        if self._borrowed.is_complete and self._needed is not None:
            self._needed[1].set_result(self._borrowed.found)
            self._borrowed = None

    async def _send(self, parts: Sequence[_Answer]) -> None:
        """Send messages that belong together, with no other but pongs in between."""
        async with self._sending:
            for message, data in parts:
                await self._client.send(message, data)

    async def _run(self, job: Callable[[], T]) -> T:
        """Run `job` in the thread that trains. Its errors beside `ProtocolError` are answered."""
        try:
            return await self._executor.run(job)
        except ProtocolError:
            raise
        except Exception as error:  # of torch and transformers, with a client's numbers
            log.warning("training_failed", reason=str(error)[:500])
            raise ProtocolError("not_computed", f"the step failed here: {error}"[:1000]) from None

    async def _export(self) -> list[_Answer]:
        state = await self._run(self._trainer.export)
        digest = await asyncio.to_thread(hash_state, state)
        head = TrainState(applied=self.applied, tensors=len(state), digest=digest)
        return [(head, b""), *_encode_state(state)]

    async def _take_if_complete(self) -> list[_Answer]:
        """Use the tensors that have arrived, after the last one."""
        assert self._incoming is not None
        head, arrived = self._incoming
        if not arrived.is_complete:
            return []
        self._incoming = None
        trainer, found = self._trainer, arrived.found
        match head:
            case TrainGradients():
                await self._run(partial(trainer.reduce, head.step, found))
                return [(TrainReduced(step=head.step), b"")]
            case TrainParameters():
                await self._run(partial(trainer.set_parameters, head.applied, found))
                return [(TrainRestored(applied=head.applied), b"")]
            case TrainState():
                if await asyncio.to_thread(hash_state, found) != head.digest:
                    raise ProtocolError(
                        "bad_tensor", "a state with another digest than was announced"
                    )
                await self._run(partial(trainer.restore, head.applied, found))
                self._layouts.clear()
                self._feedback.reset()
                return [(TrainRestored(applied=head.applied), b"")]

    async def _watch_idle(self, timeout_s: float) -> None:
        while True:
            left_s = self._active_at + timeout_s - time.monotonic()
            if left_s <= 0 and not self._computing:
                raise ProtocolError("idle_timeout", f"nothing happened for {timeout_s:g} s")
            await asyncio.sleep(max(left_s, 0.1))

    async def _watch_drain(self, drain: Drain) -> None:
        """Tell the client, which takes the adapters elsewhere, and give it the drain's time."""
        await drain.wait()
        await self._client.send(Leaving(seconds=drain.remaining_s))
        await asyncio.sleep(drain.remaining_s)
        raise ProtocolError("draining", "this node has given up its blocks")


def _encode_state(state: Mapping[str, Tensor]) -> list[_Answer]:
    found: list[_Answer] = []
    for name, value in state.items():
        meta, data = tensors.encode(value.float())
        found.append((TrainTensor(name=name, tensor=meta), data))
    return found


def _advance(work: BlockByBlock) -> Tensor | int | None:
    """Run one block, or return which one lacks parameters; return the result after the last one."""
    try:
        return next(work)
    except StopIteration as ended:
        result: Tensor = ended.value
        return result
