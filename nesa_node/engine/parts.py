"""Loading parts of a model: a span of blocks, and the two ends."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nesa_node.core.errors import CorruptCheckpointError
from nesa_node.core.span import Span
from nesa_node.engine.blocks import Blocks, sliced_decoder
from nesa_node.engine.checkpoint import Checkpoint
from nesa_node.engine.ends import Embedder, EmbeddingModules, Head
from nesa_node.engine.progress import Progress
from nesa_node.engine.skeleton import Skeleton

LM_HEAD = "lm_head"


class _NoPositions(nn.Module):
    """Adds nothing, where a decoder adds learned positions that the embedder has added already."""

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
    progress: Progress | None = None,
) -> Blocks:
    """Load blocks `span` of a model, their tensors only. Blocks the thread.

    Peak memory is the span's plus the largest tensor's. Raises `CorruptCheckpointError` (a tensor
    is missing or misshapen), what `Checkpoint.fetch` raises, and `ValueError` for a span that is
    empty or not the model's.
    """
    if not len(span) or span.end > checkpoint.num_blocks:
        raise ValueError(f"{checkpoint.name} has blocks 0:{checkpoint.num_blocks}, not {span}")
    device = torch.device(device)
    skeleton = Skeleton(checkpoint)
    family = skeleton.family
    decoder: Any = sliced_decoder(skeleton.decoder, family.layers, span)
    for name in (family.embedding, family.projection_in):
        if name is not None:
            decoder._modules[name] = None
    if family.positions is not None:
        decoder._modules[family.positions] = _NoPositions(dtype, device)
    if family.embedding_norm is not None:
        decoder._modules[family.embedding_norm] = nn.Identity()
    for name in family.final:
        if decoder._modules.get(name) is not None:
            decoder._modules[name] = nn.Identity()
    skeleton.make_buffers(decoder, device)
    skeleton.load(
        skeleton.block_names(span),
        dtype=dtype,
        device=device,
        task=f"loading blocks {span}",
        progress=progress,
    )
    skeleton.require_complete(decoder)
    return Blocks(
        decoder,
        family.layers,
        span,
        heads=family.cache_heads(checkpoint.config),
        hidden_size=int(checkpoint.config.hidden_size),
        context_length=checkpoint.context_length,
        dtype=dtype,
        device=device,
    )


def load_embedder(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> Embedder:
    """Load what comes before the blocks. Raises as `load_blocks` does."""
    return _load_embedder(Skeleton(checkpoint), dtype, torch.device(device), progress)


def load_head(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> Head:
    """Load what comes after the blocks. Raises as `load_blocks` does."""
    return _load_head(Skeleton(checkpoint), dtype, torch.device(device), progress, shared=None)


def load_ends(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> tuple[Embedder, Head]:
    """Load both ends; a weight that they share is in memory once. Raises as `load_blocks` does."""
    device = torch.device(device)
    skeleton = Skeleton(checkpoint)
    embedder = _load_embedder(skeleton, dtype, device, progress)
    shared = skeleton.get(f"{skeleton.family.decoder}.{skeleton.family.embedding}.weight")
    return embedder, _load_head(skeleton, dtype, device, progress, shared=shared)


def _load_embedder(
    skeleton: Skeleton, dtype: torch.dtype, device: torch.device, progress: Progress | None
) -> Embedder:
    family, decoder = skeleton.family, skeleton.decoder
    weight = f"{family.decoder}.{family.embedding}.weight"
    others = (family.projection_in, family.positions, family.embedding_norm)
    modules = {name: getattr(decoder, name) for name in others if name is not None}
    tokens: nn.Module = getattr(decoder, family.embedding)
    names = [
        name
        for attribute, module in modules.items()
        if module is not None
        for name in skeleton.module_names(f"{family.decoder}.{attribute}")
    ]
    skeleton.make_buffers(tokens, device)
    # A checkpoint of tied weights may have kept either name.
    only_head = not skeleton.has(weight) and skeleton.tied.get(f"{LM_HEAD}.weight") == weight
    stored = f"{LM_HEAD}.weight" if only_head else weight
    skeleton.load(
        [stored, *names], dtype=dtype, device=device, task="loading embeddings", progress=progress
    )
    if only_head:
        skeleton.put(weight, skeleton.get(stored))
    return Embedder(
        EmbeddingModules(
            tokens=tokens,
            projection_in=modules.get(family.projection_in or ""),
            positions=modules.get(family.positions or ""),
            norm=modules.get(family.embedding_norm or ""),
        ),
        vocab_size=int(skeleton.get(weight).shape[0]),
        context_length=skeleton.checkpoint.context_length,
    )


def _load_head(
    skeleton: Skeleton,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None,
    *,
    shared: Tensor | None,
) -> Head:
    family, decoder = skeleton.family, skeleton.decoder
    final = [name for name in family.final if getattr(decoder, name) is not None]
    names = [n for name in final for n in skeleton.module_names(f"{family.decoder}.{name}")]
    weight = f"{LM_HEAD}.weight"
    source = skeleton.tied.get(weight)
    if skeleton.has(weight):
        stored = weight
    elif source is not None:
        stored = source
    else:
        raise CorruptCheckpointError(f"{skeleton.checkpoint.name} lacks the tensors {weight}")
    names += [name for name in skeleton.module_names(LM_HEAD) if name != weight]
    reuse = shared is not None and (stored == source or _same_source(skeleton, stored, source))
    if not reuse:
        names.append(stored)
    skeleton.load(names, dtype=dtype, device=device, task="loading the head", progress=progress)
    skeleton.put(weight, shared if reuse and shared is not None else skeleton.get(stored))
    lm_head = skeleton.model.get_submodule(LM_HEAD)
    assert isinstance(lm_head, nn.Linear)
    return Head(
        [getattr(decoder, name) for name in final],
        lm_head,
        softcap=getattr(skeleton.checkpoint.config, "final_logit_softcapping", None),
    )


def _same_source(skeleton: Skeleton, stored: str, source: str | None) -> bool:
    """Return whether the embedding was read from the head's own tensor, for want of another."""
    return source is not None and stored != source and not skeleton.has(source)
