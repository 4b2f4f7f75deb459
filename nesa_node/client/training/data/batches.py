"""The order of training examples, and the micro-batches that they make.

R rows of a micro-batch, L tokens of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from nesa_node.client.training.data.examples import IGNORED, TrainingExample
from nesa_node.core.errors import ConfigError

_OPEN_ROWS = 64
"""Rows in which a packed text may find room: what bounds the time to pack many."""
MAX_SEED = (1 << 63) - 1
_VIRTUAL = {"input_ids": 0, "attention_mask": 1, "labels": IGNORED}
"""What a virtual token has in the tensors of a batch: a place, and no target."""


class _Stream(IntEnum):
    """Uses of one seed, which draw different numbers."""

    PACKING = 0
    EPOCH = 1
    VALIDATION = 2


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatchData:
    """Tokens of one forward. Padding has id 0 and stands at the right of a row only."""

    ids_RL: Tensor
    """int64, on the CPU."""
    labels_RL: Tensor
    """int64, on the CPU, not shifted: what position i - 1 predicts. `IGNORED` also for padding, and
    for the first token of each text, which nothing of its own text predicts but virtual tokens."""
    text_lengths: tuple[tuple[int, ...], ...]
    """For each row the lengths of its texts, one after the other from the row's beginning."""
    num_targets: int
    """Labels that are not ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _VirtualTokens:
    num_virtual_tokens: int = 0
    """That a session puts before each text: they take room, and predict its first token."""


@dataclass(frozen=True, slots=True)
class PackedLayout(_VirtualTokens):
    """A micro-batch is one row of whole texts, of at most `max_tokens` tokens together.

    Texts are packed once, in an order drawn from the seed, each into the first row with room among
    the last `_OPEN_ROWS`; then rows are what is shuffled.
    """

    max_tokens: int

    def __post_init__(self) -> None:
        """Raises `ConfigError`."""
        if self.max_tokens < 1:
            raise ConfigError(f"a packed row needs at least one token, got {self.max_tokens}")
        if self.num_virtual_tokens < 0:
            raise ConfigError(f"num_virtual_tokens is negative: {self.num_virtual_tokens}")


@dataclass(frozen=True, slots=True)
class PaddedLayout(_VirtualTokens):
    """A micro-batch is `rows` texts, one in each row, padded at the right to the longest."""

    rows: int

    def __post_init__(self) -> None:
        """Raises `ConfigError`."""
        if self.rows < 1:
            raise ConfigError(f"a micro-batch needs at least one row, got {self.rows}")


class BatchOrder:
    """Micro-batches of all steps. A step's depend on the arguments and its number alone.

    Each epoch has every example once, in an order of its own. Its last step may have fewer
    micro-batches than the rest, and the last one of these, if it is padded, fewer rows. A training
    that is restored at step n goes on with the batches that it would have had.
    """

    def __init__(
        self,
        examples: Sequence[TrainingExample],
        layout: PackedLayout | PaddedLayout,
        *,
        seed: int,
        micro_batches_per_step: int,
    ) -> None:
        """Raises `ConfigError` for numbers out of range, and an example that fits into no row."""
        _check_seed(seed)
        if micro_batches_per_step < 1:
            raise ConfigError(
                f"a step needs at least one micro-batch, got {micro_batches_per_step}"
            )
        if not examples:
            raise ConfigError("there are no examples to train on: give a file with records")
        self._examples = examples
        self._lengths = [len(example) for example in examples]
        if not all(self._lengths):
            raise ConfigError("an example has no tokens: remove it")
        self._layout = layout
        self._seed = seed
        self._micro_batches_per_step = micro_batches_per_step
        self._packed = self._pack(layout) if isinstance(layout, PackedLayout) else None
        self._planned: tuple[int, list[Sequence[int]]] = (0, self._plan_epoch(0))

    @property
    def micro_batches_per_epoch(self) -> int:
        return len(self._planned[1])

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.micro_batches_per_epoch // self._micro_batches_per_step)

    def step(self, number: int) -> list[MicroBatchData]:
        """Micro-batches of step `number`, counted from 0 through all epochs."""
        return [self._build(group) for group in self._find_groups(number)]

    def num_tokens(self, number: int) -> int:
        """Tokens of step `number`, without padding."""
        return sum(self._lengths[index] for group in self._find_groups(number) for index in group)

    def _find_groups(self, number: int) -> list[Sequence[int]]:
        """The examples of each micro-batch of a step."""
        if number < 0:
            raise ValueError(f"steps are counted from 0, got {number}")
        epoch, index = divmod(number, self.steps_per_epoch)
        if self._planned[0] != epoch:
            self._planned = (epoch, self._plan_epoch(epoch))
        start = index * self._micro_batches_per_step
        return self._planned[1][start : start + self._micro_batches_per_step]

    def _plan_epoch(self, epoch: int) -> list[Sequence[int]]:
        if self._packed is not None:
            order = _draw_order(len(self._packed), self._seed, _Stream.EPOCH, epoch)
            return [self._packed[index] for index in order.tolist()]
        assert isinstance(self._layout, PaddedLayout)
        indexes = _draw_order(len(self._examples), self._seed, _Stream.EPOCH, epoch).tolist()
        rows = self._layout.rows
        return [indexes[start : start + rows] for start in range(0, len(indexes), rows)]

    def _pack(self, layout: PackedLayout) -> list[Sequence[int]]:
        longest = max(self._lengths) + layout.num_virtual_tokens
        if longest > layout.max_tokens:
            raise ConfigError(
                f"an example has {longest} tokens, and a packed row holds {layout.max_tokens}: "
                "allow longer rows, or cut examples to that length"
            )
        rows: list[list[int]] = []
        rooms: list[int] = []
        for index in _draw_order(len(self._examples), self._seed, _Stream.PACKING).tolist():
            length = self._lengths[index] + layout.num_virtual_tokens
            first = max(0, len(rows) - _OPEN_ROWS)
            for row in range(first, len(rows)):
                if length <= rooms[row]:
                    break
            else:
                row = len(rows)
                rows.append([])
                rooms.append(layout.max_tokens)
            rows[row].append(index)
            rooms[row] -= length
        return list(rows)

    def _build(self, group: Sequence[int]) -> MicroBatchData:
        rows = [group] if self._packed is not None else [[index] for index in group]
        text_lengths = tuple(tuple(self._lengths[index] for index in row) for row in rows)
        shape = (len(rows), max(map(sum, text_lengths)))
        ids_RL = torch.zeros(shape, dtype=torch.int64)
        labels_RL = torch.full(shape, IGNORED, dtype=torch.int64)
        for number, row in enumerate(rows):
            start = 0
            for index in row:
                example = self._examples[index]
                end = start + len(example)
                ids_RL[number, start:end] = torch.from_numpy(example.ids)
                labels_RL[number, start:end] = torch.from_numpy(example.labels)
                if not self._layout.num_virtual_tokens:
                    labels_RL[number, start] = IGNORED
                start = end
        num_targets = int((labels_RL != IGNORED).sum())
        return MicroBatchData(ids_RL, labels_RL, text_lengths, num_targets)


def split_validation(
    examples: Sequence[TrainingExample], size: int | float, *, seed: int
) -> tuple[tuple[TrainingExample, ...], tuple[TrainingExample, ...]]:
    """Examples to train on and, drawn by the seed, to validate with; both in the given order.

    `size` is a number of examples (an int), or a fraction of all between 0 and 1 (a float), which
    is rounded and at least one. Raises `ConfigError` if either part would be empty.
    """
    _check_seed(seed)
    if isinstance(size, float):
        if not 0 < size < 1:
            raise ConfigError(f"a fraction for validation lies between 0 and 1, got {size}")
        count = max(1, round(size * len(examples)))
    else:
        count = size
    if not 0 < count < len(examples):
        raise ConfigError(
            f"{count} of {len(examples)} examples for validation: each part needs at least one"
        )
    chosen = set(_draw_order(len(examples), seed, _Stream.VALIDATION)[:count].tolist())
    return (
        _choose(examples, (index for index in range(len(examples)) if index not in chosen)),
        _choose(examples, sorted(chosen)),
    )


def _choose(
    examples: Sequence[TrainingExample], indexes: Iterable[int]
) -> tuple[TrainingExample, ...]:
    return tuple(examples[index] for index in indexes)


def _check_seed(seed: int) -> None:
    if not 0 <= seed <= MAX_SEED:
        raise ConfigError(f"a seed is a number from 0 to 2**63 - 1, got {seed}")


def _draw_order(count: int, seed: int, *stream: int) -> NDArray[np.intp]:
    """A permutation of 0, 1, ..., `count` - 1.

    Made of raw bits, which stay the same in all versions of numpy; those of its `Generator` do not.
    """
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=stream))
    return np.argsort(bits.random_raw(count), kind="stable")


def prepend_virtual_tokens(batch: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Put `count` virtual tokens before each row of a batch's `input_ids`, `labels` and mask."""
    return {
        name: functional.pad(batch[name], (count, 0), value=fill)
        for name, fill in _VIRTUAL.items()
        if name in batch
    }


