"""Somebody who looks at the swarm and takes no part: `python -m benchmarks.regions.observer`."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from nesa_node.core.ids import ModelId
from nesa_node.core.logging import setup_logging
from nesa_node.swarm.dht.sealing import Lease, PlacementNotice
from nesa_node.swarm.node import Swarm, open_swarm
from nesa_node.swarm.p2p.identity import Identity


async def watch(peers: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="nesa-bench-") as folder:
        identity = Identity.ephemeral(Path(folder))
        async with open_swarm(identity, initial_peers=peers, listen=False) as swarm:
            while line := await asyncio.to_thread(sys.stdin.readline):
                assert json.loads(line)["do"] == "look"
                print(json.dumps(await look(swarm)), flush=True)


async def look(swarm: Swarm) -> dict[str, Any]:
    """The nodes of the only model, how many pairs nobody has measured, and who leads."""
    records = await swarm.directory.fetch_all()
    if not records:
        return {"num_blocks": 0, "nodes": [], "joining": []}
    model_id = ModelId(records[0].model_id)
    snapshot = swarm.directory.with_links(await swarm.directory.fetch(model_id))
    links = snapshot.links
    assert links is not None
    leases = await swarm.notices.fetch(Lease, model_id)
    placements = await swarm.notices.fetch(PlacementNotice, model_id)
    return {
        "model_id": model_id,
        "num_blocks": snapshot.num_blocks,
        "taken_at": snapshot.taken_at,
        "nodes": [asdict(node) for node in snapshot.nodes],
        "joining": [asdict(node) for node in snapshot.joining],
        "unmeasured": int(np.isnan(links.rtt_ms_NN).sum()) // 2,
        "packed_bytes": [len(record.measured) for record in records],
        "leading": {
            lease.signer: lease.epoch
            for lease in leases
            if lease.role == "leading" and lease.expires_at > snapshot.taken_at
        },
        "placements": [placement.name for placement in placements],
    }


if __name__ == "__main__":
    setup_logging("warning")
    asyncio.run(watch(json.loads(sys.argv[1])["peers"]))
