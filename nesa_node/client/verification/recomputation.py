"""Recomputation of a hop's work from the client's own copy of the weights, block by block.

L tokens of a row, P positions of it whose outputs are known, D hidden.
"""

from __future__ import annotations

from contextlib import closing
from typing import cast, get_args

import torch

from nesa_node.client.verification.session_audit import HopWork, NotAuditedError
from nesa_node.compression.tensors import DTYPES
from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import QuantType
from nesa_node.engine.cache.pages import PAGE_TOKENS, pages_for
from nesa_node.engine.model.blocks import ModelBlocks, RowChunk
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.engine.weights.skeleton import Skeleton


def _recomputed_span(work: HopWork) -> Span:
    """Blocks to run: those before the hop, too, for tokens of a reused prefix."""
    has_prefix = any(len(row.prefix_LD) for row in work.rows)
    return Span(work.first_block if has_prefix else work.span.start, work.span.end)


def missing_bytes(checkpoint: Checkpoint, work: HopWork) -> int:
    """Bytes of weights that a recomputation would have to download."""
    skeleton = Skeleton(checkpoint)
    names = skeleton.block_names(_recomputed_span(work))
    return sum(checkpoint.download_sizes(skeleton.source_names(names)).values())


def recompute(
    checkpoint: Checkpoint, work: HopWork, *, by_token: bool = False
) -> list[torch.Tensor]:
    """Outputs [P, D] of each row on the CPU, in the hop's own kind of computation.

    By one prefill, or `by_token`, which rounds otherwise and takes as long as a session. One block
    is in memory at a time. Blocks the thread. Raises what `load_blocks` raises, and
    `NotAuditedError` for a quantization that is unknown here.
    """
    declared = work.computation
    if declared.quantization not in get_args(QuantType):
        raise NotAuditedError(f"quantization {declared.quantization!r} is unknown here")
    dtype = DTYPES[declared.dtype]
    hidden = [row.prefix_LD.to(dtype) for row in work.rows]
    span = _recomputed_span(work)
    for block in range(span.start, span.end):
        if block == work.span.start:
            hidden = [
                torch.cat([prefix_LD, row.inputs_LD.to(dtype)])
                for prefix_LD, row in zip(hidden, work.rows, strict=True)
            ]
        blocks = load_blocks(
            checkpoint,
            Span(block, block + 1),
            dtype=dtype,
            device="cpu",
            quant_type=cast(QuantType, declared.quantization),
        )
        hidden = [_run_row(blocks, row_LD, by_token=by_token) for row_LD in hidden]
    return [
        output_LD[list(row.positions)] for row, output_LD in zip(work.rows, hidden, strict=True)
    ]


def _run_row(blocks: ModelBlocks, hidden_LD: torch.Tensor, *, by_token: bool) -> torch.Tensor:
    if not len(hidden_LD):
        return hidden_LD
    pages = pages_for(len(hidden_LD))
    chunks = torch.split(hidden_LD, 1 if by_token else len(hidden_LD))
    # Closed, so that the cache is freed at once and not when cycles of objects are collected.
    with closing(blocks.new_pool(pages * PAGE_TOKENS).reserve(pages)) as reservation:
        table = reservation.new_table()
        table.reserve(len(hidden_LD))
        return torch.cat([blocks.forward(chunk, [RowChunk(table, len(chunk))]) for chunk in chunks])
