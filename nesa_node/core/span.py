"""Span: a contiguous, half-open range of a model's blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from nesa_node.core.errors import ConfigError


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Blocks `start <= i < end`. Empty spans are allowed (`len() == 0`), reversed ones are not."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(f"a span needs 0 <= start <= end, got {self.start}:{self.end}")

    def __len__(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.start}:{self.end}"

    def covers(self, other: Span) -> bool:
        return self.start <= other.start and other.end <= self.end

    @classmethod
    def parse(cls, text: str) -> Span:
        """Read `a:b`. Raises `ConfigError` for anything else, an empty span included."""
        match = re.fullmatch(r"(\d{1,6}):(\d{1,6})", text.strip())
        if match is None or int(match[1]) >= int(match[2]):
            raise ConfigError(f"block indices must look like 0:10 (half-open), got {text!r}")
        return cls(int(match[1]), int(match[2]))


def split_evenly(num_blocks: int, parts: int) -> list[Span]:
    """Split all blocks into `parts` adjacent spans, with lengths that differ by at most one."""
    parts = min(parts, num_blocks)
    cuts = [num_blocks * part // parts for part in range(parts + 1)]
    return [Span(start, end) for start, end in pairwise(cuts)]
