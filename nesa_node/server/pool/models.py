"""Models by the names that a pool uses, and what their blocks take in memory and work."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from nesa_node.compression.tensors import DTYPE_NAMES
from nesa_node.core.errors import ModelNotFoundError, UnsupportedModelError
from nesa_node.core.ids import ModelId, Span, is_model_name
from nesa_node.core.settings.choices import PoolQuantType
from nesa_node.core.settings.declaration import secret_text
from nesa_node.core.settings.models import SharedConfig
from nesa_node.engine.graphs.model_graph import RequestSizes
from nesa_node.engine.graphs.network import compute_plan_id
from nesa_node.engine.model.devices import (
    cache_bytes_per_token,
    compute_block_bytes,
    compute_block_work,
)
from nesa_node.engine.weights.checkpoint import Checkpoint, compute_model_id
from nesa_node.engine.weights.demo_model import DEMO_MODEL_NAME, demo_model_path
from nesa_node.engine.weights.hub import find_cached_folder, open_checkpoint
from nesa_node.engine.weights.language_models import is_language_model, read_any_config
from nesa_node.engine.weights.skeleton import Skeleton
from nesa_node.routing.placement.building import ModelShape
from nesa_node.server.graphs.graph_model import make_network
from nesa_node.topology.roofline import BlockWork

QUANT_TYPES: tuple[PoolQuantType, ...] = ("none", "int8", "nf4")
PLANNED_CACHE_TOKENS = 8192
"""Room of the KV cache that is planned for each span."""


def locate_model(name: str, cache_dir: Path) -> str:
    """The folder under `cache_dir` that has the model's name, else the name, for the hub.

    The demo model is converted if it is not there yet. Blocks the thread. Raises
    `ModelNotFoundError` for what cannot be a name, such as a path.
    """
    if not is_model_name(name):
        raise ModelNotFoundError(
            f"{name!r:.140} is no name of a model; give one of the hub, such as "
            "HuggingFaceTB/SmolLM2-135M-Instruct, or of a folder in every machine's --cache-dir"
        )
    if name == DEMO_MODEL_NAME:
        return str(demo_model_path(cache_dir))
    return str(find_cached_folder(name, cache_dir) or name)


def open_pool_model(
    name: str, config: SharedConfig, *, max_model_bytes: int | None = None
) -> Checkpoint:
    """Open a model's config and headers, without weights. Raises as `open_checkpoint` does."""
    return open_checkpoint(
        locate_model(name, config.cache_dir),
        token=secret_text(config.token),
        cache_dir=config.cache_dir,
        read=read_any_config,
        max_model_bytes=max_model_bytes,
    )


def block_tensors(checkpoint: Checkpoint, span: Span) -> list[str]:
    """Names of the checkpoint's tensors in these blocks, or in all pieces of a network.

    Raises `CorruptCheckpointError`.
    """
    if not is_language_model(checkpoint.folder, name=checkpoint.name):
        return list(checkpoint.tensors)
    skeleton = Skeleton(checkpoint)
    return skeleton.source_names(skeleton.block_names(span))


def describe_model(checkpoint: Checkpoint) -> tuple[ModelShape, ModelId]:
    """What the blocks of a model take, and its id. Blocks the thread.

    Quantizations that cannot hold the model are left out. Raises as `compute_block_bytes` does, and
    for a network that is no language model as `make_network` does.
    """
    dtype = checkpoint.resolve_dtype("auto")
    if not is_language_model(checkpoint.folder, name=checkpoint.name):
        return _describe_network(checkpoint, dtype)
    sizes: dict[PoolQuantType, tuple[int, ...]] = {"none": compute_block_bytes(checkpoint, dtype)}
    for quant_type in QUANT_TYPES[1:]:
        with suppress(UnsupportedModelError):
            sizes[quant_type] = compute_block_bytes(checkpoint, dtype, quant_type)
    work = {
        quant_type: compute_block_work(checkpoint, dtype, block_bytes, sizes["none"])
        for quant_type, block_bytes in sizes.items()
    }
    cache_tokens = min(PLANNED_CACHE_TOKENS, 4 * checkpoint.context_length)
    shape = ModelShape(
        checkpoint.name,
        sizes,
        work,
        cache_tokens,
        cache_tokens * cache_bytes_per_token(checkpoint, dtype),
        DTYPE_NAMES[dtype],
        _head_work(checkpoint, dtype),
        str(checkpoint.config.model_type),
        _block_files(checkpoint),
    )
    return shape, compute_model_id(checkpoint)


def _describe_network(checkpoint: Checkpoint, dtype: torch.dtype) -> tuple[ModelShape, ModelId]:
    """Pieces are blocks, and a request of the usual size is a token."""
    network, plan = make_network(checkpoint, dtype, RequestSizes())
    graph = network.captured.graph
    operations, runs = graph.operations, graph.runs
    shape = ModelShape(
        checkpoint.name,
        {"none": tuple(network.count_weight_bytes(piece) for piece in plan.pieces)},
        {
            "none": tuple(
                BlockWork(
                    sum(operations[each].moved_bytes * runs[each] for each in piece),
                    sum(operations[each].flop * runs[each] for each in piece),
                )
                for piece in plan.pieces
            )
        },
        cache_tokens=1,
        cache_bytes=0,
        dtype=DTYPE_NAMES[dtype],
        family=str(checkpoint.config.model_type),
    )
    return shape, compute_plan_id(checkpoint, plan)


def _head_work(checkpoint: Checkpoint, dtype: torch.dtype) -> BlockWork:
    weights = checkpoint.config.vocab_size * checkpoint.config.hidden_size
    return BlockWork(weights * dtype.itemsize, 2 * weights)


def _block_files(checkpoint: Checkpoint) -> tuple[Mapping[str, int], ...]:
    skeleton = Skeleton(checkpoint)
    spans = (Span(index, index + 1) for index in range(checkpoint.num_blocks))
    names = (skeleton.source_names(skeleton.block_names(span)) for span in spans)
    files = tuple(checkpoint.download_sizes(each) for each in names)
    return files if any(files) else ()
