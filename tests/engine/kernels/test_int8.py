"""Weights in int8 against bitsandbytes' own layer, and against double precision.

T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bitsandbytes import functional as theirs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nesa_node.core.errors import UnsupportedModelError
from nesa_node.engine.kernels import quantized_linear as unpacked
from nesa_node.engine.kernels.linear import DTYPE_NAMES, GEMV_MAX_TOKENS
from nesa_node.engine.kernels.machine_code import get_mapping_address, load_functions
from nesa_node.engine.kernels.native.compiler import compile_functions
from nesa_node.engine.kernels.native.function_builder import encode_constants
from nesa_node.engine.kernels.native.job_builder import Processor
from nesa_node.engine.kernels.quantized_linear import MAX_LEVEL, Int8Linear, quantize_int8
from tests.engine.their_layers import THRESHOLD, int8_layer

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SUM = 2e-6
"""Of the sum of the sizes of what is added up, in float32."""
THEIR_CONSTANT = 1.9e-5
"""bitsandbytes' torch kernels multiply by 6.200124e-05 where 1 / 127^2 is 6.2000124e-05."""
ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Of the result, and of each weight where they are unpacked."""
PAGE = mmap.PAGESIZE


@pytest.fixture(autouse=True)
def forward_only() -> Iterator[None]:
    with torch.inference_mode():
        yield


def weights(outputs: int, inputs: int) -> Tensor:
    generator = torch.Generator().manual_seed(outputs * 1000 + inputs)
    weight_OI: Tensor = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    return weight_OI


def layer(
    outputs: int, inputs: int, dtype: torch.dtype = torch.float32, *, bias: bool = False
) -> Int8Linear:
    levels_OI, scales_O = quantize_int8(weights(outputs, inputs))
    bias_O = nn.Parameter(torch.randn(outputs).to(dtype), requires_grad=False) if bias else None
    return Int8Linear(levels_OI, scales_O, levels_OI.shape, bias_O, dtype)


def activations(
    tokens: int, inputs: int, outliers: int, dtype: torch.dtype, size: float = 30
) -> Tensor:
    """Each token has outliers of its own, as many as that."""
    x_TI = torch.randn(tokens, inputs)
    for row in x_TI:
        row[torch.randperm(inputs)[:outliers]] *= size
    return x_TI.to(dtype)


def wanted(linear: Int8Linear, x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """The product in double precision, and the sum of the sizes of its terms."""
    weight_OI = linear.levels.double() * linear.scales.double().unsqueeze(1) / MAX_LEVEL
    bias_O = torch.zeros(1) if linear.bias is None else linear.bias
    terms = (x_TI.double(), weight_OI, bias_O.double().expand(len(weight_OI)))
    return (
        nn.functional.linear(*terms),
        nn.functional.linear(*(term.abs() for term in terms)),
    )


def assert_product(output: Tensor, linear: Int8Linear, x_TI: Tensor) -> None:
    expected, sizes = wanted(linear, x_TI)
    assert output.dtype == x_TI.dtype
    assert output.shape == expected.shape
    error = (output.double() - expected).abs()
    rounding = ROUNDING[x_TI.dtype]
    few = linear._functions is not None and len(x_TI) <= GEMV_MAX_TOKENS
    of_weights = 0 if few else rounding
    assert (error <= (SUM + of_weights) * sizes + rounding * expected.abs()).all()


def one_by_one(x_TI: Tensor) -> list[Tensor]:
    return [x_TI[token : token + 1] for token in range(len(x_TI))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (70, 33), (1025, 700), (3, 4096)])
def test_the_format_is_that_of_bitsandbytes(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight_OI = weights(*shape).to(dtype)
    weight_OI[-1, : shape[1] // 2] *= 50
    levels_OI, scales_O = quantize_int8(weight_OI)
    expected_OI, expected_O, _ = theirs.int8_vectorwise_quant(weight_OI.half())
    assert torch.equal(levels_OI, expected_OI)
    assert torch.equal(scales_O, expected_O)
    turned_OI, _ = quantize_int8(weight_OI.t().contiguous().t())
    assert torch.equal(turned_OI, expected_OI)


def test_a_row_of_zeros_stays_zero() -> None:
    weight_OI = weights(4, 64)
    weight_OI[2] = 0
    levels_OI, scales_O = quantize_int8(weight_OI)
    assert not levels_OI[2].any()
    x_TI = activations(3, 64, 2, torch.float32)
    output = Int8Linear(levels_OI, scales_O, levels_OI.shape, None, torch.float32)(x_TI)
    assert not output[:, 2].any()
    assert output.isfinite().all()


def test_weights_beyond_sixteen_bits_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="--quant-type none"):
        quantize_int8(weights(4, 64) * 1e6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outliers", [0, 3, 40])
@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 64, 96])
def test_it_is_within_half_a_level_of_inputs_of_bitsandbytes(
    tokens: int, outliers: int, bias: bool
) -> None:
    """Whose inputs are rounded to 127 levels to either side, but in columns with an outlier."""
    linear = layer(96, 192, bias=bias)
    x_TI = activations(tokens, 192, outliers, torch.float32).half().float()
    beyond_TI = x_TI.abs() >= THRESHOLD
    steps_T1 = x_TI.masked_fill(beyond_TI, 0).abs().amax(1, keepdim=True) / MAX_LEVEL
    rounded_TI = ~beyond_TI.any(0) * steps_T1 / 2
    bound_TO = rounded_TI @ linear.dequantize(torch.float32).abs().t()
    expected, sizes = wanted(linear, x_TI)
    theirs_TO = int8_layer(weights(96, 192), linear.bias)(x_TI)
    ours_TO = linear(x_TI)
    assert ((ours_TO - theirs_TO).abs() <= bound_TO + (SUM + THEIR_CONSTANT) * sizes).all()
    if not outliers:
        assert (theirs_TO - expected).abs().max() > 1000 * (ours_TO - expected).abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 8, 9, 96])
def test_outliers_a_thousand_times_larger_leave_the_others_as_they_are(
    tokens: int, dtype: torch.dtype
) -> None:
    """Against what the other inputs alone come to, where the weights of outliers are zeros."""
    weight_OI = weights(64, 256)
    weight_OI[:, :4] = 0
    linear = Int8Linear(*quantize_int8(weight_OI), weight_OI.shape, None, dtype)
    x_TI = torch.randn(tokens, 256).to(dtype)
    alone = linear(x_TI)
    x_TI[:, :4] *= 1000
    assert torch.equal(linear(x_TI), alone)
    x_TI = activations(tokens, 256, 5, dtype, 1000)
    assert_product(linear(x_TI), linear, x_TI)


@settings(max_examples=150)
@given(
    dtype=st.sampled_from(DTYPES),
    outputs=st.integers(1, 70),
    inputs=st.integers(1, 6).map(lambda n: n * 64) | st.integers(1, 200),
    tokens=st.integers(0, 20) | st.sampled_from((64, 95, 96, 130)),
    outliers=st.sampled_from((0, 1, 5, 200)),
    bias=st.booleans(),
)
def test_products_are_those_of_double_precision(
    dtype: torch.dtype, outputs: int, inputs: int, tokens: int, outliers: int, bias: bool
) -> None:
    with torch.inference_mode():
        linear = layer(outputs, inputs, dtype, bias=bias)
        x_TI = activations(tokens, inputs, outliers, dtype)
        assert_product(linear(x_TI), linear, x_TI)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_of_more_than_one_round_of_unpacking(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacked, "_UNPACK_CHUNK_BYTES", 1 << 15)
    for shape in ((1000, 128), (257, 192), (5, 1 << 15)):
        linear = layer(*shape, dtype, bias=True)
        for tokens in (20, 96):
            x_TI = activations(tokens, shape[1], 3, dtype)
            assert_product(linear(x_TI), linear, x_TI)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_machine_code_torch_computes_the_same(dtype: torch.dtype) -> None:
    linear = layer(96, 192, dtype, bias=True)
    linear._functions = None
    for tokens in (0, 1, 8, 9, 96):
        x_TI = activations(tokens, 192, 3, dtype)
        assert_product(linear(x_TI), linear, x_TI)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 64), (33, 128), (1024, 576)])
def test_a_token_has_the_same_bits_whatever_it_is_batched_with(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    linear = layer(*shape, dtype, bias=True)
    x_TI = activations(GEMV_MAX_TOKENS, shape[1], 3, dtype)
    alone = torch.cat([linear(row) for row in one_by_one(x_TI)])
    for tokens in range(1, GEMV_MAX_TOKENS + 1):
        assert torch.equal(linear(x_TI[:tokens]), alone[:tokens])
        assert torch.equal(linear(x_TI[-tokens:]), alone[-tokens:])


def test_in_float32_few_tokens_and_many_differ_as_they_do_in_float32() -> None:
    linear = layer(96, 192)
    x_TI = activations(128, 192, 3, torch.float32, 1000)
    many = linear(x_TI)
    plain = nn.Linear(192, 96, bias=False)
    plain.weight = nn.Parameter(linear.dequantize(torch.float32))
    _, sizes = wanted(linear, x_TI)
    for start in range(0, 128, 4):
        rows = slice(start, start + 4)
        difference = (linear(x_TI[rows]) - many[rows]).abs()
        assert (difference <= SUM * sizes[rows]).all()
        assert ((many[rows] - plain(x_TI)[rows]).abs() <= SUM * sizes[rows]).all()


@pytest.mark.parametrize("outputs", [2, 3, 5, 64, 1001])
def test_threads_change_no_bit(outputs: int) -> None:
    linear, results, before = layer(outputs, 128), [], torch.get_num_threads()
    x_TI = activations(3, 128, 2, torch.float32)
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            results.append(linear(x_TI))
            assert torch.equal(results[-1], results[0])
    finally:
        torch.set_num_threads(before)
    assert_product(results[0], linear, x_TI)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's flags of processors")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_processor_with_registers_of_256_bits_computes_the_same(dtype: torch.dtype) -> None:
    if "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    name = DTYPE_NAMES[dtype]
    products = [("int8_product", name, tokens) for tokens in range(1, GEMV_MAX_TOKENS + 1)]
    codes = compile_functions([("int8_unpack", name), *products], Processor("haswell", "", 16, 8))
    for outputs in (2, 7, 64):
        linear = layer(outputs, 256, dtype)
        linear._functions = load_functions(encode_constants(), codes)
        for tokens in range(1, GEMV_MAX_TOKENS + 2):
            x_TI = activations(tokens, 256, 3, dtype)
            assert_product(linear(x_TI), linear, x_TI)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_beside_the_tensors_is_read_or_written(dtype: torch.dtype) -> None:
    """The weight ends where memory ends, and so do the inputs."""
    levels_OI = at_the_end(PAGE // 64, 64, torch.int8)
    levels_OI.random_(-MAX_LEVEL, MAX_LEVEL)
    scales_O = torch.rand(len(levels_OI))
    linear = Int8Linear(levels_OI, scales_O, levels_OI.shape, None, dtype)
    assert linear._functions is not None
    for tokens in range(1, GEMV_MAX_TOKENS + 2):
        x_TI = at_the_end(tokens, 64, dtype).copy_(activations(tokens, 64, 3, dtype))
        assert_product(linear(x_TI), linear, x_TI)


def at_the_end(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    memory = mmap.mmap(-1, 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    beyond = ctypes.c_void_p(get_mapping_address(memory) + PAGE)
    assert ctypes.CDLL(None).mprotect(beyond, ctypes.c_size_t(PAGE), 0) == 0
    start = PAGE - rows * columns * dtype.itemsize
    count = rows * columns
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(rows, columns)


@pytest.mark.parametrize("tokens", [1, 8, 9, 96])
def test_what_is_no_number_is_not_lost(tokens: int) -> None:
    linear = layer(8, 64)
    x_TI = activations(tokens, 64, 2, torch.float32)
    x_TI[0, 5] = torch.nan
    output = linear(x_TI)
    assert output[0].isnan().all()
    assert output[1:].isfinite().all()


@pytest.mark.parametrize("tokens", [1, 9, 96])
def test_sizes_of_inputs_far_from_one(tokens: int) -> None:
    linear = layer(8, 64)
    for size in (0, 1e-20, 1e-6, 1e-4):
        x_TI = torch.randn(tokens, 64) * size
        assert_product(linear(x_TI), linear, x_TI)
    x_TI = torch.randn(tokens, 64) * 1e20
    assert_product(linear(x_TI), linear, x_TI)


@pytest.mark.parametrize("shape", [(128,), (0, 128), (1, 0, 128), (2, 3, 128), (1, 1, 9, 128)])
def test_inputs_of_any_rank_that_lie_apart(shape: tuple[int, ...]) -> None:
    linear = layer(64, 128, torch.bfloat16)
    wide = activations(max(torch.Size(shape[:-1]).numel(), 0), 256, 3, torch.bfloat16)
    inputs = wide[:, ::2].reshape(shape) if wide.numel() else torch.zeros(shape).bfloat16()
    assert linear(inputs).shape == (*shape[:-1], 64)
    assert_product(linear(inputs).view(-1, 64), linear, inputs.reshape(-1, 128))


def test_joined_layers_give_their_outputs_one_after_another() -> None:
    parts = [layer(outputs, 128, bias=True) for outputs in (64, 6, 33)]
    joined = Int8Linear.concatenate(parts)
    for tokens in (1, 20):
        x_TI = activations(tokens, 128, 3, torch.float32)
        assert torch.equal(joined(x_TI), torch.cat([part(x_TI) for part in parts], dim=1))


def test_gradients_of_inputs_go_through_the_weights_that_are_meant() -> None:
    with torch.inference_mode(False):
        linear = layer(64, 128, bias=True)
        x_TI = torch.randn(3, 128, requires_grad=True)
        [found] = torch.autograd.grad(linear(x_TI).sum(), x_TI)
    expected = (linear.levels * linear.scales.unsqueeze(1) / MAX_LEVEL).sum(0)
    assert torch.allclose(found, expected.expand(3, -1), atol=1e-5)


def test_bitsandbytes_is_not_imported_on_the_cpu() -> None:
    """It takes seconds and 120 MB, and may fetch code to run."""
    program = (
        "import sys, torch\n"
        "from nesa_node.engine.kernels.quantized_linear import make_quantized_linear\n"
        "for kind in ('int8', 'nf4'):\n"
        "    linear = make_quantized_linear(torch.nn.Linear(64, 64), torch.randn(64, 64), kind,\n"
        "        dtype=torch.float32, device=torch.device('cpu'))\n"
        "    linear(torch.randn(1, 64)), linear(torch.randn(20, 64))\n"
        "assert 'bitsandbytes' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[3])
