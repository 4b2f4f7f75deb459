"""A loaded span of a model's blocks, and the input and output buffers of a step.

T packed tokens of all rows in a step, L tokens of one row, D hidden.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nesa_node.compression.hidden_states import Range
from nesa_node.core.errors import ContextLengthError
from nesa_node.core.span import Span
from nesa_node.engine.attention import PackedRuns, Run
from nesa_node.engine.families import CacheHeads
from nesa_node.engine.feeds import Piece
from nesa_node.engine.fused_layers import FusedDecoder
from nesa_node.engine.pages import PagePool
from nesa_node.engine.row_cache import RowCache
from nesa_node.engine.threads import Threads

__all__ = ["Blocks", "Run", "sliced_decoder"]


T = TypeVar("T")


class Blocks:
    """Forward pass of a span for the next tokens of many rows, with KV caches in a `PagePool`.

    Not thread-safe: one executor thread owns it. It keeps no state between steps.
    """

    def __init__(
        self,
        decoder: nn.Module,
        layers: str,
        span: Span,
        *,
        heads: CacheHeads,
        hidden_size: int,
        context_length: int,
        weight_bytes: int,
        packs_rows: bool,
        dtype: torch.dtype,
        device: torch.device,
        threads: Threads | None = None,
    ) -> None:
        """`decoder` runs `span` on `inputs_embeds` and returns the last block's raw output.

        `packs_rows`: its attention goes through transformers' attention interface, so rows can be
        packed into one sequence. `threads` is shared by selections of the same span.
        """
        self.threads = threads or Threads()
        self.span = span
        self.hidden_size = hidden_size
        self.context_length = context_length
        self.dtype = dtype
        self.device = device
        self.weight_bytes = weight_bytes
        self._packs_rows = packs_rows
        self._decoder: Any = decoder
        self._layers = layers
        self._heads = heads
        self._parts: dict[Span, Blocks] = {}

    @property
    def cache_bytes_per_token(self) -> int:
        """KV cache of one token in all blocks: 2 x head_dim x n_kv_heads x blocks x bytes per item.

        Nesa paper, eq. 4, corrected: the paper counts query heads and the whole model's blocks.
        """
        per_block = 2 * self._heads.dim * self._heads.count * self.dtype.itemsize
        return per_block * len(self.span)

    def part(self, span: Span) -> Blocks:
        """Return a sub-span that shares these weights. Raises `ValueError` outside this span."""
        if span == self.span:
            return self
        if not len(span) or not self.span.covers(span):
            raise ValueError(f"blocks {span} are not within {self.span}")
        if span not in self._parts:
            start = span.start - self.span.start
            self._parts[span] = Blocks(
                self._sliced(Span(start, start + len(span))),
                self._layers,
                span,
                heads=self._heads,
                hidden_size=self.hidden_size,
                context_length=self.context_length,
                weight_bytes=self.weight_bytes * len(span) // len(self.span),
                packs_rows=self._packs_rows,
                dtype=self.dtype,
                device=self.device,
                threads=self.threads,
            )
        return self._parts[span]

    def _sliced(self, local: Span) -> nn.Module:
        if isinstance(self._decoder, FusedDecoder):
            return self._decoder.part(local)
        return sliced_decoder(self._decoder, self._layers, local)

    def new_pool(self, tokens: int) -> PagePool:
        """Return an empty KV cache with room for `tokens` tokens of all rows together."""
        return PagePool(self.span, self._heads, tokens=tokens, dtype=self.dtype, device=self.device)

    def forward(self, hidden_TD: Tensor, runs: Sequence[Run]) -> Tensor:
        """Run the next tokens of each run's row, packed in the order of `runs`, and cache them.

        Every run's table must have room (`reserve`) and belong to a pool that covers this span.
        `hidden_TD` may have any floating dtype and device, and is not modified. The result [T, D]
        has this span's dtype and device. If it raises, all rows keep their length. Raises
        `ContextLengthError`, and `ValueError` for a wrong shape or another span's pool.
        """
        self._check(hidden_TD.shape, runs)
        return self._timed(lambda: self._forward(hidden_TD, runs), len(hidden_TD))

    def _timed(self, job: Callable[[], T], tokens: int) -> T:
        if self.device.type != "cpu":
            return job()
        return self.threads.run(job, tokens, len(self.span))

    @torch.inference_mode()
    def _forward(self, hidden_TD: Tensor, runs: Sequence[Run]) -> Tensor:
        packed = self._packed(runs)
        inputs_TD = hidden_TD.to(device=self.device, dtype=self.dtype)
        if packed is None:
            output_TD = self._run_apart(inputs_TD[None], runs)
        elif self._has_code_for(packed):
            inputs_TD = inputs_TD.contiguous()
            output_TD = torch.empty_like(inputs_TD)
            self._decoder.run_few([Range.of(inputs_TD)], [Range.of(output_TD)], packed)
        elif isinstance(self._decoder, FusedDecoder):
            output_TD = self._decoder.forward(inputs_TD, packed)
        else:
            positions_1T = packed.positions_1T
            output_TD = self._decode(inputs_TD[None], positions_1T, packed, packed=packed)
        _advance(runs)
        return output_TD

    def run(self, pieces: Sequence[Piece], runs: Sequence[Run]) -> None:
        """Run `forward` on buffers: `pieces` are the packed tokens of `runs`, in the same order.

        Small batches create no tensor: machine code reads and writes the buffers' memory directly.
        """
        tokens = 0
        for piece in pieces:
            tokens += piece.end - piece.start
        self._check((tokens, pieces[0].feed.hidden.meta.shape[1]), runs)
        self._timed(lambda: self._run(pieces, runs), tokens)

    def _run(self, pieces: Sequence[Piece], runs: Sequence[Run]) -> None:
        packed = self._packed(runs)
        if packed is None or not self._has_code_for(packed, pieces):
            return self._run_tensors(pieces, runs)
        inputs = [piece.feed.hidden.range(piece.start, piece.end) for piece in pieces]
        outputs = [piece.feed.place(piece.start, piece.end) for piece in pieces]
        self._decoder.run_few(inputs, outputs, packed)
        _advance(runs)

    def _run_tensors(self, pieces: Sequence[Piece], runs: Sequence[Run]) -> None:
        inputs = [piece.feed.hidden.tensor_TD[piece.start : piece.end] for piece in pieces]
        if len({tensor.dtype for tensor in inputs}) > 1:
            inputs = [tensor.to(self.dtype) for tensor in inputs]
        output_TD = self._forward(inputs[0] if len(inputs) == 1 else torch.cat(inputs), runs).cpu()
        at = 0
        for piece in pieces:
            count = piece.end - piece.start
            piece.feed.put(piece.start, piece.end, output_TD[at : at + count])
            at += count

    def _packed(self, runs: Sequence[Run]) -> PackedRuns | None:
        return PackedRuns(runs[0].table.pool, runs) if self._packs_rows else None

    def _has_code_for(self, packed: PackedRuns, pieces: Sequence[Piece] = ()) -> bool:
        decoder = self._decoder
        if not (isinstance(decoder, FusedDecoder) and decoder.serves_few(packed)):
            return False
        # A loop, since `all` takes three times as long.
        for piece in pieces:
            if piece.feed.hidden.dtype != self.dtype or piece.feed.dtype != self.dtype:
                return False
        return True

    def _run_apart(self, inputs_1TD: Tensor, runs: Sequence[Run]) -> Tensor:
        outputs, start = [], 0
        for run in runs:
            end = run.table.length + run.count
            positions_1L = torch.arange(run.table.length, end, device=self.device)[None]
            inputs_1LD = inputs_1TD[:, start : start + run.count]
            outputs.append(self._decode(inputs_1LD, positions_1L, RowCache(run)))
            start += run.count
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _decode(
        self, inputs_1LD: Tensor, positions_1L: Tensor, cache: PackedRuns | RowCache, **extra: Any
    ) -> Tensor:
        output = self._decoder(
            inputs_embeds=inputs_1LD,
            position_ids=positions_1L,
            past_key_values=cache,
            use_cache=True,
            **extra,
        )
        hidden_LD: Tensor = output.last_hidden_state[0]
        return hidden_LD

    def _check(self, shape: Sequence[int], runs: Sequence[Run]) -> None:
        if not runs:
            raise ValueError("expected at least one run")
        tokens = 0
        pool = runs[0].table.pool
        for run in runs:
            if run.table.pool is not pool or not pool.span.covers(self.span):
                raise ValueError(f"a cache of blocks {pool.span} cannot serve blocks {self.span}")
            tokens += run.count
            if run.count < 1:
                raise ValueError(f"expected runs of at least one token, got {run.count}")
            end, room = run.table.length + run.count, run.table.capacity
            if end > self.context_length:
                raise ContextLengthError(f"{end} tokens; the model holds {self.context_length}")
            if end > room:
                raise ValueError(f"{end} tokens in pages for {room}: reserve them first")
        if tuple(shape) != (tokens, self.hidden_size):
            raise ValueError(f"expected [{tokens}, {self.hidden_size}], got {list(shape)}")


def _advance(runs: Sequence[Run]) -> None:
    for run in runs:
        run.table.length += run.count


def sliced_decoder(decoder: nn.Module, layers: str, local: Span) -> nn.Module:
    """Return a decoder with the layers `local` only, which shares all modules with `decoder`.

    Layers keep their absolute `layer_idx`: some models compute with it (GPT-2 can scale attention
    by it), and the cache is indexed by it. What the decoder indexes from 0 is sliced to fit.
    """
    sliced = copy.copy(decoder)
    sliced._modules = dict(decoder._modules)
    stack = decoder.get_submodule(layers)
    assert isinstance(stack, nn.ModuleList)
    sliced._modules[layers] = nn.ModuleList(list(stack)[local.start : local.end])
    config: Any = copy.deepcopy(decoder.config)
    types = getattr(config, "layer_types", None)
    config.num_hidden_layers = len(local)
    if types is not None:
        config.layer_types = list(types)[local.start : local.end]
    # Only the decoder's own config: its layers share that of the whole model.
    object.__setattr__(sliced, "config", config)
    return sliced
