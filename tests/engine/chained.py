"""A model cut into spans that run one after the other in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from nesa_node.core.span import Span
from nesa_node.engine.blocks import Blocks
from nesa_node.engine.checkpoint import Checkpoint, open_checkpoint
from nesa_node.engine.parts import load_blocks, load_ends

THIRDS = (Span(0, 2), Span(2, 4), Span(4, 6))


def open_local(folder: Path) -> Checkpoint:
    return open_checkpoint(str(folder), cache_dir=folder / "unused")


class Chain:
    """Weights only; each `Run` has its own caches."""

    def __init__(
        self,
        folder: Path,
        *,
        spans: Sequence[Span] = THIRDS,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        checkpoint = open_local(folder)
        self.embedder, self.head = load_ends(checkpoint, dtype=dtype, device=device)
        self.blocks = [load_blocks(checkpoint, span, dtype=dtype, device=device) for span in spans]


class Run:
    """One sequence. Positions follow from what was fed before."""

    def __init__(self, chain: Chain, *, blocks: Sequence[Blocks] | None = None) -> None:
        self.chain = chain
        self.blocks = list(chain.blocks if blocks is None else blocks)
        self.caches = [span.new_cache() for span in self.blocks]
        self.length = 0

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Return logits_LV of these tokens, which follow those before."""
        hidden_LD = self.chain.embedder(torch.tensor(tokens), self.length)
        for span, cache in zip(self.blocks, self.caches, strict=True):
            hidden_LD = span.forward(hidden_LD, cache)
        self.length += len(tokens)
        return self.chain.head(hidden_LD)

    def rollback(self, length: int) -> None:
        for cache in self.caches:
            cache.truncate(length)
        self.length = length

    def greedy(self, prompt: Sequence[int], count: int, *, chunk: int | None = None) -> list[int]:
        for start in range(0, len(prompt), chunk or len(prompt)):
            logits_LV = self.step(prompt[start : start + (chunk or len(prompt))])
        new = [int(logits_LV[-1].argmax())]
        while len(new) < count:
            new.append(int(self.step(new[-1:])[-1].argmax()))
        return new
