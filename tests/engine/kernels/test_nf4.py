"""nf4 against bitsandbytes' own layer, and against what it means in double precision.

T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import pytest
import torch
from bitsandbytes import functional as theirs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nesa_node.engine.kernels import quantized_linear as unpacked
from nesa_node.engine.kernels.linear import GEMV_MAX_TOKENS
from nesa_node.engine.kernels.machine_code import get_mapping_address
from nesa_node.engine.kernels.quantized_linear import BLOCK_SIZE, Nf4Linear, quantize_nf4
from tests.engine.their_layers import nf4_and_back, nf4_layer

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SUM = 2e-6
ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Of each weight, where they are unpacked, and of the result."""
PAGE = mmap.PAGESIZE


@pytest.fixture(autouse=True)
def forward_only() -> Iterator[None]:
    with torch.inference_mode():
        yield


def weights(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(outputs * 1000 + inputs)
    weight_OI: Tensor = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    return weight_OI.to(dtype)


def layer(
    outputs: int, inputs: int, dtype: torch.dtype = torch.float32, *, bias: bool = False
) -> Nf4Linear:
    packed, peaks_N = quantize_nf4(weights(outputs, inputs, dtype))
    bias_O = nn.Parameter(torch.randn(outputs).to(dtype), requires_grad=False) if bias else None
    return Nf4Linear(packed, peaks_N, (outputs, inputs), bias_O, dtype)


def product_and_sizes(linear: Nf4Linear, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The product in double precision, and the sum of its terms' magnitudes."""
    bias_O = torch.zeros(1) if linear.bias is None else linear.bias
    weight_OI = linear.dequantize(torch.float32).double()
    terms = (inputs.double(), weight_OI, bias_O.double().expand(len(weight_OI)))
    return nn.functional.linear(*terms), nn.functional.linear(*(term.abs() for term in terms))


def assert_product(output: Tensor, linear: Nf4Linear, inputs: Tensor) -> None:
    expected, sizes = product_and_sizes(linear, inputs)
    assert output.dtype == inputs.dtype
    assert output.shape == expected.shape
    error = (output.double() - expected).abs()
    rounding = ROUNDING[inputs.dtype]
    assert (error <= (SUM + rounding) * sizes + rounding * expected.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (2, 96), (33, 128), (1000, 640)])
def test_the_format_is_that_of_bitsandbytes(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight_OI = weights(*shape, dtype)
    weight_OI[0, :3] *= 40
    weight_OI.view(-1, BLOCK_SIZE)[-1] = 0
    packed, peaks_N = quantize_nf4(weight_OI)
    expected, state = theirs.quantize_4bit(weight_OI, blocksize=BLOCK_SIZE, quant_type="nf4")
    assert torch.equal(packed, expected.squeeze(1))
    assert torch.equal(peaks_N, state.absmax)
    ours = Nf4Linear(packed, peaks_N, shape, None, dtype).dequantize(dtype)
    assert torch.equal(ours, nf4_and_back(weight_OI))
    turned, _ = quantize_nf4(weight_OI.t().contiguous().t())
    assert torch.equal(turned, packed)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [*range(1, 10), 33, 64])
def test_products_are_those_of_bitsandbytes(tokens: int, bias: bool) -> None:
    linear = layer(96, 192, bias=bias)
    reference = nf4_layer(weights(96, 192), linear.bias)
    x_TI = torch.randn(tokens, 192)
    _, sizes = product_and_sizes(linear, x_TI)
    # Either may add up in any order: the error is one of the terms, not of the largest sum.
    assert ((linear(x_TI) - reference(x_TI)).abs() <= SUM * sizes).all()


@settings(max_examples=100)
@given(
    dtype=st.sampled_from(DTYPES),
    outputs=st.integers(1, 70),
    blocks=st.integers(1, 6),
    tokens=st.integers(0, 20) | st.sampled_from((64, 130)),
    bias=st.booleans(),
)
def test_products_are_those_of_double_precision(
    dtype: torch.dtype, outputs: int, blocks: int, tokens: int, bias: bool
) -> None:
    with torch.inference_mode():
        linear = layer(outputs, blocks * BLOCK_SIZE, dtype, bias=bias)
        inputs = torch.randn(tokens, blocks * BLOCK_SIZE).to(dtype)
        assert_product(linear(inputs), linear, inputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_half_a_block_more(dtype: torch.dtype) -> None:
    linear = layer(64, 96, dtype, bias=True)
    for tokens in (1, 8, 30):
        inputs = torch.randn(tokens, 96).to(dtype)
        assert_product(linear(inputs), linear, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_of_more_than_one_round_of_unpacking(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacked, "_UNPACK_CHUNK_BYTES", 1 << 15)
    for shape in ((1000, 128), (386, 96), (64, 1 << 15)):
        linear = layer(*shape, dtype, bias=True)
        inputs = torch.randn(20, shape[1]).to(dtype)
        assert_product(linear(inputs), linear, inputs)


def test_without_machine_code_torch_computes_the_same() -> None:
    linear = layer(96, 192, bias=True)
    linear._functions = None
    for tokens in (0, 1, 8, 30):
        inputs = torch.randn(tokens, 192)
        assert_product(linear(inputs), linear, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 64), (33, 128), (1024, 576)])
def test_a_token_has_the_same_bits_whatever_it_is_batched_with(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    linear = layer(*shape, dtype, bias=True)
    if linear._functions is None:
        pytest.skip("this processor has no registers of 512 bits")
    inputs = torch.randn(GEMV_MAX_TOKENS, shape[1]).to(dtype)
    alone = torch.cat(
        [linear(row) for row in (inputs[token : token + 1] for token in range(GEMV_MAX_TOKENS))]
    )
    for tokens in range(1, GEMV_MAX_TOKENS + 1):
        assert torch.equal(linear(inputs[:tokens]), alone[:tokens])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_beside_the_tensors_is_read_or_written(dtype: torch.dtype) -> None:
    """The weight ends where memory ends."""
    memory = mmap.mmap(-1, 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    beyond = ctypes.c_void_p(get_mapping_address(memory) + PAGE)
    assert ctypes.CDLL(None).mprotect(beyond, ctypes.c_size_t(PAGE), 0) == 0
    packed = torch.frombuffer(memory, dtype=torch.uint8, count=PAGE).random_()
    shape = (2 * PAGE // BLOCK_SIZE, BLOCK_SIZE)
    linear = Nf4Linear(packed, torch.rand(shape[0]), shape, None, dtype)
    for tokens in range(1, GEMV_MAX_TOKENS + 2):
        inputs = torch.randn(tokens, BLOCK_SIZE).to(dtype)
        assert_product(linear(inputs), linear, inputs)


def test_joined_layers_give_their_outputs_one_after_another() -> None:
    parts = [layer(outputs, 128, bias=True) for outputs in (64, 6, 33)]
    joined = Nf4Linear.concatenate(parts)
    for tokens in (1, 20):
        inputs = torch.randn(tokens, 128)
        expected = torch.cat([part(inputs) for part in parts], dim=1)
        assert torch.allclose(joined(inputs), expected, atol=SUM)


def test_gradients_of_inputs_are_those_of_the_weights_that_are_meant() -> None:
    with torch.inference_mode(False):
        linear = layer(64, 128, bias=True)
        inputs = torch.randn(3, 128, requires_grad=True)
        [found] = torch.autograd.grad(linear(inputs).sum(), inputs)
    expected = linear.dequantize(torch.float32).sum(0).expand(3, -1)
    assert torch.allclose(found, expected, atol=1e-5)
