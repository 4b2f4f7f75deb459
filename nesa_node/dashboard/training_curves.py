"""Loss curves of fine-tunings on this machine, read from the logs that `finetune` writes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOG_NAME = "log.jsonl"
MAX_POINTS = 240
"""Of one curve; each is the mean of as many steps as it takes."""
MAX_LOG_BYTES = 64 << 20


@dataclass(slots=True)
class _Read:
    """What was read of one log, as it was then."""

    stamp: tuple[int, int] = (-1, -1)
    """Size and time of its last change."""
    entry: dict[str, Any] = field(default_factory=dict)


class TrainingCurves:
    """Curves of the trainings whose output folders these are."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)
        self._read = {folder: _Read() for folder in self.folders}

    def read(self) -> dict[str, Any]:
        """Views of the trainings that have begun, by folder. Reads files: call it in a thread."""
        for folder, read in self._read.items():
            try:
                status = os.stat(folder / LOG_NAME)
                stamp = status.st_size, status.st_mtime_ns
                if stamp != read.stamp and status.st_size <= MAX_LOG_BYTES:
                    read.entry = summarize_log(folder.name, (folder / LOG_NAME).read_text())
                    read.stamp = stamp
            except (OSError, UnicodeDecodeError):
                read.entry = {}
        return {str(folder): read.entry for folder, read in self._read.items() if read.entry}


def summarize_log(name: str, text: str) -> dict[str, Any]:
    """View of a log; empty without a step. Lines that are cut or damaged are left out."""
    steps = [found for line in text.splitlines() if (found := _parse(line)) is not None]
    if not steps:
        return {}
    last = steps[-1]
    size = -(-len(steps) // MAX_POINTS)
    groups = [steps[at : at + size] for at in range(0, len(steps), size)]
    return {
        "name": name,
        "step": last["step"],
        "loss": _last([last], "loss"),
        "learning_rate": _last([last], "learning_rate"),
        "at": last["at"],
        "steps": [group[-1]["step"] for group in groups],
        "losses": [_mean(group, "loss") for group in groups],
        "eval_losses": [_last(group, "eval_loss") for group in groups],
    }


def _parse(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
        found = {name: float(entry[name]) for name in ("loss", "learning_rate", "at")}
        value = entry.get("eval_loss")
        found["eval_loss"] = math.nan if value is None else float(value)
        return {**found, "step": int(entry["step"])}
    except (ValueError, KeyError, TypeError):
        return None


def _mean(group: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [each[name] for each in group if math.isfinite(each[name])]
    return round(sum(values) / len(values), 5) if values else None


def _last(group: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [each[name] for each in group if math.isfinite(each[name])]
    return round(values[-1], 5) if values else None
