"""Fused decoder layers for Llama-shaped models, in half as many operations as transformers'.

q, k and v are one product, gate and up another. A small step is bound by dispatch, not arithmetic:
a layer of hidden size 1024 with hardly any weights takes 0.37 ms instead of 0.53, and the decoder's
own forward 0.07 ms instead of 0.29 (one busy core).

T packed tokens, D hidden, Q query heads, H key/value heads, E head size, P positions.

Compiled decoding of small batches through Llama-shaped layers.

Beside reading weights, a small step costs dispatch: 5 to 30 us for each of torch's some thirty
operations a layer. Here it is five kernels and four products (`compiled_step.py`).

T tokens, D hidden, E head size, P positions.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from nesa_node.compression.hidden_states import BufferRange
from nesa_node.core.span import Span
from nesa_node.engine.cache.paged_attention import PackedRows
from nesa_node.engine.kernels import huge_pages
from nesa_node.engine.kernels.linear import make_linear
from nesa_node.engine.kernels.machine_code import compile_functions
from nesa_node.engine.kernels.matmul import DTYPE_NAMES
from nesa_node.engine.kernels.quantize import QuantizedLinear
from nesa_node.engine.model.compiled_step import (
    MAX_VECTOR_FLOATS,
    CompiledStep,
    DecoderFunctions,
    ScratchBuffers,
)

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


MIN_ROTARY_POSITIONS = 1024


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
        self._compiled_decoder = _make_compiled_decoder(layers)

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


class RotaryCache:
    """Precomputed rotary cosines and sines of P positions.

    They do not depend on a sequence's length: `families.context_length` excludes lengths that would
    change the frequencies.
    """

    def __init__(self, rotary_emb: Any, head_dim: int, context_length: int, like_D: Tensor) -> None:
        """Tables have the dtype and device of `like_D`."""
        self._rotary_emb = rotary_emb
        self._head_dim = head_dim
        self._context_length = context_length
        self._like_D = like_D
        self._positions = 0
        self._tables: tuple[Tensor, Tensor] | None = None

    def tables_for(self, positions: int) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines [P, 1, E] for at least `positions`."""
        if self._tables is None or self._positions < positions:
            self._tables = self._compute_tables(positions)
            self._positions = len(self._tables[0])
        return self._tables

    @torch.inference_mode()
    def _compute_tables(self, positions: int) -> tuple[Tensor, Tensor]:
        count = min(max(2 * positions, MIN_ROTARY_POSITIONS), self._context_length)
        positions_1P = torch.arange(count, device=self._like_D.device).unsqueeze(0)
        cos_1PE, sin_1PE = self._rotary_emb(self._like_D, positions_1P)
        if cos_1PE.shape[-1] != self._head_dim:
            raise ValueError(f"{cos_1PE.shape[-1]} of {self._head_dim} numbers of a head rotated")
        half = sin_1PE.shape[-1] // 2
        signed_1PE = torch.cat((-sin_1PE[..., :half], sin_1PE[..., half:]), dim=-1)
        return cos_1PE[0].unsqueeze(1), signed_1PE[0].unsqueeze(1)


