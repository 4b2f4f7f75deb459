"""Free pages of a pool, as runs of consecutive pages."""

from __future__ import annotations

import heapq

MAX_STALE_HEAP_ENTRIES = 64
"""Outdated heap entries tolerated beyond one per run; at more the heap is rebuilt."""


class FreePageRuns:
    """Index of free runs. Every operation takes logarithmic time in the number of runs.

    Runs are maximal: if a page is not free, the next one is free only if a run begins there.
    """

    def __init__(self, pages: int) -> None:
        """Start with pages 0 to `pages` - 1 free."""
        self.pages = 0
        """Number of free pages."""
        self._end_by_start: dict[int, int] = {}
        """First page of each run -> page after its last."""
        self._start_by_end: dict[int, int] = {}
        """Page after the last of each run -> its first page."""
        self._heap: list[tuple[int, int]] = []
        """Heap of (-length, first page). Outdated entries are dropped when they reach the top."""
        self._add_run(0, pages)

    def is_run_start(self, page: int) -> bool:
        """Whether a run begins at `page`."""
        return page in self._end_by_start

    def longest_run(self) -> tuple[int, int]:
        """First page and length of the longest run, the lowest of several; (0, 0) if none."""
        while self._heap:
            length, start = -self._heap[0][0], self._heap[0][1]
            if self._end_by_start.get(start) == start + length:
                return start, length
            heapq.heappop(self._heap)
        return 0, 0

    def allocate(self, page: int, start: int) -> None:
        """Remove `page` from the run that begins at `start`."""
        end = self._remove_run(start)
        assert start <= page < end
        self._add_run(start, page)
        self._add_run(page + 1, end)

    def release(self, page: int) -> None:
        """Add `page`, which must not be free, and join it with adjacent runs."""
        start, end = self._start_by_end.get(page, page), page + 1
        if start < page:
            self._remove_run(start)
        if self.is_run_start(end):
            end = self._remove_run(end)
        self._add_run(start, end)

    def _add_run(self, start: int, end: int) -> None:
        if start == end:
            return
        self.pages += end - start
        self._end_by_start[start], self._start_by_end[end] = end, start
        heapq.heappush(self._heap, (start - end, start))
        if len(self._heap) > 2 * len(self._end_by_start) + MAX_STALE_HEAP_ENTRIES:
            self._heap = [(start - end, start) for start, end in self._end_by_start.items()]
            heapq.heapify(self._heap)

    def _remove_run(self, start: int) -> int:
        """Remove the run that begins at `start`; return the page after its last."""
        end = self._end_by_start.pop(start)
        del self._start_by_end[end]
        self.pages -= end - start
        return end
