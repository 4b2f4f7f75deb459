"""Feeds come out of a span as tensors would, whoever computes it and however they are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from nesa_node.compression import tensors
from nesa_node.compression.tensors import HiddenStates
from nesa_node.core.ids import Span
from nesa_node.engine.model.blocks import ModelBlocks, RowChunk, StepBuffers
from nesa_node.engine.model.compiled_step import COMPILED_MAX_TOKENS, CompiledDecoder
from nesa_node.engine.model.loading import load_blocks
from tests.engine.chained import new_row, open_local
from tests.engine.tiny_models import FAMILIES, save_tiny_model

DTYPES = [torch.float32, torch.bfloat16]


@dataclass
class Part:
    buffers: StepBuffers
    start: int
    end: int


def load(family: str, models_dir: Path, dtype: torch.dtype) -> ModelBlocks:
    checkpoint = open_local(save_tiny_model(family, models_dir))
    return load_blocks(checkpoint, Span(1, 4), dtype=dtype, device="cpu")


def received(tokens: int, blocks: ModelBlocks, dtype: torch.dtype) -> HiddenStates:
    """As a step brings them."""
    meta, payload = tensors.encode(torch.randn(tokens, blocks.hidden_size).to(dtype))
    return HiddenStates.from_payload(meta, bytearray(payload), max_bytes=1 << 20)


def run_in_parts(
    blocks: ModelBlocks, feeds: Sequence[StepBuffers], cuts: Sequence[Sequence[int]]
) -> None:
    """`cuts[n]`: how many tokens of each feed the n-th forward takes."""
    pool = blocks.new_pool(4096)
    tables = [pool.reserve(8).new_table() for _ in feeds]
    at = [0] * len(feeds)
    for counts in cuts:
        parts, runs = [], []
        for index, count in enumerate(counts):
            if count:
                tables[index].reserve(at[index] + count)
                parts.append(Part(feeds[index], at[index], at[index] + count))
                runs.append(RowChunk(tables[index], count))
                at[index] += count
        blocks.forward_buffers(parts, runs)
    assert [table.length for table in tables] == at


def expected(
    blocks: ModelBlocks, feeds: Sequence[StepBuffers], cuts: Sequence[Sequence[int]]
) -> list[StepBuffers]:
    """The same by `forward`."""
    pool = blocks.new_pool(4096)
    tables = [pool.reserve(8).new_table() for _ in feeds]
    outputs: list[list[torch.Tensor]] = [[] for _ in feeds]
    for counts in cuts:
        taken = [index for index, count in enumerate(counts) if count]
        inputs = []
        for index in taken:
            start, end = tables[index].length, tables[index].length + counts[index]
            tables[index].reserve(end)
            inputs.append(feeds[index].hidden.tensor_TD[start:end].to(blocks.dtype))
        runs = [RowChunk(tables[index], counts[index]) for index in taken]
        output_TD = blocks.forward(torch.cat(inputs), runs)
        split = torch.split(output_TD, [run.count for run in runs])
        for index, part_TD in zip(taken, split, strict=True):
            outputs[index].append(part_TD)
    return [
        StepBuffers(
            feed.hidden, feed.dtype, HiddenStates.from_tensor(torch.cat(parts).to(feed.dtype))
        )
        for feed, parts in zip(feeds, outputs, strict=True)
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("sizes", "cuts"),
    [
        ((1,), [(1,)]),
        ((3, 1, 5), [(3, 1, 5)]),
        ((4, 1, 9), [(1, 0, 9), (2, 1, 0), (1, 0, 0)]),
        ((COMPILED_MAX_TOKENS + 8, 2), [(COMPILED_MAX_TOKENS + 2, 1), (6, 1)]),
        ((COMPILED_MAX_TOKENS + 1,), [(COMPILED_MAX_TOKENS + 1,)]),
    ],
)
def test_feeds_get_what_tensors_get(
    family: str, sizes: Sequence[int], cuts: Sequence[Sequence[int]], models_dir: Path
) -> None:
    blocks = load(family, models_dir, torch.float32)
    feeds = [StepBuffers(received(size, blocks, blocks.dtype), blocks.dtype) for size in sizes]
    before = [bytes(feed.hidden.payload) for feed in feeds]
    run_in_parts(blocks, feeds, cuts)
    for feed, right in zip(feeds, expected(blocks, feeds, cuts), strict=True):
        assert feed.output is not None
        assert right.output is not None
        assert torch.equal(feed.output.tensor_TD, right.output.tensor_TD)
        assert bytes(feed.output.payload) == bytes(right.output.payload)
        assert feed.output.meta == right.output.meta
    assert [bytes(feed.hidden.payload) for feed in feeds] == before


@pytest.mark.parametrize("of_span", DTYPES)
@pytest.mark.parametrize("of_feeds", [*DTYPES, torch.float16])
def test_feeds_of_another_dtype_than_the_span(
    of_span: torch.dtype, of_feeds: torch.dtype, models_dir: Path
) -> None:
    blocks = load("llama", models_dir, of_span)
    feeds = [StepBuffers(received(size, blocks, of_feeds), of_feeds) for size in (1, 2)]
    feeds.append(StepBuffers(received(1, blocks, of_span), of_feeds))
    cuts = [(1, 1, 1), (0, 1, 0)]
    run_in_parts(blocks, feeds, cuts)
    for feed, right in zip(feeds, expected(blocks, feeds, cuts), strict=True):
        assert feed.output is not None
        assert right.output is not None
        assert feed.output.dtype == of_feeds
        assert torch.equal(feed.output.tensor_TD, right.output.tensor_TD)


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_tokens_are_no_tensors(
    dtype: torch.dtype, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = load("llama", models_dir, dtype)
    feeds = [StepBuffers(received(1, blocks, dtype), dtype) for _ in range(3)]
    asked: list[HiddenStates] = []
    read: Any = HiddenStates.__dict__["tensor_TD"]

    def noted(states: HiddenStates) -> torch.Tensor:
        asked.append(states)
        tensor_TD: torch.Tensor = read.fget(states)
        return tensor_TD

    monkeypatch.setattr(HiddenStates, "tensor_TD", property(noted))
    run_in_parts(blocks, feeds, [(1, 1, 1)])
    assert not asked
    monkeypatch.setattr(CompiledDecoder, "supports", lambda *_: False)
    run_in_parts(blocks, feeds, [(1, 1, 1)])
    assert asked


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 12])
def test_tensors_and_feeds_share_what_was_written_down(
    dtype: torch.dtype, tokens: int, models_dir: Path
) -> None:
    """Sessions of another dtype than the span go in as tensors, in torch's inference mode."""
    blocks = load("llama", models_dir, dtype)
    pool = blocks.new_pool(1024)
    outputs = []
    for kind in (torch.float16, dtype):
        runs = []
        for _ in range(tokens):
            table = pool.reserve(1).new_table()
            table.reserve(1)
            runs.append(RowChunk(table, 1))
        torch.manual_seed(0)
        values_TD = torch.randn(tokens, blocks.hidden_size).half()
        feed = StepBuffers(HiddenStates.from_tensor(values_TD.to(kind)), dtype)
        blocks.forward_buffers([Part(feed, 0, tokens)], runs)
        assert feed.output is not None
        outputs.append(feed.output.tensor_TD)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("tokens", [1, COMPILED_MAX_TOKENS])
def test_no_output_keeps_the_memory_of_others(tokens: int, models_dir: Path) -> None:
    blocks = load("llama", models_dir, torch.float32)
    feeds = [StepBuffers(received(tokens, blocks, blocks.dtype), blocks.dtype) for _ in range(3)]
    run_in_parts(blocks, feeds, [(tokens,) * 3])
    for feed in feeds:
        assert feed.output is not None
        tensor_TD = feed.output.tensor_TD
        assert tensor_TD.untyped_storage().nbytes() == tensor_TD.nbytes == feed.output.nbytes


def test_what_fails_leaves_the_rows_as_they_were(models_dir: Path) -> None:
    blocks = load("llama", models_dir, torch.float32)
    row = new_row(blocks)
    feed = StepBuffers(received(2, blocks, blocks.dtype), blocks.dtype)
    with pytest.raises(ValueError, match="reserve them first"):
        blocks.forward_buffers([Part(feed, 0, 2)], [RowChunk(row, 2)])
    row.reserve(2)
    with pytest.raises(ValueError, match="expected \\[2, 64\\], got \\[1, 64\\]"):
        blocks.forward_buffers([Part(feed, 0, 1)], [RowChunk(row, 2)])
    assert row.length == 0
