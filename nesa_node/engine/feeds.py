"""What a span is fed, and what comes of it.

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
    """Hidden states [T, D] that pass through a span, at once or piece by piece."""

    hidden: HiddenStates
    dtype: torch.dtype
    """Of the output."""
    output: HiddenStates | None = None
    """Complete when all pieces have passed."""

    def put(self, start: int, end: int, output_TD: Tensor) -> None:
        """Take the output of the tokens `start:end`, on the CPU."""
        output_TD = output_TD.to(self.dtype)
        # What is kept of one feed must not keep the others' memory.
        is_all = end - start == self.hidden.tokens
        if is_all and output_TD.untyped_storage().nbytes() == output_TD.nbytes:
            self.output = HiddenStates.of(output_TD)
        else:
            self._room().tensor_TD[start:end] = output_TD

    def place(self, start: int, end: int) -> Range:
        """Where the output of the tokens `start:end` is to be written."""
        return self._room().range(start, end)

    def _room(self) -> HiddenStates:
        if self.output is None:
            self.output = HiddenStates.room(self.hidden.meta.shape, self.dtype)
        return self.output


class Piece(Protocol):
    """The packed tokens `start:end` of a feed."""

    start: int
    end: int

    @property
    def feed(self) -> Feed: ...
