"""One look at a swarm by somebody who is no member of it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nesa_node.core.config import ClientConfig
from nesa_node.swarm.identity import Identity
from nesa_node.swarm.node import open_swarm
from nesa_node.swarm.records import NodeRecord


@dataclass(frozen=True, slots=True)
class SwarmReading:
    """The valid records, and how many others were refused, by reason."""

    records: tuple[NodeRecord, ...]
    dropped: Mapping[str, int]


async def read_swarm(config: ClientConfig) -> SwarmReading:
    """Join the DHT as a client, read the records of all nodes, leave.

    Raises `BootstrapError` if none of the initial peers answers.
    """
    with tempfile.TemporaryDirectory(prefix="nesa-reader-") as folder:
        async with open_swarm(
            Identity.ephemeral(Path(folder)),
            initial_peers=config.initial_peers,
            swarm_key=config.swarm_key.get_secret_value() if config.swarm_key else None,
            listen=False,
        ) as swarm:
            records = await swarm.directory.fetch_all()
            return SwarmReading(tuple(records), dict(swarm.directory.dropped))
