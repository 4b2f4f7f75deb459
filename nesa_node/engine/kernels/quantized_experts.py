"""Experts of a mixture with quantized weights, in the formats of `quantized_linear.py`.

transformers stacks each kind of weight over a block's experts. Here every expert is a quantized
linear layer of its own on its part of the stack: the machine code of a few tokens reads the experts
that a batch's tokens were routed to, and no other. Each expert is quantized by itself, in rows of
outputs and blocks of 64 along inputs, however its model stores them.

T tokens, K experts of each token, S = T x K pairs of both, E experts, D hidden, I inputs,
O outputs, R rows and C columns as stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nesa_node.core.settings.choices import QuantType
from nesa_node.engine.kernels.machine_code import allocate_in_huge_pages
from nesa_node.engine.kernels.quantized_linear import (
    QUANTIZERS,
    QuantizedLinear,
    compute_weight_bytes,
)

_DOWN = "down_proj"
_LLAMA4 = "Llama4TextExperts"


@dataclass(frozen=True, slots=True)
class StackShape:
    """Shape of one kind of weight of all experts of a block."""

    experts: int
    outputs: int
    inputs: int
    is_transposed: bool
    """Whether experts' matrices are stored as [I, O]."""

    def compute_bytes(self, quant_type: QuantType) -> int:
        """Return the bytes of the quantized weights. Raises `UnsupportedModelError`."""
        return self.experts * compute_weight_bytes(self.outputs, self.inputs, quant_type)


