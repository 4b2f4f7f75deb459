"""Versioned document of sections, which encodes the changes since any version."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec

MAX_REMOVED = 4096
"""Maximum removals in memory; a reader that missed older ones gets the whole document."""

_Entry = tuple[int, msgspec.Raw]


class Sections:
    """Sections of entries, as JSON: `{"version", "full", "sections": {name: {key: value}}}`.

    A reader with a version gets the entries that changed after it, null for removed ones; there is
    no state per reader. Thread-safe. To know the version of the result of `since`, read `version`
    before the call.
    """

    def __init__(self) -> None:
        self.version = 0
        self._sections: dict[str, dict[str, _Entry]] = {}
        self._removed: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._removed_all_since = 0
        self._made: dict[int | None, bytes] = {}
        self._guard = threading.RLock()

    def replace(self, name: str, entries: Mapping[str, Any]) -> bool:
        """Replace all entries of a section; returns whether anything changed."""
        raws = _encoded(entries)
        with self._guard:
            changed = self._put(name, raws)
            section = self._sections[name]
            gone = [key for key in section if key not in entries]
            if gone:
                version = self._next(changed)
                for key in gone:
                    del section[key]
                    self._removed[name, key] = version
                while len(self._removed) > MAX_REMOVED:
                    self._removed_all_since = self._removed.popitem(last=False)[1]
        return changed or bool(gone)

    def put(self, name: str, entries: Mapping[str, Any], *, keep: int | None = None) -> bool:
        """Set some entries of a section; returns whether anything changed.

        `keep` limits a growing section to its newest entries. Readers are not told of the removals:
        they apply the same limit.
        """
        raws = _encoded(entries)
        with self._guard:
            changed = self._put(name, raws)
            section = self._sections[name]
            if keep is not None and len(section) > keep:
                for key in list(itertools.islice(section, len(section) - keep)):
                    del section[key]
        return changed

    def since(self, version: int | None) -> bytes:
        """JSON of the changes since `version`, or of everything if that is None or unknown."""
        with self._guard:
            if version is not None and not self._removed_all_since <= version <= self.version:
                version = None
            if version not in self._made:
                self._made[version] = self._encode(version)
            return self._made[version]

    def _put(self, name: str, raws: Mapping[str, msgspec.Raw]) -> bool:
        section = self._sections.setdefault(name, {})
        changed = False
        for key, raw in raws.items():
            if key in section and bytes(section[key][1]) == bytes(raw):
                continue
            section[key] = self._next(changed), raw
            self._removed.pop((name, key), None)
            changed = True
        return changed

    def _next(self, within: bool) -> int:
        """The version of a change; all changes of one `put` or `replace` share one."""
        if not within:
            self.version += 1
            self._made.clear()
        return self.version

    def _encode(self, version: int | None) -> bytes:
        least = -1 if version is None else version
        news: dict[str, dict[str, msgspec.Raw | None]] = {}
        for name, section in self._sections.items():
            fresh = {key: raw for key, (changed, raw) in section.items() if changed > least}
            if fresh or version is None:
                news[name] = {**fresh}
        if version is not None:
            for (name, key), removed in self._removed.items():
                if removed > version:
                    news.setdefault(name, {})[key] = None
        return msgspec.json.encode(
            {"version": self.version, "full": version is None, "sections": news}
        )


def _encoded(entries: Mapping[str, Any]) -> dict[str, msgspec.Raw]:
    """Encode the entries, before the lock is taken."""
    return {key: msgspec.Raw(msgspec.json.encode(value)) for key, value in entries.items()}
