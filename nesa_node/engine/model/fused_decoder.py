"""Fused decoder layers for Llama-shaped models, in half as many operations as transformers'.

q, k and v are one product, gate and up another. A small step is bound by dispatch, not arithmetic:
a layer of hidden size 1024 with hardly any weights takes 0.37 ms instead of 0.53, and the decoder's
own forward 0.07 ms instead of 0.29 (one busy core).

Small batches run on machine code: beside reading weights they cost dispatch, 5 to 30 us for each of
torch's some thirty operations a layer. Here it is five kernels and four products
(`compiled_step.py`).

T packed tokens, D hidden, Q query heads, H key/value heads, E head size, P positions.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from nesa_node.compression.tensors import BufferRange
from nesa_node.core.ids import Span
from nesa_node.engine.cache.paged_attention import PackedRows
from nesa_node.engine.kernels.linear import DTYPE_NAMES
from nesa_node.engine.kernels.machine_code import compile_functions
from nesa_node.engine.model.compiled_step import (
    MAX_VECTOR_FLOATS,
    CompiledStep,
    DecoderFunctions,
    ScratchBuffers,
)
from nesa_node.engine.model.fused_layer import FusedLayer, RotaryCache

COMPILED_MAX_TOKENS = 32
"""Tokens in a step. Above, torch's whole-tensor operations are cheap and its attention faster."""
MAX_COMPILED_STEPS = 48
"""Bounds memory: each takes up to 10 kB per layer, and clients choose the sub-spans they use."""


class CompiledDecoder:
    """Compiled steps through layers of one shape and dtype, recorded once for each batch size."""

    def __init__(self, layers: Iterable[FusedLayer]) -> None:
        """Raises `ValueError` for unsupported or unequal layer shapes, or without a compiler."""
        [shape, *others] = {_layer_shape(layer) for layer in layers}
        if others or shape is None:
            raise ValueError("these layers' sizes, activation, dtype or device have none")
        dtype, dim, group = shape
        functions = compile_functions(
            ("add_and_norm", dtype),
            ("rotate", dtype, dim),
            ("attend", dtype, dim, group),
            ("activate", dtype),
        )
        if functions is None:
            raise ValueError("there is no machine code for this processor")
        self._functions = DecoderFunctions(*functions)
        self._buffers = ScratchBuffers(COMPILED_MAX_TOKENS)
        self._steps: dict[tuple[int, int, int, int], CompiledStep] = {}
        """Least recently used first."""

    def supports(self, packed: PackedRows) -> bool:
        """Whether the batch is small enough, and each row's cache is contiguous."""
        if packed.tokens > COMPILED_MAX_TOKENS:
            return False
        # A loop, since `all` takes three times as long.
        for row in packed.rows:  # noqa: SIM110
            if not isinstance(row.slots, slice):
                return False
        return True

    def run(
        self,
        layers: Sequence[FusedLayer],
        inputs: Iterable[BufferRange],
        outputs: Iterable[BufferRange],
        rotary_tables: tuple[Tensor, Tensor],
        packed: PackedRows,
    ) -> None:
        """Run `layers` on the packed tokens' hidden states, from `inputs` to `outputs`.

        `rotary_tables`: cosines and signed sines [P, 1, E].
        """
        tokens = packed.tokens
        # Sub-spans share this object.
        key = tokens, layers[0].layer_idx, len(layers), torch.get_num_threads()
        program = self._steps.get(key)
        if program is None or not program.is_valid_for(rotary_tables, packed.pool):
            program = CompiledStep(
                self._functions, layers, self._buffers, tokens, rotary_tables, packed.pool
            )
        self._steps.pop(key, None)
        self._steps[key] = program
        if len(self._steps) > MAX_COMPILED_STEPS:
            del self._steps[next(iter(self._steps))]
        program.run(inputs, outputs, packed)


def _layer_shape(layer: FusedLayer) -> tuple[str, int, int] | None:
    """Return a layer's dtype, E and G; None if no machine code supports it."""
    weight = layer.post_attention_norm.weight
    sizes = (len(weight), layer.down_proj.in_features, layer.head_dim // 2)
    if (
        weight.device.type != "cpu"
        or weight.dtype not in DTYPE_NAMES
        or not isinstance(layer.act_fn, SiLUActivation | nn.SiLU)
        or any(size % MAX_VECTOR_FLOATS for size in sizes)
        or layer.num_q_heads % layer.num_kv_heads
    ):
        return None
    return DTYPE_NAMES[weight.dtype], layer.head_dim, layer.num_q_heads // layer.num_kv_heads


class FusedDecoder(nn.Module):
    """Replacement of a decoder with Llama-shaped layers: the same weights and results.

    Rows have to be packed; gradients are not supported.
    """

    def __init__(self, decoder: Any, context_length: int) -> None:
        """Takes `decoder` apart layer by layer, so that at most one layer is in memory twice."""
        super().__init__()
        self.rotary_emb = decoder.rotary_emb
        layers: list[FusedLayer] = []
        for layer in decoder.layers:
            layers.append(FusedLayer(layer))
            layer._modules.clear()  # frees the weights even if the layer is still referenced
        self.layers = nn.ModuleList(layers)
        # Looking up a submodule by name takes torch longer than a small product.
        self._layers_in_order: Sequence[FusedLayer] = layers
        like_D = layers[0].post_attention_norm.weight
        self._rotary_cache = RotaryCache(
            decoder.rotary_emb, layers[0].head_dim, context_length, like_D
        )
        self._compiled_decoder: CompiledDecoder | None = None
        with suppress(ValueError):  # no machine code supports such layers
            self._compiled_decoder = CompiledDecoder(layers)

    def select_layers(self, local: Span) -> FusedDecoder:
        """Return a decoder of the layers `local`, which shares everything else."""
        part = copy.copy(self)
        part._layers_in_order = self._layers_in_order[local.start : local.end]
        part._modules = {**self._modules, "layers": nn.ModuleList(part._layers_in_order)}
        return part

    def forward(self, hidden_TD: Tensor, packed: PackedRows) -> Tensor:
        """Run all layers on hidden states [T, D]; returns the last layer's output [T, D]."""
        cos_P1E, sin_P1E = self._rotary_cache.tables_for(packed.max_length)
        rotation = packed.gather_by_position(cos_P1E), packed.gather_by_position(sin_P1E)
        for layer in self._layers_in_order:
            hidden_TD = layer.forward(hidden_TD, rotation, packed)
        return hidden_TD

    def can_run_compiled(self, packed: PackedRows) -> bool:
        """Whether `run_compiled` supports this batch."""
        return self._compiled_decoder is not None and self._compiled_decoder.supports(packed)

    def run_compiled(
        self, inputs: Iterable[BufferRange], outputs: Iterable[BufferRange], packed: PackedRows
    ) -> None:
        """Run `forward` from memory to memory, in the layers' dtype, on machine code."""
        assert self._compiled_decoder is not None
        tables = self._rotary_cache.tables_for(packed.max_length)
        self._compiled_decoder.run(self._layers_in_order, inputs, outputs, tables, packed)
