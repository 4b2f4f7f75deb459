"""T tokens, I inputs, O outputs."""

from __future__ import annotations

import copy
import ctypes
import mmap
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from nesa_node.core.ids import Span
from nesa_node.engine.kernels import machine_code
from nesa_node.engine.kernels.linear import (
    DTYPE_NAMES,
    GEMV_MAX_TOKENS,
    FastLinear,
    Gemv,
    count_scratch_items,
    load_amx_matmul,
    load_gemv,
    make_linear,
    replace_linear_layers,
)
from nesa_node.engine.kernels.machine_code import (
    HUGE_PAGE_BYTES,
    allocate_in_huge_pages,
    copy_to_huge_pages,
    get_mapping_address,
    load_functions,
)
from nesa_node.engine.kernels.native.compiler import compile_functions
from nesa_node.engine.kernels.native.function_builder import encode_constants
from nesa_node.engine.kernels.native.job_builder import Processor
from nesa_node.engine.model.blocks import ModelBlocks, RowChunk
from nesa_node.engine.model.fused_decoder import FusedDecoder
from nesa_node.engine.model.loading import load_blocks
from tests.engine.chained import distance, open_local
from tests.engine.guarded import guarded
from tests.engine.tiny_models import save_tiny_model

DTYPES = (torch.float32, torch.bfloat16)
SUM, ROUNDING = 1e-6, {torch.float32: 2**-24, torch.bfloat16: 2**-8}
"""Products are summed in float32, relative to the sum of their sizes, and rounded once."""
PAGE = mmap.PAGESIZE


@pytest.fixture(autouse=True)
def forward_only() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def layer(outputs: int, inputs: int, dtype: torch.dtype, *, bias: bool = False) -> FastLinear:
    torch.manual_seed(outputs * inputs)
    weight_OI = torch.randn(outputs, inputs).to(dtype)
    return FastLinear(make_linear(weight_OI, torch.randn(outputs).to(dtype) if bias else None))


def assert_product(output: Tensor, linear: nn.Linear, inputs: Tensor) -> None:
    given: Tensor | None = linear.bias
    bias = torch.zeros(linear.out_features) if given is None else given
    terms = (inputs.double(), linear.weight.double(), bias.double())
    expected = nn.functional.linear(*terms)
    sizes = nn.functional.linear(*(term.abs() for term in terms))
    assert output.shape == expected.shape
    assert output.dtype == linear.weight.dtype
    error = (output.double() - expected).abs()
    assert (error <= SUM * sizes + ROUNDING[output.dtype] * expected.abs()).all()


def one_by_one(rows: Tensor) -> list[Tensor]:
    return [rows[row : row + 1] for row in range(len(rows))]


@settings(max_examples=200)
@given(
    dtype=st.sampled_from(DTYPES),
    outputs=st.integers(1, 70),
    inputs=st.integers(1, 12).map(lambda n: n * 16) | st.integers(1, 200),
    tokens=st.integers(0, 20) | st.sampled_from((63, 64, 65, 255, 256, 300)),
    bias=st.booleans(),
)
def test_products_are_those_of_double_precision(
    dtype: torch.dtype, outputs: int, inputs: int, tokens: int, bias: bool
) -> None:
    with torch.inference_mode():
        linear = layer(outputs, inputs, dtype, bias=bias)
        input_TI = torch.randn(tokens, inputs).to(dtype)
        assert_product(linear(input_TI), linear, input_TI)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 32), (33, 64), (1024, 576), (3, 1536)])
