"""The parts of a model that stay with the client: embedding, final norm and head.

L tokens of one row, R rows of one token each, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nesa_node.engine.ends import Embedder


@dataclass(frozen=True, slots=True)
class Ends:
    """`embedder` and `head` in `dtype` on `device`; safe for several threads at once."""

    embedder: Embedder
    head: Callable[[torch.Tensor], torch.Tensor]
    """The last block's output [T, D] to logits [T, V]."""
    normed: Callable[[torch.Tensor], torch.Tensor]
    """The same to what the head's matrix is applied to, [T, D]."""
    dtype: torch.dtype
    device: torch.device
    hidden_size: int
    lm_head: torch.nn.Linear
    """The matrix of `head` alone, a module of torch's."""

    def embed(self, row_ids: Sequence[torch.Tensor], positions: Sequence[int]) -> torch.Tensor:
        """Hidden states [T, D] of each row's ids [L] (int64) from its position on, row by row."""
        rows = [
            self.embedder(ids_L, position)
            for ids_L, position in zip(row_ids, positions, strict=True)
            if ids_L.numel()
        ]
        if not rows:
            return torch.empty((0, self.hidden_size), dtype=self.dtype, device=self.device)
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def embed_each(self, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Hidden states [R, D] of one token of each of R rows, at its position there."""
        return self.embedder.each(
            torch.tensor(tokens, device=self.device), torch.tensor(positions, device=self.device)
        )
