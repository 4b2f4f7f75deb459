"""Loaders of a model's parts: a span of blocks, the embedding, the head."""

from __future__ import annotations

from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

from nesa_node.core.settings.choices import QuantType
from nesa_node.core.span import Span
from nesa_node.engine.cache.paged_attention import ATTENTION_NAME as PAGED_ATTENTION
from nesa_node.engine.kernels.linear import replace_linear_layers
from nesa_node.engine.kernels.matmul import load_gemv
from nesa_node.engine.model.blocks import ModelBlocks, slice_decoder
from nesa_node.engine.model.embedder_and_head import Embedder, EmbeddingModules, Head
from nesa_node.engine.model.fused_decoder import FusedDecoder
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.engine.weights.progress import Progress
from nesa_node.engine.weights.skeleton import Skeleton

LM_HEAD_PATH = "lm_head"


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
    progress: Progress | None = None,
) -> ModelBlocks:
    """Load the tensors of blocks `span` of a model. Blocks the thread.

    Linear layers are held as `quant_type` says, everything else in `dtype`, which is also that of
    activations. Peak memory is the span's plus that of the largest tensor, as stored in the
    checkpoint. Raises `CorruptCheckpointError` (a tensor is missing or misshapen), what
    `Checkpoint.fetch` raises, `UnsupportedModelError` for weights that cannot be quantized so, and
    `ValueError` for a span that is empty or outside the model.
    """
    if not len(span) or span.end > checkpoint.num_blocks:
        raise ValueError(f"{checkpoint.name} has blocks 0:{checkpoint.num_blocks}, not {span}")
    device = torch.device(device)
    if device.type == "cpu" and quant_type == "none":
        # Compile while this thread reads the weights; the result is cached for `Linear`.
        Thread(target=load_gemv, args=(dtype,), daemon=True).start()
    skeleton = Skeleton(checkpoint)
    family = skeleton.family
    if family.packs_rows:
        skeleton.model.config._attn_implementation = PAGED_ATTENTION
    decoder: Any = slice_decoder(skeleton.decoder, family.layers_name, span)
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
    skeleton.make_buffers(decoder, device)
    skeleton.load(
        skeleton.block_names(span),
        dtype=dtype,
        device=device,
        task=f"loading blocks {span}",
        quant_type=quant_type,
        progress=progress,
    )
    skeleton.require_complete(decoder)
    weight_bytes = sum(weight.nbytes for weight in decoder.parameters())
    if family.has_llama_layers:
        decoder = FusedDecoder(decoder, checkpoint.context_length)
    replace_linear_layers(decoder)
    return ModelBlocks(
        decoder,
        family.layers_name,
        span,
        heads=family.cache_heads(checkpoint.config),
        hidden_size=int(checkpoint.config.hidden_size),
        context_length=checkpoint.context_length,
        weight_bytes=weight_bytes,
        packs_rows=family.packs_rows,
        dtype=dtype,
        device=device,
    )


def embedder_and_head_names(skeleton: Skeleton) -> list[str]:
    """Return the names of the tensors that `load_embedder_and_head` loads."""
    return [*_embedder_names(skeleton), *_head_names(skeleton)]


def load_embedder_and_head(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> tuple[Embedder, Head]:
    """Load the embedding and the head; a tied weight is in memory once.

    Raises as `load_blocks` does.
    """
    device = torch.device(device)
    skeleton = Skeleton(checkpoint)
    embedder = _load_embedder(skeleton, dtype, device, progress)
    return embedder, _load_head(skeleton, dtype, device, progress)


def _embedder_names(skeleton: Skeleton) -> list[str]:
    family = skeleton.family
    parts = (family.embedding, family.projection_in, family.positions, family.embedding_norm)
    return [
        name
        for part in parts
        if part is not None
        for name in skeleton.module_names(f"{family.decoder}.{part}")
    ]


def _head_names(skeleton: Skeleton) -> list[str]:
    family = skeleton.family
    parts = [*(f"{family.decoder}.{part}" for part in family.final_modules), LM_HEAD_PATH]
    return [name for part in parts for name in skeleton.module_names(part)]


def _load_embedder(
    skeleton: Skeleton, dtype: torch.dtype, device: torch.device, progress: Progress | None
) -> Embedder:
    family, decoder = skeleton.family, skeleton.decoder
    tokens: nn.Module = getattr(decoder, family.embedding)
    others = (family.projection_in, family.positions, family.embedding_norm)
    modules = {name: getattr(decoder, name) for name in others if name is not None}
    skeleton.make_buffers(tokens, device)
    skeleton.load(
        _embedder_names(skeleton),
        dtype=dtype,
        device=device,
        task="loading embeddings",
        progress=progress,
    )
    return Embedder(
        EmbeddingModules(
            tokens=tokens,
            projection_in=modules.get(family.projection_in or ""),
            positions=modules.get(family.positions or ""),
            norm=modules.get(family.embedding_norm or ""),
        ),
        context_length=skeleton.checkpoint.context_length,
    )


def _load_head(
    skeleton: Skeleton, dtype: torch.dtype, device: torch.device, progress: Progress | None
) -> Head:
    family, decoder = skeleton.family, skeleton.decoder
    final = [name for name in family.final_modules if getattr(decoder, name) is not None]
    skeleton.load(
        _head_names(skeleton),
        dtype=dtype,
        device=device,
        task="loading the head",
        progress=progress,
    )
    lm_head = skeleton.model.get_submodule(LM_HEAD_PATH)
    assert isinstance(lm_head, nn.Linear)
    return Head(
        [getattr(decoder, name) for name in final],
        lm_head,
        softcap=getattr(skeleton.checkpoint.config, "final_logit_softcapping", None),
    )