def test_a_token_has_the_same_bits_whatever_it_is_batched_with(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    linear = layer(*shape, dtype, bias=True)
    input_TI = torch.randn(GEMV_MAX_TOKENS, shape[1]).to(dtype)
    alone = torch.cat([linear(row) for row in one_by_one(input_TI)])
    for tokens in range(1, linear._gemv_max_tokens + 1):
        assert torch.equal(linear(input_TI[:tokens]), alone[:tokens])
        assert torch.equal(linear(input_TI[-tokens:]), alone[-tokens:])


needs_tiles = pytest.mark.skipif(
    load_amx_matmul(torch.bfloat16) is None, reason="this processor has no AMX"
)


@needs_tiles
@settings(max_examples=100)
@given(
    outputs=st.integers(32, 200),
    inputs=st.integers(1, 40).map(lambda n: n * 32),
    tokens=st.integers(1, 32),
    bias=st.booleans(),
)
def test_products_in_tiles_are_those_of_double_precision(
    outputs: int, inputs: int, tokens: int, bias: bool
) -> None:
    with torch.inference_mode():
        linear = layer(outputs, inputs, torch.bfloat16, bias=bias)
        assert linear._amx_matmul is not None
        input_TI = torch.randn(tokens, inputs).bfloat16()
        output = linear._amx_matmul(input_TI, linear.weight, linear._float32_bias())
        assert_product(output, linear, input_TI)


@needs_tiles
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", [(32, 32), (33, 64), (1001, 576), (96, 2816)])
def test_a_token_in_tiles_has_the_same_bits_whatever_it_is_batched_with(
    shape: tuple[int, int],
) -> None:
    linear = layer(*shape, torch.bfloat16, bias=True)
    input_TI = torch.randn(32, shape[1]).bfloat16()
    together = linear(input_TI)
    for tokens in range(1, 33):
        torch.set_num_threads(1 + tokens % 3)
        assert torch.equal(linear(input_TI[:tokens]), together[:tokens])
        assert torch.equal(linear(input_TI[-tokens:]), together[-tokens:])


@needs_tiles
def test_what_is_no_number_in_one_token_stays_there() -> None:
    """Tiles are as wide as they are: what lies beside the tokens must reach none of them."""
    linear = layer(64, 64, torch.bfloat16)
    assert linear._amx_matmul is not None
    input_TI = torch.randn(5, 64).bfloat16()
    expected = linear(input_TI)
    room = torch.full((count_scratch_items(5, 64),), -1, dtype=torch.int32)  # NaN
    output_TO = torch.empty(5, 64, dtype=torch.bfloat16)
    for call in linear._amx_matmul.bind_calls(
        input_TI, room, linear.weight, linear._float32_bias(), output_TO
    ):
        call()
    assert torch.equal(output_TO, expected)
    input_TI[2, 7] = torch.nan
    spoilt = linear(input_TI)
    assert spoilt[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(spoilt[others], expected[others])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [2, 3, 5, 64, 1001])
def test_threads_change_no_bit(dtype: torch.dtype, outputs: int) -> None:
    linear, results = layer(outputs, 128, dtype), []
    input_TI = torch.randn(3, 128).to(dtype)
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        results.append(linear(input_TI))
        assert torch.equal(results[-1], results[0])
    assert_product(results[0], linear, input_TI)


def test_sixteen_bits_are_rounded_as_torch_rounds() -> None:
    """To even, into denormals, to infinity; NaN stays NaN."""
    wide, narrow = load_gemv(torch.float32), load_gemv(torch.bfloat16)
    assert wide is not None
    assert narrow is not None
    scales = torch.tensor([1.0, 1e-38, 1e-40, 3e38, torch.inf, torch.nan, 0.0, -1.0])
    weight_OI = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    input_TI = torch.zeros(8, 64, dtype=torch.bfloat16)
    input_TI[:, 0] = scales
    bias_O = torch.randn(4096) * 1e-40
    expected = wide(input_TI.float(), weight_OI.float(), bias_O)
    rounded = expected.bfloat16()
    found = narrow(input_TI, weight_OI, bias_O)
    assert torch.equal(found.isnan(), rounded.isnan())
    assert torch.equal(found.nan_to_num(0.5), rounded.nan_to_num(0.5))
    assert rounded.isnan().any()
    assert rounded.isinf().any()
    assert (expected != rounded).any()


def test_halfway_is_rounded_to_even() -> None:
    narrow = load_gemv(torch.bfloat16)
    assert narrow is not None
    # 1 + k / 256 + a bit that lies halfway between two of bfloat16's numbers.
    input_TI = torch.zeros(1, 32, dtype=torch.bfloat16)
    input_TI[0, :2] = 1
    weight_OI = torch.zeros(64, 32, dtype=torch.bfloat16)
    weight_OI[:, 0] = 1 + torch.arange(64) / 128
    weight_OI[:, 1] = 1 / 256
    expected = (weight_OI[:, 0].float() + 1 / 256).bfloat16()
    assert torch.equal(narrow(input_TI, weight_OI, torch.zeros(64))[0], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_beside_the_tensors_is_read_or_written(dtype: torch.dtype) -> None:
    """The weight ends where memory ends; what the output lies in is as it was around it."""
    product = load_gemv(dtype)
    assert product is not None
    outputs, inputs = PAGE // 64, 64 // dtype.itemsize
    memory = mmap.mmap(-1, 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    beyond = ctypes.c_void_p(get_mapping_address(memory) + PAGE)
    assert ctypes.CDLL(None).mprotect(beyond, ctypes.c_size_t(PAGE), 0) == 0
    weight_OI = torch.frombuffer(memory, dtype=dtype, count=outputs * inputs)
    weight_OI = weight_OI.view(outputs, inputs).normal_()
    for tokens in range(1, GEMV_MAX_TOKENS + 1):
        input_TI = torch.randn(tokens, inputs).to(dtype)
        output = product(input_TI, weight_OI, torch.zeros(outputs))
        assert_product(output, make_linear(weight_OI, None), input_TI)


@needs_tiles
@pytest.mark.parametrize("tokens", [1, 16, 17, 32])
@pytest.mark.parametrize("outputs", [32, 45, 64])
def test_nothing_beyond_what_tiles_multiply_is_read_or_written(outputs: int, tokens: int) -> None:
    product, inputs = load_amx_matmul(torch.bfloat16), 96
    assert product is not None
    weight_OI, input_TI, output_TO = (
        guarded(torch.randn(shape).bfloat16())
        for shape in ((outputs, inputs), (tokens, inputs), (tokens, outputs))
    )
    bias_O = guarded(torch.randn(outputs))
    room = guarded(torch.zeros(count_scratch_items(tokens, inputs), dtype=torch.int32))
    for call in product.bind_calls(input_TI, room, weight_OI, bias_O, output_TO):
        call()
    assert torch.equal(output_TO, product(input_TI, weight_OI, bias_O))


@pytest.mark.parametrize("shape", [(128,), (0, 128), (1, 0, 128), (2, 3, 128), (1, 1, 9, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_of_any_rank(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    linear = layer(64, 128, dtype)
    inputs = torch.randn(shape).to(dtype)
    assert_product(linear(inputs), linear, inputs)


@pytest.mark.parametrize("tokens", [2, 5, 20])
def test_inputs_that_lie_apart(tokens: int) -> None:
    linear = layer(64, 128, torch.float32)
    wide = torch.randn(tokens, 3, 128)
    turned = torch.randn(128, tokens).t()
    for inputs in (wide[:, 1], turned):
        assert not inputs.is_contiguous()
        assert_product(linear(inputs), linear, inputs)


@pytest.mark.parametrize("tokens", [1, 3, 20, 100])
def test_gradients_are_torchs(tokens: int) -> None:
    with torch.inference_mode(False):
        linear = layer(64, 128, torch.float32, bias=True)
        inputs = torch.randn(tokens, 128, requires_grad=True)
        [found] = torch.autograd.grad(linear(inputs).square().sum(), inputs)
        plain = nn.functional.linear(inputs, linear.weight, linear.bias)
        [expected] = torch.autograd.grad(plain.square().sum(), inputs)
    assert torch.equal(found, expected)


def test_layers_of_a_model_are_replaced_and_keep_their_weights() -> None:
    class Own(nn.Linear):
        """With another forward, which is not to be lost."""

    # transformers states no types for it.
    conv: Any = Conv1D(48, 64)  # type: ignore[no-untyped-call]
    nn.init.normal_(conv.bias)
    model = nn.Sequential(nn.Linear(64, 32), nn.Sequential(conv, nn.ReLU()), Own(48, 64))
    plain, own, inputs = model[0], model[2], torch.randn(3, 64)
    expected, of_conv = plain(inputs), conv(inputs)
    replace_linear_layers(model)
    inner: Any = model[1]
    assert [type(model[0]), type(inner[0]), model[2]] == [FastLinear, FastLinear, own]
    assert model[0].weight is plain.weight
    assert torch.equal(inner[0].weight, conv.weight.t())
    assert distance(model[0](inputs), expected) <= 2e-6
    assert distance(inner[0](inputs), of_conv) <= 2e-6


@pytest.fixture
def anew() -> Iterator[None]:
    machine_code._compile_functions.cache_clear()
    yield
    machine_code._compile_functions.cache_clear()


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import llvmlite_that_nobody_has", "llvmlite_that_nobody_has"),
        ("print('no JSON')", "Expecting value"),
        ("print('[1]')", "bytes-like"),
        ("print('[\"\"]')", "expected 8 functions, got 0"),
        ("import time; time.sleep(60)", "timed out"),
    ],
)
def test_where_products_cannot_be_compiled_torch_computes(
    program: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "other_compiler.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(machine_code, "_COMPILER_MODULE", "other_compiler")
    monkeypatch.setattr(machine_code, "COMPILE_TIMEOUT_S", 2)
    linear = layer(64, 128, torch.float32)
    assert linear._gemv is None
    for tokens in (1, 2, 4, 8, 20):
        input_TI = torch.randn(tokens, 128)
        assert_product(linear(input_TI), linear, input_TI)
    shown = capsys.readouterr().err
    assert shown.count("native_compilation_failed") == 1
    assert reason in shown


@pytest.mark.usefixtures("anew")
def test_where_made_code_may_not_run_torch_computes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine_code, "_READ_AND_RUN", 1 << 20)  # no such protection
    assert layer(64, 128, torch.float32)._gemv is None
    assert "may not execute memory" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's flags of processors")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_processor_without_wide_registers_computes_the_same(dtype: torch.dtype) -> None:
    if "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    wanted = [("product", DTYPE_NAMES[dtype], tokens) for tokens in range(1, GEMV_MAX_TOKENS + 1)]
    codes = compile_functions(wanted, Processor("haswell", "", 16, 8))
    product = Gemv(load_functions(encode_constants(), codes))
    for outputs in (2, 7, 64):
        linear = layer(outputs, 256, dtype)
        for tokens in range(1, GEMV_MAX_TOKENS + 1):
            input_TI = torch.randn(tokens, 256).to(dtype)
            assert_product(product(input_TI, linear.weight, linear._zeros_O), linear, input_TI)


def test_a_processor_that_cannot_multiply_and_add_is_refused() -> None:
    """Its products would call a library's."""
    with pytest.raises(RuntimeError, match="refers to what is outside"):
        compile_functions([("product", "float32", 1)], Processor("x86-64", "", 16, 4))


def test_inputs_of_another_shape_or_dtype_are_refused() -> None:
    linear = layer(8, 128, torch.float32)
    wrong = [torch.randn(2, 64), torch.randn(1, 130), torch.randn(2, 128).double()]
    for inputs in wrong:
        with pytest.raises(RuntimeError, match=r"dtype|shapes"):
            linear(inputs)


def test_a_layer_may_be_copied_converted_and_filled_anew() -> None:
    with torch.inference_mode(False):
        linear, inputs = layer(8, 128, torch.float32, bias=True), torch.randn(2, 128)
        copied = copy.deepcopy(linear)
    assert torch.equal(copied(inputs), linear(inputs))
    other = layer(9, 128, torch.float32, bias=True)
    with torch.inference_mode(False):
        linear.load_state_dict({name: tensor[:8] for name, tensor in other.state_dict().items()})
    assert_product(linear(inputs), linear, inputs)
    assert not torch.equal(copied(inputs), linear(inputs))
    linear.bfloat16()
    assert_product(linear(inputs.bfloat16()), linear, inputs.bfloat16())


def test_the_default_dtype_changes_nothing() -> None:
    """It is the process's: transformers sets it while another thread loads a model."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        linear = layer(300, 128, torch.float32)
        inputs = torch.randn(2, 128, dtype=torch.float32)
        assert linear._zeros_O.dtype == torch.float32
        assert_product(linear(inputs), linear, inputs)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("anew")
def test_threads_that_ask_at_once_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, real = [], subprocess.run

    def run(*arguments: Any, **keywords: Any) -> Any:
        runs.append(arguments)
        return real(*arguments, **keywords)

    monkeypatch.setattr(subprocess, "run", run)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(machine_code.compile_functions, [("activate", "float32")] * 4))
    assert len(runs) == 1
    assert all(functions is found[0] for functions in found)


def huge_kilobytes(tensor: Tensor) -> int:
    """What of a tensor's memory the kernel was asked to put in huge pages."""
    text, within = Path("/proc/self/smaps").read_text(), 0
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
        first, last = (int(end, 16) for end in mapping.split()[0].split("-"))
        if re.search(r"VmFlags:.*\bhg\b", mapping):
            start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
            within += max(min(last, end) - max(first, start), 0)
    return within >> 10


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's map of memory")
def test_the_kernel_is_asked_for_whole_huge_pages() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has none")
    tensor = allocate_in_huge_pages((5 << 20,), torch.int8)
    assert huge_kilobytes(tensor) == 4 << 10


def test_a_kernel_without_huge_pages_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345)
    assert copy_to_huge_pages(torch.ones(1 << 20)).sum() == 1 << 20


@pytest.mark.parametrize("shape", [(1 << 19,), (1025, 1024), (3, 700, 1024)])
def test_what_is_large_lies_in_huge_pages(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    copy = copy_to_huge_pages(tensor)
    assert torch.equal(copy, tensor)
    assert copy.data_ptr() != tensor.data_ptr()
    assert copy.data_ptr() % HUGE_PAGE_BYTES == 0
    if len(shape) > 1:
        turned = copy_to_huge_pages(tensor.mT)
        assert turned.is_contiguous()
        assert torch.equal(turned, tensor.mT)


def test_what_is_small_is_not_copied() -> None:
    tensor = torch.randn(1000)
    assert copy_to_huge_pages(tensor) is tensor
    turned = copy_to_huge_pages(torch.randn(3, 5).t())
    assert turned.is_contiguous()
    assert turned.shape == (5, 3)


def load(family: str, models_dir: Path) -> ModelBlocks:
    checkpoint = open_local(save_tiny_model(family, models_dir))
    return load_blocks(checkpoint, Span(1, 4), dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "mixtral"])
def test_every_linear_layer_of_a_span_is_ours(family: str, models_dir: Path) -> None:
    modules = list(load(family, models_dir)._decoder.modules())
    linears = [module for module in modules if isinstance(module, nn.Linear | Conv1D)]
    assert len(linears) >= 12
    others = {type(module) for module in linears} - {FastLinear}
    assert all("Router" in kind.__name__ for kind in others)


def test_rows_have_the_same_bits_together_as_alone(models_dir: Path) -> None:
    """In a fused decoder: everything but its products is computed row by row."""
    blocks = load("llama", models_dir)
    assert isinstance(blocks._decoder, FusedDecoder)
    hidden_TD = torch.randn(GEMV_MAX_TOKENS, blocks.hidden_size)

    def run(rows: Tensor) -> Tensor:
        promise = blocks.new_pool(len(rows) * 32).reserve(len(rows))
        runs = [RowChunk(promise.new_table(), 1) for _ in rows]
        for each in runs:
            each.table.reserve(1)
        return blocks.forward(rows, runs)

    alone = torch.cat([run(row) for row in one_by_one(hidden_TD)])
    for rows in range(1, GEMV_MAX_TOKENS + 1):
        assert torch.equal(run(hidden_TD[:rows]), alone[:rows])