def add_virtual_tokens(micro: MicroBatchData, count: int) -> MicroBatchData:
    """Put `count` virtual tokens before each text of a micro-batch."""
    rows, columns = micro.ids_RL.shape
    pieces = list(micro.text_lengths[0]) if rows == 1 else [columns]
    texts = zip(
        torch.split(micro.ids_RL, pieces, 1), torch.split(micro.labels_RL, pieces, 1), strict=True
    )
    wide = [
        prepend_virtual_tokens({"input_ids": ids_RL, "labels": labels_RL}, count)
        for ids_RL, labels_RL in texts
    ]
    return MicroBatchData(
        torch.cat([each["input_ids"] for each in wide], 1),
        torch.cat([each["labels"] for each in wide], 1),
        tuple(tuple(count + length for length in row) for row in micro.text_lengths),
        micro.num_targets,
    )


def require_predicted(micro: MicroBatchData) -> None:
    """Raises `ConfigError` for a target that is a text's first token, before virtual tokens."""
    for row, lengths in enumerate(micro.text_lengths):
        for start in accumulate((0, *lengths[:-1])):
            if int(micro.labels_RL[row, start]) != IGNORED:
                raise ConfigError(
                    f"the first token of a text (row {row}, position {start}) has a label, but "
                    f"nothing predicts it: this session has no virtual tokens; label it {IGNORED}, "
                    "or give the batches' layout num_virtual_tokens=0"
                )


