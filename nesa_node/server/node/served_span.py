"""A span as this node serves it: its blocks, their measured speed, its cache and its server."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from nesa_node.core.ids import PeerId, Span
from nesa_node.core.logging import get_logger
from nesa_node.core.settings.declaration import gib_to_bytes, secret_text
from nesa_node.core.settings.models import NodeConfig
from nesa_node.core.wait_tracking import track_wait
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.devices import (
    SpanThroughput,
    free_memory_bytes,
    measure_throughput,
)
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.files import show_progress
from nesa_node.engine.weights.weights_root import hash_span
from nesa_node.server.adapters.adapter_server import AdapterServer
from nesa_node.server.adapters.loaded_adapters import LoadedAdapters
from nesa_node.server.node.announcer import Announcer, Capacity
from nesa_node.server.node.node_model import DecoderModel, count_cache_tokens
from nesa_node.server.node.span_speed import keep_speed_current
from nesa_node.server.scheduler.batch import open_executor
from nesa_node.server.scheduler.scheduler import Scheduler
from nesa_node.server.session.admission import Admission, AdmissionLimits
from nesa_node.server.session.message_loop import RefusalLog
from nesa_node.server.session.sealing import describe_computation
from nesa_node.server.session.session_server import SessionServer
from nesa_node.server.training.training_memory import TrainingMemory
from nesa_node.server.training.training_server import TrainingServer
from nesa_node.swarm.node import Swarm

log = get_logger(__name__)

HIDDEN_BYTES_PER_CACHE_BYTE = 1.0
MIN_HIDDEN_BYTES = 256 << 20
AUTO_TRAINING_FRACTION = 0.25
"""Share of the memory that the cache leaves free."""
MAX_PEER_QUARTERS = 3
"""Most quarters of the room for hidden states that one peer gets, for a session of the model's
whole length. Otherwise it gets half: long sessions fill this room long before the cache."""


class SpanServer(Protocol):
    """Serves a span's streams."""

    def handle(
        self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Coroutine[object, object, None]:
        """Serve one incoming stream until its end; the caller closes it."""
        ...

    async def drain(self, timeout_s: float, *, idle_s: float | None = None) -> None:
        """Have clients move off within `timeout_s`, idle ones within `idle_s`."""
        ...


class ServedSpan(ABC):
    """A span of a model's blocks that a node has loaded."""

    span: Span
    throughput: SpanThroughput
    weight_bytes: int
    weights_root: bytes | None = None
    """`hash_span` of what was loaded; None where the checkpoint does not record what is read."""

    @property
    @abstractmethod
    def server(self) -> SpanServer: ...

    @abstractmethod
    def capacity(self) -> Capacity: ...

    @abstractmethod
    def keep_speed_current(
        self, announcer: Announcer, cache_dir: Path
    ) -> AbstractAsyncContextManager[None]:
        """Keep the announced speed current while the body runs."""


class DecoderSpan(ServedSpan):
    """Blocks of a language model, with their KV cache."""

    def __init__(
        self,
        blocks: ModelBlocks,
        throughput: SpanThroughput,
        admission: Admission,
        server: SessionServer,
        scheduler: Scheduler,
        weights_root: bytes | None,
    ) -> None:
        self.blocks = blocks
        self.span = blocks.span
        self.weight_bytes = blocks.weight_bytes
        self.throughput = throughput
        self.admission = admission
        self.weights_root = weights_root
        self._server = server
        self._scheduler = scheduler

    @property
    def server(self) -> SessionServer:
        return self._server

    def keep_speed_current(
        self, announcer: Announcer, cache_dir: Path
    ) -> AbstractAsyncContextManager[None]:
        def take_served(announced: SpanThroughput) -> SpanThroughput | None:
            step_s = self._scheduler.decode_times.take_mean_s(self.span)
            return None if step_s is None else replace(announced, decode_tokens_per_s=1 / step_s)

        return keep_speed_current(
            self._scheduler.executor,
            announcer,
            cache_dir,
            measure=lambda stop: measure_throughput(self.blocks, stop=stop),
            take_served=take_served,
        )

    def capacity(self) -> Capacity:
        return Capacity(
            total_tokens=self.admission.max_tokens,
            free_tokens=self.admission.free_tokens,
            load=self._scheduler.load,
            sessions=self._scheduler.sessions,
            tokens=self._scheduler.stats.tokens,
        )


@asynccontextmanager
async def open_span(
    config: NodeConfig,
    served: DecoderModel,
    swarm: Swarm,
    scheduler: Scheduler,
    span: Span,
    *,
    adapters: AdapterServer,
    refusals: RefusalLog | None = None,
) -> AsyncIterator[DecoderSpan]:
    """Load and measure `span`, and allocate its cache. On exit no session uses it any more.

    The memory is freed once the caller has dropped its references too. `adapters` has the files of
    adapters that sessions name. `refusals` is shared by all
    spans of the daemon. Raises `ModelError`, `ResourceError` and `OSError`.
    """
    device = scheduler.executor
    with track_wait("weights to be loaded", blocks=(span,)):
        blocks = await device.run(partial(_load, served, span))
        root = None
        if (digests := served.checkpoint.read_digests) is not None:
            root = await device.run(partial(hash_span, served.checkpoint, span, digests))
    log.info("speed_measurement_started", span=str(span), reason="clients choose nodes by it")
    with track_wait("the speed to be measured", blocks=(span,)):
        throughput = await device.run(partial(measure_throughput, blocks))
    scheduler.seed_cost(throughput, span)
    tokens = count_cache_tokens(config, blocks)
    pool = await device.run(partial(blocks.new_pool, tokens))
    admission = Admission(make_limits(config, blocks, tokens), pool)
    async with open_executor(is_background=True) as background:
        # A GPU runs what it is given in order, whichever thread gives it.
        executor = background if blocks.device.type == "cpu" else device
        training = TrainingServer(
            swarm,
            served.checkpoint,
            blocks,
            executor,
            TrainingMemory(_count_training_bytes(config, blocks, tokens)),
            step_timeout_s=config.step_timeout_s,
            idle_timeout_s=config.idle_timeout_s,
        )
        server = SessionServer(
            swarm,
            served.model_id,
            blocks,
            scheduler,
            admission,
            training,
            LoadedAdapters(blocks, adapters, gib_to_bytes(config.adapter_memory_gib) or 0),
            describe_computation(blocks, served.quant_type),
            swarm_key=secret_text(config.swarm_key),
            step_timeout_s=config.step_timeout_s,
            idle_timeout_s=config.idle_timeout_s,
            refusals=refusals,
        )
        try:
            yield DecoderSpan(blocks, throughput, admission, server, scheduler, root)
        finally:
            await server.close()


def _load(served: DecoderModel, span: Span) -> ModelBlocks:
    with show_progress() as progress:
        return load_blocks(
            served.checkpoint,
            span,
            dtype=served.dtype,
            device=served.device,
            quant_type=served.quant_type,
            cache_dtype=served.cache_dtype,
            progress=progress,
        )


def _count_training_bytes(config: NodeConfig, blocks: ModelBlocks, cache_tokens: int) -> int:
    """Memory for training: what is set, or a part of what the cache leaves free."""
    given = gib_to_bytes(config.training_gib)
    if given is not None:
        return given
    free = free_memory_bytes(blocks.device) - cache_tokens * blocks.cache_bytes_per_token
    return max(int(free * AUTO_TRAINING_FRACTION), 0)


def make_limits(config: NodeConfig, blocks: ModelBlocks, tokens: int) -> AdmissionLimits:
    """The limits for a cache of `tokens`."""
    # Hidden states take as much for a token whose cache is in 8 bits.
    of_cache = int(tokens * blocks.full_cache_bytes_per_token * HIDDEN_BYTES_PER_CACHE_BYTE)
    per_token = blocks.hidden_size * 4
    needed = tokens * per_token
    # No peer may take all of it, but a single session can use the model's whole length.
    half = max(tokens // 2, min(tokens, blocks.context_length or tokens))
    hidden_bytes = max(min(of_cache, needed), MIN_HIDDEN_BYTES)
    whole = (blocks.context_length or tokens) * per_token
    return AdmissionLimits(
        hidden_bytes=hidden_bytes,
        hidden_bytes_per_peer=min(
            max(hidden_bytes // 2, whole), MAX_PEER_QUARTERS * hidden_bytes // 4
        ),
        hidden_bytes_per_token=per_token,
        hidden_reserve_bytes=hidden_bytes // 4,
        sessions_per_peer=config.max_sessions_per_peer,
        cache_tokens_per_peer=config.max_cache_tokens_per_peer or half,
        allow=frozenset(config.allow_peers),
        deny=frozenset(config.deny_peers),
        trusted=frozenset(config.trusted_peers),
    )
