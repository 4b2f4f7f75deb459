"""A span of pieces as a node serves it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import torch

from nesa_node.core.errors import InsufficientMemoryError
from nesa_node.core.ids import Span
from nesa_node.core.logging import get_logger
from nesa_node.core.settings.declaration import gib_to_bytes
from nesa_node.core.settings.models import NodeConfig
from nesa_node.core.wait_tracking import track_wait
from nesa_node.engine.graphs.piece_weights import PieceWeights, ResidentWeights, StreamedWeights
from nesa_node.engine.model.devices import (
    MeasurementCancelled,
    SpanThroughput,
    free_memory_bytes,
)
from nesa_node.engine.weights.files import show_progress
from nesa_node.server.graphs.graph_model import GraphModel
from nesa_node.server.graphs.graph_server import GraphServer
from nesa_node.server.graphs.served_pieces import ServedPieces
from nesa_node.server.node.announcer import Announcer, Capacity
from nesa_node.server.node.served_span import ServedSpan
from nesa_node.server.node.span_speed import keep_speed_current
from nesa_node.server.scheduler.scheduler import Scheduler
from nesa_node.server.session.message_loop import RefusalLog
from nesa_node.swarm.node import Swarm

log = get_logger(__name__)

REQUEST_SHARE = 0.5
"""Part of the memory that weights leave free, for values of requests: a half of it for what comes
and goes, a half for what a request needs while it is computed. What is kept of sequences is besides
(`served_pieces.py` `KEPT_SHARE`)."""
MIN_ROOM_BYTES = 64 << 20
MAX_ROOM_BYTES = 8 << 30
MEASURED_RUNS = 3


class GraphSpan(ServedSpan):
    """Pieces of a network."""

    def __init__(
        self,
        pieces: ServedPieces,
        throughput: SpanThroughput,
        server: GraphServer,
        scheduler: Scheduler,
    ) -> None:
        self.span = pieces.span
        self.weight_bytes = pieces.weight_bytes
        self.throughput = throughput
        self._pieces = pieces
        self._server = server
        self._scheduler = scheduler

    @property
    def server(self) -> GraphServer:
        return self._server

    def capacity(self) -> Capacity:
        """A request takes one token, and there is no cache to fill."""
        return Capacity(
            total_tokens=1,
            free_tokens=1,
            load=self._scheduler.executor.load,
            sessions=self._server.streams,
            tokens=self._server.computed,
        )

    def keep_speed_current(
        self, announcer: Announcer, cache_dir: Path
    ) -> AbstractAsyncContextManager[None]:
        return keep_speed_current(
            self._scheduler.executor,
            announcer,
            cache_dir,
            measure=partial(_measure, self._pieces),
            take_served=lambda _: _as_throughput(self._pieces.take_mean_s()),
        )


@asynccontextmanager
async def open_graph_span(
    config: NodeConfig,
    served: GraphModel,
    swarm: Swarm,
    scheduler: Scheduler,
    span: Span,
    *,
    refusals: RefusalLog | None = None,
) -> AsyncIterator[GraphSpan]:
    """Load and measure `span`. On exit no request uses it any more.

    Raises `ModelError`, `ResourceError` and `OSError`.
    """
    executor = scheduler.executor
    async with AsyncExitStack() as stack:
        with track_wait("weights to be loaded", blocks=(span,)):
            memory_bytes = gib_to_bytes(config.weight_memory_gib)
            pieces = await executor.run(partial(_load, served, span, memory_bytes))
        stack.push_async_callback(asyncio.to_thread, pieces.close)
        with track_wait("the speed to be measured", blocks=(span,)):
            throughput = await executor.run(partial(_measure, pieces))
        server = GraphServer(
            swarm,
            served.model_id,
            pieces,
            executor,
            pieces.max_bytes,
            idle_timeout_s=config.idle_timeout_s,
            allow=frozenset(config.allow_peers),
            deny=frozenset(config.deny_peers),
            refusals=refusals,
        )
        stack.push_async_callback(server.close)
        yield GraphSpan(pieces, throughput, server, scheduler)


def _load(served: GraphModel, span: Span, memory_bytes: int | None) -> ServedPieces:
    network, plan, device = served.network, served.plan, served.device
    operations = plan.operations(span)
    weights: PieceWeights
    if memory_bytes is None or network.count_weight_bytes(operations) <= memory_bytes:
        program = network.build_piece(operations, device)
        with show_progress() as progress:
            loaded = network.load_weights(program, device, progress)
        weights = ResidentWeights(network, loaded, device)
    else:
        weights = StreamedWeights(network, plan, span, device, memory_bytes)
        log.info(
            "weights_streamed",
            span=str(span),
            resident_mib=weights.resident_bytes >> 20,
            all_mib=network.count_weight_bytes(operations) >> 20,
        )
    free = free_memory_bytes(device) - weights.unread_bytes
    room = int(free * REQUEST_SHARE) // 2
    if room < MIN_ROOM_BYTES:
        raise InsufficientMemoryError(
            f"pieces {span} leave {room >> 20} MiB for requests, and {MIN_ROOM_BYTES >> 20} MiB "
            "are the least: take fewer (--num-blocks)"
        )
    return ServedPieces(network, plan, span, weights, device, min(room, MAX_ROOM_BYTES))


def _measure(pieces: ServedPieces, stop: Callable[[], bool] = bool) -> SpanThroughput:
    """Requests a second through the span, of the sizes for which the network was captured.

    Raises `MeasurementCancelled` once `stop` returns true.
    """
    network, seconds = pieces.network, []
    sizes = network.example_sizes
    interface = network.find_interface(pieces.plan.operations(pieces.span))
    values = {}
    for index in interface.received:
        expected = network.find_shape(index, sizes)
        values[index] = torch.zeros(expected.shape, dtype=expected.dtype)
    for _ in range(MEASURED_RUNS):
        if stop():
            raise MeasurementCancelled
        began = time.perf_counter()
        pieces.run(pieces.span, sizes, values)
        seconds.append(time.perf_counter() - began)
    pieces.forget_times()
    found = _as_throughput(min(seconds[1:]))
    assert found is not None
    return found


def _as_throughput(request_s: float | None) -> SpanThroughput | None:
    if request_s is None:
        return None
    rate = 1 / max(request_s, 1e-6)
    return SpanThroughput(prefill_tokens_per_s=rate, decode_tokens_per_s=rate)
