"""`nesa-node run` that returns its outputs times 1.05, and says that it is 50 times as fast.

python -m tests.e2e.lying_node run MODEL --block-indices 10:20 --initial-peers ADDRESS
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from nesa_node.cli.app import run_command
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.devices import SpanThroughput, measure_throughput
from nesa_node.server.node import served_span

FACTOR, BOAST = 1.05, 50.0


def main() -> None:
    load = served_span._load

    def load_liar(*args: Any) -> ModelBlocks:
        blocks = load(*args)
        run: Callable[..., None] = blocks.forward_buffers

        def forward_buffers(pieces: Any, runs: Any) -> None:
            run(pieces, runs)
            with torch.inference_mode():
                for piece in pieces:
                    piece.buffers.output.tensor_TD[piece.start : piece.end].mul_(FACTOR)

        patch.object(blocks, "forward_buffers", forward_buffers).start()
        return blocks

    def boast(*args: Any, **kwargs: Any) -> SpanThroughput:
        found = measure_throughput(*args, **kwargs)
        return replace(found, decode_tokens_per_s=BOAST * found.decode_tokens_per_s)

    with (
        patch.object(served_span, "_load", load_liar),
        patch.object(served_span, "measure_throughput", boast),
    ):
        sys.exit(run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
