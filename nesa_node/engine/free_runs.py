"""Free pages of a pool, as runs of consecutive pages."""

from __future__ import annotations

import heapq

SPARE_ENTRIES = 64
"""Outdated heap entries tolerated beyond one per run; at more the heap is rebuilt."""


class FreeRuns:
    """Index of free runs. Every operation takes logarithmic time in the number of runs.

    Runs are maximal: if a page is not free, the next one is free only if a run begins there.
    """

    def __init__(self, pages: int) -> None:
        """Start with pages 0 to `pages` - 1 free."""
        self.pages = 0
        """Number of free pages."""
        self._end: dict[int, int] = {}
        """First page of each run -> page after its last."""
        self._start: dict[int, int] = {}
        """Page after the last of each run -> its first page."""
        self._longest: list[tuple[int, int]] = []
        """Heap of (-length, first page). Outdated entries are dropped when they reach the top."""
        self._add(0, pages)

    def begins_at(self, page: int) -> bool:
        """Whether a run begins at `page`."""
        return page in self._end

    def longest(self) -> tuple[int, int]:
        """First page and length of the longest run, the lowest of several; (0, 0) if none."""
        while self._longest:
            length, start = -self._longest[0][0], self._longest[0][1]
            if self._end.get(start) == start + length:
                return start, length
            heapq.heappop(self._longest)
        return 0, 0

    def take(self, page: int, start: int) -> None:
        """Remove `page` from the run that begins at `start`."""
        end = self._remove(start)
        assert start <= page < end
        self._add(start, page)
        self._add(page + 1, end)

    def give_back(self, page: int) -> None:
        """Add `page`, which must not be free, and join it with adjacent runs."""
        start, end = self._start.get(page, page), page + 1
        if start < page:
            self._remove(start)
        if self.begins_at(end):
            end = self._remove(end)
        self._add(start, end)

    def _add(self, start: int, end: int) -> None:
        if start == end:
            return
        self.pages += end - start
        self._end[start], self._start[end] = end, start
        heapq.heappush(self._longest, (start - end, start))
        if len(self._longest) > 2 * len(self._end) + SPARE_ENTRIES:
            self._longest = [(start - end, start) for start, end in self._end.items()]
            heapq.heapify(self._longest)

    def _remove(self, start: int) -> int:
        """Remove the run that begins at `start`; return the page after its last."""
        end = self._end.pop(start)
        del self._start[end]
        self.pages -= end - start
        return end
