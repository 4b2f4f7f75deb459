"""A shard as a node holds it: its blocks, their cache, and the server of its sessions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from nesa_node.core.errors import AdapterError
from nesa_node.core.ids import ModelId
from nesa_node.core.settings.declaration import secret_text
from nesa_node.core.settings.models import NodeConfig
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.devices import SpanThroughput, measure_throughput
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.server.adapters.loaded_adapters import LoadedAdapters
from nesa_node.server.node.served_span import make_limits
from nesa_node.server.scheduler.batch import open_executor
from nesa_node.server.scheduler.scheduler import open_scheduler
from nesa_node.server.session.admission import Admission
from nesa_node.server.session.message_loop import RefusalLog
from nesa_node.server.session.sealing import describe_computation
from nesa_node.server.session.session_server import SessionServer
from nesa_node.server.training.training_memory import TrainingMemory
from nesa_node.server.training.training_server import TrainingServer
from nesa_node.swarm.node import Swarm


@dataclass(eq=False)
class HeldShard:
    """Blocks that sessions use under any of `names`."""

    server: SessionServer
    admission: Admission
    throughput: SpanThroughput
    used_at: float = field(default_factory=time.monotonic)
    """When it was last asked for."""

    @property
    def names(self) -> set[ModelId]:
        return self.server.names


class _NoAdapters:
    async def open_digest(self, _: str) -> Path:
        raise AdapterError("a shard is used without adapters")


@asynccontextmanager
async def open_shard(
    config: NodeConfig,
    swarm: Swarm,
    name: ModelId,
    checkpoint: Checkpoint,
    blocks: ModelBlocks,
    cache_tokens: int,
    refusals: RefusalLog,
) -> AsyncIterator[HeldShard]:
    """Serve `blocks`, on a thread of their own. On exit no session uses them any more."""
    async with open_executor() as executor, open_scheduler(executor) as scheduler:
        throughput = await executor.run(partial(measure_throughput, blocks))
        scheduler.seed_cost(throughput, blocks.span)
        pool = await executor.run(partial(blocks.new_pool, cache_tokens))
        limits = make_limits(config, blocks, cache_tokens)
        # One owner has all of it, and clients that know the id are the owner's.
        limits = replace(
            limits,
            allow=frozenset(),
            hidden_bytes_per_peer=limits.hidden_bytes,
            cache_tokens_per_peer=config.max_cache_tokens_per_peer or cache_tokens,
        )
        admission = Admission(limits, pool)
        server = SessionServer(
            swarm,
            name,
            blocks,
            scheduler,
            admission,
            TrainingServer(
                swarm,
                checkpoint,
                blocks,
                executor,
                TrainingMemory(0),
                step_timeout_s=config.step_timeout_s,
                idle_timeout_s=config.idle_timeout_s,
            ),
            LoadedAdapters(blocks, _NoAdapters(), 0),
            describe_computation(blocks, "none"),
            swarm_key=secret_text(config.swarm_key),
            step_timeout_s=config.step_timeout_s,
            idle_timeout_s=config.idle_timeout_s,
            refusals=refusals,
            is_star_only=True,
        )
        try:
            yield HeldShard(server, admission, throughput)
        finally:
            await server.close()
