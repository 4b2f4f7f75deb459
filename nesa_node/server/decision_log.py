"""What an orchestrator decided, kept on disk for whoever asks later why."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

MAX_ENTRIES = 1000
_MAX_LINE_BYTES = 64 * 1024


class DecisionLog:
    """JSON lines in one file: the last `max_entries` at least, twice as many at most."""

    def __init__(self, path: Path, max_entries: int = MAX_ENTRIES) -> None:
        self.path = path
        self._max_entries = max_entries
        self._count = sum(1 for _ in self._lines())

    def write(self, entry: Mapping[str, object]) -> None:
        """Raises `OSError`."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(entry), default=str, separators=(",", ":")) + "\n")
        self._count += 1
        if self._count > 2 * self._max_entries:
            self._shorten()

    def read(self) -> list[dict[str, object]]:
        """Every entry that can be read, the oldest first."""
        entries = []
        for line in self._lines():
            try:
                entry = json.loads(line)
            except ValueError:
                # Half a line, of a process that was killed.
                continue
            if isinstance(entry, dict):
                entries.append(entry)
        return entries

    def find(self, name: str) -> dict[str, object] | None:
        """The entry whose `name` is, or begins with, that."""
        found = [entry for entry in self.read() if str(entry.get("name", "")).startswith(name)]
        return found[-1] if found else None

    def _shorten(self) -> None:
        lines = list(self._lines())[-self._max_entries :]
        temporary = self.path.with_suffix(".new")
        temporary.write_text("".join(lines), encoding="utf-8")
        os.replace(temporary, self.path)
        self._count = len(lines)

    def _lines(self) -> Iterator[str]:
        if not self.path.exists():
            return
        with self.path.open(encoding="utf-8", errors="replace") as file:
            while line := file.readline(_MAX_LINE_BYTES):
                if line.endswith("\n"):
                    yield line


def decision_log_path(folder: Path, model_id: str) -> Path:
    """The file of a model's decisions in `folder`."""
    safe = "".join(c if c.isalnum() or c in "-_.@" else "_" for c in model_id)
    return folder / f"{safe[:120]}.jsonl"
