"""Index of cached prefixes: which pages hold the KV cache of which token sequences.

A prefix is known by a chain of keys, one per full page. A key identifies its page and all pages
before it; the caller chooses how keys are made (usually hashes).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

Key = Hashable


@dataclass(slots=True)
class _Entry:
    page: int
    parent: Key | None
    children: set[Key] = field(default_factory=set)


class PrefixIndex:
    """Least-recently-used index from chained keys to pages, which the pool owns and evicts.

    Within one prefix the last page is evicted first, since a page without those before it is
    useless.
    """

    def __init__(self) -> None:
        self.reused_tokens = 0
        """Tokens that rows took from the cache instead of computing them."""
        self.asked_tokens = 0
        """Tokens that rows looked up."""
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._keys: dict[int, Key] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, page: int) -> bool:
        return page in self._keys

    def find(self, keys: Sequence[Key]) -> list[int]:
        """Return the pages of the longest known prefix of this chain, and mark them as used."""
        known = self._known(keys)
        self._touch(keys[:known])
        return [self._entries[key].page for key in keys[:known]]

    def add(self, keys: Sequence[Key], pages: Sequence[int]) -> None:
        """Register `pages[i]` under `keys[i]`. Known keys keep their page.

        A page has one key: the chain is cut at the first page registered under another key.
        """
        added = self._known(keys)
        for key, page in zip(keys[added:], pages[added:], strict=True):
            if key in self._entries or page in self._keys:
                break
            parent = keys[added - 1] if added else None
            if parent is not None:
                self._entries[parent].children.add(key)
            self._entries[key] = _Entry(page, parent)
            self._keys[page] = key
            added += 1
        self._touch(keys[:added])

    def forget(self, page: int) -> list[int]:
        """Remove a page and all pages that continue it; return all of them."""
        entry = self._entries[self._keys[page]]
        if entry.parent is not None:
            self._entries[entry.parent].children.discard(self._keys[page])
        pages: list[int] = []
        doomed = [self._keys[page]]
        while doomed:
            entry = self._entries.pop(doomed.pop())
            doomed += entry.children
            del self._keys[entry.page]
            pages.append(entry.page)
        return pages

    def forget_oldest(self, count: int, spare: Callable[[int], bool]) -> list[int]:
        """Evict the `count` oldest pages for which `spare` holds, or all of those; return them."""
        forgotten: list[int] = []
        pages = (entry.page for entry in self._entries.values())
        for page in list(itertools.islice(filter(spare, pages), count)):
            if len(forgotten) >= count:
                break
            if page in self:
                forgotten += filter(spare, self.forget(page))
        return forgotten

    def _known(self, keys: Sequence[Key]) -> int:
        return next((at for at, key in enumerate(keys) if key not in self._entries), len(keys))

    def _touch(self, keys: Sequence[Key]) -> None:
        for key in reversed(keys):
            self._entries.move_to_end(key)
