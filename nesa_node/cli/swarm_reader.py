"""Reading of a swarm's node records as a DHT client."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from nesa_node.core.settings.declaration import secret_text
from nesa_node.core.settings.models import ClientConfig, SharedConfig
from nesa_node.core.wait_tracking import track_wait
from nesa_node.swarm.dht.member import FETCH_TIMEOUT_S
from nesa_node.swarm.dht.records import NodeRecord
from nesa_node.swarm.node import Swarm, open_swarm
from nesa_node.swarm.p2p.identity import Identity


@dataclass(frozen=True, slots=True)
class SwarmReading:
    """Valid node records, and counts of rejected records by reason."""

    records: tuple[NodeRecord, ...]
    dropped: Mapping[str, int]


async def read_swarm(config: ClientConfig) -> SwarmReading:
    """Join the DHT as a client, read the records of all nodes, leave.

    Raises `BootstrapError` if none of the initial peers answers.
    """
    async with open_reader(config) as swarm:
        return await read_records(swarm)


async def read_records(swarm: Swarm) -> SwarmReading:
    """Fetch the records of all nodes. May take up to `FETCH_TIMEOUT_S`."""
    with track_wait("the DHT's records of all nodes", limit_s=FETCH_TIMEOUT_S):
        records = await swarm.directory.fetch_all()
    return SwarmReading(tuple(records), dict(swarm.directory.dropped))


@asynccontextmanager
async def open_reader(config: SharedConfig) -> AsyncIterator[Swarm]:
    """Join the DHT as a client with an ephemeral identity. Raises `BootstrapError`."""
    with await asyncio.to_thread(tempfile.TemporaryDirectory, prefix="nesa-reader-") as folder:
        async with open_swarm(
            Identity.ephemeral(Path(folder)),
            initial_peers=config.initial_peers,
            swarm_key=secret_text(config.swarm_key),
            listen=False,
        ) as swarm:
            yield swarm
