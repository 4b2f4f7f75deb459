"""Matrices of a mixture's experts, which a checkpoint has one by one or stacked.

E experts, R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from nesa_node.engine.kernels.machine_code import allocate_in_huge_pages


def is_expert_stacking(converter: WeightConverter) -> bool:
    """Whether a conversion stacks each kind of weight over experts and concatenates the kinds."""
    merge, *join = converter.operations
    return (
        isinstance(merge, MergeModulelist)
        and merge.dim == 0
        and len(join) <= 1
        and all(isinstance(item, Concatenate) and item.dim == 1 for item in join)
        and len(join) == len(converter.source_patterns) - 1 <= 1
    )


def read_experts(
    converter: WeightConverter,
    names: Sequence[tuple[str, str]],
    read: Callable[[str], Tensor],
) -> Iterator[Tensor]:
    """Read one expert's matrix [R, C] after another, with its kinds of weights concatenated.

    `names` are pairs of a source pattern and a checkpoint's name, ordered by expert. Raises
    `ValueError` where the shapes or numbers of experts disagree.
    """
    kinds = [
        [name for pattern, name in names if pattern == wanted]
        for wanted in converter.source_patterns
    ]
    if len({len(kind) for kind in kinds}) != 1:
        raise ValueError(f"unequal numbers of experts: {[len(kind) for kind in kinds]}")
    expected: list[torch.Size] = []
    for of_expert in zip(*kinds, strict=True):
        parts = [read(name) for name in of_expert]
        shapes = [part.shape for part in parts]
        if not expected:
            expected = shapes
            if len({(part.ndim, part.shape[-1], part.dtype) for part in parts}) != 1:
                raise ValueError(f"experts of different shapes: {[list(each) for each in shapes]}")
        for name, shape, wanted_shape in zip(of_expert, shapes, expected, strict=True):
            if shape != wanted_shape:
                raise ValueError(f"{name} has shape {list(shape)}")
        matrix_RC = parts[0] if len(parts) == 1 else torch.cat(parts)
        # What is yielded is not kept while the next expert is read.
        del parts
        yield matrix_RC
        del matrix_RC


def read_stack(
    converter: WeightConverter,
    names: Sequence[tuple[str, str]],
    read: Callable[[str], Tensor],
    shape_ERC: Sequence[int],
) -> Iterator[Tensor]:
    """`read_experts` of a stacked weight whose shape the config states.

    Raises `ValueError` for other numbers or shapes of experts, too.
    """
    experts, *shape_RC = shape_ERC
    if len(names) != experts * len(converter.source_patterns):
        raise ValueError(f"{len(names)} matrices, which are not those of {experts} experts")
    for matrix_RC in read_experts(converter, names, read):
        if list(matrix_RC.shape) != shape_RC:
            raise ValueError(
                f"experts have shape {list(matrix_RC.shape)}, the config makes it {shape_RC}"
            )
        yield matrix_RC
        del matrix_RC


def stack_experts(
    converter: WeightConverter,
    names: Sequence[tuple[str, str]],
    read: Callable[[str], Tensor],
) -> Tensor:
    """Read experts' matrices into their slices of one tensor [E, R, C].

    Equals `converter.convert`, which needs up to three times the memory. Raises as `read_experts`.
    """
    stacked_ERC: Tensor | None = None
    experts = len(names) // len(converter.source_patterns)
    expert = 0
    for matrix_RC in read_experts(converter, names, read):
        if stacked_ERC is None:
            shape = (experts, *matrix_RC.shape)
            stacked_ERC = allocate_in_huge_pages(shape, matrix_RC.dtype)
        stacked_ERC[expert] = matrix_RC
        # `enumerate` would keep the matrix while the next one is read.
        expert += 1  # noqa: SIM113
        del matrix_RC
    assert stacked_ERC is not None
    return stacked_ERC
