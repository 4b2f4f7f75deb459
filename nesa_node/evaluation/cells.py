"""Cells of the result table: one quantization of the weights, one codec of the wire."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from nesa_node.compression.codecs import FAMILIES
from nesa_node.compression.tensors import encode
from nesa_node.core.errors import ConfigError, ProtocolError

WEIGHTS = ("none", "int8", "nf4")
WIRE = ("none", "blockwise8@2:64:8", "int4@2:32:48")
SERVED = "as served"
"""Name for the weights of a live swarm, as its nodes hold them."""


@dataclass(frozen=True, slots=True)
class Cell:
    weights: str
    wire: str

    def __str__(self) -> str:
        return f"weights {self.weights}, wire {self.wire}"


def grid(weights: Iterable[str], wire: Iterable[str]) -> list[Cell]:
    """All combinations, grouped by weights; the first is the unquantized baseline.

    The baseline is included even if it is not among the arguments.
    """
    baseline = "none"
    rows = list(dict.fromkeys(weights))
    baseline_weights = SERVED if SERVED in rows else baseline
    first = Cell(baseline_weights, baseline)
    ordered = sorted(product(rows, dict.fromkeys(wire)), key=lambda pair: pair[0] != first.weights)
    return list(dict.fromkeys([first, *(Cell(*pair) for pair in ordered)]))


def check_weights(names: Sequence[str]) -> None:
    """Raise `ConfigError` for a name that is not in `WEIGHTS`."""
    for name in names:
        if name not in WEIGHTS:
            raise ConfigError(f"--weights {name}: choose among {', '.join(WEIGHTS)}")


def check_wire(names: Sequence[str], *, hidden_size: int) -> None:
    """Raise `ConfigError` for a codec that is unknown or does not fit the model's hidden size."""
    for name in names:
        family = name.partition(":")[0].partition("@")[0]
        if family not in FAMILIES:
            raise ConfigError(
                f"--wire {name}: unknown codec; choose among {', '.join(FAMILIES)}, with "
                "parameters as in int8:16:8"
            )
        try:
            encode(torch.zeros(1, hidden_size), codec=name)
        except ProtocolError as error:
            raise ConfigError(f"--wire {name}: {error}") from error
