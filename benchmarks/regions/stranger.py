"""Orchestrators that nobody allows: `python -m benchmarks.regions.stranger SETTINGS`.

The order "lie" has one identity claim the lease and ask every node for one and the same span, and
another one have all change places in epoch 0, which is over for whoever has obeyed before. Nobody
signs what is forged. The answer tells how many members kept forged ones.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from nesa_node.core.errors import NesaError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.logging import setup_logging
from nesa_node.swarm.dht.rpc import PROTOCOL_PREFIX
from nesa_node.swarm.dht.sealing import (
    AnnouncedMove,
    Lease,
    PlacementNotice,
    notice_key,
    seal_statement,
)
from nesa_node.swarm.dht.validator import dht_id
from nesa_node.swarm.node import Swarm, open_swarm
from nesa_node.swarm.p2p.hivemind_imports import MSGPackSerializer, dht_pb2
from nesa_node.swarm.p2p.identity import Identity

TTL_S = 300.0


async def live(settings: dict[str, Any]) -> None:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nesa-bench-")))
        absurd, stale = [
            await stack.enter_async_context(
                open_swarm(
                    Identity.ephemeral(folder),
                    host_maddrs=[settings["listen"]],
                    initial_peers=settings["peers"],
                )
            )
            for _ in range(2)
        ]
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            assert order["do"] == "lie"
            print(json.dumps(await lie(absurd, stale, order)), flush=True)


async def lie(absurd: Swarm, stale: Swarm, order: dict[str, Any]) -> dict[str, Any]:
    """`order` has the model, its number of blocks, and (peer, start, end) of every node."""
    model, blocks = ModelId(order["model_id"]), int(order["num_blocks"])
    spans = {peer: (start, end) for peer, start, end in order["nodes"]}
    await absurd.notices.publish(
        Lease, model, epoch=int(time.time()) - 1, ttl_s=100.0, role="leading"
    )
    everybody = [
        AnnouncedMove(peer=peer, was=was, to=(0, was[1] - was[0]), gain=0.9)
        for peer, was in spans.items()
    ]
    placement = await absurd.notices.publish(
        PlacementNotice, model, epoch=int(time.time()) - 1, **_fields(blocks, everybody, 0.9)
    )
    swapped = [
        AnnouncedMove(peer=peer, was=was, to=(blocks - was[1], blocks - was[0]), gain=0.0)
        for peer, was in spans.items()
    ]
    await stale.notices.publish(PlacementNotice, model, epoch=0, **_fields(blocks, swapped, 0.0))
    forged = msgspec.msgpack.decode(seal_statement(placement, absurd.identity))
    unsigned = msgspec.msgpack.encode({**forged, "signature": bytes(64)})
    foreign = msgspec.msgpack.encode({**forged, "peer_id": order["boss"]})
    return {
        "asked": 2 * len(spans),
        "kept": await _store(absurd, placement, unsigned, list(spans))
        + await _store(absurd, placement, foreign, list(spans), subkey=order["boss"]),
        "signers": [absurd.identity.peer_id, stale.identity.peer_id],
    }


def _fields(blocks: int, moves: Sequence[AnnouncedMove], gain: float) -> dict[str, Any]:
    return {
        "ttl_s": TTL_S,
        "num_blocks": blocks,
        "based_on": "",
        "moves": tuple(moves),
        "gain": gain,
        "strategy": "rebalance-latency",
        "trigger": "gain",
        "reason": "all of it is mine",
    }


async def _store(
    swarm: Swarm,
    notice: PlacementNotice,
    sealed: bytes,
    members: Sequence[str],
    *,
    subkey: str = "",
) -> int:
    """How many members keep those bytes, asked one by one."""
    request = dht_pb2.StoreRequest(
        keys=[dht_id(notice_key(PlacementNotice, ModelId(notice.model_id)))],
        subkeys=[MSGPackSerializer.dumps(subkey or notice.peer_id)],
        values=[MSGPackSerializer.dumps(sealed)],
        expiration_time=[notice.expires_at],
        in_cache=[False],
    ).SerializeToString()
    kept = 0
    for member in members:
        try:
            data = await swarm.transport.unary.call(
                PeerId(member), PROTOCOL_PREFIX + "rpc_store", request
            )
        except NesaError:
            continue
        kept += any(dht_pb2.StoreResponse.FromString(data).store_ok)
    return kept


if __name__ == "__main__":
    setup_logging("warning")
    asyncio.run(live(json.loads(sys.argv[1])))
