"""Parts of a model that run in the client: embedding, final norm and head, with batching.

L tokens of one row, R rows of one token each, T packed tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nesa_node.engine.ends import Embedder


@dataclass(frozen=True, slots=True)
class Ends:
    """Embedding, final norm and head in `dtype` on `device`. Thread-safe."""

    embedder: Embedder
    head: Callable[[torch.Tensor], torch.Tensor]
    """Logits [T, V] of the last block's output [T, D]."""
    normed: Callable[[torch.Tensor], torch.Tensor]
    """Final norm alone: the head's input [T, D] of the last block's output [T, D]."""
    dtype: torch.dtype
    device: torch.device
    hidden_size: int
    lm_head: torch.nn.Linear
    """The head's matrix as a torch module."""

    def embed(self, row_ids: Sequence[torch.Tensor], positions: Sequence[int]) -> torch.Tensor:
        """Embed each row's ids [L] (int64) from its position on; hidden states [T, D] by row."""
        rows = [
            self.embedder(ids_L, position)
            for ids_L, position in zip(row_ids, positions, strict=True)
            if ids_L.numel()
        ]
        if not rows:
            return torch.empty((0, self.hidden_size), dtype=self.dtype, device=self.device)
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def embed_each(self, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Embed one token of each of R rows at its position; hidden states [R, D]."""
        return self.embedder.each(
            torch.tensor(tokens, device=self.device), torch.tensor(positions, device=self.device)
        )
