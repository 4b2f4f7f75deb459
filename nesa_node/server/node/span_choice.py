"""The model that a daemon serves, the choice of its span, and the memory that this needs."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from functools import partial

import torch

from nesa_node.core.errors import ConfigError, InsufficientMemoryError
from nesa_node.core.ids import ModelId, Span
from nesa_node.core.logging import get_logger
from nesa_node.core.settings.choices import QuantType
from nesa_node.core.settings.declaration import gib_to_bytes, secret_text
from nesa_node.core.settings.models import NodeConfig
from nesa_node.engine.kernels.threads import fix_threads
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.devices import (
    MemoryFit,
    choose_device,
    compute_block_bytes,
    fit_blocks,
    free_memory_bytes,
)
from nesa_node.engine.weights.checkpoint import Checkpoint, compute_model_id
from nesa_node.engine.weights.hub import open_checkpoint
from nesa_node.server.node.announcer import Announcer
from nesa_node.sharding.span_placement import choose_span, reconsider_span
from nesa_node.swarm.node import Swarm

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeModel:
    """A model's checkpoint, data type, quantization and device on this node."""

    checkpoint: Checkpoint
    model_id: ModelId
    dtype: torch.dtype
    quant_type: QuantType
    device: torch.device


def open_node_model(config: NodeConfig) -> NodeModel:
    """Open the checkpoint without loading weights. Blocks the thread.

    Raises `ConfigError`, `ModelError` and `ResourceError`.
    """
    if config.threads is not None:
        fix_threads(config.threads)
    assert config.model is not None
    checkpoint = open_checkpoint(
        config.model,
        revision=config.revision,
        token=secret_text(config.token),
        cache_dir=config.cache_dir,
        max_disk_bytes=gib_to_bytes(config.max_disk_gib),
        evicts=config.evict_downloads,
        max_model_bytes=gib_to_bytes(config.pool_max_download_gib),
    )
    device = choose_device(config.device)
    if device.type == "mps" and config.quant_type != "none":
        raise ConfigError(f"--quant-type {config.quant_type} needs --device cpu or cuda")
    return NodeModel(
        checkpoint=checkpoint,
        model_id=compute_model_id(checkpoint),
        dtype=checkpoint.resolve_dtype(config.torch_dtype),
        quant_type=config.quant_type,
        device=device,
    )


PLANNED_CACHE_TOKENS = 8192
"""Cache tokens for which memory is kept free when the number of blocks is chosen automatically."""
MAX_AUTO_CACHE_TOKENS = 65_536
MIN_CACHE_TOKENS = 128
AUTO_CACHE_FRACTION = 0.5
JOIN_ROUNDS = 3
JOIN_PAUSE_RANGE_S = (0.5, 1.0)


def count_blocks(config: NodeConfig, served: NodeModel) -> int:
    """How many blocks to serve.

    Raises `InsufficientMemoryError`, `ConfigError`, and `UnsupportedModelError` for weights that
    nf4 cannot hold.
    """
    checkpoint = served.checkpoint
    if (span := config.block_indices or config.first_blocks) is not None:
        if span.end > checkpoint.num_blocks:
            flag = "--first-blocks" if config.block_indices is None else "--block-indices"
            raise ConfigError(
                f"{flag} {span}: {checkpoint.name} has blocks 0:{checkpoint.num_blocks}"
            )
        asked, start = len(span), span.start
    elif isinstance(config.num_blocks, int):
        if config.num_blocks > checkpoint.num_blocks:
            raise ConfigError(
                f"--num-blocks {config.num_blocks}: {checkpoint.name} has "
                f"{checkpoint.num_blocks} blocks"
            )
        asked, start = config.num_blocks, 0
    else:
        cache_tokens = config.attn_cache_tokens or PLANNED_CACHE_TOKENS
        return _find_fit(served, cache_tokens).blocks
    require_memory(config, served, Span(start, start + asked))
    return asked


def require_memory(
    config: NodeConfig, served: NodeModel, span: Span, *, regained_bytes: int = 0
) -> None:
    """Raises `InsufficientMemoryError` unless `span` fits once `regained_bytes` are free again."""
    blocks, start = len(span), span.start
    cache_tokens = config.attn_cache_tokens or MIN_CACHE_TOKENS
    fit = _find_fit(served, cache_tokens, regained_bytes)
    if fit.blocks < blocks:
        sizes = compute_block_bytes(served.checkpoint, served.dtype, served.quant_type)
        needed = sum(sizes[start : start + blocks]) + blocks * fit.cache_bytes_per_block
        raise InsufficientMemoryError(
            f"{blocks} blocks of {served.checkpoint.name} with {cache_tokens} tokens of cache take "
            f"{needed >> 20} MiB, {fit.free_bytes >> 20} MiB are free; {fit.blocks} blocks would "
            "fit: ask for fewer (--num-blocks), a smaller cache, a 16-bit --torch-dtype or "
            "--quant-type int8"
        )


def _find_fit(served: NodeModel, cache_tokens: int, regained_bytes: int = 0) -> MemoryFit:
    return fit_blocks(
        served.checkpoint,
        dtype=served.dtype,
        device=served.device,
        cache_tokens=cache_tokens,
        quant_type=served.quant_type,
        free_bytes=free_memory_bytes(served.device) + regained_bytes,
    )


def count_cache_tokens(config: NodeConfig, blocks: ModelBlocks) -> int:
    """Cache tokens to offer for a loaded span. Raises `InsufficientMemoryError`."""
    free = free_memory_bytes(blocks.device)
    per_token = blocks.cache_bytes_per_token
    if config.attn_cache_tokens is not None:
        if config.attn_cache_tokens * per_token > free:
            raise InsufficientMemoryError(
                f"--attn-cache-tokens {config.attn_cache_tokens} takes "
                f"{config.attn_cache_tokens * per_token >> 20} MiB and {free >> 20} MiB are free"
            )
        return config.attn_cache_tokens
    fitting = int(free * AUTO_CACHE_FRACTION) // per_token
    if fitting < MIN_CACHE_TOKENS:
        raise InsufficientMemoryError(
            f"{free >> 20} MiB are free, which holds {fitting} tokens of cache; "
            f"{MIN_CACHE_TOKENS} are the least: take fewer blocks (--num-blocks)"
        )
    return min(fitting, MAX_AUTO_CACHE_TOKENS)


async def claim_span(
    config: NodeConfig, served: NodeModel, swarm: Swarm, announcer: Announcer, *, rng: random.Random
) -> Span:
    """Claim the span that was given, or the one that the swarm needs most; announced as "joining"
    on return.

    Nodes that start at the same moment see each other's claims and give way by peer id.
    """
    blocks = await asyncio.to_thread(count_blocks, config, served)
    if (given := config.block_indices or config.first_blocks) is not None:
        await announcer.announce("joining", given)
        return given
    peer = swarm.identity.peer_id
    fetch = partial(swarm.directory.fetch, served.model_id, served.checkpoint.num_blocks)
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
