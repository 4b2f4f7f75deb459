"""Pages that hold beginnings of texts: found, shared, never written again, given up when needed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from nesa_node.core.errors import CacheFullError
from nesa_node.engine.cache.pages import (
    PAGE_TOKENS,
    CacheReservation,
    PagePool,
    PageTable,
    pages_for,
)
from nesa_node.engine.cache.prefix_index import PrefixIndex, PrefixKey
from tests.engine.cache.test_pages import pool_of, read, write
from tests.engine.chained import fork


def filled(pool: PagePool, keys: Sequence[PrefixKey], values: Sequence[float]) -> None:
    """Leave full pages of these values behind."""
    promise = pool.reserve(len(keys))
    table = promise.new_table()
    for value in values:
        write(table, PAGE_TOKENS, value)
    table.publish_prefix(keys)
    promise.close()


def begun(promise: CacheReservation, keys: Sequence[PrefixKey]) -> PageTable:
    table = promise.new_table()
    table.reuse_prefix(keys)
    return table


def test_a_chain_is_found_from_its_beginning_only() -> None:
    index = PrefixIndex()
    index.add("abc", [5, 6, 7])
    index.add("abx", [8, 9, 3])
    assert index.find("abcd") == [5, 6, 7]
    assert index.find("abxd") == [5, 6, 3]
    assert index.find("ya") == []
    assert 8 not in index.key_by_page


def test_a_page_is_known_under_one_key() -> None:
    index = PrefixIndex()
    index.add("ab", [1, 2])
    index.add("xyz", [3, 1, 4])
    assert index.find("xyz") == [3]
    assert len(index) == 3


def test_a_forgotten_page_takes_along_what_goes_on_after_it() -> None:
    index = PrefixIndex()
    index.add("abc", [1, 2, 3])
    index.add("abx", [1, 2, 4])
    assert sorted(index.remove(2)) == [2, 3, 4]
    assert index.find("abc") == [1]
    index.add("abc", [1, 5, 6])
    assert index.find("abc") == [1, 5, 6]


def test_the_least_recently_used_text_goes_first_and_from_its_end() -> None:
    index = PrefixIndex()
    index.add("abc", [1, 2, 3])
    index.add("xyz", [4, 5, 6])
    index.find("ab")
    assert len(index.evict_oldest(2, lambda _: True)) == 2
    assert (index.find("abc"), index.find("xyz")) == ([1, 2], [4, 5])
    assert len(index.evict_oldest(1, lambda page: page != 2)) == 1
    assert (index.find("abc"), index.find("xyz")) == ([], [4, 5])
    assert len(index.evict_oldest(9, lambda _: True)) == 2
    assert len(index) == 0


def test_rows_begin_with_what_another_left_and_count_for_what_they_hold() -> None:
    pool = pool_of(8)
    filled(pool, "abc", [1.0, 2.0, 3.0])
    assert (pool.held_pages, pool.unreserved_pages, pool.cached_pages) == (0, 8, 3)
    promise = pool.reserve(8)
    first, second = begun(promise, "abz"), begun(promise, "abc")
    assert (first.length, second.length) == (2 * PAGE_TOKENS, 3 * PAGE_TOKENS)
    assert (promise.held_pages, pool.held_pages) == (5, 3)
    assert pool.prefixes.reused_tokens == 5 * PAGE_TOKENS
    write(first, 3, 9.0)
    assert read(first) == [1.0] * 32 + [2.0] * 32 + [9.0] * 3
    assert read(second) == [1.0] * 32 + [2.0] * 32 + [3.0] * 32
    promise.close()
    assert (pool.held_pages, pool.cached_pages) == (0, 3)


def test_a_row_cut_back_into_a_known_page_copies_it() -> None:
    pool = pool_of(4)
    promise = pool.reserve(2)
    writer = promise.new_table()
    write(writer, 2 * PAGE_TOKENS, 1.0)
    writer.publish_prefix("ab")
    writer.truncate(PAGE_TOKENS + 5)
    write(writer, PAGE_TOKENS - 5, 2.0)
    reader = pool.reserve(2)
    assert read(begun(reader, "ab")) == [1.0] * 2 * PAGE_TOKENS
    assert read(writer) == [1.0] * (PAGE_TOKENS + 5) + [2.0] * (PAGE_TOKENS - 5)
    for each in (promise, reader):
        each.close()


def test_where_no_page_is_left_for_a_copy_the_known_one_is_taken_back() -> None:
    pool = pool_of(2)
    promise = pool.reserve(2)
    writer = promise.new_table()
    write(writer, 2 * PAGE_TOKENS, 1.0)
    writer.publish_prefix("ab")
    writer.truncate(PAGE_TOKENS - 1)
    write(writer, PAGE_TOKENS + 1, 2.0)
    assert pool.prefixes.find("ab") == []
    assert read(writer) == [1.0] * (PAGE_TOKENS - 1) + [2.0] * (PAGE_TOKENS + 1)
    promise.close()


def test_a_pool_full_of_known_pages_keeps_every_promise() -> None:
    pool = pool_of(16)
    filled(pool, range(16), [float(key) for key in range(16)])
    assert (pool.cached_pages, pool.unreserved_pages) == (16, 16)
    held = pool.reserve(4)
    first = begun(held, range(4))
    small = pool.reserve(2)
    row = small.new_table()
    row.reserve(2 * PAGE_TOKENS)
    assert isinstance(row.slots(0, 2 * PAGE_TOKENS), slice), "in one piece"
    assert len(pool.prefixes.find(range(16))) == 14, "no more is given up than is needed"
    large = pool.reserve(10)
    other = large.new_table()
    other.reserve(10 * PAGE_TOKENS)
    assert pool.cached_pages == 0
    with pytest.raises(CacheFullError):
        other.reserve(11 * PAGE_TOKENS)
    assert read(first) == [float(key) for key in range(4) for _ in range(PAGE_TOKENS)]
    for each in (held, small, large):
        each.close()
    assert pool.cached_pages == 4


def test_room_is_made_for_a_row_in_one_piece() -> None:
    pool = pool_of(8)
    filled(pool, range(8), [float(key) for key in range(8)])
    pool._free_unheld(pool.prefixes.evict_oldest(1, lambda _: True))
    promise = pool.reserve(4)
    row = promise.new_table()
    for _ in range(4):
        write(row, PAGE_TOKENS, 1.0)
    assert isinstance(row.slots(0, row.length), slice)
    assert pool.prefixes.find(range(8)) == [0, 1, 2, 3]
    promise.close()


def test_beyond_its_promise_a_row_takes_the_room_of_known_pages() -> None:
    pool = pool_of(4)
    filled(pool, "abc", [1.0, 2.0, 3.0])
    small = pool.reserve(1)
    row = small.new_table()
    write(row, 4 * PAGE_TOKENS, 5.0)
    assert pool.cached_pages == 0
    assert read(row) == [5.0] * 4 * PAGE_TOKENS
    small.close()


class Texts:
    """Texts of a few values that often begin alike; a page's key is all the text up to its end."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def make(self, tokens: int) -> list[float]:
        values: list[float] = []
        while len(values) < tokens:
            values += [float(self._rng.randint(1, 2))] * PAGE_TOKENS
        return values[:tokens]

    @staticmethod
    def keys(text: Sequence[float]) -> list[tuple[float, ...]]:
        return [tuple(text[: 32 * page]) for page in range(1, len(text) // PAGE_TOKENS + 1)]


def append(table: PageTable, values: Sequence[float]) -> None:
    """Write values one run of equals after another."""
    table.reserve(table.length + len(values))
    for value in values:
        where = table.slots(table.length, table.length + 1)
        for layer in table.pool.tensors:
            layer[where] = value
        table.length += 1


@pytest.mark.parametrize("seed", range(6))
def test_rows_hold_their_own_text_whatever_they_share(seed: int) -> None:
    """Random sessions against lists of numbers; every promise is kept, every page comes back."""
    rng = random.Random(seed)
    texts = Texts(rng)
    pool = pool_of(24)
    live: list[tuple[CacheReservation, list[tuple[PageTable, list[float]]]]] = []
    for _ in range(400):
        action = rng.choice(("open", "open", "write", "write", "cut", "fork", "publish", "close"))
        if action == "open":
            planned = texts.make(rng.randint(1, 180))
            try:
                promise = pool.reserve(pages_for(len(planned)))
            except CacheFullError:
                continue
            table = begun(promise, Texts.keys(planned))
            held = table.length
            append(table, planned[held : held + rng.randint(0, 90)])
            live.append((promise, [(table, planned[: table.length])]))
        elif live:
            promise, rows = rng.choice(live)
            table, text = rng.choice(rows)
            if action == "write":
                more = texts.make(len(text) + rng.randint(1, 50))[len(text) :]
                needed = max(pages_for(len(text) + len(more)) - len(table.pages), 0)
                covered = promise.held_pages + needed <= promise.pages
                try:
                    append(table, more)
                    text += more
                except CacheFullError:
                    assert not covered, "a promise was broken"
            elif action == "cut":
                length = rng.randint(0, table.length)
                table.truncate(length)
                del text[length:]
            elif action == "fork":
                try:
                    rows.append((fork(table), list(text)))
                except CacheFullError:
                    continue
            elif action == "publish":
                table.publish_prefix(Texts.keys(text))
            else:
                promise.close()
                live.remove((promise, rows))
        for _, rows in live:
            assert all(read(table) == text for table, text in rows if text)
    assert pool.prefixes.reused_tokens > 20 * PAGE_TOKENS
    for kept, _ in live:
        kept.close()
    assert (pool.held_pages, pool.unreserved_pages) == (0, 24)
    pool._free_unheld(pool.prefixes.evict_oldest(pool.num_pages, lambda _: True))
    assert pool.cached_pages == 0
    assert pool._free.longest_run() == (0, 24)