class FusedLayer(nn.Module):
    """Fused decoder layer of Llama, Mistral, Qwen2 or Qwen3."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_idx: int = attention.layer_idx
        self.window = _attention_window(attention)
        self.scaling: float = attention.scaling
        self.head_dim: int = attention.head_dim
        self.num_rotary_heads = (attention.q_proj.out_features + attention.k_proj.out_features) // (
            self.head_dim
        )
        self.num_q_heads = attention.q_proj.out_features // self.head_dim
        self.num_kv_heads = self.num_rotary_heads - self.num_q_heads
        self.qkv_proj = _concatenate_linears(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o_proj = attention.o_proj
        self.gate_up_proj = _concatenate_linears(mlp.gate_proj, mlp.up_proj)
        self.down_proj = mlp.down_proj
        self.act_fn = mlp.act_fn
        self.input_norm = RMSNorm.from_module(layer.input_layernorm)
        self.post_attention_norm = RMSNorm.from_module(layer.post_attention_layernorm)
        self.qk_norm: RMSNorm | None = None
        if hasattr(attention, "q_norm"):
            query_E, key_E = attention.q_norm.weight, attention.k_norm.weight
            keys = self.num_rotary_heads - self.num_q_heads
            weight = torch.cat((query_E.expand(self.num_q_heads, -1), key_E.expand(keys, -1)))
            self.qk_norm = RMSNorm(weight, attention.q_norm.variance_epsilon)

    def forward(
        self, hidden_TD: Tensor, rotation: tuple[Tensor, Tensor], packed: PackedRows
    ) -> Tensor:
        """Run the layer on [T, D]. `rotation`: cosines and signed sines [T, 1, E]."""
        hidden_TD = self._attention(hidden_TD, rotation, packed).add_(hidden_TD)
        return self._mlp(hidden_TD).add_(hidden_TD)

    def _attention(
        self, hidden_TD: Tensor, rotation: tuple[Tensor, Tensor], packed: PackedRows
    ) -> Tensor:
        tokens = len(hidden_TD)
        qkv = self.qkv_proj.forward(self.input_norm.forward(hidden_TD))
        qkv = qkv.view(tokens, -1, self.head_dim)
        turned = qkv[:, : self.num_rotary_heads]
        if self.qk_norm is not None:
            turned = self.qk_norm.forward(turned)
        cos, sin = rotation
        # Rotate by swapping the halves of each head; the signs are in the sines.
        swapped = turned.roll(self.head_dim // 2, -1)
        # One product at a time, so that 16-bit results are rounded where transformers rounds them.
        turned = (turned * cos).add_(swapped.mul_(sin))
        packed.store_kv(
            self.layer_idx, turned[:, self.num_q_heads :], qkv[:, self.num_rotary_heads :]
        )
        attended = packed.compute_attention(
            self.layer_idx, turned[:, : self.num_q_heads], self.scaling, window=self.window
        )
        output_TD: Tensor = self.o_proj.forward(attended.reshape(tokens, -1))
        return output_TD

    def _mlp(self, hidden_TD: Tensor) -> Tensor:
        gate, up = self.gate_up_proj.forward(self.post_attention_norm.forward(hidden_TD)).chunk(
            2, dim=-1
        )
        output_TD: Tensor = self.down_proj.forward(self.act_fn.forward(gate).mul_(up))
        return output_TD


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32 as in transformers."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    @classmethod
    def from_module(cls, norm: Any) -> RMSNorm:
        return cls(norm.weight, norm.variance_epsilon)

    def forward(self, inputs: Tensor) -> Tensor:
        wide = inputs.float()
        scale = wide.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        return (wide * scale).to(inputs.dtype).mul_(self.weight)


def _make_compiled_decoder(layers: Sequence[FusedLayer]) -> CompiledDecoder | None:
    """Return a compiled decoder for `layers`; None if their shape is unsupported."""
    try:
        return CompiledDecoder(layers)
    except ValueError:
        return None


def _attention_window(attention: Any) -> int | None:
    """Return the sliding window of a layer's attention in tokens; None if it is unbounded."""
    if hasattr(attention, "sliding_window"):
        window: int | None = attention.sliding_window
    elif attention.config.model_type == "mistral":
        window = attention.config.sliding_window
    else:
        window = None
    return window


def _concatenate_linears(*linears: Any) -> nn.Module:
    """Return one linear layer with the concatenated outputs of `linears`."""
    kind = type(linears[0])
    if issubclass(kind, QuantizedLinear):
        joined: nn.Module = kind.concatenate(linears)
        return joined
    biases: list[Tensor | None] = [linear.bias for linear in linears]
    known = [bias for bias in biases if bias is not None]
    weight_OI = huge_pages.concatenate([linear.weight for linear in linears])
    return make_linear(weight_OI, torch.cat(known) if known else None)
