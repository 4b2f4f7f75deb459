"""Run as a program: print the resident bytes after a hundred lengths of input, and after more."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import torch

from nesa_node.core.ids import Span
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.hub import open_checkpoint
from tests.engine.chained import forward, new_row

LENGTHS = (range(1, 100), range(100, 250))


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    checkpoint = open_checkpoint(str(folder), cache_dir=folder)
    blocks = load_blocks(checkpoint, Span(0, 1), dtype=torch.float32, device="cpu")
    row = new_row(blocks)
    for lengths in LENGTHS:
        for length in lengths:
            forward(blocks, torch.randn(length, blocks.hidden_size), row)
            row.truncate(0)
        print(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    main()
