"""Which pages hold the beginning of which texts, so that a later row need not compute it again.

A text is known only by a chain of keys, one for each of its full pages. Each key stands for its
page and all before it; what a key is made of is for whoever makes it.
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
    """Bookkeeping only: whose pages these are, and when one must go, the pool decides.

    The least recently used comes first, and of one text the end before the beginning: without its
    beginning an end is of no use to anybody.
    """

    def __init__(self) -> None:
        self.reused_tokens = 0
        """That rows began with instead of computing them."""
        self.asked_tokens = 0
        """That rows hoped to begin with."""
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._keys: dict[int, Key] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, page: int) -> bool:
        return page in self._keys

    def find(self, keys: Sequence[Key]) -> list[int]:
        """The pages of as much of this chain as is known, from its beginning."""
        known = self._known(keys)
        self._touch(keys[:known])
        return [self._entries[key].page for key in keys[:known]]

    def add(self, keys: Sequence[Key], pages: Sequence[int]) -> None:
        """Let `keys[i]` be found at `pages[i]`. What is known already stays where it is.

        A page has one key: at the first that is known under another, the chain ends.
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
        """Forget a page and whatever goes on after it: all these pages."""
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
        """Forget `count` of the pages for which `spare` holds, or all; returns these."""
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
