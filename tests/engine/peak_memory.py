"""Run as a program: print the peak resident bytes before and after loading a span, what its weights
take, and one of its layers in float32.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.footprint import peak_bytes
from nesa_node.core.ids import Span
from nesa_node.engine.model.devices import compute_block_bytes
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.hub import open_checkpoint
from tests.engine.chained import forward, new_row


def main() -> None:
    torch.set_num_threads(1)
    folder, span = Path(sys.argv[1]), Span.parse(sys.argv[2])
    checkpoint = open_checkpoint(str(folder), cache_dir=folder)
    # A daemon's peak before it loads anything: imports and one matrix product.
    torch.randn(512, 512) @ torch.randn(512, 512)
    how: Any = {"dtype": torch.float32, "device": "cpu", "quant_type": (*sys.argv[3:], "none")[0]}
    first = load_blocks(checkpoint, Span(0, 1), **how)
    forward(first, torch.randn(4, first.hidden_size), new_row(first))
    del first
    before = peak_bytes()
    # As a daemon does: malloc gives each thread an arena of its own.
    with ThreadPoolExecutor(1) as thread:
        blocks = thread.submit(load_blocks, checkpoint, span, **how).result()
    print(
        before, peak_bytes(), blocks.weight_bytes, compute_block_bytes(checkpoint, torch.float32)[0]
    )


if __name__ == "__main__":
    main()
