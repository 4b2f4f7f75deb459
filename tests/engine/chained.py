"""A model cut into spans that run one after the other in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from nesa_node.core.errors import CacheFullError
from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import CacheDtype, ClientQuantType, QuantType
from nesa_node.engine.cache.pages import PageTable, pages_for
from nesa_node.engine.model import blocks as engine
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.embedder_and_head import load_embedder_and_head
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.engine.weights.hub import open_checkpoint

THIRDS = (Span(0, 2), Span(2, 4), Span(4, 6))


def open_local(folder: Path) -> Checkpoint:
    return open_checkpoint(str(folder), cache_dir=folder / "unused")


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected value."""
    return float((found - expected).abs().max() / expected.abs().max())


def new_row(blocks: ModelBlocks, tokens: int = 1024) -> PageTable:
    """An empty row in a pool of its own."""
    return blocks.new_pool(tokens).reserve(pages_for(tokens)).new_table()


def forward(blocks: ModelBlocks, hidden_LD: Tensor, row: PageTable) -> Tensor:
    """Run one row's next tokens."""
    row.reserve(row.length + len(hidden_LD))
    return blocks.forward(hidden_LD, [engine.RowChunk(row, len(hidden_LD))])


class Chain:
    """Weights only; each `Run` has its own caches."""

    def __init__(
        self,
        folder: Path,
        *,
        spans: Sequence[Span] = THIRDS,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        quant_type: QuantType = "none",
        client_quant_type: ClientQuantType = "none",
        cache_dtype: CacheDtype = "auto",
    ) -> None:
        checkpoint = open_local(folder)
        self.embedder, self.head = load_embedder_and_head(
            checkpoint, dtype=dtype, device=device, quant_type=client_quant_type
        )
        self.blocks = [
            load_blocks(
                checkpoint,
                span,
                dtype=dtype,
                device=device,
                quant_type=quant_type,
                cache_dtype=cache_dtype,
            )
            for span in spans
        ]


class Run:
    """One sequence. Positions follow from what was fed before."""

    def __init__(self, chain: Chain, *, blocks: Sequence[ModelBlocks] | None = None) -> None:
        self.chain = chain
        self.blocks = list(chain.blocks if blocks is None else blocks)
        self.tables = [new_row(span) for span in self.blocks]
        self.length = 0

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Return logits_LV of these tokens, which follow those before."""
        hidden_LD = self.chain.embedder(torch.tensor(tokens), self.length)
        for span, table in zip(self.blocks, self.tables, strict=True):
            hidden_LD = forward(span, hidden_LD, table)
        self.length += len(tokens)
        return self.chain.head(hidden_LD)

    def rollback(self, length: int) -> None:
        for table in self.tables:
            table.truncate(length)
        self.length = length

    def greedy(self, prompt: Sequence[int], count: int, *, chunk: int | None = None) -> list[int]:
        for start in range(0, len(prompt), chunk or len(prompt)):
            logits_LV = self.step(prompt[start : start + (chunk or len(prompt))])
        new = [int(logits_LV[-1].argmax())]
        while len(new) < count:
            new.append(int(self.step(new[-1:])[-1].argmax()))
        return new


def fork(table: PageTable) -> PageTable:
    """A row with the same tokens, which shares pages until either row writes to them."""
    with table.pool._lock:
        twin = table.reservation.new_table()
        try:
            twin.adopt_pages(table._pages[: pages_for(table.length)], table.length)
        except CacheFullError:
            twin.close()
            raise
        return twin
