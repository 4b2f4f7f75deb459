"""What one run of a benchmark is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch

Dtype = Literal["float32", "bfloat16"]
Quant = Literal["none", "int8", "nf4", "llm_int8"]
USERS_THREADS = 0
"""No `--threads`: daemons and client choose, local transformers has all, as users run them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Each benchmark has its own defaults, and others for `--quick`."""

    model: str = "250m"
    dtype: Dtype = "float32"
    quant_type: Quant = "none"
    device: str = "cpu"
    """Of daemons, client and local transformers."""
    nodes: tuple[int, ...] = (1, 2, 3)
    threads: tuple[int, ...] = (1, USERS_THREADS)
    """Of each process, where a benchmark compares with one process."""
    sessions: tuple[int, ...] = (1,)
    runs: int = 5
    prompt_tokens: int = 32
    new_tokens: int = 64
    long_prompt: int = 0
    seconds: float = 180.0
    round_trips_ms: tuple[int, ...] = (0, 10, 50, 100, 200)
    bandwidths_mbit: tuple[int, ...] = (1000, 100, 10)
    batches: tuple[int, ...] = (1, 8, 32)
    codecs: tuple[str, ...] = ("none",)
    prompts: tuple[int, ...] = ()
    congestion_control: str = "cubic"
    sysctls: tuple[str, ...] = ()
    ga: Literal["corrected", "printed"] = "corrected"
    matrix: str | None = None
    scorer: str | None = None
    snapshots: int = 0
    draft: str | None = None
    seed: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def updated(self, given: Mapping[str, Any]) -> Self:
        """With the values of `given` that are not None."""
        return replace(self, **{key: value for key, value in given.items() if value is not None})

    def as_json(self) -> dict[str, Any]:
        """For results: of a path only its name, since its folder is this machine's."""
        names = {"matrix": self.matrix, "scorer": self.scorer, "draft": self.draft}
        return asdict(self) | {key: path and Path(path).name for key, path in names.items()}
