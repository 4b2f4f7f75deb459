"""Opening of training sessions: checks, memory, and adapters on a span's weights."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import math
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from nesa_node.compression.codecs import codec_names
from nesa_node.core.errors import ConfigError, ProtocolError, RecordError, is_installed
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.core.logging import get_logger
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.training.adapted_blocks import AdaptedBlocks
from nesa_node.engine.training.kept_micro_batches import KeptRoom
from nesa_node.engine.training.span_trainer import SpanTrainer
from nesa_node.engine.training.training_spec import TrainingSpec
from nesa_node.engine.training.training_state import Partition
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.server.scheduler.batch import Executor
from nesa_node.server.session.message_loop import Drain
from nesa_node.server.training.training_memory import (
    OpeningBudget,
    TrainingMemory,
    compute_need,
)
from nesa_node.server.training.training_session import TrainingSession
from nesa_node.swarm.dht.training_notices import TrainingNotice
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.tasks import wait_until_done
from nesa_node.swarm.protocol.link_encoder import HiddenStatesSpec, LinkEncoder, get_link_speed
from nesa_node.swarm.protocol.messages import VERSION
from nesa_node.swarm.protocol.stream import Stream
from nesa_node.swarm.protocol.training_messages import TrainOpen, TrainOpened

log = get_logger(__name__)

PLAN_READ_S = 5.0
"""Longest read of the DHT for what a client has announced. It signed what it sends, too."""


class TrainingServer:
    """All training sessions of one span, on the weights that it serves."""

    def __init__(
        self,
        swarm: Swarm,
        checkpoint: Checkpoint,
        blocks: ModelBlocks,
        executor: Executor,
        memory: TrainingMemory,
        *,
        step_timeout_s: float,
        idle_timeout_s: float,
    ) -> None:
        self.memory = memory
        self._swarm = swarm
        self._checkpoint = checkpoint
        self._blocks = blocks
        self._executor = executor
        self._building = asyncio.Lock()
        self._openings = OpeningBudget()
        self._step_timeout_s = step_timeout_s
        self._idle_timeout_s = idle_timeout_s

    async def serve(self, stream: Stream, opened: TrainOpen, drain: Drain) -> None:
        """Run a session whose model, blocks and membership are checked, until its client ends it.

        Raises `ProtocolError` for what must be answered with a fatal error, and `BusyError`.
        """
        if not is_installed("peft"):
            raise ProtocolError("not_trained", "this node has no PEFT (pip install peft)")
        try:
            spec = TrainingSpec.decode(opened.spec)
            partition = Partition(opened.zero_stage, opened.partition, opened.partitions)
        except ConfigError as error:
            raise ProtocolError("bad_spec", str(error)) from None
        if opened.max_tokens > opened.max_kept_tokens:
            raise ProtocolError("bad_spec", "max_kept_tokens must be at least max_tokens")
        await self._agree(stream.peer, opened)
        blocks = self._blocks.select(Span(*opened.blocks))
        need = compute_need(
            blocks,
            spec,
            max_tokens=opened.max_tokens,
            max_kept_tokens=opened.max_kept_tokens,
            partition=partition,
        )
        with self.memory.reserve(stream.peer, need) as keep:
            # Not in a thread that computes, which would stand still for seconds the first time.
            await asyncio.to_thread(importlib.import_module, "peft")
            trainer = await self._build(
                stream.peer,
                partial(
                    self._make_trainer,
                    blocks,
                    spec,
                    keep=keep,
                    partition=partition,
                ),
            )
            log.info(
                "training_opened",
                blocks=str(blocks.span),
                parameters=sum(map(math.prod, trainer.blocks.shapes.values())),
                kept_mib=keep.nbytes >> 20,
            )
            try:
                await self._run(stream, opened, trainer, drain)
            finally:
                log.info("training_closed", blocks=str(blocks.span), steps=trainer.applied)

    async def _agree(self, peer: PeerId, opened: TrainOpen) -> None:
        """Check that the session is one that its client has announced, to all nodes alike.

        Raises `ProtocolError("plan_mismatch")`.
        """
        notices = self._swarm.notices
        try:
            notice = notices.open(TrainingNotice, opened.notice)
        except RecordError as error:
            raise ProtocolError("plan_mismatch", str(error)) from None
        if (notice.peer_id, notice.model_id) != (peer, opened.model):
            raise ProtocolError("plan_mismatch", "the notice is of another peer or model")
        plan = notice.find_plan(opened.plan)
        if plan is None:
            raise ProtocolError("plan_mismatch", "the notice has no such plan")
        differences = [
            name
            for name, differs in (
                ("spec", plan.spec != hashlib.sha256(opened.spec).hexdigest()),
                ("max_tokens", plan.max_tokens != opened.max_tokens),
                ("partitions", opened.partitions > plan.replicas),
                ("zero_stage", opened.zero_stage != plan.zero_stage),
            )
            if differs
        ]
        if differences:
            raise ProtocolError("plan_mismatch", f"not as planned: {', '.join(differences)}")
        with suppress(TimeoutError):
            async with asyncio.timeout(PLAN_READ_S):
                for known in await notices.fetch(TrainingNotice, ModelId(opened.model)):
                    is_newer = known.order >= notice.order
                    if known.peer_id == peer and is_newer and known.find_plan(plan.digest) is None:
                        raise ProtocolError("plan_mismatch", "its client has announced other plans")

    async def _build(self, peer: PeerId, make: Callable[[], SpanTrainer]) -> SpanTrainer:
        """Make adapters, one session's at a time, beside the threads that compute.

        PEFT takes a fraction of a second to seconds of Python for a model, in which iterations go
        on. Raises `BusyError` for a peer that opens too often, and `ProtocolError`.
        """
        async with self._building:
            self._openings.check(peer)
            started = time.monotonic()
            making = asyncio.ensure_future(asyncio.to_thread(make))
            try:
                await wait_until_done(making)
                return making.result()
            except ConfigError as error:
                raise ProtocolError("bad_spec", str(error)) from None
            except Exception as error:  # of PEFT and torch, with a client's spec
                log.warning("training_not_opened", peer=peer, reason=str(error)[:500])
                raise ProtocolError("bad_spec", f"no such adapters here: {error}"[:1000]) from None
            finally:
                self._openings.charge(peer, time.monotonic() - started)

    def _make_trainer(
        self, blocks: ModelBlocks, spec: TrainingSpec, *, keep: KeptRoom, partition: Partition
    ) -> SpanTrainer:
        adapted = AdaptedBlocks(
            blocks, self._checkpoint, spec.make_config(), seed=spec.seed, partition=partition
        )
        return SpanTrainer(adapted, spec.optimizer, keep=keep, partition=partition)

    async def _run(
        self, stream: Stream, opened: TrainOpen, trainer: SpanTrainer, drain: Drain
    ) -> None:
        speed = await get_link_speed(self._swarm, stream.peer, opened.quality)
        wire = LinkEncoder(opened.quality, opened.codecs, speed)
        session = TrainingSession(
            stream, opened, trainer, self._executor, wire, self._swarm.message_budget
        )
        await stream.send(
            TrainOpened(version=VERSION, step_timeout_s=self._step_timeout_s, codecs=codec_names())
        )
        dtype = str(trainer.blocks.dtype).removeprefix("torch.")
        await wire.prepare(
            stream, HiddenStatesSpec(trainer.blocks.hidden_size, dtype, opened.max_tokens)
        )
        await session.run(drain=drain, idle_timeout_s=self._idle_timeout_s)
