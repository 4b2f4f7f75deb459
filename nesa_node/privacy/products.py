"""Which linear layers of a model's blocks are products of one input."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from nesa_node.core.ids import Span
from nesa_node.engine.weights.skeleton import Skeleton

SAME_INPUTS = (
    frozenset({"q_proj", "k_proj", "v_proj"}),
    frozenset({"gate_proj", "up_proj"}),
)
"""Names of layers beside each other that get the same input; all else has an input of its own."""
ROWS_AT_ONCE = 1024
"""Of weights that are read, as 64-bit numbers."""


@dataclass(frozen=True, slots=True)
class LinearProduct:
    """Linear layers with one input: the product with all of their weights, one below the other."""

    paths: tuple[str, ...]
    """Of the layers in the model."""
    outputs: tuple[int, ...]
    """Of each layer."""
    inputs: int


def list_products(skeleton: Skeleton, span: Span) -> list[LinearProduct]:
    """The products of these blocks, in the order of the model."""
    groups: defaultdict[str, list[tuple[str, int, int]]] = defaultdict(list)
    for name in skeleton.block_names(span):
        layer = skeleton.find_linear_layer(name)
        if layer is not None:
            path = name.removesuffix(".weight")
            groups[_group_of(path)].append((path, *sizes_of(layer)))
    return [
        LinearProduct(
            tuple(path for path, _, _ in layers),
            tuple(outputs for _, outputs, _ in layers),
            layers[0][2],
        )
        for layers in groups.values()
    ]


def read_rows(skeleton: Skeleton, product: LinearProduct) -> Iterator[npt.NDArray[np.float64]]:
    """The product's weights, `ROWS_AT_ONCE` rows or fewer at a time. Raises what reading raises."""
    skeleton.checkpoint.fetch(skeleton.source_names([f"{path}.weight" for path in product.paths]))
    for path in product.paths:
        weight = skeleton.read_weight(f"{path}.weight")
        if isinstance(skeleton.model.get_submodule(path), Conv1D):
            weight = weight.T
        for start in range(0, len(weight), ROWS_AT_ONCE):
            yield weight[start : start + ROWS_AT_ONCE].double().numpy()


def sizes_of(layer: nn.Module) -> tuple[int, int]:
    """Outputs and inputs of a linear layer, which may be on the meta device."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    outputs, inputs = reversed(weight.shape) if isinstance(layer, Conv1D) else weight.shape
    return outputs, inputs


def _group_of(path: str) -> str:
    parent, _, leaf = path.rpartition(".")
    together = next((names for names in SAME_INPUTS if leaf in names), None)
    return path if together is None else f"{parent}.{'+'.join(sorted(together))}"