class ExpertStack(nn.Module):
    """One kind of weight of all experts: a quantized linear layer for each."""

    def __init__(
        self,
        levels: Tensor,
        scales: Tensor,
        shape: StackShape,
        kind: type[QuantizedLinear],
        dtype: torch.dtype,
    ) -> None:
        """Both tensors have a first dimension of experts. `dtype` is that of inputs."""
        super().__init__()
        self.shape = shape
        self.levels = nn.Parameter(levels, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        size = (shape.outputs, shape.inputs)
        # No children: their parameters are views of the stack's.
        self.experts = tuple(
            kind(*parts, size, None, dtype) for parts in zip(levels, scales, strict=True)
        )


class QuantizedExperts(nn.Module):
    """Replacement of a mixture's experts: the same results as with the dequantized weights.

    The weights are `ExpertStack`s, put there by the names of transformers' parameters; biases keep
    their names and dtype.
    """

    def __init__(self, experts: nn.Module) -> None:
        """`experts` is transformers' module, with weights of which `find_stack` knows the shape."""
        super().__init__()
        self.shapes = _read_shapes(experts)
        """Of the stacked weights, by their names: first up, then down."""
        for name, value in experts._parameters.items():
            if name not in self.shapes:
                self.register_parameter(name, value)
        self._apply_gate = _find_gate(experts)

    def forward(self, hidden_TD: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum [T, D] of the experts [T, K] of each token, in its dtype.

        A token's result does not depend on other tokens. Experts beyond the last add nothing, as in
        transformers. Supports gradients of `hidden_TD` and of the weights of the sum.
        """
        tokens, used = top_k_index.shape
        expert_S = top_k_index.flatten()
        order_S = expert_S.argsort(stable=True)
        counts = torch.bincount(expert_S, minlength=self._shape.experts).tolist()
        output_SD = hidden_TD.new_zeros(tokens * used, hidden_TD.shape[1])
        for expert, pairs_R in enumerate(torch.split(order_S, counts)[: self._shape.experts]):
            if len(pairs_R):
                output_SD[pairs_R] = self._run_expert(expert, hidden_TD[pairs_R // used])
        weighted_TKD = output_SD.view(tokens, used, hidden_TD.shape[1]) * top_k_weights.unsqueeze(
            -1
        )
        return weighted_TKD.sum(1).to(hidden_TD.dtype)

    def count_weights(self) -> int:
        """Number of all weights and biases."""
        stacked = (each.experts * each.outputs * each.inputs for each in self.shapes.values())
        return sum(stacked) + sum(bias.numel() for bias in self.parameters(recurse=False))

    @property
    def _shape(self) -> StackShape:
        return self.shapes[_DOWN]

    def _run_expert(self, expert: int, input_RD: Tensor) -> Tensor:
        up, down = self.shapes
        return self._multiply(down, expert, self._apply_gate(self._multiply(up, expert, input_RD)))

    def _multiply(self, name: str, expert: int, input_RI: Tensor) -> Tensor:
        stack: ExpertStack = self._modules[name]  # type: ignore[assignment]
        output_RO: Tensor = stack.experts[expert](input_RI)
        bias_EO = self._parameters.get(f"{name}_bias")
        return output_RO if bias_EO is None else output_RO + bias_EO[expert]


class QuantizedScaledExperts(QuantizedExperts):
    """Experts as Llama 4 calls them: each gets all tokens, those of other experts times zero."""

    def forward(self, scaled_ETD: Tensor) -> Tensor:  # type: ignore[override]
        """Return the experts' outputs [E x T, D] of inputs [E x T, D], both expert by expert."""
        output_SD = torch.zeros_like(scaled_ETD)
        parts = scaled_ETD.view(self._shape.experts, -1, scaled_ETD.shape[-1])
        for expert, input_TD in enumerate(parts):
            # Without biases, an expert of zeros is zero.
            [routed_R] = input_TD.detach().any(-1).nonzero(as_tuple=True)
            if len(routed_R):
                pairs_R = routed_R + expert * len(input_TD)
                output_SD[pairs_R] = self._run_expert(expert, input_TD[routed_R])
        return output_SD


def find_stack(module: nn.Module, name: str) -> StackShape | None:
    """Return the shape of the stacked weight `name` of a mixture's experts; else None.

    Known are modules with transformers' interface of experts (`_apply_gate`), and Llama 4's.
    Weights of any other layout, such as DBRX's, keep their dtype.
    """
    shapes = module.shapes if isinstance(module, QuantizedExperts) else _read_shapes(module)
    return shapes.get(name)


def make_quantized_experts(module: nn.Module) -> QuantizedExperts:
    """Return the replacement of transformers' module, yet without weights; itself if it is one."""
    if isinstance(module, QuantizedExperts):
        return module
    is_scaled = type(module).__name__ == _LLAMA4
    return (QuantizedScaledExperts if is_scaled else QuantizedExperts)(module)


def quantize_stack(
    matrices: Iterable[Tensor],
    shape: StackShape,
    quant_type: QuantType,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> ExpertStack:
    """Quantize experts' matrices [R, C] one after another, each before the next one is made.

    On the CPU, as in `make_quantized_linear`. Raises `UnsupportedModelError` for weights beyond the
    range of float16.
    """
    kind, quantize = QUANTIZERS[quant_type]
    parts: list[Tensor] = []
    expert = 0
    for matrix_RC in matrices:
        one = quantize(matrix_RC.t() if shape.is_transposed else matrix_RC)
        if not parts:
            parts = [
                allocate_in_huge_pages((shape.experts, *part.shape), part.dtype) for part in one
            ]
        for stack, part in zip(parts, one, strict=True):
            stack[expert] = part
        # `enumerate` would keep the matrix while the next one is made.
        expert += 1  # noqa: SIM113
        del matrix_RC, one, part
    levels, scales = (part.to(device) for part in parts)
    return ExpertStack(levels, scales, shape, kind, dtype)


def _read_shapes(module: Any) -> Mapping[str, StackShape]:
    """Shapes of the stacked weights of transformers' experts, up then down; empty if unknown."""
    if type(module).__name__ == _LLAMA4:
        has_gate, has_bias, is_transposed = True, False, True
    elif hasattr(module, "_apply_gate") and not getattr(module, "has_post_expert_norm", True):
        has_gate, has_bias = module.has_gate, module.has_bias
        is_transposed = module.is_transposed
    else:
        return {}
    names = ("gate_up_proj" if has_gate else "up_proj", _DOWN)
    biases = [f"{name}_bias" for name in names] if has_bias else []
    weights = dict(module.named_parameters())
    if weights.keys() != {*names, *biases} or any(weights[name].ndim != 3 for name in names):
        return {}
    shapes = {}
    for name in names:
        experts, *size = weights[name].shape
        outputs, inputs = reversed(size) if is_transposed else size
        shapes[name] = StackShape(experts, outputs, inputs, is_transposed)
    up, down = shapes.values()
    fits = up.experts == down.experts and up.outputs == down.inputs * (1 + has_gate)
    return shapes if fits and up.inputs == down.outputs else {}


def _find_gate(experts: Any) -> Callable[[Tensor], Tensor]:
    """Return what an expert does between its two products."""
    if type(experts).__name__ == _LLAMA4:
        activate = experts.act_fn

        def gate_and_scale(gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            gated: Tensor = up * activate(gate)
            return gated

        return gate_and_scale
    gate: Callable[[Tensor], Tensor] = experts._apply_gate if experts.has_gate else experts.act_fn
    return gate
