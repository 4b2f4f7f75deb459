"""Recorder of the files whose functions run, for `tests.house.walks`.

Each process whose PYTHONPATH has this folder imports it at its start. If `WALKS_FOLDER` is set,
SIGUSR1 begins a window and the next SIGUSR1 ends it; each writes PID-COUNT.json there: an empty
list at the beginning, at the end the files that had a call.
"""

import json
import os
import signal
import sys
import threading
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType


def install(folder: Path) -> None:
    seen: set[str] = set()
    recording, count = False, 0

    def profile(frame: FrameType, event: str, arg: object) -> None:
        # The code of modules and class bodies, which runs at an import, lacks this flag.
        if recording and event == "call" and frame.f_code.co_flags & CO_OPTIMIZED:
            seen.add(frame.f_code.co_filename)

    def toggle(signum: int, frame: FrameType | None) -> None:
        nonlocal recording, count
        recording = False
        count += 1
        part = folder / f"{os.getpid()}-{count}.part"
        part.write_text(json.dumps(sorted(seen.copy())), "utf-8")
        seen.clear()
        part.rename(part.with_suffix(".json"))
        recording = bool(count % 2)

    signal.signal(signal.SIGUSR1, toggle)
    threading.setprofile(profile)
    sys.setprofile(profile)


if folder := os.environ.get("WALKS_FOLDER"):
    install(Path(folder))
