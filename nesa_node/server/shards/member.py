"""The life of a daemon that holds shards: it tells its address, and serves until it is stopped."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from nesa_node.core.logging import get_logger
from nesa_node.core.metrics import MetricRegistry
from nesa_node.core.settings.models import NodeConfig
from nesa_node.engine.kernels.threads import fix_threads
from nesa_node.server.node.daemon import StoppedError, join_swarm
from nesa_node.server.node.invitation import (
    check_ready_file,
    most_reachable_address,
    ready_file,
    ready_file_fields,
)
from nesa_node.server.node.metrics import daemon_source
from nesa_node.server.node.shutdown import Shutdown, stop_signals
from nesa_node.server.shards.shard_server import ShardServer
from nesa_node.swarm.p2p.tasks import running_in_background
from nesa_node.swarm.protocol.messages import PROTOCOL
from nesa_node.swarm.protocol.shard_messages import SHARD_PROTOCOL

log = get_logger(__name__)


async def run_shard_member(
    config: NodeConfig, *, metric_sources: MetricRegistry | None = None
) -> None:
    """Hold shards until SIGTERM or SIGINT. Raises as `serve_shards` does."""
    with stop_signals() as stopping, suppress(StoppedError):
        await serve_shards(config, stopping, metric_sources=metric_sources)


async def serve_shards(
    config: NodeConfig, stopping: asyncio.Event, *, metric_sources: MetricRegistry | None = None
) -> None:
    """Hold shards until `stopping` is set, without a record on the DHT.

    Raises `SwarmError` and `ConfigError`.
    """
    check_ready_file(config.ready_file)
    if config.threads is not None:
        fix_threads(config.threads)
    sources = metric_sources or MetricRegistry()
    async with join_swarm(config, stopping) as swarm:
        server = ShardServer(config, swarm)
        await swarm.transport.serve(PROTOCOL, server.handle_session)
        await swarm.transport.serve(SHARD_PROTOCOL, server.handle_owner)
        with (
            ready_file(config.ready_file, ready_file_fields(swarm)),
            sources.registered(daemon_source(swarm, "shard member", sources.version)),
        ):
            _print_address(most_reachable_address(swarm.transport.addresses))
            try:
                async with running_in_background(server.run()):
                    await Shutdown(stopping, swarm.transport).wait()
            finally:
                await server.close()


def _print_address(address: str | None) -> None:
    log.info("shards_awaited", address=address)
    # The terminal may be gone; the node continues.
    with suppress(OSError):
        print(f"place shards on this machine:\nnesa-node deploy MODEL --to {address}", flush=True)
