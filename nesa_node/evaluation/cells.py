"""Cells of the result table: one quantization of the weights, one codec of the wire.

Models for the cells of the table, run in this process with a swarm's code path.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from nesa_node.client.model.auto import build_model
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.client.model.local import LocalConnection
from nesa_node.client.session.base import SwarmConnection
from nesa_node.compression.codecs import FAMILIES
from nesa_node.compression.tensors import encode
from nesa_node.core.errors import ConfigError, ProtocolError
from nesa_node.core.span import split_evenly
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.checkpoint import Checkpoint

WEIGHTS = ("none", "int8", "nf4")
WIRE_CODECS = ("none", "blockwise8@2:64:8", "int4@2:32:48")
WEIGHTS_AS_SERVED = "as served"
"""Name for the weights of a live swarm, as its nodes hold them."""


@dataclass(frozen=True, slots=True)
class Cell:
    weights: str
    wire: str

    def __str__(self) -> str:
        return f"weights {self.weights}, wire {self.wire}"


def make_cells(weights: Iterable[str], wire: Iterable[str]) -> list[Cell]:
    """All combinations, grouped by weights; the first is the unquantized baseline.

    The baseline is included even if it is not among the arguments.
    """
    baseline = "none"
    rows = list(dict.fromkeys(weights))
    baseline_weights = WEIGHTS_AS_SERVED if WEIGHTS_AS_SERVED in rows else baseline
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


class LocalModels:
    """The blocks as `nodes` spans, in memory with one quantization of the weights at a time.

    Embedding and head, which clients hold, always have `dtype`.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, nodes: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._checkpoint = checkpoint
        self._spans = split_evenly(checkpoint.num_blocks, nodes)
        self._dtype = dtype
        self._device = device
        self._weights: str | None = None
        self._parts: list[ModelBlocks] = []

    @contextmanager
    def open(self, cell: Cell) -> Iterator[DistributedModelForCausalLM]:
        """The model with the cell's weights and wire codec; close it before opening the next.

        Raises as `load_blocks` does.
        """
        connection = LocalConnection(self._load(cell.weights), codec=cell.wire)

        @asynccontextmanager
        async def connect() -> AsyncIterator[SwarmConnection]:
            yield connection

        try:
            with build_model(
                self._checkpoint, connect, dtype=self._dtype, device=self._device
            ) as model:
                yield model
        finally:
            connection.close()

    def _load(self, weights: str) -> list[ModelBlocks]:
        if weights != self._weights:
            # Freed before loading, since memory may not suffice for two models.
            self._parts, self._weights = [], None
            options: dict[str, Any] = {} if weights == "none" else {"quant_type": weights}
            self._parts = [
                load_blocks(
                    self._checkpoint, span, dtype=self._dtype, device=self._device, **options
                )
                for span in self._spans
            ]
            self._weights = weights
        return self._parts
