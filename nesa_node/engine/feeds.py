"""Input and output buffers of a step through a span.

T packed tokens, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nesa_node.compression.hidden_states import HiddenStates, Range


@dataclass(eq=False, slots=True)
class Feed:
    """Input [T, D] and output of a step through a span, which may run in several slices."""

    hidden: HiddenStates
    dtype: torch.dtype
    """Of the output."""
    output: HiddenStates | None = None
    """Complete when all slices have run."""

    def put(self, start: int, end: int, output_TD: Tensor) -> None:
        """Store the output of tokens `start:end`, which is on the CPU."""
        output_TD = output_TD.to(self.dtype)
        # A slice of a larger batch's storage is copied, so that keeping it does not keep the whole
        # batch.
        is_all = end - start == self.hidden.tokens
        if is_all and output_TD.untyped_storage().nbytes() == output_TD.nbytes:
            self.output = HiddenStates.of(output_TD)
        else:
            self._room().tensor_TD[start:end] = output_TD

    def place(self, start: int, end: int) -> Range:
        """Memory for the output of tokens `start:end`."""
        return self._room().range(start, end)

    def _room(self) -> HiddenStates:
        if self.output is None:
            self.output = HiddenStates.room(self.hidden.meta.shape, self.dtype)
        return self.output


class Piece(Protocol):
    """Tokens `start:end` of a `Feed`, packed into a batch."""

    start: int
    end: int

    @property
    def feed(self) -> Feed: ...
