"""Loaders of a span of blocks."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import CacheDtype, QuantType
from nesa_node.engine.cache.paged_attention import ATTENTION_NAME as PAGED_ATTENTION
from nesa_node.engine.kernels.linear import (
    iterate_modules,
    load_gemv,
    replace_linear_layers,
)
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.fused_decoder import FusedDecoder
from nesa_node.engine.model.splice import AbsentModule, slice_decoder
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.engine.weights.files import Progress
from nesa_node.engine.weights.skeleton import EmptyModel, Skeleton


class _ZeroPositions(nn.Module):
    """Stand-in for learned positions in a decoder: zero, since the embedder has added them."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._zero = torch.zeros((), dtype=dtype, device=device)

    def forward(self, *_: object, **__: object) -> Tensor:
        return self._zero


def load_blocks(
    checkpoint: Checkpoint,
    span: Span,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    quant_type: QuantType = "none",
    cache_dtype: CacheDtype = "auto",
    progress: Progress | None = None,
) -> ModelBlocks:
    """Load the tensors of blocks `span` of a model. Blocks the thread.

    Linear layers and experts are held as `quant_type` says, KV caches as `cache_dtype` does,
    everything else in `dtype`, which is also that of activations. Peak memory is the span's plus
    that of the largest tensor, as stored in the checkpoint. Raises `CorruptCheckpointError` (a
    tensor is missing or misshapen), what `Checkpoint.fetch` raises, `UnsupportedModelError` for
    weights that cannot be quantized so, and `ValueError` for a span that is empty or outside the
    model.
    """
    if not len(span) or span.end > checkpoint.num_blocks:
        raise ValueError(f"{checkpoint.name} has blocks 0:{checkpoint.num_blocks}, not {span}")
    device = torch.device(device)
    if device.type == "cpu" and quant_type == "none":
        # Compile while this thread reads the weights; the result is cached for `Linear`.
        Thread(target=load_gemv, args=(dtype,), daemon=True).start()
    skeleton = Skeleton(checkpoint)
    decoder = detach_served_span(skeleton, span, dtype=dtype, device=device)
    skeleton.load(
        skeleton.block_names(span),
        dtype=dtype,
        device=device,
        task=f"loading blocks {span}",
        quant_type=quant_type,
        progress=progress,
    )
    return finish_blocks(
        skeleton, decoder, span, dtype=dtype, device=device, cache_dtype=cache_dtype
    )


def finish_blocks(
    model: EmptyModel,
    decoder: Any,
    span: Span,
    *,
    dtype: torch.dtype,
    device: torch.device,
    cache_dtype: CacheDtype = "auto",
) -> ModelBlocks:
    """Blocks of a `detach_served_span` decoder, all of whose weights are loaded."""
    model.require_complete(decoder)
    weight_bytes = _count_bytes(decoder)
    if model.family.has_llama_layers:
        decoder = FusedDecoder(decoder, model.checkpoint.context_length)
    replace_linear_layers(decoder)
    return ModelBlocks(
        decoder,
        model.checkpoint,
        span,
        weight_bytes=weight_bytes,
        dtype=dtype,
        device=device,
        cache_dtype=cache_dtype,
    )


def _count_bytes(root: nn.Module) -> int:
    weights = {
        id(weight): weight.nbytes
        for module in iterate_modules(root)
        for weight in module._parameters.values()
        if weight is not None
    }
    return sum(weights.values())


def load_blocks_without_linear_layers(
    checkpoint: Checkpoint,
    span: Span,
    replace: Callable[[str, nn.Module], nn.Module],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> ModelBlocks:
    """Load blocks `span` with other modules for their linear layers, whose weights are not read.

    `replace(path, layer)` makes the module at `path`; a bias that it has is loaded. Raises as
    `load_blocks` does.
    """
    device = torch.device(device)
    skeleton = Skeleton(checkpoint)
    names = []
    for name in skeleton.block_names(span):
        if (layer := skeleton.find_linear_layer(name)) is None:
            names.append(name)
        else:
            path = name.removesuffix(".weight")
            skeleton.model.set_submodule(path, replace(path, layer), strict=True)
    decoder = detach_served_span(skeleton, span, dtype=dtype, device=device)
    skeleton.load(names, dtype=dtype, device=device, task=f"loading blocks {span}")
    skeleton.require_complete(decoder)
    weight_bytes = _count_bytes(decoder)
    return ModelBlocks(
        decoder, checkpoint, span, weight_bytes=weight_bytes, dtype=dtype, device=device
    )


def detach_served_span(
    model: EmptyModel, span: Span, *, dtype: torch.dtype, device: torch.device
) -> Any:
    """`detach_span` with attention over pages, where rows can be packed."""
    if model.family.packs_rows:
        model.model.config._attn_implementation = PAGED_ATTENTION
    return detach_span(model, span, dtype=dtype, device=device)


def detach_span(model: EmptyModel, span: Span, *, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a decoder of the blocks `span`, without what comes before and after them.

    It takes `inputs_embeds` and returns the last block's raw output. Buffers that no checkpoint
    holds are made; weights are missing yet, and those that are loaded into `model` are its.
    """
    family = model.family
    decoder: Any = slice_decoder(model.decoder, family.layers_name, span)
    if family.tree is not None:
        absent = AbsentModule(int(decoder.config.hidden_size), dtype=dtype, device=device)
        for name in list(decoder._modules):
            # Tables of rotary frequencies are for layers; everything else is before or after them.
            if name != family.layers_name and "rotary" not in name and "rope" not in name:
                decoder._modules[name] = absent
        model.make_buffers(decoder, device)
        return decoder
    for name in (family.embedding, family.projection_in):
        if name is not None:
            decoder._modules[name] = None
    if family.positions is not None:
        decoder._modules[family.positions] = _ZeroPositions(dtype, device)
    if family.embedding_norm is not None:
        decoder._modules[family.embedding_norm] = nn.Identity()
    for name in family.final_modules:
        if decoder._modules.get(name) is not None:
            decoder._modules[name] = nn.Identity()
    model.make_buffers(decoder, device)
    return decoder
