"""Distributed models whose blocks run in this process, in three spans."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import torch

from nesa_node.client.model.auto import build_model
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.client.model.layers import LocalConnection
from nesa_node.client.session.base import SwarmConnection
from nesa_node.core.ids import Span
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.hub import open_checkpoint
from nesa_node.verification.distributions import ComputeLogits
from tests.engine.tiny_models import VOCABULARY


@contextmanager
def local_model(
    folder: Path, *, client_blocks: tuple[int, int] = (0, 0), nodes: int = 3
) -> Iterator[DistributedModelForCausalLM]:
    checkpoint = open_checkpoint(str(folder), cache_dir=folder)
    bounds = [checkpoint.num_blocks * node // nodes for node in range(nodes + 1)]
    connection = LocalConnection(
        [
            load_blocks(checkpoint, Span(a, b), dtype=torch.float32, device="cpu")
            for a, b in itertools.pairwise(bounds)
        ]
    )

    @asynccontextmanager
    async def connect(_: ComputeLogits) -> AsyncIterator[SwarmConnection]:
        yield connection

    try:
        with build_model(checkpoint, connect, client_blocks=client_blocks) as model:
            yield model
    finally:
        connection.close()


def random_ids(rows: int, columns: int, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (rows, columns), generator=generator)


def left_padded(
    lengths: list[int], *, pad: int = 0, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random prompts of these lengths, as ids and mask [B, L]."""
    ids_BL = random_ids(len(lengths), max(lengths), seed=seed)
    columns = torch.arange(max(lengths))
    starts = torch.tensor([max(lengths) - length for length in lengths])
    mask_BL = (columns[None, :] >= starts[:, None]).long()
    return ids_BL.where(mask_BL != 0, pad), mask_BL
