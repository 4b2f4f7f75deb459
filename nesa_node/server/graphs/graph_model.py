"""A network that a node serves in pieces, and the plan by which it is cut."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from nesa_node.core.errors import (
    ConfigError,
    InsufficientMemoryError,
    NesaError,
    UnsupportedFeatureError,
)
from nesa_node.core.ids import Span
from nesa_node.core.logging import get_logger
from nesa_node.core.settings.declaration import gib_to_bytes
from nesa_node.core.settings.models import NodeConfig
from nesa_node.engine.graphs.model_graph import RequestSizes
from nesa_node.engine.graphs.network import Network, compute_plan_id, open_plan_network
from nesa_node.engine.model.devices import RESERVE_BYTES, free_memory_bytes
from nesa_node.engine.weights.checkpoint import Checkpoint, compute_model_id
from nesa_node.server.node.node_model import NodeModel
from nesa_node.sharding.graph_plan import MAX_PLAN_BYTES, GraphPlan, decode_plan
from nesa_node.swarm.graph_plans import PlannedModel, fetch_plan, find_plans
from nesa_node.swarm.node import Swarm

log = get_logger(__name__)

DEFAULT_PIECES = 8


@dataclass(frozen=True, kw_only=True)
class GraphModel(NodeModel):
    """A network and its plan. A block is a piece, and a request counts as a token."""

    unit = "pieces"

    network: Network
    plan: GraphPlan

    @property
    def num_blocks(self) -> int:
        return len(self.plan.pieces)

    @property
    def context_length(self) -> int:
        return 1

    @cached_property
    def _piece_bytes(self) -> Sequence[int]:
        return [self.network.count_weight_bytes(piece) for piece in self.plan.pieces]

    def count_fitting(self, config: NodeConfig) -> int:
        usable = self._usable_bytes()
        memory = gib_to_bytes(config.weight_memory_gib)
        if memory is not None:
            usable = min(usable, memory)
        for count in range(self.num_blocks, 0, -1):
            starts = range(self.num_blocks - count + 1)
            if max(sum(self._piece_bytes[start : start + count]) for start in starts) <= usable:
                return count
        if memory == usable:
            return 1  # it reads what exceeds this memory for each request
        raise InsufficientMemoryError(
            f"the largest piece of {self.checkpoint.name} takes "
            f"{max(self._piece_bytes) >> 20} MiB, and {max(usable, 0) >> 20} MiB can be used: free "
            "memory, cut the network into more pieces (--pieces), or have weights that do not fit "
            "read for each request (--weight-memory-gib)"
        )

    def require_memory(self, config: NodeConfig, span: Span, *, regained_bytes: int = 0) -> None:
        needed = sum(self._piece_bytes[span.start : span.end])
        memory = gib_to_bytes(config.weight_memory_gib)
        if memory is not None:
            needed = min(needed, memory)
        usable = self._usable_bytes() + regained_bytes
        if needed > usable:
            raise InsufficientMemoryError(
                f"pieces {span} of {self.checkpoint.name} take {needed >> 20} MiB, and "
                f"{max(usable, 0) >> 20} MiB can be used: take fewer (--num-blocks), or keep less "
                "in memory (--weight-memory-gib)"
            )

    def _usable_bytes(self) -> int:
        return free_memory_bytes(self.device) - RESERVE_BYTES


def open_graph_model(
    config: NodeConfig, checkpoint: Checkpoint, device: torch.device
) -> GraphModel:
    """Capture a checkpoint's network, and read or make its plan. Blocks the thread.

    Raises `ConfigError`, `ModelError` and `UnsupportedFeatureError`.
    """
    if config.quant_type != "none":
        raise ConfigError(
            f"--quant-type {config.quant_type}: networks in pieces are served in full precision"
        )
    if config.cache_dtype != "auto":
        raise ConfigError(
            f"--cache-dtype {config.cache_dtype}: networks in pieces keep keys and values as they "
            "are computed"
        )
    if config.attestation != "none":
        raise ConfigError("--attestation: nodes of networks in pieces do not attest yet")
    if config.plan is not None:
        if config.pieces is not None:
            raise ConfigError("give --plan or --pieces, not both")
        plan = _read_plan(config)
        return _make(checkpoint, device, open_plan_network(checkpoint, plan), plan)
    network, plan = make_network(
        checkpoint,
        checkpoint.resolve_dtype(config.torch_dtype),
        RequestSizes(image_size=config.image_size),
        config.pieces,
    )
    return _make(checkpoint, device, network, plan)


def make_network(
    checkpoint: Checkpoint, dtype: torch.dtype, sizes: RequestSizes, count: int | None = None
) -> tuple[Network, GraphPlan]:
    """Capture a checkpoint's network and cut it into `count` pieces. Blocks the thread.

    Without a count, as a node does that was given none. Raises as `Network` and
    `Network.make_plan` do.
    """
    network = Network(checkpoint, dtype, sizes)
    if count is None:
        count = min(max(DEFAULT_PIECES, len(network.parts)), len(network.captured.graph))
    return network, network.make_plan(count)


def _read_plan(config: NodeConfig) -> GraphPlan:
    assert config.plan is not None
    try:
        with config.plan.open("rb") as file:
            content = file.read(MAX_PLAN_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--plan {config.plan}: {error.strerror}") from error
    return decode_plan(content, where=f"--plan {config.plan}")


def _make(
    checkpoint: Checkpoint, device: torch.device, network: Network, plan: GraphPlan
) -> GraphModel:
    return GraphModel(
        checkpoint=checkpoint,
        model_id=compute_plan_id(checkpoint, plan),
        dtype=network.dtype,
        quant_type="none",
        device=device,
        network=network,
        plan=plan,
    )


async def adopt_plan(config: NodeConfig, served: GraphModel, swarm: Swarm) -> GraphModel:
    """`served` by the plan that most nodes of the swarm have, unless the operator chose one.

    Where none of their plans is usable, it stays as it is.
    """
    if config.pieces is not None or config.plan is not None or not config.initial_peers:
        return served
    base = compute_model_id(served.checkpoint)
    for found in await find_plans(swarm, base):
        if found.model_id == served.model_id:
            return served
        try:
            return await asyncio.to_thread(
                _adopt, served, found, await fetch_plan(swarm, found, random.Random())
            )
        except (NesaError, OSError) as error:
            log.warning("plan_not_adopted", model=found.model_id, reason=str(error))
    return served


def _adopt(served: GraphModel, found: PlannedModel, plan: GraphPlan) -> GraphModel:
    """Raises `UnsupportedFeatureError` for a plan of another network or dtype."""
    if plan.dtype != served.plan.dtype:
        raise UnsupportedFeatureError(f"its pieces are in {plan.dtype}")
    network = served.network
    try:
        network.check_plan(plan)
    except UnsupportedFeatureError:
        # Captured for requests of other sizes.
        network = open_plan_network(served.checkpoint, plan)
    log.info("plan_adopted", model=found.model_id, pieces=len(plan.pieces))
    return replace(served, model_id=found.model_id, network=network, plan=plan)
