"""Identifiers of peers, models and sessions, and spans: half-open ranges of a model's blocks."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import NewType

from nesa_node.core.errors import ConfigError

PeerId = NewType("PeerId", str)
"""A libp2p peer id in base58. An Ed25519 peer id contains the public key itself."""

ModelId = NewType("ModelId", str)
"""`name@digest`: nodes of one swarm share it (`engine/weights/checkpoint.py`)."""

SessionId = NewType("SessionId", bytes)
"""16 random bytes chosen by the client."""


_MODEL_NAME_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_GGUF_ENDING = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$")
MAX_MODEL_NAME_CHARS = 128


def is_model_name(text: str) -> bool:
    """Whether `text` can name a model to any machine: as on the hub, and no path."""
    return len(text) <= MAX_MODEL_NAME_CHARS and _MODEL_NAME_PATTERN.fullmatch(text) is not None


def model_name_candidates(model: str) -> frozenset[str]:
    """Names under which nodes may announce the command line's `model` (name, folder or full id).

    Symbolic links of a folder are resolved, as the node that serves it does. A GGUF file goes by
    its name without the ending, also that in a folder.
    """
    path = os.path.expanduser(model)
    resolved = os.path.realpath(path) if os.path.exists(path) else model
    names = {os.path.basename(each.rstrip("/")) for each in (model, resolved)}
    if os.path.isdir(path):
        names |= {name for name in os.listdir(path) if name.endswith(".gguf")}
    stems = {_GGUF_ENDING.sub("", name.rpartition(":")[2]) for name in names}
    return frozenset({model} | names | stems)


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

    def overlaps(self, other: Span) -> bool:
        """Whether a block is in both."""
        return max(self.start, other.start) < min(self.end, other.end)

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
