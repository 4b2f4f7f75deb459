"""The free pages of a pool, as runs of pages that follow one another."""

from __future__ import annotations

import heapq

SPARE_ENTRIES = 64
"""That are out of date, beyond as many as there are runs, before they are thrown away."""


class FreeRuns:
    """Looks and changes take logarithmic time, however many pages there are.

    No two runs touch: where a page is not free, the next one is free only if a run begins there.
    """

    def __init__(self, pages: int) -> None:
        """Pages 0 to `pages` - 1 are free."""
        self.pages = 0
        """How many are free."""
        self._end: dict[int, int] = {}
        """By the first page of a run, the page after its last."""
        self._start: dict[int, int] = {}
        """The other way round."""
        self._longest: list[tuple[int, int]] = []
        """A heap of (-length, first page). Runs that are no more are dropped when they come up."""
        self._add(0, pages)

    def begins_at(self, page: int) -> bool:
        """Whether a run begins there."""
        return page in self._end

    def longest(self) -> tuple[int, int]:
        """The first page of the longest run, the first of several, and its length; 0 if none is."""
        while self._longest:
            length, start = -self._longest[0][0], self._longest[0][1]
            if self._end.get(start) == start + length:
                return start, length
            heapq.heappop(self._longest)
        return 0, 0

    def take(self, page: int, start: int) -> None:
        """Let a page of the run that begins at `start` be free no more."""
        end = self._remove(start)
        assert start <= page < end
        self._add(start, page)
        self._add(page + 1, end)

    def give_back(self, page: int) -> None:
        """Let a page be free that was not."""
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
        """Returns the page after the run's last."""
        end = self._end.pop(start)
        del self._start[end]
        self.pages -= end - start
        return end
