from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from types import FrameType

import pytest
import torch

from nesa_node.core.errors import CacheFullError
from nesa_node.core.ids import Span
from nesa_node.engine.cache.pages import (
    PAGE_TOKENS,
    CacheReservation,
    PagePool,
    PageTable,
    pages_for,
)
from nesa_node.engine.weights.families import CacheHeads
from tests.engine.chained import fork

HEADS = CacheHeads(2, 4)


def pool_of(pages: int) -> PagePool:
    return PagePool(
        Span(0, 2),
        HEADS,
        tokens=pages * PAGE_TOKENS,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


@pytest.fixture
def pool() -> Iterator[PagePool]:
    pool = pool_of(16)
    yield pool
    assert pool.held_pages == 0, "a test gives back what it took"
    assert pool.unreserved_pages == pool.num_pages


def write(table: PageTable, tokens: int, value: float) -> None:
    """Append `tokens` tokens, all of one value."""
    table.reserve(table.length + tokens)
    where = table.slots(table.length, table.length + tokens)
    for layer in table.pool.tensors:
        layer[where] = value
    table.length += tokens


def read(table: PageTable) -> list[float]:
    exported = table.pool.export_tokens(table.slots(0, table.length), Span(0, 2))
    assert exported.shape == (4, table.length, 2, 4)
    assert torch.equal(exported, exported[:1, :, :1, :1].expand_as(exported))
    return [float(value) for value in exported[0, :, 0, 0]]


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (32, 1), (33, 2), (4000, 125)])
def test_pages_are_counted_up(tokens: int, pages: int) -> None:
    assert pages_for(tokens) == pages


