"""Index of cached prefixes: which pages hold the KV cache of which token sequences.

A prefix is known by a chain of keys, one per full page. A key identifies its page and all pages
before it; the caller chooses how keys are made (usually hashes).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

PrefixKey = Hashable


@dataclass(slots=True)
class _Entry:
    page: int
    parent: PrefixKey | None
    children: set[PrefixKey] = field(default_factory=set)


class PrefixIndex:
    """Least-recently-used index from chained keys to pages, which the pool owns and evicts.

    Within one prefix the last page is evicted first, since a page without those before it is
    useless.
    """

    def __init__(self) -> None:
        self.reused_tokens = 0
        """Tokens that rows took from the cache instead of computing them."""
        self.queried_tokens = 0
        """Tokens that rows looked up."""
        self._entries: OrderedDict[PrefixKey, _Entry] = OrderedDict()
        self.key_by_page: dict[int, PrefixKey] = {}
        """The key of each page in the index; to be read only."""

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, keys: Sequence[PrefixKey]) -> list[int]:
        """Return the pages of the longest known prefix of this chain, and mark them as used."""
        known = self._count_known(keys)
        self._mark_used(keys[:known])
        return [self._entries[key].page for key in keys[:known]]

    def add(self, keys: Sequence[PrefixKey], pages: Sequence[int]) -> None:
        """Register `pages[i]` under `keys[i]`. Known keys keep their page.

        A page has one key: the chain is cut at the first page registered under another key.
        """
        added = self._count_known(keys)
        for key, page in zip(keys[added:], pages[added:], strict=True):
            if key in self._entries or page in self.key_by_page:
                break
            parent = keys[added - 1] if added else None
            if parent is not None:
                self._entries[parent].children.add(key)
            self._entries[key] = _Entry(page, parent)
            self.key_by_page[page] = key
            added += 1
        self._mark_used(keys[:added])

    def remove(self, page: int) -> list[int]:
        """Remove a page and all pages that continue it; return all of them."""
        entry = self._entries[self.key_by_page[page]]
        if entry.parent is not None:
            self._entries[entry.parent].children.discard(self.key_by_page[page])
        pages: list[int] = []
        doomed = [self.key_by_page[page]]
        while doomed:
            entry = self._entries.pop(doomed.pop())
            doomed += entry.children
            del self.key_by_page[entry.page]
            pages.append(entry.page)
        return pages

    def evict_oldest(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        """Evict the `count` oldest pages that are `evictable`, or all of those; return them."""
        forgotten: list[int] = []
        pages = (entry.page for entry in self._entries.values())
        for page in list(itertools.islice(filter(evictable, pages), count)):
            if len(forgotten) >= count:
                break
            if page in self.key_by_page:
                forgotten += filter(evictable, self.remove(page))
        return forgotten

    def _count_known(self, keys: Sequence[PrefixKey]) -> int:
        return next((at for at, key in enumerate(keys) if key not in self._entries), len(keys))

    def _mark_used(self, keys: Sequence[PrefixKey]) -> None:
        for key in reversed(keys):
            self._entries.move_to_end(key)
