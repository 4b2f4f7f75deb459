"""Texts of a micro-batch: packed without padding on the wire, in rows where blocks run.

T tokens of all texts, R rows, L tokens of the longest row, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nesa_node.core.errors import ProtocolError
from nesa_node.engine.training.adapted_blocks import MicroBatch


@dataclass(frozen=True, slots=True)
class TextLayout:
    """Lengths of the texts of each row. Texts share a row only where there is one row.

    Padding follows the text of a row.
    """

    texts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        """Raises `ProtocolError("bad_rows")` for several rows of several texts."""
        if len(self.texts) > 1 and any(len(row) != 1 for row in self.texts):
            raise ProtocolError("bad_rows", "texts share a row only where it is the only one")

    @property
    def row_lengths(self) -> tuple[int, ...]:
        return tuple(map(sum, self.texts))

    @property
    def num_tokens(self) -> int:
        return sum(self.row_lengths)

    @property
    def padded_tokens(self) -> int:
        """Tokens with padding."""
        return len(self.texts) * max(self.row_lengths)

    @property
    def is_padded(self) -> bool:
        return self.padded_tokens != self.num_tokens

    def make_batch(self, seed: int) -> MicroBatch:
        """What blocks need to run these texts. `seed` is that of dropout."""
        mask_RL = positions_RL = None
        if self.is_padded:
            lengths_R1 = torch.tensor(self.row_lengths).unsqueeze(1)
            mask_RL = (torch.arange(max(self.row_lengths)) < lengths_R1).long()
        if len(self.texts[0]) > 1:
            positions_RL = torch.cat([torch.arange(length) for length in self.texts[0]])[None]
        return MicroBatch(seed, mask_RL, positions_RL)

    def to_rows(self, packed_TD: Tensor) -> Tensor:
        """Return [R, L, D] with zeros for padding; a view of [T, D] where there is none."""
        rows, columns = len(self.texts), max(self.row_lengths)
        if not self.is_padded:
            return packed_TD.view(rows, columns, *packed_TD.shape[1:])
        padded_RLD = packed_TD.new_zeros(rows, columns, *packed_TD.shape[1:])
        for row, part_LD in enumerate(torch.split(packed_TD, list(self.row_lengths))):
            padded_RLD[row, : len(part_LD)] = part_LD
        return padded_RLD

    def from_rows(self, rows_RLD: Tensor) -> Tensor:
        """Return the texts' tokens [T, D] of [R, L, D]."""
        if not self.is_padded:
            return rows_RLD.reshape(-1, *rows_RLD.shape[2:])
        return torch.cat([row_LD[:n] for row_LD, n in zip(rows_RLD, self.row_lengths, strict=True)])


def plain_layout(lengths: Sequence[int]) -> TextLayout:
    """Layout of one text in each row."""
    return TextLayout(tuple((length,) for length in lengths))
