"""Rows of many sessions in one step: each gets what it gets alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nesa_node.core.ids import Span
from nesa_node.engine.cache.pages import PAGE_TOKENS, PagePool, PageTable, pages_for
from nesa_node.engine.model.blocks import ModelBlocks, RowChunk
from nesa_node.engine.model.loading import load_blocks
from tests.engine.chained import distance, fork, forward, new_row, open_local
from tests.engine.tiny_models import FAMILIES, save_tiny_model

TOLERANCE = 1e-5
ROWS, LONGEST = 5, 200


@dataclass
class Row:
    """A row in the shared pool, and what it will be fed."""

    table: PageTable
    inputs_CD: Tensor
    expected_CD: Tensor
    outputs: list[Tensor]


@pytest.fixture(params=FAMILIES)
def blocks(request: pytest.FixtureRequest, models_dir: Path) -> ModelBlocks:
    checkpoint = open_local(save_tiny_model(request.param, models_dir))
    return load_blocks(checkpoint, Span(1, 4), dtype=torch.float32, device="cpu")


def new_rows(blocks: ModelBlocks, pool: PagePool, rng: random.Random) -> list[Row]:
    rows = []
    for seed in range(ROWS):
        length = rng.randint(2, LONGEST)
        generator = torch.Generator().manual_seed(seed)
        inputs_CD = torch.randn(length, blocks.hidden_size, generator=generator)
        table = pool.reserve(pages_for(LONGEST)).new_table()
        rows.append(Row(table, inputs_CD, forward(blocks, inputs_CD, new_row(blocks)), []))
    return rows


def run_together(blocks: ModelBlocks, rows: list[Row], counts: list[int]) -> None:
    for row, count in zip(rows, counts, strict=True):
        row.table.reserve(row.table.length + count)
    inputs = [
        row.inputs_CD[row.table.length : row.table.length + count]
        for row, count in zip(rows, counts, strict=True)
    ]
    runs = [RowChunk(row.table, count) for row, count in zip(rows, counts, strict=True)]
    outputs = torch.split(blocks.forward(torch.cat(inputs), runs), counts)
    for row, output_LD in zip(rows, outputs, strict=True):
        row.outputs.append(output_LD)


@pytest.mark.parametrize("pages", [ROWS * pages_for(LONGEST), 4 * ROWS * pages_for(LONGEST)])
def test_prefills_and_decodes_of_many_rows_mix(blocks: ModelBlocks, pages: int) -> None:
    """In a pool that is just large enough the rows' pages end up in pieces."""
    rng = random.Random(pages)
    rows = new_rows(blocks, blocks.new_pool(pages * PAGE_TOKENS), rng)
    while left := [row for row in rows if row.table.length < len(row.inputs_CD)]:
        chosen = rng.sample(left, rng.randint(1, len(left)))
        rest = [len(row.inputs_CD) - row.table.length for row in chosen]
        counts = [1 if rng.random() < 0.5 else rng.randint(1, most) for most in rest]
        run_together(blocks, chosen, counts)
    for row in rows:
        assert distance(torch.cat(row.outputs), row.expected_CD) <= TOLERANCE


def test_a_row_goes_on_after_a_rollback_and_a_fork(blocks: ModelBlocks) -> None:
    inputs_CD = torch.randn(90, blocks.hidden_size, generator=torch.Generator().manual_seed(0))
    expected_CD = forward(blocks, inputs_CD, new_row(blocks))
    first = blocks.new_pool(64 * PAGE_TOKENS).reserve(20).new_table()
    forward(blocks, inputs_CD[:50], first)
    second = fork(first)
    forward(blocks, inputs_CD[:7], second)
    first.truncate(41)
    assert distance(forward(blocks, inputs_CD[41:], first), expected_CD[41:]) <= TOLERANCE
    second.truncate(50)
    assert distance(forward(blocks, inputs_CD[50:], second), expected_CD[50:]) <= TOLERANCE


def test_a_part_of_the_span_runs_in_the_pool_of_the_whole(blocks: ModelBlocks) -> None:
    part = blocks.select(Span(2, 3))
    hidden_LD = torch.randn(40, blocks.hidden_size, generator=torch.Generator().manual_seed(0))
    alone_LD = forward(part, hidden_LD, new_row(part))
    assert torch.equal(forward(part, hidden_LD, new_row(blocks)), alone_LD)
