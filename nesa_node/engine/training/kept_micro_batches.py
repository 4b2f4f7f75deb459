"""Micro-batches between their forward and their backward, and how much is kept of each.

R sequences, L tokens of each, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import Tensor

from nesa_node.engine.training.adapted_blocks import MicroBatch

Keep = Literal["input", "inputs", "activations"]
"""What is kept of a micro-batch: the span's input alone (its blocks run three times), the input of
each block (twice), or all activations (once)."""
KEEPS: tuple[Keep, ...] = get_args(Keep)


@dataclass(frozen=True, slots=True)
class KeptRoom:
    """Memory for micro-batches between forward and backward: at least the inputs of all."""

    nbytes: int
    tokens: int
    """Of all micro-batches that may be kept at once, at most."""
    token_bytes: Mapping[Keep, int]
    """What a token takes, by what is kept of its micro-batch."""


@dataclass(slots=True)
class KeptMicroBatch:
    """What a micro-batch's backward needs. Of each block its input and output, if they are kept."""

    batch: MicroBatch
    hidden_RLD: Tensor
    keep: Keep
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.hidden_RLD.nbytes + sum(each.nbytes for each in self.inputs[1:])

    @property
    def num_tokens(self) -> int:
        return self.hidden_RLD.shape[0] * self.hidden_RLD.shape[1]


class KeptMicroBatches(dict[int, KeptMicroBatch]):
    """By number, those that have gone forward."""

    def __init__(self, keep: Keep | KeptRoom, *, most: Keep) -> None:
        """`keep`: of each, or the room for all; `most` is what may be kept of any."""
        super().__init__()
        self._keep = keep
        self._most = KEEPS.index(most)

    @property
    def nbytes(self) -> int:
        """Of hidden states, without the blocks' activations."""
        return sum(each.nbytes for each in self.values())

    def choose_keep(self, tokens: int) -> Keep:
        """What to keep of one more micro-batch: as much as leaves room for the inputs of the rest.

        At least its input, room or not.
        """
        if not isinstance(self._keep, KeptRoom):
            return KEEPS[min(self._most, KEEPS.index(self._keep))]
        room, left, later = self._keep, self._keep.nbytes, self._keep.tokens - tokens
        for each in self.values():
            left -= each.num_tokens * room.token_bytes[each.keep]
            later -= each.num_tokens
        left -= max(later, 0) * room.token_bytes["input"]
        keeps = KEEPS[: self._most + 1]
        fitting = [keep for keep in keeps if tokens * room.token_bytes[keep] <= left]
        return fitting[-1] if fitting else "input"
