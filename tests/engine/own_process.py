"""Memory is measured in processes of their own: a peak never falls, and others leave gaps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, LlamaConfig


def figures(program: str, folder: Path, span: str, *more: str, **shape: Any) -> list[list[int]]:
    """The numbers that `tests.engine.PROGRAM` prints, line by line, of a Llama in `folder`.

    Freed blocks go back to the system: malloc would keep up to 64 MiB of them, as it happens.
    """
    auto: Any = AutoModelForCausalLM
    auto.from_config(LlamaConfig(vocab_size=128, **shape)).save_pretrained(folder)
    finished = subprocess.run(
        [sys.executable, "-m", f"tests.engine.{program}", str(folder), span, *more],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
        capture_output=True,
        text=True,
        check=True,
    )
    return [[int(number) for number in line.split()] for line in finished.stdout.splitlines()]
