"""Which inputs reach Python code that none before them reached: later inputs are made of these.

Lines are seen by `sys.settrace`, which makes a parser several times slower, so that only some
inputs are traced, and none of those that are timed. Machine code is not seen.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

SHARE = 1 / 16
"""Of the inputs: these are traced while they are read, and not timed."""
MAX_KEPT = 512
MAX_KEPT_BYTES = 4096
"""Of one input: what they take together must not be taken for memory that a parser keeps."""
_NOT_TRACED = (
    __file__,
    str(Path(__file__).with_name("loop.py")),
    str(Path(asyncio.__file__).parent),
)


class Guide:
    """The inputs of which others are made: `seeds`, and what reached new code."""

    def __init__(self, seeds: Iterable[bytes]) -> None:
        self.inputs = list(seeds)
        self._most = len(self.inputs) + MAX_KEPT
        self._reached: set[tuple[CodeType, int, int]] = set()
        """Pairs of lines, one run after the other."""
        self._news = False

    def is_due(self, rng: random.Random) -> bool:
        return len(self.inputs) < self._most and rng.random() < SHARE

    @contextmanager
    def tracing(self, data: bytes) -> Iterator[None]:
        """Keep `data` if what runs meanwhile in this thread reaches something new."""
        self._news = False
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)
        if self._news and len(data) <= MAX_KEPT_BYTES:
            self.inputs.append(data)

    def _enter(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        code, last = frame.f_code, 0
        if code.co_filename.startswith(_NOT_TRACED):
            return None

        def step(frame: FrameType, _event: str, _argument: Any) -> Any:
            nonlocal last
            edge = (code, last, frame.f_lineno)
            if edge not in self._reached:
                self._reached.add(edge)
                self._news = True
            last = frame.f_lineno
            return step

        return step
