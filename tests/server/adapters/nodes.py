"""Nodes that store adapters, each with its own p2pd."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from nesa_node.core.ids import ModelId, PeerId
from nesa_node.server.adapters.adapter_server import AdapterServer
from nesa_node.server.adapters.store import AdapterStore
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.protocol.adapter_messages import ADAPTER_PROTOCOL
from tests.engine.adapter_folders import LAYERS
from tests.swarm.local_swarm import local_swarm
from tests.swarm.record_fields import MODEL_ID, make_status

MODEL = ModelId(MODEL_ID)
MIB = 2**20


async def serve_adapters(
    member: Swarm, folder: Path, *, max_bytes: int = 64 * MIB, **options: Any
) -> AdapterServer:
    """Make a member of a swarm a node that stores adapters: its record, its store, its stream."""
    await member.directory.publish(make_status())

    def find_addresses() -> dict[PeerId, Sequence[str]]:
        known = member.directory.addresses(MODEL, 30)
        return {peer: known[peer] for peer in known if peer != member.identity.peer_id}

    server = AdapterServer(
        member,
        MODEL,
        AdapterStore(folder, max_bytes),
        find_layers=lambda: LAYERS,
        find_addresses=find_addresses,
        **options,
    )
    await member.transport.serve(ADAPTER_PROTOCOL, server.handle)
    return server


@asynccontextmanager
async def adapter_nodes(
    folder: Path, count: int, **options: Any
) -> AsyncIterator[tuple[list[Swarm], list[AdapterServer]]]:
    """`count` nodes of `MODEL` with stores, each with its own p2pd."""
    swarm_options = {key: options.pop(key) for key in ("swarm_key",) if key in options}
    async with local_swarm(folder, count, **swarm_options) as members:
        servers = [
            await serve_adapters(member, folder / f"store-{number}", **options)
            for number, member in enumerate(members)
        ]
        yield members, servers
