"""Plans by which the swarm serves a network, found on the DHT and fetched from its nodes."""

from __future__ import annotations

import asyncio
import random
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from nesa_node.core.errors import (
    ConfigError,
    NesaError,
    PeerUnreachableError,
    ProtocolError,
    RemoteError,
)
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.logging import get_logger
from nesa_node.sharding.graph_plan import MAX_PLAN_BYTES, GraphPlan, decode_plan
from nesa_node.swarm.dht.records import NodeRecord
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.identity import adapter_proof
from nesa_node.swarm.protocol.graph_messages import GRAPH_PROTOCOL, PlanPart, PlanRequest
from nesa_node.swarm.protocol.messages import Busy, ErrorMessage
from nesa_node.swarm.protocol.stream import Stream

log = get_logger(__name__)

FETCH_TIMEOUT_S = 20.0
MAX_ASKED_NODES = 5
MAX_PLANS = 8


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A network that nodes serve by one plan."""

    model_id: ModelId
    num_pieces: int
    nodes: tuple[tuple[PeerId, tuple[str, ...]], ...]
    """Those that serve, with their addresses."""
    is_whole: bool
    """Whether each piece has a node."""


async def find_plans(swarm: Swarm, base: ModelId) -> list[PlannedModel]:
    """The plans by which nodes serve the weights of `base` (a model id without a plan).

    Those that serve all pieces come first, then those with more nodes; at most `MAX_PLANS`.
    Raises `SwarmError` where the DHT does not answer.
    """
    groups: dict[tuple[str, int], list[NodeRecord]] = defaultdict(list)
    for record in await swarm.directory.fetch_all():
        if record.model_id.startswith(f"{base}.") and record.state == "serving":
            groups[record.model_id, record.num_blocks].append(record)
    found = [summarize_plan(*key, records) for key, records in groups.items()]
    found.sort(key=lambda each: (not each.is_whole, -len(each.nodes), each.model_id))
    return found[:MAX_PLANS]


def is_planned(model_id: ModelId) -> bool:
    """Whether the model is a network in pieces."""
    return re.search(r"@[^.]+\.[0-9a-f]{16}$", model_id) is not None


def summarize_plan(model_id: str, count: int, records: Sequence[NodeRecord]) -> PlannedModel:
    """The network that these nodes serve."""
    held = {piece for record in records for piece in range(*record.span)}
    nodes = tuple((record.signer, record.addresses) for record in records)
    return PlannedModel(ModelId(model_id), count, nodes, len(held) == count)


async def fetch_plan(swarm: Swarm, found: PlannedModel, rng: random.Random) -> GraphPlan:
    """Ask nodes, in random order, for the plan that `found.model_id` names.

    Raises `PeerUnreachableError` where none of `MAX_ASKED_NODES` sends it.
    """
    reason: NesaError | None = None
    for peer, addresses in rng.sample(found.nodes, min(len(found.nodes), MAX_ASKED_NODES)):
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                return await _fetch_from(swarm, found, peer, addresses)
        except (NesaError, TimeoutError) as error:
            log.info("plan_not_fetched", peer=peer, reason=str(error) or "it was silent")
            reason = error if isinstance(error, NesaError) else None
    raise PeerUnreachableError(
        f"no node sent the plan of {found.model_id}" + (f": {reason}" if reason else "")
    )


async def _fetch_from(
    swarm: Swarm, found: PlannedModel, peer: PeerId, addresses: Sequence[str]
) -> GraphPlan:
    own, membership = swarm.transport.peer_id, swarm.notices.membership
    stream = Stream(peer, *await swarm.transport.open_stream(peer, GRAPH_PROTOCOL, addresses))
    try:
        proof = adapter_proof(membership, own, peer)
        await stream.send(PlanRequest(model=found.model_id, membership=proof))
        content = bytearray()
        while True:
            message, _ = await stream.receive()
            match message:
                case PlanPart():
                    content += message.data
                case Busy() | ErrorMessage():
                    raise RemoteError("refused", f"{peer}: {message.message}")
                case _:
                    raise ProtocolError("unexpected", "another message than plan_part")
            if message.total_bytes > MAX_PLAN_BYTES or len(content) > message.total_bytes:
                raise ProtocolError("bad_frame", f"{peer} sends a plan that is too large")
            if len(content) == message.total_bytes:
                break
    finally:
        await stream.close()
    try:
        plan = decode_plan(bytes(content), where=f"the plan of {peer}")
    except ConfigError as error:
        raise ProtocolError("bad_plan", str(error)) from None
    if not found.model_id.endswith(f".{plan.digest}") or len(plan.pieces) != found.num_pieces:
        raise ProtocolError("bad_plan", f"{peer} sent another plan than it announces")
    return plan
