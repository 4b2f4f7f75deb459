"""Versioned document of sections, which encodes the changes since any version."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec

MAX_REMEMBERED_REMOVALS = 4096
"""Maximum removals in memory; a reader that missed older ones gets the whole document."""

_Entry = tuple[int, msgspec.Raw]


class VersionedSections:
    """Sections of entries, as JSON: `{"version", "full", "sections": {name: {key: value}}}`.

    A reader with a version gets the entries that changed after it, null for removed ones; there is
    no state per reader. Thread-safe. To know the version of the result of `since`, read `version`
    before the call.
    """

    def __init__(self) -> None:
        self.version = 0
        self._sections: dict[str, dict[str, _Entry]] = {}
        self._removed: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._oldest_known_version = 0
        self._encoded_since: dict[int | None, bytes] = {}
        self._lock = threading.RLock()

    def replace_entries(self, name: str, entries: Mapping[str, Any]) -> bool:
        """Replace all entries of a section; returns whether anything changed."""
        raws = _encode_entries(entries)
        with self._lock:
            changed = self._set_raw(name, raws)
            section = self._sections[name]
            gone = [key for key in section if key not in entries]
            if gone:
                version = self._bump_version(changed)
                for key in gone:
                    del section[key]
                    self._removed[name, key] = version
                while len(self._removed) > MAX_REMEMBERED_REMOVALS:
                    self._oldest_known_version = self._removed.popitem(last=False)[1]
        return changed or bool(gone)

    def set_entries(
        self, name: str, entries: Mapping[str, Any], *, keep: int | None = None
    ) -> bool:
        """Set some entries of a section; returns whether anything changed.

        `keep` limits a growing section to its newest entries. Readers are not told of the removals:
        they apply the same limit.
        """
        raws = _encode_entries(entries)
        with self._lock:
            changed = self._set_raw(name, raws)
            section = self._sections[name]
            if keep is not None and len(section) > keep:
                for key in list(itertools.islice(section, len(section) - keep)):
                    del section[key]
        return changed

    def encode_since(self, version: int | None) -> bytes:
        """JSON of the changes since `version`, or of everything if that is None or unknown."""
        with self._lock:
            if version is not None and not self._oldest_known_version <= version <= self.version:
                version = None
            if version not in self._encoded_since:
                self._encoded_since[version] = self._encode(version)
            return self._encoded_since[version]

    def _set_raw(self, name: str, raws: Mapping[str, msgspec.Raw]) -> bool:
        section = self._sections.setdefault(name, {})
        changed = False
        for key, raw in raws.items():
            if key in section and bytes(section[key][1]) == bytes(raw):
                continue
            section[key] = self._bump_version(changed), raw
            self._removed.pop((name, key), None)
            changed = True
        return changed

    def _bump_version(self, within: bool) -> int:
        """The version of a change; changes of one `set_entries` or `replace_entries` share one."""
        if not within:
            self.version += 1
            self._encoded_since.clear()
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


def _encode_entries(entries: Mapping[str, Any]) -> dict[str, msgspec.Raw]:
    """Encode the entries, before the lock is taken."""
    return {key: msgspec.Raw(msgspec.json.encode(value)) for key, value in entries.items()}
