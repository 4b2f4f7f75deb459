"""LLM.int8() against bitsandbytes' own layer, and against its formula in double precision.

T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nesa_node.engine.kernels import quantized_linear
from nesa_node.engine.kernels.linear import make_linear
from nesa_node.engine.kernels.quantized_linear import (
    OUTLIER_THRESHOLD,
    LlmInt8Linear,
    QuantizedLinear,
    make_quantized_linear,
    multiply_levels,
    quantize_int8,
)
from tests.engine.chained import distance
from tests.engine.their_layers import THRESHOLD, int8_layer

INPUTS, OUTPUTS = 200, 96
DTYPES = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Tolerance of outputs, relative to the largest."""


def make_layer(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> QuantizedLinear:
    generator = torch.Generator().manual_seed(5)
    weight_OI = torch.randn(OUTPUTS, INPUTS, generator=generator) * 0.1
    bias_O = torch.randn(OUTPUTS, generator=generator).to(dtype) if bias else None
    return make_quantized_linear(
        make_linear(weight_OI, bias_O),
        weight_OI,
        "llm_int8",
        dtype=dtype,
        device=torch.device("cpu"),
    )


def make_inputs(tokens: int, outliers: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Inputs that float16 holds, some of them beyond the threshold, each token's elsewhere."""
    generator = torch.Generator().manual_seed(7)
    input_TI = torch.randn(tokens, INPUTS, generator=generator)
    for token in input_TI:
        places = torch.randperm(INPUTS, generator=generator)[:outliers]
        token[places] = 6 + 40 * torch.rand(outliers, generator=generator)
        token[places[::2]] *= -1
    return input_TI.half().to(dtype)


def reference(layer: Any, input_TI: Tensor) -> Tensor:
    """The formula, token by token in double precision."""
    weight_OI = layer.levels.numpy().astype(np.float64)
    steps_O = layer.scales.numpy().astype(np.float64) / 127
    rows = []
    for token_I in input_TI.double().numpy():
        apart = np.abs(token_I) >= 6.0
        inner_I = np.where(apart, 0.0, token_I)
        peak = np.abs(inner_I).max()
        # In float32 as torch divides, so that no level that lies halfway goes the other way.
        factor = np.float32(1) / np.float32(peak) * np.float32(127) if peak else np.float32(0)
        levels_I = np.rint(inner_I.astype(np.float32) * factor).astype(np.int64)
        sums_O = weight_OI.astype(np.int64) @ levels_I
        exact_O = (weight_OI[:, apart] * steps_O[:, None]) @ token_I[apart]
        rows.append(sums_O * (peak / 127) * steps_O + exact_O)
    output_TO = torch.tensor(np.array(rows))
    return output_TO if layer.bias is None else output_TO + layer.bias.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outliers", [0, 1, 9, INPUTS])
@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_outputs_are_those_of_the_formula(tokens: int, outliers: int, dtype: torch.dtype) -> None:
    layer = make_layer(dtype)
    input_TI = make_inputs(tokens, outliers, dtype)
    found = layer(input_TI)
    assert found.dtype == dtype
    assert distance(found.double(), reference(layer, input_TI)) < DTYPES[dtype]


@pytest.mark.parametrize("bias", [False, True])
def test_a_tokens_outputs_are_those_of_bitsandbytes(bias: bool) -> None:
    """Whose layer sets columns of all tokens apart: of one token it computes the same."""
    layer = make_layer(bias=bias)
    generator = torch.Generator().manual_seed(5)
    weight_OI = torch.randn(OUTPUTS, INPUTS, generator=generator) * 0.1
    theirs = int8_layer(weight_OI, layer.bias)
    assert THRESHOLD == OUTLIER_THRESHOLD
    for input_1I in torch.split(make_inputs(12, 5), 1):
        # Their factor is 1.9e-5 off, and they round the sum before the outliers are added.
        assert distance(layer(input_1I), theirs(input_1I)) < 3e-5


def test_what_is_at_the_threshold_is_not_rounded() -> None:
    layer = make_layer(bias=False)
    input_1I = torch.zeros(1, INPUTS)
    input_1I[0, :2] = torch.tensor([OUTLIER_THRESHOLD, -OUTLIER_THRESHOLD])
    input_1I[0, 2:4] = torch.tensor([5.9990234375, 0.02])  # the latter's level is 0
    columns_OI = layer.dequantize(torch.float32)
    expected = 6 * (columns_OI[:, 0] - columns_OI[:, 1]) + input_1I[0, 2] * columns_OI[:, 2]
    assert distance(layer(input_1I)[0], expected) < 1e-6


def test_a_token_does_not_depend_on_what_it_is_batched_with() -> None:
    layer = make_layer()
    input_TI = make_inputs(30, 4)
    alone = torch.cat([layer(each) for each in torch.split(input_TI, 1)])
    assert distance(layer(input_TI), alone) < 1e-6
    assert torch.equal(layer(input_TI.view(5, 6, INPUTS)).view(30, OUTPUTS), layer(input_TI))


def test_rounding_inputs_costs_more_than_rounding_weights() -> None:
    """What `int8` does not do: `docs/decisions/008`."""
    layer = make_layer(bias=False)
    input_TI = make_inputs(20, 0)
    exact = input_TI @ layer.dequantize(torch.float32).t()
    assert distance(layer(input_TI), exact) > 1e-3


def test_empty_and_zero_inputs() -> None:
    layer = make_layer()
    assert layer(torch.zeros(0, INPUTS)).shape == (0, OUTPUTS)
    assert layer.bias is not None
    assert torch.equal(layer(torch.zeros(2, INPUTS)), layer.bias.expand(2, OUTPUTS))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_none_and_spoils_no_other_token(value: float) -> None:
    layer = make_layer()
    input_TI = make_inputs(3, 2)
    expected = layer(input_TI)
    input_TI[1, 4] = value
    found = layer(input_TI)
    assert not found[1].isfinite().any()
    assert distance(found[[0, 2]], expected[[0, 2]]) < 1e-6


def test_gradients_of_inputs_are_those_of_the_dequantized_weights() -> None:
    layer = make_layer()
    input_TI = make_inputs(6, 3).requires_grad_()
    output_TO = layer(input_TI)
    grad_TO = torch.randn(6, OUTPUTS, generator=torch.Generator().manual_seed(1))
    output_TO.backward(grad_TO)
    assert input_TI.grad is not None
    assert distance(input_TI.grad, grad_TO @ layer.dequantize(torch.float32)) < 1e-6
    with torch.no_grad():
        assert torch.equal(layer(input_TI), output_TO)


@pytest.mark.parametrize("inputs", [1, 2, 3, 64, 1024, 5000])
def test_sums_of_levels_are_exact(inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(inputs)
    tokens_TI = torch.randint(-127, 128, (5, inputs), dtype=torch.int8, generator=generator)
    tokens_TI[0] = 127
    weights_OI = torch.randint(-127, 128, (33, inputs), dtype=torch.int8, generator=generator)
    weights_OI[0] = 127
    expected = tokens_TI.long() @ weights_OI.long().t()
    assert torch.equal(multiply_levels(tokens_TI, weights_OI).long(), expected)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: False)
    assert torch.equal(multiply_levels(tokens_TI, weights_OI).long(), expected)


def test_layers_are_joined_and_divided() -> None:
    """As a fused decoder does with the projections of attention."""
    parts = [make_layer(), make_layer()]
    joined = LlmInt8Linear.concatenate(parts)  # type: ignore[arg-type]
    input_TI = make_inputs(4, 3)
    expected = torch.cat([part(input_TI) for part in parts], dim=1)
    assert distance(joined(input_TI), expected) < 1e-6
    half = joined.select_rows(OUTPUTS, 2 * OUTPUTS)
    assert distance(half(input_TI), parts[1](input_TI)) < 1e-6


def test_weights_are_those_of_int8() -> None:
    layer = make_layer()
    generator = torch.Generator().manual_seed(5)
    levels_OI, scales_O = quantize_int8(torch.randn(OUTPUTS, INPUTS, generator=generator) * 0.1)
    assert torch.equal(layer.levels, levels_OI)
    assert torch.equal(layer.scales, scales_O)
    sizes = [
        quantized_linear.compute_quantized_bytes(nn.Linear(INPUTS, OUTPUTS), kind)
        for kind in ("int8", "llm_int8")
    ]
    assert sizes[0] == sizes[1] == layer.levels.nbytes + layer.scales.nbytes
