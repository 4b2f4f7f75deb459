"""Run as a program: print the bytes of a span and of its largest weight, and what it takes.

That is, for each of four changes of its layout, resident bytes after it and at its peak, above what
there was before the span was loaded.
"""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from nesa_node.core.span import Span
from nesa_node.engine.blocks import Blocks
from nesa_node.engine.parts import load_blocks
from tests.engine.chained import open_local
from tests.engine.packing import MANY, ONE, decode, packed_layers


def status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def load(folder: Path, span: Span) -> Blocks:
    return load_blocks(open_local(folder), span, dtype=torch.float32, device="cpu")


def change(blocks: Blocks, rows: int) -> None:
    wanted = 4 * len(blocks.span) if rows == MANY else 0
    while packed_layers(blocks) != wanted:
        decode(blocks, rows)


def main() -> None:
    torch.set_num_threads(1)
    folder, span = Path(sys.argv[1]), Span.parse(sys.argv[2])
    with ThreadPoolExecutor(1) as executor:  # as a daemon does
        # What oneDNN compiles for these shapes is no matter here.
        first = executor.submit(load, folder, Span(0, 1)).result()
        for rows in (MANY, ONE):
            executor.submit(change, first, rows).result()
        del first
        before = status("VmRSS")
        blocks = executor.submit(load, folder, span).result()
        print(blocks.weight_bytes, max(weight.nbytes for weight in blocks._decoder.parameters()))
        for rows in (MANY, ONE, MANY, ONE):
            forget_peak()
            executor.submit(change, blocks, rows).result()
            print(status("VmRSS") - before, status("VmHWM") - before)


if __name__ == "__main__":
    main()
