"""What layers compute between their products, against torch's own operations.

T tokens, D hidden, F inner size, Q query heads, H key/value heads, E head size, S slots.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import CacheDtype
from nesa_node.engine.cache.cache_side import dequantize_heads, quantize_heads
from nesa_node.engine.cache.pages import PageTable
from nesa_node.engine.kernels.linear import DTYPE_NAMES
from nesa_node.engine.kernels.machine_code import NativeFunction, compile_functions, load_functions
from nesa_node.engine.kernels.native import compiler as program
from nesa_node.engine.kernels.native.function_builder import encode_constants
from nesa_node.engine.kernels.native.job_builder import Processor
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.compiled_step import (
    COMPILED_MAX_TOKENS,
    MAX_COMPILED_STEPS,
    MAX_VECTOR_FLOATS,
    CompiledDecoder,
    float_as_field,
)
from nesa_node.engine.model.fused_decoder import MIN_ROTARY_POSITIONS, FusedDecoder
from nesa_node.engine.model.loading import load_blocks
from tests.engine.chained import distance, forward, new_row, open_local
from tests.engine.guarded import guarded
from tests.engine.tiny_models import save_tiny_model

Machine = tuple[Callable[..., NativeFunction], torch.dtype]
Attention = tuple[Tensor, Tensor, Tensor, list[int], list[int]]

WITHIN = {torch.float32: 1e-6, torch.bfloat16: 2**-7}
"""Relative to the largest: one step of the dtype, where a last bit was rounded the other way."""


def here(*wanted: str | int) -> NativeFunction:
    found = compile_functions(wanted)
    assert found is not None
    return found[0]


@cache
def for_haswell(*wanted: str | int) -> NativeFunction:
    """Registers of 8 floats, and 16 of them."""
    if "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    [code] = program.compile_functions([wanted], Processor("haswell", "", 16, 8))
    return load_functions(encode_constants(), [code])[0]


# An id with a function's address in it would differ from process to process.
@pytest.fixture(
    params=itertools.product((here, for_haswell), DTYPE_NAMES),
    ids=lambda one: f"{one[0].__name__}-{one[1]}",
)
def machine(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return request.param


@pytest.fixture(params=DTYPE_NAMES)
def dtype(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return request.param


def addresses(*tensors: Tensor) -> list[int]:
    assert all(tensor.is_contiguous() for tensor in tensors)
    return [tensor.data_ptr() for tensor in tensors]


@pytest.mark.parametrize(("tokens", "size"), [(1, 16), (3, 64), (2, 1040)])
def test_sum_and_norm(machine: Machine, tokens: int, size: int) -> None:
    compile_, dtype = machine
    x_TD, added_TD = (torch.randn(tokens, size).to(dtype) for _ in range(2))
    weight_D, out_TD = torch.randn(size).to(dtype), torch.empty(tokens, size, dtype=dtype)
    sum_TD = x_TD + added_TD
    wide = sum_TD.float()
    root = (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    expected_TD = (wide * root).to(dtype) * weight_D
    add_and_norm = compile_("add_and_norm", DTYPE_NAMES[dtype])
    add_and_norm(*addresses(x_TD, added_TD, weight_D, out_TD), tokens, size, float_as_field(1e-5))
    assert torch.equal(x_TD, sum_TD)
    assert distance(out_TD.double(), expected_TD.double()) <= WITHIN[dtype]


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
def test_activation(machine: Machine, scale: float) -> None:
    compile_, dtype = machine
    gate_up = (torch.randn(3, 2 * 4096) * scale).to(dtype)
    gate_up[0, :4] = torch.tensor([0.0, -0.0, torch.inf, -88.0])
    out_TF = torch.empty(3, 4096, dtype=dtype)
    compile_("activate", DTYPE_NAMES[dtype])(*addresses(gate_up, out_TF), 3, 4096)
    gate, up = gate_up.chunk(2, dim=-1)
    expected_TF = functional.silu(gate) * up
    close = torch.isclose(out_TF, expected_TF, rtol=WITHIN[dtype], atol=1e-28)
    assert close.all()


def test_not_a_number_is_not_lost(dtype: torch.dtype) -> None:
    gate_up, out_TF = torch.ones(1, 32, dtype=dtype), torch.empty(1, 16, dtype=dtype)
    gate_up[0, 3], gate_up[0, 16 + 5] = torch.nan, torch.nan
    here("activate", DTYPE_NAMES[dtype])(*addresses(gate_up, out_TF), 1, 16)
    assert out_TF.isnan()[0].nonzero().flatten().tolist() == [3, 5]


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_rotation(machine: Machine, dim: int) -> None:
    compile_, dtype = machine
    tokens, queries, heads, slots = 3, 6, 2, 10
    qkv = torch.randn(tokens, queries + 2 * heads, dim).to(dtype)
    cosines, sines = (torch.randn(20, dim).to(dtype) for _ in range(2))
    cache = [torch.full((slots, heads, dim), torch.nan, dtype=dtype) for _ in range(2)]
    positions, places = torch.tensor([3, 7, 19]), torch.tensor([1, 9, 4])
    turned = qkv[:, : queries + heads]
    expected = turned * cosines[positions].unsqueeze(1)
    expected += turned.roll(dim // 2, -1) * sines[positions].unsqueeze(1)
    values = qkv[:, queries + heads :].clone()
    rotate = compile_("rotate", DTYPE_NAMES[dtype], dim, "auto")
    numbers = addresses(qkv, cosines, sines, *cache, positions, places)
    rotate(*numbers, tokens, queries, heads)
    assert distance(qkv[:, :queries].double(), expected[:, :queries].double()) <= WITHIN[dtype]
    keys = cache[0][places]
    assert distance(keys.double(), expected[:, queries:].double()) <= WITHIN[dtype]
    assert torch.equal(cache[1][places], values)
    for side in cache:
        written = ~side.isnan().flatten(1).any(1)
        assert written.nonzero().flatten().tolist() == [1, 4, 9]


def attention(dtype: torch.dtype, dim: int, group: int, heads: int = 2) -> Attention:
    """Of three tokens over the first, the middle and the last of 400 slots."""
    qkv = torch.randn(3, heads * (group + 2), dim).to(dtype)
    keys, values = (torch.randn(400, heads, dim).to(dtype) for _ in range(2))
    return qkv, keys, values, [0, 20, 393], [1, 300, 7]


def attend(
    function: NativeFunction,
    case: Attention,
    group: int,
    *,
    threads: int = 1,
    scales: tuple[Tensor, ...] = (),
) -> Tensor:
    qkv, keys, values, firsts, counts = case
    tokens, heads, dim = len(qkv), keys.shape[1], keys.shape[2]
    out_TQE = torch.empty(tokens, heads * group, dim, dtype=qkv.dtype)
    room = -(-max(counts) // MAX_VECTOR_FLOATS) * MAX_VECTOR_FLOATS
    scratch = torch.full((threads, group, room), torch.nan)
    numbers = [torch.tensor(each) for each in ([*reversed(range(tokens))], firsts, counts)]
    turned = qkv.flip(0)
    tensors = addresses(turned, keys, values, out_TQE, *numbers, scratch)
    fields = tokens, heads, room, float_as_field(dim**-0.5), *addresses(*scales)
    function(*tensors, *fields, threads=threads)
    return out_TQE.flip(0)


def reference(case: Attention, group: int) -> Tensor:
    qkv, keys, values, firsts, counts = case
    outputs = []
    for query, first, count in zip(qkv, firsts, counts, strict=True):
        seen = slice(first, first + count)
        k, v = (side[seen].double().transpose(0, 1).unsqueeze(0) for side in (keys, values))
        query_1Q1E = query[: group * keys.shape[1]].double().unsqueeze(0).unsqueeze(2)
        output = functional.scaled_dot_product_attention(query_1Q1E, k, v, enable_gqa=True)
        outputs.append(output[0, :, 0])
    return torch.stack(outputs)


@pytest.mark.parametrize(("dim", "group"), [(32, 1), (64, 2), (64, 3), (128, 8)])
def test_attention(machine: Machine, dim: int, group: int) -> None:
    compile_, dtype = machine
    case = attention(dtype, dim, group)
    output = attend(compile_("attend", DTYPE_NAMES[dtype], dim, group, "auto"), case, group)
    assert distance(output.double(), reference(case, group)) <= WITHIN[dtype]


def test_attention_to_what_stands_out(dtype: torch.dtype) -> None:
    """Scores of thousands, as attention sinks have: no exponent overflows."""
    case = attention(dtype, 64, 2)
    case[1].mul_(300)
    output = attend(here("attend", DTYPE_NAMES[dtype], 64, 2, "auto"), case, 2)
    assert distance(output.double(), reference(case, 2)) <= 4 * WITHIN[dtype]


def test_threads_change_no_bit_of_attention(dtype: torch.dtype) -> None:
    case, function = attention(dtype, 64, 2), here("attend", DTYPE_NAMES[dtype], 64, 2, "auto")
    alone = attend(function, case, 2)
    for threads in (2, 3, 16):
        assert torch.equal(attend(function, case, 2, threads=threads), alone)


def test_one_rows_numbers_do_not_reach_another() -> None:
    """Nor does what lies in the cache beside what a token sees."""
    qkv, keys, values, firsts, counts = attention(torch.float32, 64, 2)
    function = here("attend", "float32", 64, 2, "auto")
    expected = attend(function, (qkv, keys, values, firsts, counts), 2)
    for side in (keys, values):
        side[1:20] = side[320:393] = torch.nan
    qkv[0] = torch.nan
    output = attend(function, (qkv, keys, values, firsts, counts), 2)
    assert output[0].isnan().all()
    assert torch.equal(output[1:], expected[1:])


def load(
    family: str, models_dir: Path, dtype: torch.dtype, cache_dtype: CacheDtype = "auto"
) -> ModelBlocks:
    checkpoint = open_local(save_tiny_model(family, models_dir))
    return load_blocks(checkpoint, Span(1, 4), dtype=dtype, device="cpu", cache_dtype=cache_dtype)


def without(blocks: ModelBlocks) -> None:
    assert isinstance(blocks._decoder, FusedDecoder)
    assert blocks._compiled_decoder is not None
    blocks._compiled_decoder = None


@pytest.mark.parametrize("family", ["llama", "llama_biased", "mistral", "qwen3"])
def test_a_span_computes_the_same_as_with_torchs_operations(
    family: str, models_dir: Path, dtype: torch.dtype
) -> None:
    """A prompt of few tokens, and steps over a window's end."""
    blocks, plain = (load(family, models_dir, dtype) for _ in range(2))
    without(plain)
    rows = [new_row(each) for each in (blocks, plain)]
    for tokens in (7, 60, 1, 1, COMPILED_MAX_TOKENS, 2):
        hidden_TD = torch.randn(tokens, blocks.hidden_size).to(dtype)
        before = hidden_TD.clone()
        outputs = [
            forward(each, hidden_TD, row).double()
            for each, row in zip((blocks, plain), rows, strict=True)
        ]
        assert torch.equal(hidden_TD, before)
        assert distance(*outputs) <= (1e-5 if dtype == torch.float32 else 0.05)


