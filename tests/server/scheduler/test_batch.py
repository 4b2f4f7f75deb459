"""Cutting and merging steps changes where tokens run, never which or in what order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nesa_node.compression.tensors import HiddenStates
from nesa_node.core.errors import CacheFullError
from nesa_node.core.ids import Span
from nesa_node.engine.cache.pages import PagePool
from nesa_node.engine.model.blocks import ModelBlocks, RowChunk
from nesa_node.engine.weights.families import CacheHeads
from nesa_node.server.scheduler.batch import (
    QueuedStep,
    SessionBatch,
    TokenChunk,
    run_batch,
    take_tokens,
)
from nesa_node.swarm.protocol.messages import RowSlice, Step

POOL_TOKENS = 8192


class Recorder:
    """Doubles what it is given, and notes which token of which row it was."""

    dtype = torch.float32

    def __init__(self) -> None:
        self.seen: dict[int, list[tuple[float, float]]] = {}

    def forward_buffers(self, pieces: Sequence[TokenChunk], runs: Sequence[RowChunk]) -> None:
        parts = [piece.buffers.hidden.tensor_TD[piece.start : piece.end] for piece in pieces]
        output_TD = self.forward(torch.cat(parts), runs)
        outputs = torch.split(output_TD, [len(part_TD) for part_TD in parts])
        for piece, part_TD in zip(pieces, outputs, strict=True):
            piece.buffers.write_output(piece.start, piece.end, part_TD)

    def forward(self, hidden_TD: torch.Tensor, runs: Sequence[RowChunk]) -> torch.Tensor:
        tables = [id(run.table) for run in runs]
        assert len(set(tables)) == len(tables), "a row runs once in an iteration"
        assert sum(run.count for run in runs) == len(hidden_TD)
        at = 0
        for run in runs:
            table, count = run.table, run.count
            assert table.length + count <= table.capacity
            tokens = hidden_TD[at : at + count].tolist()
            self.seen.setdefault(id(table), []).extend((a, b) for a, b in tokens)
            table.length += count
            at += count
        return hidden_TD * 2


def new_pool() -> PagePool:
    heads = CacheHeads(num_kv_heads=1, head_dim=1)
    device = torch.device("cpu")
    return PagePool(Span(0, 1), heads, tokens=POOL_TOKENS, dtype=torch.float32, device=device)


def pending(number: int, rows: list[RowSlice]) -> QueuedStep:
    """A step whose tokens say which row and position they have."""
    marks = [[float(p.row), float(p.position + i)] for p in rows for i in range(p.count)]
    hidden = HiddenStates.from_tensor(torch.tensor(marks))
    step = Step(session=b"s" * 16, epoch=1, step=number, rows=tuple(rows), tensor=cast(Any, None))
    return QueuedStep(hidden, hidden.dtype, step=step, arrived_at=0.0)


@settings(max_examples=100)
@given(data=st.data())
def test_every_token_runs_once_in_order_and_comes_back_to_its_step(data: st.DataObject) -> None:
    lengths = [0] * data.draw(st.integers(1, 4))
    steps = []
    for number in range(data.draw(st.integers(1, 6))):
        chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, unique=True))
        rows = []
        for row in chosen:
            rows.append(RowSlice(row, lengths[row], data.draw(st.integers(1, 60))))
            lengths[row] += rows[-1].count
        steps.append(pending(number, rows))
    promise = new_pool().reserve(0)
    tables = [promise.new_table() for _ in lengths]
    queue, blocks = deque(steps), Recorder()
    while queue:
        tokens = data.draw(st.integers(1, sum(step.remaining_tokens for step in queue)))
        share = take_tokens(queue, tables, tokens)
        assert sum(run.count for run in share.runs) == tokens
        run_batch(cast(ModelBlocks, blocks), [share])
        assert share.error is None
        for step in share.completed_steps:
            assert queue.popleft() is step
            assert step.output is not None
            assert torch.equal(step.output.tensor_TD, step.hidden.tensor_TD * 2)
    for row, table in enumerate(tables):
        expected = [(float(row), float(position)) for position in range(lengths[row])]
        assert blocks.seen.get(id(table), []) == expected


def test_a_step_of_many_rows_is_one_piece() -> None:
    promise = new_pool().reserve(0)
    tables = [promise.new_table() for _ in range(200)]
    share = take_tokens([pending(1, [RowSlice(row, 0, 1) for row in range(200)])], tables, 200)
    assert len(share.chunks) == 1
    assert len(share.runs) == 200


def test_only_those_that_fail_alone_too_have_failed() -> None:
    class Poisoned(Recorder):
        def forward(self, hidden_TD: torch.Tensor, runs: Sequence[RowChunk]) -> torch.Tensor:
            if bool((hidden_TD[:, 1] == 7).any()):
                raise RuntimeError("poison")
            return super().forward(hidden_TD, runs)

    promise = new_pool().reserve(0)
    shares: list[SessionBatch] = [
        take_tokens([pending(1, [RowSlice(0, 0, count)])], [promise.new_table()], count)
        for count in (3, 9, 5)
    ]
    run_batch(cast(ModelBlocks, Poisoned()), shares)
    assert [share.error is None for share in shares] == [True, False, True]
    for share in (shares[0], shares[2]):
        [done] = share.completed_steps
        assert done.output is not None
        assert torch.equal(done.output.tensor_TD, done.hidden.tensor_TD * 2)


def test_a_session_that_gets_no_pages_does_not_keep_others_from_running() -> None:
    pool = new_pool()
    promises = [pool.reserve(pages) for pages in (1, 0, pool.num_pages - 1)]
    shares = [
        take_tokens([pending(1, [RowSlice(0, 0, 3)])], [promise.new_table()], 3)
        for promise in promises
    ]
    assert pool.held_pages == 0, "pages are taken where the iteration runs"
    run_batch(cast(ModelBlocks, Recorder()), shares)
    assert [type(share.error) for share in shares] == [type(None), CacheFullError, type(None)]
    for share in (shares[0], shares[2]):
        [done] = share.completed_steps
        assert done.output is not None
        assert torch.equal(done.output.tensor_TD, done.hidden.tensor_TD * 2)
