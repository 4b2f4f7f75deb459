"""A span under the load of many sessions and of one."""

from __future__ import annotations

import torch

from nesa_node.engine.blocks import Blocks, Run
from nesa_node.engine.packed_linear import PackedLinear

ONE, MANY = 1, 8
SETTLED = 260
"""After so many forwards of one kind a small span has the layout for it."""


def packed_layers(blocks: Blocks) -> int:
    return sum(isinstance(module, PackedLinear) for module in blocks._decoder.modules())


def decode(blocks: Blocks, rows: int, forwards: int = 1) -> list[int]:
    """Run forwards of one token in each of `rows` rows; return what was packed after each."""
    promise = blocks.new_pool(rows * 32).promise(rows)
    runs = [Run(promise.new_table(), 1) for _ in range(rows)]
    hidden_TD = torch.randn(rows, blocks.hidden_size)
    packed = []
    for _ in range(forwards):
        for run in runs:
            run.table.truncate(0)
            run.table.reserve(1)
        blocks.forward(hidden_TD, runs)
        packed.append(packed_layers(blocks))
    return packed
