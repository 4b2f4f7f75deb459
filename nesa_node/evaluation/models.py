"""Models for the cells of the table, run in this process with a swarm's code path."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import torch

from nesa_node.client.causal_lm import DistributedModelForCausalLM
from nesa_node.client.local import LocalConnection
from nesa_node.client.model import build_model
from nesa_node.client.sessions import SwarmConnection
from nesa_node.core.span import split_evenly
from nesa_node.engine.blocks import Blocks
from nesa_node.engine.checkpoint import Checkpoint
from nesa_node.engine.parts import load_blocks
from nesa_node.evaluation.cells import Cell


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
        self._parts: list[Blocks] = []

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

    def _load(self, weights: str) -> list[Blocks]:
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
