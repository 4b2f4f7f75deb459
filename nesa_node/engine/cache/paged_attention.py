"""Paged attention of many rows at once, and the KV cache of one row, for transformers' models.

The tokens of all rows are packed into one sequence, under transformers' attention interface;
`RowCache` serves models whose attention is outside of it. H key/value heads, G query heads for each
of them, D head size, L tokens of one row in this step, T tokens of all rows, C tokens of one row so
far, S slots of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

from nesa_node.engine.adapters.served_adapter import ServedAdapter
from nesa_node.engine.cache.cache_side import CacheSide, dequantize_heads
from nesa_node.engine.cache.pages import PagePool, PageTable

ATTENTION_NAME = "nesa_pages"
MAX_DEQUANTIZED_BYTES = 32 << 20
"""Keys, or values, of a row that are dequantized at once, if one head has no more."""
_ALL_HEADS = slice(None)


@dataclass(frozen=True, slots=True)
class RowChunk:
    """The next `count` tokens of a row, for which its pages have room."""

    table: PageTable
    count: int
    adapter: ServedAdapter | None = None
    """None: the base model. Pages hold what their adapter computed; the caller keeps them apart."""


@dataclass(slots=True)
class PackedRow:
    """One run's range in the packed tokens and its slots in the pool."""

    start: int
    count: int
    past: int
    slots: slice | Tensor
    mask_by_window: dict[int | None, Tensor | None] = field(default_factory=dict)

    def visible_slots(
        self, side: CacheSide, window: int | None, heads: slice = _ALL_HEADS
    ) -> Tensor:
        """Keys or values [1, H, C, D] of these heads that this run's tokens attend to."""
        skipped = max(self.past + 1 - window, 0) if window is not None else 0
        if side.scales_SH is None and heads is _ALL_HEADS and isinstance(self.slots, slice):
            # One call into torch instead of three for slicing and transposing.
            _, all_heads, dim = side.stored_SHD.shape
            first, count = self.slots.start + skipped, self.past + self.count - skipped
            width = all_heads * dim
            return side.stored_SHD.as_strided(
                (1, all_heads, count, dim), (0, dim, width, 1), first * width
            )
        if isinstance(self.slots, slice):
            slots: slice | Tensor = slice(self.slots.start + skipped, self.slots.stop)
        else:
            slots = self.slots[skipped:]
        stored_HCD = side.stored_SHD[slots, heads].transpose(0, 1)
        if side.scales_SH is not None:
            stored_HCD = dequantize_heads(stored_HCD, side.scales_SH[slots, heads].T, side.dtype)
        return stored_HCD.unsqueeze(0)

    def mask(self, window: int | None, device: torch.device) -> Tensor | None:
        """Boolean mask [L, C] of the keys that each query attends to; None: plain causal."""
        if window not in self.mask_by_window:
            self.mask_by_window[window] = self._build_mask(window, device)
        return self.mask_by_window[window]

    def _build_mask(self, window: int | None, device: torch.device) -> Tensor | None:
        end = self.past + self.count
        if self.past == 0 and (window is None or end <= window):
            return None
        first = max(self.past + 1 - window, 0) if window is not None else 0
        query_L1 = torch.arange(self.past, end, device=device).unsqueeze(1)
        key_C = torch.arange(first, end, device=device)
        seen_LC = key_C <= query_L1
        if window is not None:
            seen_LC &= key_C > query_L1 - window
        return seen_LC


