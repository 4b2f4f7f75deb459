"""Pages that an iteration takes in the device's thread, beside what else goes on in a node."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nesa_node.compression import tensors
from nesa_node.compression.tensors import HiddenStates
from nesa_node.core.ids import Span
from nesa_node.engine.cache.pages import PAGE_TOKENS, PagePool, PageTable
from nesa_node.engine.weights.families import CacheHeads
from nesa_node.server.scheduler.batch import (
    QueuedStep,
    SessionBatch,
    _reserve_pages,
    open_executor,
    run_batch,
    take_tokens,
)
from nesa_node.server.session.transfer import TransferSender
from nesa_node.swarm.protocol.messages import Pages, RowSlice, Step, Synced, TransferOpened
from nesa_node.swarm.protocol.replay_buffer import ReplayBuffer

WRITTEN = -99.0
VALUES = [float(number) for number in range(1, PAGE_TOKENS + 1)]


def pool_of(pages: int) -> PagePool:
    return PagePool(
        Span(0, 1),
        CacheHeads(1, 1),
        tokens=pages * PAGE_TOKENS,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


class Writing:
    """Blocks that write the same number into each slot that they are given."""

    span = Span(0, 1)
    dtype = torch.float32
    cache_dtype = "auto"

    def __init__(self, pool: PagePool) -> None:
        self._sides = pool.tensors

    def forward_buffers(self, _: Any, runs: Any) -> None:
        for run in runs:
            end = run.table.length + run.count
            for side_SHD in self._sides:
                side_SHD[run.table.slots(run.table.length, end)] = WRITTEN
            run.table.length = end


def filled(table: PageTable, values: list[float]) -> PageTable:
    table.reserve(len(values))
    for side_SHD in table.pool.tensors:
        side_SHD[table.slots(0, len(values))] = torch.tensor(values).view(-1, 1, 1)
    table.length = len(values)
    return table


def share_of(tables: list[PageTable], *rows: RowSlice) -> SessionBatch:
    count = sum(row.count for row in rows)
    states = HiddenStates.from_tensor(torch.zeros(count, 2))
    step: Any = Step(session=b"s" * 16, epoch=1, step=1, rows=rows, tensor=states.meta)
    return take_tokens([QueuedStep(states, states.dtype, step=step, arrived_at=0.0)], tables, count)


class Successor:
    """The stream to a node that takes a session over, and what came of row 0."""

    peer = "successor"

    def __init__(self) -> None:
        self.row: list[float] = []
        self._answers: list[Synced] = []

    async def send(self, message: Any, payload: Any = None) -> None:
        if not isinstance(message, Pages):
            self._answers.append(Synced(lengths=message.lengths))
        elif message.row == 0:
            keys_and_values = tensors.decode(message.tensor, bytearray(payload), max_bytes=1 << 20)
            self.row += keys_and_values[0].flatten().tolist()

    async def receive(self) -> tuple[Synced, bytes]:
        return self._answers.pop(), b""


def beams() -> tuple[list[PageTable], list[SessionBatch]]:
    """Two rows share a page beyond the end of the second, which writes there now."""
    pool = pool_of(8)
    promise = pool.reserve(4)
    tables = [filled(promise.new_table(), VALUES[:20]), promise.new_table()]
    promise.reorder(tables, [0, 0])
    tables[1].truncate(10)
    return tables, [share_of(tables, RowSlice(0, 20, 1), RowSlice(1, 10, 1))]


def prefix() -> tuple[list[PageTable], list[SessionBatch]]:
    """A row is cut back into a page that it has published, and that another session needs now."""
    pool = pool_of(2)
    table = filled(pool.reserve(1).new_table(), VALUES)
    table.publish_prefix(["key"])
    table.truncate(20)
    other = pool.reserve(1).new_table()
    return [table], [
        share_of([table], RowSlice(0, 20, 1)),
        share_of([other], RowSlice(0, 0, PAGE_TOKENS)),
    ]


@pytest.mark.parametrize("case", [beams, prefix])
async def test_pages_that_are_replaced_meanwhile_are_handed_over_as_they_were(case: Any) -> None:
    tables, shares = case()
    blocks: Any = Writing(tables[0].pool)
    state: Any = SimpleNamespace(tables=tables, blocks=blocks, replay_buffer=ReplayBuffer())
    stream: Any = Successor()
    gate = threading.Event()
    async with open_executor() as executor, asyncio.timeout(10):
        # Another job is ahead in the device's thread: the iteration and the transfer wait there.
        ahead = asyncio.create_task(executor.run(gate.wait))
        await asyncio.sleep(0.01)
        running = asyncio.create_task(executor.run(lambda: run_batch(blocks, shares)))
        await asyncio.sleep(0.01)
        sending = asyncio.create_task(
            TransferSender(stream, state, executor, TransferOpened()).sync()
        )
        await asyncio.sleep(0.01)
        gate.set()
        await asyncio.gather(ahead, running, sending)
    assert [share.error for share in shares] == [None] * len(shares)
    assert stream.row[:20] == VALUES[:20]


def test_the_pools_lock_goes_round_while_pages_of_many_rows_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a session that opens, closes or publishes holds up the event loop for all of them."""
    rows = 100
    pool = pool_of(2 * rows)
    promise = pool.reserve(rows)
    tables = [filled(promise.new_table(), VALUES[:20]), *(promise.new_table() for _ in range(99))]
    promise.reorder(tables, [0] * rows)
    other = filled(pool.reserve(1).new_table(), VALUES)
    copy = PageTable._copy_on_write

    def slowly(table: PageTable, index: int) -> None:
        time.sleep(0.002)
        copy(table, index)

    monkeypatch.setattr(PageTable, "_copy_on_write", slowly)
    share = share_of(tables, *(RowSlice(row, 20, 1) for row in range(rows)))
    reserving = threading.Thread(target=_reserve_pages, args=(share,))
    reserving.start()
    published = 0
    while reserving.is_alive():
        other.publish_prefix(["key"])
        published += 1
        time.sleep(0.001)
    reserving.join()
    assert published > 10
