"""Blocks computed again from weights that are read anew, for checks of what nodes computed.

T tokens of a chunk, L tokens of a row, D hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import CacheDtype, QuantType
from nesa_node.engine.adapters.peft_folder import PeftFolder
from nesa_node.engine.adapters.served_adapter import ServedAdapter
from nesa_node.engine.cache.pages import PAGE_TOKENS, pages_for
from nesa_node.engine.model.blocks import ModelBlocks, RowChunk
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.checkpoint import Checkpoint

MAX_RUN_BYTES = 256 << 20
"""Weights that are in memory at once, where one block has no more."""
ROUTER_CLOSENESS = 1e-5
"""Two experts' logits are nearly equal if closer than this multiple of a token's largest one: in
float32, and in coarser dtypes by as much more as these round."""


def split_runs(checkpoint: Checkpoint, span: Span, dtype: torch.dtype) -> Sequence[Span]:
    """`span` in parts that `run_blocks` may have in memory at once: several small blocks, or one.

    Blocks of a mixture of experts are apart, so that each one's routers are known.
    """
    stored = sum(tensor.numel for tensor in checkpoint.tensors.values())
    block_bytes = stored * dtype.itemsize // checkpoint.num_blocks
    family = checkpoint.family
    count = 1 if family.router is not None else max(MAX_RUN_BYTES // block_bytes, 1)
    starts = range(span.start, span.end, count)
    return [Span(start, min(start + count, span.end)) for start in starts]


def run_blocks(
    checkpoint: Checkpoint,
    span: Span,
    rows: Sequence[Tensor],
    *,
    dtype: torch.dtype,
    quant_type: QuantType,
    cache_dtype: CacheDtype = "auto",
    adapter: PeftFolder | None = None,
    by_token: bool = False,
) -> list[tuple[Tensor, Tensor | None]]:
    """Outputs [L, D] of the blocks for each row of inputs [L, D] in `dtype`, on the CPU.

    With each, for one block of a mixture of experts, whether a router was undecided, [L]. By one
    prefill, or `by_token`, which rounds otherwise and takes as long as a session. Blocks the
    thread. Raises what `load_blocks` and `load_adapter` raise.
    """
    blocks = load_blocks(
        checkpoint,
        span,
        dtype=dtype,
        device="cpu",
        quant_type=quant_type,
        cache_dtype=cache_dtype,
    )
    served = None if adapter is None else blocks.load_adapter(adapter)
    found: list[tuple[Tensor, Tensor | None]] = []
    for hidden_LD in rows:
        with _ties_of_routers(checkpoint, blocks) as ties:
            output_LD = _run_row(blocks, hidden_LD, served, by_token=by_token)
        found.append((output_LD, torch.cat(ties) if ties else None))
    return found


@contextmanager
def _ties_of_routers(checkpoint: Checkpoint, blocks: ModelBlocks) -> Iterator[list[Tensor]]:
    """Collects whether the block's router was undecided: [T] of each chunk that it runs."""
    ties: list[Tensor] = []
    with ExitStack() as stack:
        for router in blocks.routers():
            taken = _experts_per_token(checkpoint)
            hook = router.register_forward_hook(partial(_note_ties, ties, taken))
            stack.callback(hook.remove)
        yield ties


def _experts_per_token(checkpoint: Checkpoint) -> int | None:
    """How many experts a router takes; None if not those with the largest of its first output."""
    taken = getattr(checkpoint.config, "num_experts_per_tok", None)
    return taken if checkpoint.family.reads_router and isinstance(taken, int) else None


def _note_ties(
    ties: list[Tensor],
    taken: int | None,
    _: nn.Module,
    inputs: tuple[Tensor, ...],
    output: tuple[Tensor, ...],
) -> None:
    """Forward hook of a router; without `taken` each of its tokens counts as undecided."""
    if taken is None:
        tokens = inputs[0].numel() // inputs[0].shape[-1]
        ties.append(torch.ones(tokens, dtype=torch.bool))
        return
    logits_TE = output[0]
    closeness = ROUTER_CLOSENESS * torch.finfo(logits_TE.dtype).eps / torch.finfo(torch.float32).eps
    logits_TE = logits_TE.to("cpu", torch.float32)
    if taken >= logits_TE.shape[1]:
        return
    best_TE = logits_TE.topk(taken + 1).values
    gaps_T = best_TE[:, taken - 1] - best_TE[:, taken]
    ties.append(gaps_T < closeness * logits_TE.abs().amax(1))


def _run_row(
    blocks: ModelBlocks, hidden_LD: Tensor, adapter: ServedAdapter | None, *, by_token: bool
) -> Tensor:
    if not len(hidden_LD):
        return hidden_LD
    pages = pages_for(len(hidden_LD))
    chunks = torch.split(hidden_LD, 1 if by_token else len(hidden_LD))
    # Closed, so that the cache is freed at once and not when cycles of objects are collected.
    with closing(blocks.new_pool(pages * PAGE_TOKENS).reserve(pages)) as reservation:
        table = reservation.new_table()
        table.reserve(len(hidden_LD))
        return torch.cat(
            [blocks.forward(chunk, [RowChunk(table, len(chunk), adapter)]) for chunk in chunks]
        )
