"""Layers of Llama's shape for a few tokens, in machine code but for their products.

What a small step costs beside its weights is operations: each takes torch 5 to 30 microseconds, and
a layer has some thirty of them. Here they are five, and four products.

T tokens, D hidden, F inner size, Q query heads, H key/value heads, E head size, P positions,
S slots.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from nesa_node.engine.attention import PackedRuns, Row
from nesa_node.engine.gemv import NAMES
from nesa_node.engine.machine_code import compiled

if TYPE_CHECKING:
    from nesa_node.engine.fused_layers import FusedLayer, Norm

MOST_TOKENS = 32
"""For more of them torch's operations on whole tensors cost little, and its attention less."""
LANES = 16
"""Floats in the widest vector there is: sizes must be multiples of it."""
WORTH_THREADS = 1 << 14
"""Slots times heads: to read fewer keys takes less time than to call other threads."""


class FewTokens:
    """Runs layers of one shape and dtype."""

    def __init__(self, layers: Iterable[FusedLayer]) -> None:
        """Raises `ValueError` for layers of another shape, or where there is no compiler."""
        [shape, *others] = {_shape(layer) for layer in layers}
        if others or shape is None:
            raise ValueError("these layers' sizes, activation, dtype or device have none")
        dtype, dim, group = shape
        functions = compiled(
            ("add_and_norm", dtype),
            ("rotate", dtype, dim),
            ("attend", dtype, dim, group),
            ("activate", dtype),
        )
        if functions is None:
            raise ValueError("there is no machine code for this processor")
        self._add_and_norm, self._rotate, self._attend, self._activate = functions

    def serves(self, packed: PackedRuns) -> bool:
        """Whether these are few tokens, and the cache of each row lies in one piece.

        Not where gradients are wanted: it has none.
        """
        last = packed.rows[-1]
        return (
            last.start + last.count <= MOST_TOKENS
            and all(isinstance(row.slots, slice) for row in packed.rows)
            and not torch.is_grad_enabled()
        )

    def run(
        self,
        layers: Iterable[FusedLayer],
        hidden_TD: Tensor,
        tables: tuple[Tensor, Tensor],
        packed: PackedRuns,
    ) -> Tensor:
        """The last layer's output [T, D]. `tables`: cosines and signed sines [P, 1, E]."""
        hidden_TD = hidden_TD.clone(memory_format=torch.contiguous_format)
        step = _Step(packed, tables)
        added_TD = torch.zeros_like(hidden_TD)
        for layer in layers:
            added_TD = self._layer(layer, hidden_TD, added_TD, step)
        return hidden_TD.add_(added_TD)

    def _layer(self, layer: FusedLayer, hidden_TD: Tensor, added_TD: Tensor, step: _Step) -> Tensor:
        """Add what the last layer left to add to `hidden_TD`; return what this one leaves."""
        tokens = len(hidden_TD)
        normed_TD = self._normed(layer.before_attention, hidden_TD, added_TD)
        qkv = layer.qkv.forward(normed_TD)
        if layer.of_heads is not None:
            turned = qkv.view(tokens, -1, layer.head_dim)[:, : layer.turned]
            turned.copy_(layer.of_heads.forward(turned))
        keys, values = step.cache(layer.layer_idx)
        cosines, sines = step.tables
        self._rotate(
            qkv.data_ptr(),
            cosines,
            sines,
            keys,
            values,
            step.positions,
            step.slots,
            tokens,
            layer.queries,
            layer.heads,
        )
        attended = self._attended(layer, qkv, step)
        normed_TD = self._normed(layer.before_mlp, hidden_TD, layer.out.forward(attended))
        gate_up = layer.gate_up.forward(normed_TD)
        inner = gate_up.shape[1] // 2
        active_TF = torch.empty(tokens, inner, dtype=gate_up.dtype)
        self._activate(gate_up.data_ptr(), active_TF.data_ptr(), tokens, inner)
        output_TD: Tensor = layer.down.forward(active_TF)
        return output_TD

    def _attended(self, layer: FusedLayer, qkv: Tensor, step: _Step) -> Tensor:
        """Attention's output [T, Q x E]."""
        tokens = len(qkv)
        attended_TQE = torch.empty(tokens, layer.queries, layer.head_dim, dtype=qkv.dtype)
        seen = step.seen(layer.window)
        if seen.tokens:
            scratch, threads = seen.scratch(layer.queries // layer.heads, layer.heads)
            self._attend(
                qkv.data_ptr(),
                *step.cache(layer.layer_idx),
                attended_TQE.data_ptr(),
                *seen.numbers,
                scratch.data_ptr(),
                seen.tokens,
                layer.heads,
                seen.room,
                field(layer.scaling),
                threads=threads,
            )
        for row in step.longer_rows:
            query_TQE = qkv.view(tokens, -1, layer.head_dim)[:, : layer.queries]
            attended_TQE[row.start : row.start + row.count] = step.packed.attend(
                layer.layer_idx, query_TQE, layer.scaling, window=layer.window, rows=[row]
            )
        return attended_TQE.flatten(1)

    def _normed(self, norm: Norm, hidden_TD: Tensor, added_TD: Tensor) -> Tensor:
        normed_TD = torch.empty_like(hidden_TD)
        self._add_and_norm(
            hidden_TD.data_ptr(),
            added_TD.data_ptr(),
            norm.weight.data_ptr(),
            normed_TD.data_ptr(),
            *hidden_TD.shape,
            field(norm.eps),
        )
        return normed_TD


class _Seen:
    """Which slots those tokens see that are their rows' only ones."""

    def __init__(self, rows: list[Row], window: int | None) -> None:
        ends = [row.past + 1 for row in rows]
        skipped = [max(end - window, 0) if window is not None else 0 for end in ends]
        counts = [end - skip for end, skip in zip(ends, skipped, strict=True)]
        firsts = [_start(row) + skip for row, skip in zip(rows, skipped, strict=True)]
        self.tokens = len(rows)
        self.room = -(-max(counts, default=0) // LANES) * LANES
        self.numbers, self._tensor = _numbers([row.start for row in rows], firsts, counts)
        self._total = sum(counts)
        self._scratch: Tensor | None = None

    def scratch(self, group: int, heads: int) -> tuple[Tensor, int]:
        """Room for scores, and for how many threads."""
        if self._scratch is None:
            worth_it = self._total * heads >= WORTH_THREADS
            threads = torch.get_num_threads() if worth_it else 1
            self._scratch = torch.empty(threads, group, self.room, dtype=torch.float32)
        return self._scratch, len(self._scratch)


class _Step:
    """What all layers of a step have in common."""

    def __init__(self, packed: PackedRuns, tables: tuple[Tensor, Tensor]) -> None:
        self.packed = packed
        self._tensors = tables
        self.tables = tuple(table.data_ptr() for table in tables)
        self.longer_rows = [row for row in packed.rows if row.count > 1]
        """Their tokens share what they read: torch's attention takes less time for them."""
        self._single_rows = [row for row in packed.rows if row.count == 1]
        positions = [row.past + n for row in packed.rows for n in range(row.count)]
        slots = [_start(row) + row.past + n for row in packed.rows for n in range(row.count)]
        (self.positions, self.slots), self._places = _numbers(positions, slots)
        self._seen: dict[int | None, _Seen] = {}

    def cache(self, layer_idx: int) -> tuple[int, int]:
        """Where a layer's keys and values [S, H, E] are."""
        pool = self.packed.pool
        layer = layer_idx - pool.span.start
        return pool.keys_SHD[layer].data_ptr(), pool.values_SHD[layer].data_ptr()

    def seen(self, window: int | None) -> _Seen:
        seen = self._seen.get(window)
        if seen is None:
            seen = self._seen[window] = _Seen(self._single_rows, window)
        return seen


def _start(row: Row) -> int:
    assert isinstance(row.slots, slice)
    start: int = row.slots.start
    return start


def _numbers(*lists: list[int]) -> tuple[list[int], Tensor]:
    """Addresses of these as int64, and what keeps them there."""
    tensor = torch.tensor(lists)
    size = 8 * tensor.shape[1]
    return [tensor.data_ptr() + size * index for index in range(len(lists))], tensor


def _shape(layer: FusedLayer) -> tuple[str, int, int] | None:
    """A layer's dtype, E and G; None if it has no machine code."""
    weight = layer.before_mlp.weight
    sizes = (len(weight), layer.down.in_features, layer.head_dim // 2)
    if (
        weight.device.type != "cpu"
        or weight.dtype not in NAMES
        or not isinstance(layer.act, SiLUActivation | nn.SiLU)
        or any(size % LANES for size in sizes)
        or layer.queries % layer.heads
    ):
        return None
    return NAMES[weight.dtype], layer.head_dim, layer.queries // layer.heads


def field(value: float) -> int:
    """A float32 as a field of a function's."""
    return int.from_bytes(struct.pack("<f", value), "little")
