"""Stacking of mixture-of-experts weights without holding them twice.

E experts, R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter


def stacks_experts(converter: WeightConverter) -> bool:
    """Whether a conversion stacks each kind of weight over experts and concatenates the kinds."""
    merge, *join = converter.operations
    return (
        isinstance(merge, MergeModulelist)
        and merge.dim == 0
        and len(join) <= 1
        and all(isinstance(item, Concatenate) and item.dim == 1 for item in join)
        and len(join) == len(converter.source_patterns) - 1 <= 1
    )


def stack_experts(
    converter: WeightConverter,
    names: Sequence[tuple[str, str]],
    read: Callable[[str], Tensor],
) -> Tensor:
    """Read experts' matrices [R, C] one at a time into their slices of one tensor [E, R', C].

    `names` are pairs of a source pattern and a checkpoint's name, ordered by expert. Equals
    `converter.convert`, which needs up to three times the memory. Raises `ValueError` where the
    shapes or numbers of experts disagree.
    """
    kinds = [
        [name for pattern, name in names if pattern == wanted]
        for wanted in converter.source_patterns
    ]
    if len({len(kind) for kind in kinds}) != 1:
        raise ValueError(f"unequal numbers of experts: {[len(kind) for kind in kinds]}")
    firsts = [read(kind[0]) for kind in kinds]
    if len({(first.ndim, first.shape[-1], first.dtype) for first in firsts}) != 1:
        raise ValueError(f"experts of different shapes: {[list(first.shape) for first in firsts]}")
    rows = [len(first) for first in firsts]
    stacked_ERC = torch.empty(
        (len(kinds[0]), sum(rows), firsts[0].shape[-1]), dtype=firsts[0].dtype
    )
    del firsts
    for index, kind in enumerate(kinds):
        start = sum(rows[:index])
        for expert, name in enumerate(kind):
            matrix_RC = read(name)
            if matrix_RC.shape != (rows[index], stacked_ERC.shape[2]):
                raise ValueError(f"{name} has shape {list(matrix_RC.shape)}")
            stacked_ERC[expert, start : start + rows[index]] = matrix_RC
    return stacked_ERC
