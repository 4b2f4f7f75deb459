"""What a sender keeps of a session, to send it again to the replacement of a dead receiver.

T packed tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from nesa_node.compression import tensors
from nesa_node.compression.tensors import TensorMeta
from nesa_node.swarm.messages import RowSlice, Want


@dataclass(frozen=True, slots=True)
class Kept:
    """One step as it was sent: its tokens by row, and the encoded hidden states [T, D]."""

    step: int
    rows: tuple[RowSlice, ...]
    want: Want
    meta: TensorMeta
    payload: memoryview | bytearray
    via: tuple[str, ...] = ()
    """How what it was computed from had travelled."""

    def tensor(self) -> torch.Tensor:
        """The hidden states [T, D]; shares memory with `payload`, do not write to it."""
        return tensors.decode(self.meta, self.payload, max_bytes=self.meta.most_nbytes)


class Outbox:
    """Sent steps in order. A rollback cuts them; what a receiver lacks can be read back."""

    def __init__(self) -> None:
        self._kept: list[Kept] = []

    @property
    def nbytes(self) -> int:
        return sum(len(kept.payload) for kept in self._kept)

    def append(self, kept: Kept) -> None:
        self._kept.append(kept)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget every token at or beyond `lengths[row]`."""
        zeros = [0] * len(lengths)
        clipped = (clip(kept, zeros, lengths) for kept in self._kept)
        self._kept = [kept for kept in clipped if kept is not None]

    def reorder(self, sources: Sequence[int]) -> None:
        """Let each row have been sent what row `sources[row]` was."""
        copies = (_reordered(kept, sources) for kept in self._kept)
        self._kept = [kept for kept in copies if kept is not None]

    def since(self, lengths: Sequence[int], until: Sequence[int]) -> Iterator[Kept]:
        """Steps, or the parts of them, with tokens `lengths[row] <= position < until[row]`."""
        for kept in tuple(self._kept):
            part = clip(kept, lengths, until)
            if part is not None:
                yield part


def clip(kept: Kept, start: Sequence[int], end: Sequence[int]) -> Kept | None:
    """The part of `kept` within `start[row] <= position < end[row]`; None if nothing is.

    A step that lies within is returned as it is, its bytes untouched.
    """
    if _lies_within(kept, start, end):
        return kept
    rows: list[RowSlice] = []
    picks: list[tuple[int, int]] = []
    offset = 0
    for part in kept.rows:
        first = max(part.position, start[part.row])
        last = min(part.position + part.count, end[part.row])
        if first < last:
            rows.append(RowSlice(part.row, first, last - first))
            picks.append((offset + first - part.position, last - first))
        offset += part.count
    if not rows:
        return None
    return _picked(kept, rows, picks)


def _lies_within(kept: Kept, start: Sequence[int], end: Sequence[int]) -> bool:
    # A loop: `all` takes three times as long.
    for part in kept.rows:
        if part.position < start[part.row] or part.position + part.count > end[part.row]:
            return False
    return True


def _reordered(kept: Kept, sources: Sequence[int]) -> Kept | None:
    """What of `kept` the rows would have been sent; None if nothing."""
    rows: list[RowSlice] = []
    picks: list[tuple[int, int]] = []
    for row, source in enumerate(sources):
        offset = 0
        for part in kept.rows:
            if part.row == source:
                rows.append(RowSlice(row, part.position, part.count))
                picks.append((offset, part.count))
            offset += part.count
    return _picked(kept, rows, picks) if rows else None


def _picked(kept: Kept, rows: Sequence[RowSlice], picks: Sequence[tuple[int, int]]) -> Kept:
    """A step of `rows`, whose tokens are those of `kept` at each (offset, count).

    They are not compressed again, which could change them.
    """
    tensor_TD = kept.tensor()
    parts_TD = torch.cat([tensor_TD[at : at + count] for at, count in picks])
    meta, payload = tensors.encode(parts_TD)
    return Kept(kept.step, tuple(rows), kept.want, meta, payload, kept.via)