def test_a_row_grows_page_by_page_and_gives_all_back(pool: PagePool) -> None:
    promise = pool.reserve(3)
    table = promise.new_table()
    assert pool.unreserved_pages == 13
    for expected in (1, 1, 2):
        write(table, PAGE_TOKENS // 2, 1.0)
        assert len(table.pages) == expected == pool.held_pages
    table.truncate(5)
    assert pool.held_pages == 1
    promise.close()
    promise.close()


def test_a_promise_that_cannot_be_kept_is_not_made(pool: PagePool) -> None:
    kept = pool.reserve(10)
    with pytest.raises(CacheFullError, match="7 pages asked for, 6 are free"):
        pool.reserve(7)
    assert pool.unreserved_pages == 6
    kept.close()


def test_beyond_its_promise_a_row_takes_only_what_nobody_was_promised(pool: PagePool) -> None:
    small, large = pool.reserve(2), pool.reserve(12)
    table = small.new_table()
    table.reserve(4 * PAGE_TOKENS)
    assert pool.unreserved_pages == 0
    with pytest.raises(CacheFullError, match="2 pages reserved for it"):
        table.reserve(5 * PAGE_TOKENS)
    assert len(table.pages) == 4
    large.new_table().reserve(12 * PAGE_TOKENS)
    with pytest.raises(CacheFullError):
        small.grow(3)
    small.grow(2)
    assert pool.unreserved_pages == 0
    table.truncate(0)
    assert pool.unreserved_pages == 0
    for promise in (small, large):
        promise.close()


def test_rows_lie_in_one_piece_while_there_is_room(pool: PagePool) -> None:
    promises = [pool.reserve(4) for _ in range(4)]
    tables = [promise.new_table() for promise in promises]
    for _ in range(4):
        for table in tables:
            write(table, PAGE_TOKENS, 1.0)
    assert all(isinstance(table.slots(0, table.length), slice) for table in tables)
    for promise in promises:
        promise.close()


def test_a_row_in_pieces_reads_what_was_written(pool: PagePool) -> None:
    promises = [pool.reserve(1) for _ in range(16)]
    tables = [promise.new_table() for promise in promises]
    for number, table in enumerate(tables):
        write(table, 1, float(number))
    for promise in promises[::2]:
        promise.close()
    long = pool.reserve(8)
    row = long.new_table()
    for number in range(8 * PAGE_TOKENS):
        write(row, 1, float(number))
    assert isinstance(row.slots(0, row.length), torch.Tensor)
    assert read(row) == [float(number) for number in range(8 * PAGE_TOKENS)]
    assert [read(table) for table in tables[1::2]] == [[float(n)] for n in range(1, 16, 2)]
    for promise in (long, *promises):
        promise.close()


def test_a_fork_shares_pages_until_somebody_writes(pool: PagePool) -> None:
    promise = pool.reserve(8)
    first = promise.new_table()
    write(first, PAGE_TOKENS + 5, 1.0)
    second = fork(first)
    assert (pool.held_pages, promise.held_pages) == (2, 4)
    write(second, 2, 2.0)
    assert pool.held_pages == 3
    write(first, 1, 3.0)
    assert pool.held_pages == 3, "the last holder of a page need not copy it"
    shared = [1.0] * (PAGE_TOKENS + 5)
    assert read(first) == [*shared, 3.0]
    assert read(second) == [*shared, 2.0, 2.0]
    first.close()
    assert read(second) == [*shared, 2.0, 2.0]
    promise.close()


def test_a_fork_rolled_back_into_a_shared_page_copies_it(pool: PagePool) -> None:
    promise = pool.reserve(8)
    first = promise.new_table()
    write(first, 2 * PAGE_TOKENS, 1.0)
    second = fork(first)
    second.truncate(PAGE_TOKENS + 3)
    write(second, 1, 2.0)
    assert read(first) == [1.0] * 2 * PAGE_TOKENS
    assert read(second) == [1.0] * (PAGE_TOKENS + 3) + [2.0]
    promise.close()


def test_rows_are_reordered_within_their_promise(pool: PagePool) -> None:
    promise = pool.reserve(6)
    tables = [promise.new_table() for _ in range(3)]
    for number, table in enumerate(tables):
        write(table, PAGE_TOKENS + number, float(number))
    rest = pool.reserve(10)
    promise.reorder(tables, [2, 2, 0])
    assert (promise.held_pages, pool.held_pages) == (5, 3)
    write(tables[0], 1, 7.0)
    assert (promise.held_pages, pool.held_pages) == (5, 4)
    assert [table.length for table in tables] == [PAGE_TOKENS + 3, PAGE_TOKENS + 2, PAGE_TOKENS]
    assert read(tables[0]) == [2.0] * (PAGE_TOKENS + 2) + [7.0]
    assert read(tables[1]) == [2.0] * (PAGE_TOKENS + 2)
    assert read(tables[2]) == [0.0] * PAGE_TOKENS
    for kept in (promise, rest):
        kept.close()


def test_rows_that_cannot_be_copied_are_left_as_they_are(pool: PagePool) -> None:
    promise, rest = pool.reserve(2), pool.reserve(11)
    tables = [promise.new_table() for _ in range(2)]
    write(tables[0], 4 * PAGE_TOKENS, 1.0)
    write(tables[1], 1, 2.0)
    with pytest.raises(CacheFullError):
        promise.reorder(tables, [0, 0])
    assert (promise.held_pages, pool.held_pages, pool.unreserved_pages) == (5, 5, 0)
    assert read(tables[0]) == [1.0] * 4 * PAGE_TOKENS
    assert read(tables[1]) == [2.0]
    for kept in (promise, rest):
        kept.close()


def test_exported_tokens_can_be_put_into_another_pool(pool: PagePool) -> None:
    source, target = pool.reserve(3), pool.reserve(3)
    row, copy = source.new_table(), target.new_table()
    for number in range(50):
        write(row, 1, float(number))
    copy.reserve(50)
    for block in (Span(0, 1), Span(1, 2)):
        tokens = pool.export_tokens(row.slots(0, 50), block)
        pool.import_tokens(copy.slots(0, 50), block, tokens)
    copy.length = 50
    assert read(copy) == read(row)
    source.close()
    target.close()


@pytest.mark.parametrize("seed", range(5))
def test_no_page_leaks_and_none_has_two_owners(pool: PagePool, seed: int) -> None:
    """Random rows against lists of numbers; every promise is kept whatever the others do."""
    rng = random.Random(seed)
    live: list[tuple[CacheReservation, list[tuple[PageTable, list[float]]]]] = []
    written = 0.0
    for _ in range(600):
        action = rng.choice(("open", "write", "write", "write", "rollback", "fork", "close"))
        if action == "open":
            pages = rng.randint(1, 6)
            try:
                promise = pool.reserve(pages)
            except CacheFullError:
                continue
            live.append((promise, [(promise.new_table(), [])]))
        elif live:
            promise, rows = rng.choice(live)
            table, expected = rng.choice(rows)
            tokens = rng.randint(1, 40)
            if action == "write":
                more = max(pages_for(table.length + tokens) - len(table.pages), 0)
                covered = promise.held_pages + more <= promise.pages
                try:
                    written += 1
                    write(table, tokens, written)
                    expected += [written] * tokens
                except CacheFullError:
                    assert not covered, "a promise was broken"
            elif action == "rollback":
                length = rng.randint(0, table.length)
                table.truncate(length)
                del expected[length:]
            elif action == "fork":
                try:
                    rows.append((fork(table), list(expected)))
                except CacheFullError:
                    continue
            else:
                promise.close()
                live.remove((promise, rows))
        for _, rows in live:
            assert all(read(table) == expected for table, expected in rows if table.length)
    for kept, _ in live:
        kept.close()


@pytest.mark.parametrize("published", [False, True])
def test_to_take_pages_takes_no_longer_in_a_large_pool(published: bool) -> None:
    """Every second page is taken, so that no row finds what it hopes for."""
    pool, calls = pool_of(2048), 0
    others = pool.reserve(0)
    for table in [others.new_table() for _ in range(2048)]:
        table.reserve(PAGE_TOKENS)
        table.length = PAGE_TOKENS
    for table in tuple(others._tables):
        [page] = table.pages
        if page % 2:
            table.close()
        elif published:
            table.publish_prefix([page])
    promise = pool.reserve(1024)
    rows = [promise.new_table() for _ in range(256)]

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    for row in rows:
        row.reserve(1)
    sys.setprofile(None)
    assert calls <= 256 * 80
    assert sorted(row.pages[0] for row in rows) == list(range(1, 512, 2))
    for each in (promise, others):
        each.close()