def test_what_was_written_down_for_other_steps_is_not_run(models_dir: Path) -> None:
    """Other pools, parts of the span, positions beyond the tables, other numbers of threads."""
    blocks, plain = (load("llama", models_dir, torch.float32) for _ in range(2))
    without(plain)

    def check(part: Span, row: PageTable, plain_row: PageTable, tokens: int) -> None:
        hidden_TD = torch.randn(tokens, blocks.hidden_size)
        one, other = (
            forward(each.select(part), hidden_TD, its_row)
            for each, its_row in ((blocks, row), (plain, plain_row))
        )
        assert distance(one.double(), other.double()) <= 1e-5

    parts = (Span(1, 4), Span(2, 3), Span(1, 3), Span(3, 4))
    rows = [(part, new_row(blocks.select(part)), new_row(plain.select(part))) for part in parts]
    for _ in range(2):
        for each in rows:
            check(*each, tokens=1)
    whole = rows[0]
    check(*whole, tokens=MIN_ROTARY_POSITIONS // 2 + 1)
    check(*whole, tokens=1)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        check(*whole, tokens=1)
    finally:
        torch.set_num_threads(threads)
    check(*whole, tokens=1)


def test_outputs_stay_as_they_were_given(models_dir: Path) -> None:
    blocks = load("llama", models_dir, torch.float32)
    row = new_row(blocks)
    first_TD = forward(blocks, torch.randn(1, blocks.hidden_size), row)
    before = first_TD.clone()
    forward(blocks, torch.randn(1, blocks.hidden_size), row)
    assert torch.equal(first_TD, before)


def test_an_input_is_not_held(models_dir: Path) -> None:
    """It may be a small part of what a client sent."""
    blocks = load("llama", models_dir, torch.float32)
    row, whole = new_row(blocks), torch.randn(300, blocks.hidden_size)
    memory = weakref.ref(whole.untyped_storage())
    forward(blocks, whole[:2], row)
    del whole
    gc.collect()
    assert memory() is None


def test_few_programs_are_kept(models_dir: Path) -> None:
    """Clients choose parts of a span, and how many tokens a step has."""
    blocks = load("llama", models_dir, torch.float32)
    for part in (Span(1, 4), Span(1, 2), Span(2, 4)):
        row = new_row(blocks.select(part))
        for tokens in range(1, COMPILED_MAX_TOKENS + 1):
            forward(blocks.select(part), torch.randn(tokens, blocks.hidden_size), row)
    assert blocks._compiled_decoder is not None
    programs = blocks._compiled_decoder._steps
    assert len(programs) == MAX_COMPILED_STEPS
    threads = torch.get_num_threads()
    assert (COMPILED_MAX_TOKENS, 2, 2, threads, False) in programs
    assert (1, 1, 3, threads, False) not in programs


def test_a_pool_is_not_held(models_dir: Path) -> None:
    """A span that is given up gives its cache back."""
    blocks = load("llama", models_dir, torch.float32)
    row = new_row(blocks)
    forward(blocks, torch.randn(1, blocks.hidden_size), row)
    pool = weakref.ref(row.pool)
    del row
    gc.collect()
    assert pool() is None


@pytest.mark.parametrize(
    ("family", "has"), [("llama_biased", True), ("qwen3", True), ("llama_tied", False)]
)
def test_which_spans_have_machine_code(family: str, has: bool, models_dir: Path) -> None:
    blocks = load(family, models_dir, torch.float32)
    assert isinstance(blocks._decoder, FusedDecoder)
    assert (blocks._compiled_decoder is not None) == has


def test_hidden_states_may_lie_in_any_order(models_dir: Path) -> None:
    blocks = load("llama", models_dir, torch.float32)
    turned_TD = torch.randn(blocks.hidden_size, 5).t()
    expected = forward(blocks, turned_TD.contiguous(), new_row(blocks))
    assert torch.equal(forward(blocks, turned_TD, new_row(blocks)), expected)


def test_the_default_dtype_changes_nothing(models_dir: Path) -> None:
    """It is the process's: transformers sets it while another thread loads a model."""
    blocks = load("llama", models_dir, torch.float32)
    row, other = new_row(blocks), new_row(blocks)
    hidden_TD = torch.randn(900, blocks.hidden_size)
    for each in (row, other):
        forward(blocks, hidden_TD, each)
    expected = forward(blocks, hidden_TD[:1], row)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(forward(blocks, hidden_TD[:1], other), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_half_a_rotation_is_refused(models_dir: Path) -> None:
    blocks = load("llama", models_dir, torch.float32)
    rotary_emb = blocks._decoder.rotary_emb
    rotary_emb.inv_freq = rotary_emb.inv_freq[:8]
    with pytest.raises(ValueError, match="16 of 32 numbers of a head"):
        forward(blocks, torch.randn(1, blocks.hidden_size), new_row(blocks))


def test_layers_that_differ_have_none(models_dir: Path) -> None:
    layers = load("llama", models_dir, torch.float32)._decoder.layers
    layers[1].act_fn = torch.nn.GELU()
    with pytest.raises(ValueError, match="have none"):
        CompiledDecoder(layers, "auto")


def test_nothing_beyond_the_tensors_is_read_or_written(dtype: torch.dtype) -> None:
    tokens, size, heads, group, dim, slots = 3, 48, 2, 3, 32, 1001

    def random(*shape: int) -> Tensor:
        return guarded(torch.randn(*shape).to(dtype))

    name = DTYPE_NAMES[dtype]
    normed = [random(tokens, size), random(tokens, size), random(size), random(tokens, size)]
    here("add_and_norm", name)(*addresses(*normed), tokens, size, float_as_field(1e-6))
    gates = [random(tokens, 2 * size), random(tokens, size)]
    here("activate", name)(*addresses(*gates), tokens, size)
    qkv, cache = random(tokens, heads * (group + 2), dim), [random(slots, heads, dim)] * 2
    tables = [random(9, dim), random(9, dim)]
    places = [guarded(torch.tensor(each)) for each in ([0, 8, 4], [0, slots - 1, 5])]
    tensors = addresses(qkv, *tables, *cache, *places)
    here("rotate", name, dim, "auto")(*tensors, tokens, group * heads, heads)
    numbers = [guarded(torch.tensor(each)) for each in ([0, 1, 2], [0, 1, 1000], [1001, 1000, 1])]
    attention = here("attend", name, dim, group, "auto")
    for threads in (1, 2, 5):
        scratch = guarded(torch.empty(threads, group, 1008))
        out_TQE = random(tokens, heads * group, dim)
        tensors = addresses(qkv, *cache, out_TQE, *numbers, scratch)
        attention(*tensors, tokens, heads, 1008, float_as_field(dim**-0.5), threads=threads)


def test_few_tokens_run_in_it(models_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = load("llama", models_dir, torch.float32)

    class Used(Exception):
        """Machine code was."""

    def run(*_: object) -> NoReturn:
        raise Used

    monkeypatch.setattr(CompiledDecoder, "run", run)
    hidden_TD, row = torch.randn(COMPILED_MAX_TOKENS + 1, blocks.hidden_size), new_row(blocks)
    with pytest.raises(Used):
        forward(blocks, hidden_TD[:COMPILED_MAX_TOKENS], row)
    forward(blocks, hidden_TD, row)


def quantized(side_SHD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and the values that they stand for, in float32."""
    codes, scales = quantize_heads(side_SHD)
    return codes, scales, dequantize_heads(codes, scales, torch.float32)


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_rotation_stores_codes_and_scales_as_torch_does(machine: Machine, dim: int) -> None:
    """To the bit: pages that a prompt wrote go on with those of decode steps."""
    compile_, dtype = machine
    tokens, queries, heads, slots = 4, 6, 2, 10
    qkv = torch.randn(tokens, queries + 2 * heads, dim).to(dtype)
    qkv[1, -1] = 0
    qkv[2, -1] = 1e-36
    qkv[3, -1, 3] *= 1000
    cosines, sines = (torch.randn(20, dim).to(dtype) for _ in range(2))
    positions, places = torch.tensor([3, 7, 19, 0]), torch.tensor([1, 9, 4, 7])
    plain = [torch.zeros(slots, heads, dim, dtype=dtype) for _ in range(2)]
    codes = [torch.full((slots, heads, dim), 99, dtype=torch.int8) for _ in range(2)]
    scales = [torch.full((slots, heads), 99, dtype=torch.bfloat16) for _ in range(2)]
    for kind, sides, more in (("auto", plain, []), ("int8", codes, scales)):
        rotate = compile_("rotate", DTYPE_NAMES[dtype], dim, kind)
        given = qkv.clone()
        numbers = addresses(given, cosines, sines, *sides, positions, places)
        rotate(*numbers, tokens, queries, heads, *addresses(*more))
    for stored, its_codes, its_scales in zip(plain, codes, scales, strict=True):
        expected_codes, expected_scales = quantize_heads(stored[places])
        assert torch.equal(its_scales[places], expected_scales)
        assert torch.equal(its_codes[places], expected_codes)
        others = torch.tensor([0, 2, 3, 5, 6, 8])
        assert (its_codes[others] == 99).all()
        assert (its_scales[others] == 99).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_key_that_is_not_finite_has_no_finite_scale(dtype: torch.dtype, value: float) -> None:
    qkv, tables = torch.ones(1, 3, 32, dtype=dtype), [torch.ones(4, 32, dtype=dtype)] * 2
    qkv[0, 2, 7] = value
    codes, scales = torch.zeros(2, 1, 32, dtype=torch.int8), torch.ones(2, 1, dtype=torch.bfloat16)
    others = codes.clone(), scales.clone()
    where = torch.tensor([1])
    rotate = here("rotate", DTYPE_NAMES[dtype], 32, "int8")
    numbers = addresses(qkv, *tables, others[0], codes, where, where)
    rotate(*numbers, 1, 1, 1, *addresses(others[1], scales))
    assert not scales[1].isfinite().any()
    assert others[1].isfinite().all()


@pytest.mark.parametrize(("dim", "group"), [(32, 1), (64, 2), (64, 3), (128, 8)])
def test_attention_over_codes(machine: Machine, dim: int, group: int) -> None:
    compile_, dtype = machine
    qkv, keys, values, firsts, counts = attention(dtype, dim, group)
    (k_codes, k_scales, k), (v_codes, v_scales, v) = quantized(keys), quantized(values)
    function = compile_("attend", DTYPE_NAMES[dtype], dim, group, "int8")
    case = (qkv, k_codes, v_codes, firsts, counts)
    output = attend(function, case, group, scales=(k_scales, v_scales))
    expected = reference((qkv, k, v, firsts, counts), group)
    assert distance(output.double(), expected) <= WITHIN[dtype]


def test_threads_change_no_bit_of_attention_over_codes(dtype: torch.dtype) -> None:
    qkv, keys, values, firsts, counts = attention(dtype, 64, 2)
    (k_codes, k_scales, _), (v_codes, v_scales, _) = quantized(keys), quantized(values)
    case, scales = (qkv, k_codes, v_codes, firsts, counts), (k_scales, v_scales)
    function = here("attend", DTYPE_NAMES[dtype], 64, 2, "int8")
    alone = attend(function, case, 2, scales=scales)
    for threads in (2, 3, 16):
        assert torch.equal(attend(function, case, 2, threads=threads, scales=scales), alone)


def test_nothing_beyond_codes_and_scales_is_read_or_written(dtype: torch.dtype) -> None:
    tokens, heads, group, dim, slots = 3, 2, 3, 32, 1001
    name = DTYPE_NAMES[dtype]
    qkv = guarded(torch.randn(tokens, heads * (group + 2), dim).to(dtype))
    cache = [guarded(torch.zeros(slots, heads, dim, dtype=torch.int8)) for _ in range(2)]
    scales = [guarded(torch.ones(slots, heads, dtype=torch.bfloat16)) for _ in range(2)]
    tables = [guarded(torch.randn(9, dim).to(dtype)) for _ in range(2)]
    places = [guarded(torch.tensor(each)) for each in ([0, 8, 4], [0, slots - 1, 5])]
    tensors = addresses(qkv, *tables, *cache, *places)
    rotate = here("rotate", name, dim, "int8")
    rotate(*tensors, tokens, group * heads, heads, *addresses(*scales))
    numbers = [guarded(torch.tensor(each)) for each in ([0, 1, 2], [0, 1, 1000], [1001, 1000, 1])]
    attention = here("attend", name, dim, group, "int8")
    for threads in (1, 2, 5):
        scratch = guarded(torch.empty(threads, group, 1008))
        out_TQE = guarded(torch.randn(tokens, heads * group, dim).to(dtype))
        tensors = addresses(qkv, *cache, out_TQE, *numbers, scratch)
        fields = tokens, heads, 1008, float_as_field(dim**-0.5), *addresses(*scales)
        attention(*tensors, *fields, threads=threads)


@pytest.mark.parametrize("family", ["llama", "llama_biased", "mistral", "qwen3"])
def test_a_span_with_a_cache_in_8_bits_computes_the_same_as_with_torchs_operations(
    family: str, models_dir: Path, dtype: torch.dtype
) -> None:
    blocks, plain = (load(family, models_dir, dtype, "int8") for _ in range(2))
    without(plain)
    rows = [new_row(each) for each in (blocks, plain)]
    for tokens in (7, 60, 1, 1, COMPILED_MAX_TOKENS, 2):
        hidden_TD = torch.randn(tokens, blocks.hidden_size).to(dtype)
        outputs = [
            forward(each, hidden_TD, row).double()
            for each, row in zip((blocks, plain), rows, strict=True)
        ]
        # A last bit can round a key or value to its next level.
        assert distance(*outputs) <= (2e-3 if dtype == torch.float32 else 0.05)


def test_pages_of_another_kind_do_not_run_in_machine_code(models_dir: Path) -> None:
    blocks, other = (load("llama", models_dir, torch.float32, kind) for kind in ("int8", "auto"))
    hidden_TD = torch.randn(9, blocks.hidden_size)
    row, plain = new_row(other), new_row(other)
    assert distance(forward(blocks, hidden_TD, row), forward(other, hidden_TD, plain)) <= 1e-5