class PackedRows:
    """Packed runs of one step. Implements the cache interface of transformers' models."""

    def __init__(self, pool: PagePool, runs: Sequence[RowChunk]) -> None:
        self.pool = pool
        self.rows: list[PackedRow] = []
        self.tokens = 0
        """Of all rows together."""
        self.max_length = 0
        """Largest position plus one."""
        for run in runs:
            past = run.table.length
            end = past + run.count
            self.rows.append(PackedRow(self.tokens, run.count, past, run.table.slots(0, end)))
            self.tokens += run.count
            self.max_length = max(self.max_length, end)

    @cached_property
    def positions_1T(self) -> Tensor:
        rows = [torch.arange(row.past, row.past + row.count) for row in self.rows]
        return torch.cat(rows).unsqueeze(0).to(self.pool.device)

    def store_kv(self, layer_idx: int, keys_THD: Tensor, values_THD: Tensor) -> None:
        """Write a layer's keys and values of the new tokens to their slots."""
        layer = layer_idx - self.pool.span.start
        self.pool.keys[layer].write(self._new_slots, keys_THD)
        self.pool.values[layer].write(self._new_slots, values_THD)

    def compute_attention(
        self,
        layer_idx: int,
        query_TQD: Tensor,
        scaling: float | None,
        *,
        window: int | None = None,
        softcap: float | None = None,
        sinks_Q: Tensor | None = None,
        rows: Sequence[PackedRow] | None = None,
    ) -> Tensor:
        """Attention of a layer, after `store_kv` has written its new keys and values; Q = H x G.

        Returns [T, Q, D] of all rows' tokens, or those of `rows` only, in their order.
        """
        layer = layer_idx - self.pool.span.start
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        tokens, _, dim = query_TQD.shape
        query_THGD = query_TQD.view(tokens, keys.stored_SHD.shape[1], -1, dim)
        sinks_HG = None if sinks_Q is None else sinks_Q.view(query_THGD.shape[1:3])
        attention = _RowAttention(keys, values, scaling, window, softcap, sinks_HG)
        outputs = [
            attention.attend(row, query_THGD[row.start : row.start + row.count])
            for row in (self.rows if rows is None else rows)
        ]
        output_THGD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output_THGD.flatten(1, 2)

    def update(
        self, keys_1HTD: Tensor, values_1HTD: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Cache interface of transformers' layers: write, and return the arguments unchanged."""
        self.store_kv(layer_idx, keys_1HTD[0].transpose(0, 1), values_1HTD[0].transpose(0, 1))
        return keys_1HTD, values_1HTD

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def gather_by_position(self, table: Tensor) -> Tensor:
        """Gather rows of a table [positions, ...] for each token: [T, ...]."""
        if len(self.rows) == 1:
            row = self.rows[0]
            return table[row.past : row.past + row.count]
        return table[self.positions_1T[0]]

    @cached_property
    def _new_slots(self) -> slice | Tensor:
        if len(self.rows) == 1 and isinstance(slots := self.rows[0].slots, slice):
            return slice(slots.stop - self.rows[0].count, slots.stop)
        parts = []
        for row in self.rows:
            if isinstance(row.slots, slice):
                end = row.slots.stop
                parts.append(torch.arange(end - row.count, end))
            else:
                parts.append(row.slots[row.past :].cpu())
        return torch.cat(parts).to(self.pool.device)


@dataclass(frozen=True, slots=True)
class _RowAttention:
    """Attention of one layer."""

    keys: CacheSide
    values: CacheSide
    scaling: float | None
    window: int | None
    softcap: float | None
    sinks_HG: Tensor | None

    def attend(self, row: PackedRow, query_LHGD: Tensor) -> Tensor:
        """Outputs [L, H, G, D] of a row's new tokens."""
        if self.keys.scales_SH is None:
            return self._attend_heads(row, query_LHGD, _ALL_HEADS, self.sinks_HG)
        # A few heads at a time, so that a long row is never in memory at full size.
        head_bytes = (row.past + row.count) * query_LHGD.shape[-1] * self.keys.dtype.itemsize
        step = max(MAX_DEQUANTIZED_BYTES // head_bytes, 1)
        parts = []
        for first in range(0, query_LHGD.shape[1], step):
            heads = slice(first, first + step)
            sinks_HG = None if self.sinks_HG is None else self.sinks_HG[heads]
            parts.append(self._attend_heads(row, query_LHGD[:, heads], heads, sinks_HG))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _attend_heads(
        self, row: PackedRow, query_LHGD: Tensor, heads: slice, sinks_HG: Tensor | None
    ) -> Tensor:
        keys_1HCD = row.visible_slots(self.keys, self.window, heads)
        values_1HCD = row.visible_slots(self.values, self.window, heads)
        mask = row.mask(self.window, query_LHGD.device) if row.count > 1 else None
        if self.softcap is not None or sinks_HG is not None:
            return _attend_by_scores(
                query_LHGD, keys_1HCD, values_1HCD, mask, self.scaling, self.softcap, sinks_HG
            )
        if row.count == 1:
            # Query heads of a kv head are passed as its query tokens: fewer, larger products.
            return functional.scaled_dot_product_attention(
                query_LHGD, keys_1HCD, values_1HCD, scale=self.scaling
            )
        return _attend_many_tokens(query_LHGD, keys_1HCD, values_1HCD, mask, self.scaling)


def paged_attention_forward(
    module: torch.nn.Module,
    query_1QTD: Tensor,
    key_1HTD: Tensor,
    value_1HTD: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedRows,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: outputs [1, T, Q, D] with Q = H x G.

    Keys and values of this step are in the pool already. `packed` came in through the model's own
    keyword arguments.
    """
    output_TQD = packed.compute_attention(
        # mypy types any attribute of a module as a tensor or a module.
        module.layer_idx,  # type: ignore[arg-type]
        query_1QTD[0].transpose(0, 1),
        scaling,
        window=sliding_window,
        softcap=softcap,
        sinks_Q=s_aux,
    )
    return output_TQD.unsqueeze(0), None


def _attend_many_tokens(
    query_LHGD: Tensor,
    keys_1HCD: Tensor,
    values_1HCD: Tensor,
    mask_LC: Tensor | None,
    scaling: float | None,
) -> Tensor:
    query_1QLD = query_LHGD.flatten(1, 2).transpose(0, 1).unsqueeze(0)
    output_1QLD = functional.scaled_dot_product_attention(
        query_1QLD,
        keys_1HCD,
        values_1HCD,
        attn_mask=mask_LC,
        is_causal=mask_LC is None,
        scale=scaling,
        enable_gqa=query_1QLD.shape[1] != keys_1HCD.shape[1],
    )
    return output_1QLD[0].transpose(0, 1).view(query_LHGD.shape)


def _attend_by_scores(
    query_LHGD: Tensor,
    keys_1HCD: Tensor,
    values_1HCD: Tensor,
    mask_LC: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks_HG: Tensor | None,
) -> Tensor:
    """Attention whose scores are changed before softmax, which is in float32.

    Of Gemma 2: tanh-capped at `softcap`. Of gpt-oss: `sinks_HG` has a score for each query head
    that takes its share of the weight and has no value.
    """
    count, _, _, dim = query_LHGD.shape
    context = keys_1HCD.shape[2]
    query_HGLD = query_LHGD.permute(1, 2, 0, 3)
    scale = dim**-0.5 if scaling is None else scaling
    scores_HGLC = query_HGLD @ keys_1HCD[0].unsqueeze(1).transpose(-1, -2) * scale
    if softcap is not None:
        scores_HGLC = (scores_HGLC / softcap).tanh() * softcap
    if count > 1:
        if mask_LC is None:
            mask_LC = torch.ones(count, context, dtype=torch.bool, device=keys_1HCD.device).tril()
        scores_HGLC = scores_HGLC.masked_fill(~mask_LC, float("-inf"))
    if sinks_HG is not None:
        sinks_HG11 = sinks_HG[:, :, None, None].to(scores_HGLC.dtype)
        sinks_HGL1 = sinks_HG11.expand(-1, -1, count, -1)
        scores_HGLC = torch.cat((scores_HGLC, sinks_HGL1), dim=-1)
    weights_HGLC = scores_HGLC.softmax(-1, dtype=torch.float32).to(query_LHGD.dtype)
    weights_HGLC = weights_HGLC[..., :context]
    return (weights_HGLC @ values_1HCD[0].unsqueeze(1)).permute(2, 0, 1, 3)


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


class RowCache:
    """Cache interface of transformers' models for a batch of one, backed by a row's pages.

    Where `CacheHeads.repeats` > 1 the model repeats every head that many times; one copy is stored.
    """

    def __init__(self, run: RowChunk) -> None:
        self._pool = run.table.pool
        self._length = run.table.length
        end = self._length + run.count
        self._new_slots = run.table.slots(self._length, end)
        self._all_slots = run.table.slots(0, end)

    def update(
        self, keys_1HLD: Tensor, values_1HLD: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's keys and values of this step; return all up to its end [1, H, C, D]."""
        layer = layer_idx - self._pool.span.start
        repeats = self._pool.heads[layer].repeats
        return (
            self._write_and_read(self._pool.keys[layer], keys_1HLD, repeats),
            self._write_and_read(self._pool.values[layer], values_1HLD, repeats),
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._length + query_length, 0

    def _write_and_read(self, side: CacheSide, new_1HLD: Tensor, repeats: int) -> Tensor:
        side.write(self._new_slots, new_1HLD[0, ::repeats].transpose(0, 1))
        kept_1HCD = side.read(self._all_slots).transpose(0, 1).unsqueeze(0)
        return kept_1HCD.repeat_interleave(repeats, 1) if repeats > 1 else kept_1HCD
