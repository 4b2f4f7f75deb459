"""Run as a program: print how much resident memory a span adds, in bytes, once it has run."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

from nesa_node.core.ids import Span
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.hub import open_checkpoint
from tests.engine.chained import forward, new_row


def main() -> None:
    torch.set_num_threads(1)
    folder, span = Path(sys.argv[1]), Span.parse(sys.argv[2])
    how: Any = {"dtype": torch.bfloat16, "device": "cpu", "quant_type": sys.argv[3]}
    checkpoint = open_checkpoint(str(folder), cache_dir=folder)
    # Imports, torch's buffers and machine code are there before.
    run(load_blocks(checkpoint, Span(0, 1), **how))
    gc.collect()
    before = resident()
    blocks = load_blocks(checkpoint, span, **how)
    run(blocks)
    print(resident() - before)


def run(blocks: ModelBlocks) -> None:
    for tokens in (1, 16):
        forward(blocks, torch.randn(tokens, blocks.hidden_size), new_row(blocks))


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    main()
