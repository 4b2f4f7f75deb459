"""Layers of Llama's shape for a few tokens, in machine code but for their products.

What a small step costs beside its weights is operations: each takes torch 5 to 30 microseconds, and
a layer has some thirty of them. Here they are four, and five products.

T tokens, D hidden, F inner size, Q query heads, H key/value heads, E head size, P positions,
S slots.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from nesa_node.engine.attention import PackedRuns
from nesa_node.engine.gemv import NAMES
from nesa_node.engine.machine_code import compiled

if TYPE_CHECKING:
    from nesa_node.engine.fused_layers import FusedLayer

MOST_TOKENS = 32
"""For more of them torch's operations on whole tensors cost little, and its attention less."""
LANES = 16
"""Floats in the widest vector there is: sizes must be multiples of it."""
WORTH_THREADS = 1 << 20
"""Numbers of keys: to read fewer takes less time than to call other threads."""


class FewTokens:
    """Runs layers of one shape and dtype."""

    def __init__(self, layer: FusedLayer) -> None:
        """Raises `ValueError` for a layer of another shape, or where there is no compiler."""
        weight = layer.before_mlp.weight
        if not _fits(layer):
            raise ValueError("this layer's sizes, activation, dtype or device have no machine code")
        dtype, group = NAMES[weight.dtype], layer.queries // layer.heads
        functions = compiled(
            ("add_and_norm", dtype),
            ("rotate", dtype, layer.head_dim),
            ("attend", dtype, layer.head_dim, group),
            ("activate", dtype),
        )
        if functions is None:
            raise ValueError("there is no machine code for this processor")
        self._add_and_norm, self._rotate, self._attend, self._activate = functions

    def serves(self, packed: PackedRuns) -> bool:
        """Whether these are few tokens, and the cache of each row lies in one piece."""
        last = packed.rows[-1]
        return last.start + last.count <= MOST_TOKENS and all(
            isinstance(row.slots, slice) for row in packed.rows
        )

    def run(
        self,
        layers: nn.ModuleList,
        hidden_TD: Tensor,
        tables: tuple[Tensor, Tensor],
        packed: PackedRuns,
    ) -> Tensor:
        """The last layer's output [T, D]. `tables`: cosines and signed sines [P, 1, E]."""
        hidden_TD = hidden_TD.clone()
        step = _Step(packed, tables)
        added_TD = torch.zeros_like(hidden_TD)
        for layer in layers:
            added_TD = self._layer(layer, hidden_TD, added_TD, step)  # type: ignore[arg-type]
        return hidden_TD.add_(added_TD)

    def _layer(self, layer: FusedLayer, hidden_TD: Tensor, added_TD: Tensor, step: _Step) -> Tensor:
        """Add what the last layer left to add to `hidden_TD`; return what this one leaves."""
        tokens = len(hidden_TD)
        normed_TD = self._normed(layer.before_attention, hidden_TD, added_TD)
        qkv = layer.qkv.forward(normed_TD)
        if layer.of_heads is not None:
            turned = qkv.view(tokens, -1, layer.head_dim)[:, : layer.turned]
            turned.copy_(layer.of_heads.forward(turned))
        attended = torch.empty(tokens, layer.queries * layer.head_dim, dtype=qkv.dtype)
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
        seen = step.seen(layer.window)
        scratch, threads = seen.scratch(layer.heads * layer.head_dim)
        self._attend(
            qkv.data_ptr(),
            keys,
            values,
            attended.data_ptr(),
            seen.firsts,
            seen.counts,
            scratch.data_ptr(),
            tokens,
            layer.heads,
            seen.room,
            field(layer.scaling),
            threads=threads,
        )
        normed_TD = self._normed(layer.before_mlp, hidden_TD, layer.out.forward(attended))
        gate_up = layer.gate_up.forward(normed_TD)
        inner = gate_up.shape[1] // 2
        active_TF = torch.empty(tokens, inner, dtype=gate_up.dtype)
        self._activate(gate_up.data_ptr(), active_TF.data_ptr(), tokens, inner)
        output_TD: Tensor = layer.down.forward(active_TF)
        return output_TD

    def _normed(self, norm: nn.Module, hidden_TD: Tensor, added_TD: Tensor) -> Tensor:
        normed_TD = torch.empty_like(hidden_TD)
        self._add_and_norm(
            hidden_TD.data_ptr(),
            added_TD.data_ptr(),
            norm.weight.data_ptr(),  # type: ignore[operator]
            normed_TD.data_ptr(),
            *hidden_TD.shape,
            field(norm.eps),  # type: ignore[arg-type]
        )
        return normed_TD


class _Seen:
    """Which slots each token sees: the addresses of their first ones and their counts."""

    def __init__(self, firsts: list[int], counts: list[int]) -> None:
        self._numbers = torch.tensor([firsts, counts])
        self.firsts = self._numbers.data_ptr()
        self.counts = self.firsts + 8 * len(firsts)
        self._total = sum(counts)
        self.room = -(-max(counts) // LANES) * LANES
        self._scratch: Tensor | None = None

    def scratch(self, width: int) -> tuple[Tensor, int]:
        """Room for scores, and for how many threads; a slot's keys have `width` numbers."""
        threads = torch.get_num_threads() if self._total * width >= WORTH_THREADS else 1
        if self._scratch is None or len(self._scratch) < threads:
            self._scratch = torch.empty(threads, self.room)
        return self._scratch, threads


class _Step:
    """What all layers of a step have in common."""

    def __init__(self, packed: PackedRuns, tables: tuple[Tensor, Tensor]) -> None:
        self._pool = packed.pool
        self._tensors = tables
        self.tables = tuple(table.data_ptr() for table in tables)
        self._starts: list[int] = []
        self._positions: list[int] = []
        for row in packed.rows:
            assert isinstance(row.slots, slice)
            self._starts += [row.slots.start] * row.count
            self._positions += range(row.past, row.past + row.count)
        slots = [start + at for start, at in zip(self._starts, self._positions, strict=True)]
        self._numbers = torch.tensor([self._positions, slots])
        self.positions = self._numbers.data_ptr()
        self.slots = self.positions + 8 * len(slots)
        self._seen: dict[int | None, _Seen] = {}

    def cache(self, layer_idx: int) -> tuple[int, int]:
        """Where a layer's keys and values [S, H, E] are."""
        layer = layer_idx - self._pool.span.start
        keys, values = self._pool.keys_SHD[layer], self._pool.values_SHD[layer]
        return keys.data_ptr(), values.data_ptr()

    def seen(self, window: int | None) -> _Seen:
        seen = self._seen.get(window)
        if seen is None:
            ends = [position + 1 for position in self._positions]
            skipped = [max(end - window, 0) if window is not None else 0 for end in ends]
            firsts = [start + skip for start, skip in zip(self._starts, skipped, strict=True)]
            counts = [end - skip for end, skip in zip(ends, skipped, strict=True)]
            seen = self._seen[window] = _Seen(firsts, counts)
        return seen


def _fits(layer: FusedLayer) -> bool:
    weight = layer.before_mlp.weight
    sizes = (len(weight), layer.down.in_features, layer.head_dim // 2)
    return (
        weight.device.type == "cpu"
        and weight.dtype in NAMES
        and isinstance(layer.act, SiLUActivation | nn.SiLU)
        and all(size % LANES == 0 for size in sizes)
    )


def field(value: float) -> int:
    """A float32 as a field of a function's."""
    return int.from_bytes(struct.pack("<f", value), "little")