def row_lengths(mask_RL: Tensor | None, ids_RL: Tensor) -> list[int]:
    """Tokens of each row. Raises `ConfigError` for padding that is not at the right."""
    rows, columns = ids_RL.shape
    if mask_RL is None:
        return [columns] * rows
    lengths = [int(length) for length in mask_RL.sum(1)]
    wanted_RL = torch.arange(columns, device=mask_RL.device) < mask_RL.sum(1, keepdim=True)
    if not torch.equal(mask_RL.bool(), wanted_RL) or min(lengths) < 1:
        raise ConfigError(
            "training takes padding at the right of its rows only, and no empty rows: set "
            'tokenizer.padding_side = "right"'
        )
    return lengths


def split_rows(lengths: Sequence[int], max_tokens: int) -> list[tuple[int, int]]:
    """Half-open ranges of rows that have at most `max_tokens` tokens with padding.

    Raises `ConfigError` for a longer row.
    """
    ranges: list[tuple[int, int]] = []
    start = 0
    for row, length in enumerate(lengths):
        if length > max_tokens:
            raise ConfigError(
                f"a row of {length} tokens; this session takes at most {max_tokens} (max_tokens)"
            )
        if (row + 1 - start) * max(lengths[start : row + 1]) > max_tokens:
            ranges.append((start, row))
            start = row
    ranges.append((start, len(lengths)))
    return ranges
