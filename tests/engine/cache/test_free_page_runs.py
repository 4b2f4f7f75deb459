"""Runs of free pages, compared with a set of them."""

from __future__ import annotations

import itertools
import random

import pytest

from nesa_node.engine.cache.pages import MAX_STALE_HEAP_ENTRIES, FreePageRuns

PAGES = 40


def runs_of(free: set[int]) -> dict[int, int]:
    """Length by first page."""
    groups = itertools.groupby(sorted(free), lambda page: page - len([f for f in free if f < page]))
    pages = [list(group) for _, group in groups]
    return {run[0]: len(run) for run in pages}


@pytest.mark.parametrize("seed", range(5))
def test_runs_are_those_of_a_set_of_pages(seed: int) -> None:
    rng = random.Random(seed)
    runs, free = FreePageRuns(PAGES), set(range(PAGES))
    for _ in range(600):
        page = rng.randrange(PAGES)
        if page in free:
            start = max(start for start in runs_of(free) if start <= page)
            runs.allocate(page, start)
            free.remove(page)
        else:
            runs.release(page)
            free.add(page)
        lengths = runs_of(free)
        assert runs.pages == len(free)
        assert {page for page in range(PAGES) if runs.is_run_start(page)} == set(lengths)
        most = max(lengths.values(), default=0)
        first = min((start for start in lengths if lengths[start] == most), default=0)
        assert runs.longest_run() == (first, most)


def test_entries_that_are_out_of_date_are_thrown_away() -> None:
    runs = FreePageRuns(1000)
    for _ in range(100):
        for page in range(1000):
            runs.allocate(page, page)
        for page in range(1000):
            runs.release(page)
    assert len(runs._heap) <= 2 * 1 + MAX_STALE_HEAP_ENTRIES
