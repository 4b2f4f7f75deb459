"""Tensors that codecs are tried on."""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("random", "zeros", "structured", "outliers", "ranges", "tiny", "large", "alike")
CODECS = (
    "none",
    "bfloat16",
    "float16",
    "blockwise8",
    "blockwise8:256:0",
    "int8",
    "int8:16:2",
    "int8:64:0",
    "int4",
    "int4:16:8",
    "int4:32:0",
    "int4:256:2",
    "lossless",
)
LOSSY = tuple(codec for codec in CODECS if codec not in ("none", "lossless"))


def values(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Finite values that every codec takes."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(shape, generator=generator)
    uniform = torch.rand(shape, generator=generator)
    match kind:
        case "zeros":
            made.zero_()
        case "structured":
            made = torch.arange(made.numel()).view(shape) * 0.25 - 7
        case "outliers" if made.ndim and made.numel():
            # The same few channels for all tokens, and one token where one is larger still.
            made[..., ::37] *= 1000
            made.view(-1, shape[-1])[:1, -1:] *= 20_000
        case "ranges":
            made = made.sign() * 10 ** (uniform * 12 - 8)
        case "tiny":
            made = made * 10 ** (uniform * 10 - 45)
        case "large":
            # Beyond half of what float16 can hold.
            made = made.sign() * (60_000 - 20_000 * uniform)
        case "alike":
            made = torch.full(shape, 3.14159)
        case _:
            pass
    return made.clamp(-65_000, 65_000).to(dtype)
