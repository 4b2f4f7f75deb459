"""The model that a daemon opens, and the choice of its span."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import get_args

from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import Span
from nesa_node.core.logging import get_logger
from nesa_node.core.settings.choices import QuantType
from nesa_node.core.settings.declaration import gib_to_bytes, secret_text
from nesa_node.core.settings.models import NodeConfig
from nesa_node.engine.kernels.threads import fix_threads
from nesa_node.engine.model.devices import check_quant_type, choose_device
from nesa_node.engine.weights.checkpoint import compute_model_id
from nesa_node.engine.weights.families import read_network_config
from nesa_node.engine.weights.hub import open_checkpoint
from nesa_node.engine.weights.language_models import is_language_model, read_any_config
from nesa_node.server.graphs.graph_model import GraphModel, open_graph_model
from nesa_node.server.node.announcer import Announcer
from nesa_node.server.node.node_model import DecoderModel, NodeModel
from nesa_node.sharding.span_placement import choose_span, reconsider_span
from nesa_node.swarm.node import Swarm

log = get_logger(__name__)


def open_node_model(config: NodeConfig) -> DecoderModel | GraphModel:
    """Open the checkpoint without loading weights. Blocks the thread.

    Raises `ConfigError`, `ModelError`, `ResourceError`, and `UnsupportedFeatureError` for networks
    that cannot be captured.
    """
    if config.threads is not None:
        fix_threads(config.threads)
    assert config.model is not None
    is_cut = config.pieces is not None or config.plan is not None

    checkpoint = open_checkpoint(
        config.model,
        revision=config.revision,
        token=secret_text(config.token),
        cache_dir=config.cache_dir,
        max_disk_bytes=gib_to_bytes(config.max_disk_gib),
        evicts=config.evict_downloads,
        max_model_bytes=gib_to_bytes(config.pool_max_download_gib),
        read=read_network_config if is_cut else read_any_config,
    )
    device = choose_device(config.device)
    if is_cut or not is_language_model(checkpoint.folder, name=checkpoint.name):
        return open_graph_model(config, checkpoint, device)
    check_quant_type("--quant-type", config.quant_type, device, get_args(QuantType))
    if config.weight_memory_gib is not None:
        raise ConfigError(
            "--weight-memory-gib is for networks in pieces (--pieces); for fewer blocks of a "
            "language model there is --num-blocks"
        )
    return DecoderModel(
        checkpoint=checkpoint,
        model_id=compute_model_id(checkpoint),
        dtype=checkpoint.resolve_dtype(config.torch_dtype),
        quant_type=config.quant_type,
        cache_dtype=config.cache_dtype,
        device=device,
    )


JOIN_ROUNDS = 3
JOIN_PAUSE_RANGE_S = (0.5, 1.0)


async def claim_span(
    config: NodeConfig, served: NodeModel, swarm: Swarm, announcer: Announcer, *, rng: random.Random
) -> Span:
    """Claim the span that was given, or the one that the swarm needs most; announced as "joining"
    on return.

    Nodes that start at the same moment see each other's claims and give way by peer id.
    """
    blocks = await asyncio.to_thread(served.count_blocks, config)
    if (given := config.block_indices or config.first_blocks) is not None:
        await announcer.announce("joining", given)
        return given
    peer = swarm.identity.peer_id
    fetch = partial(swarm.directory.fetch, served.model_id, served.num_blocks)
    snapshot = await fetch()
    span = choose_span(snapshot.without_peers(peer), blocks, rng=rng)
    await announcer.announce("joining", span)
    if not snapshot.nodes and not snapshot.joining and not config.initial_peers:
        return span
    for _ in range(JOIN_ROUNDS):
        await asyncio.sleep(rng.uniform(*JOIN_PAUSE_RANGE_S))
        better = reconsider_span(await fetch(), peer, span, rng=rng)
        if better == span:
            break
        log.info("span_reconsidered", was=str(span), now=str(better))
        span = better
        await announcer.announce("joining", span)
    return span
