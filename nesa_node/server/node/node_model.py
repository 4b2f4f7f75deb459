"""The model that a daemon serves, and how it runs it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import ModelId
from nesa_node.core.settings.choices import QuantType
from nesa_node.core.settings.models import NodeConfig, secret_text
from nesa_node.engine.kernels.threads import fix_threads
from nesa_node.engine.model.devices import choose_device
from nesa_node.engine.weights.checkpoint import Checkpoint, compute_model_id
from nesa_node.engine.weights.hub import open_checkpoint


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
    disk = None if config.max_disk_gib is None else int(config.max_disk_gib * (1 << 30))
    checkpoint = open_checkpoint(
        config.model,
        revision=config.revision,
        token=secret_text(config.token),
        cache_dir=config.cache_dir,
        max_disk_bytes=disk,
    )
    return NodeModel(
        checkpoint=checkpoint,
        model_id=compute_model_id(checkpoint),
        dtype=checkpoint.resolve_dtype(config.torch_dtype),
        quant_type=config.quant_type,
        device=_choose_device(config.device, config.quant_type),
    )


def _choose_device(name: str, quant_type: QuantType) -> torch.device:
    """Raises `ConfigError` for a device that is missing or cannot compute with these weights."""
    device = choose_device(name)
    if device.type == "mps" and quant_type != "none":
        raise ConfigError(f"--quant-type {quant_type} needs --device cpu or cuda")
    return device
