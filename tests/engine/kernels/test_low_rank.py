"""Low-rank products in machine code, against double precision and each token's own product.

T tokens, N those with an adapter, I inputs, O outputs, R rows of A, r those of a part.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nesa_node.engine.kernels.linear import DTYPE_NAMES
from nesa_node.engine.kernels.low_rank import (
    BLOCK_OUTPUTS,
    DESCRIPTOR_FIELDS,
    PART_FIELDS,
    ROWS_AT_ONCE,
    SEGMENT_FIELDS,
    SMALL_BLOCK_OUTPUTS,
    TABLE_FIELDS,
    load_low_rank,
    to_blocks,
)
from nesa_node.engine.kernels.machine_code import NativeFunction, compile_functions, load_functions
from nesa_node.engine.kernels.native import compiler as program
from nesa_node.engine.kernels.native import low_rank as generator
from nesa_node.engine.kernels.native.function_builder import encode_constants
from nesa_node.engine.kernels.native.job_builder import Processor
from tests.engine.chained import distance
from tests.engine.guarded import guarded

Functions = Callable[[str, str], NativeFunction]
WITHIN = {torch.float32: 1e-6, torch.bfloat16: 2**-7}
"""Relative to the largest: one step of the dtype, where a last bit was rounded the other way."""


def here(name: str, dtype: str) -> NativeFunction:
    found = compile_functions((name, dtype))
    assert found is not None
    return found[0]


@cache
def for_haswell(name: str, dtype: str) -> NativeFunction:
    """Registers of 8 floats, and 16 of them."""
    if "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    [code] = program.compile_functions([(name, dtype)], Processor("haswell", "", 16, 8))
    return load_functions(encode_constants(), [code])[0]


@pytest.fixture(
    params=itertools.product((here, for_haswell), DTYPE_NAMES),
    ids=lambda one: f"{one[0].__name__}-{one[1]}",
)
def machine(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return request.param


@dataclass
class Adapter:
    """A in rows that are padded with zeros, and B^T [r, O] of each part with its first output."""

    a_RI: Tensor
    scales_R: Tensor
    parts: list[tuple[Tensor, int, int]]
    """B^T, first row of A, first output."""

    def __post_init__(self) -> None:
        self.blocks = {first: guarded(to_blocks(b_rO)) for b_rO, first, _ in self.parts}
        """By first row of A."""

    def describe(self) -> list[ctypes.c_int64 | int]:
        fields: list[ctypes.c_int64 | int] = [
            self.a_RI.data_ptr(),
            len(self.a_RI),
            self.scales_R.data_ptr(),
            len(self.parts),
        ]
        for b_rO, first, start in self.parts:
            rank, count = b_rO.shape
            fields += [self.blocks[first].data_ptr(), first, rank, start, count]
        return fields


def make_adapter(
    inputs: int, outputs: Sequence[int], ranks: Sequence[int], dtype: torch.dtype
) -> Adapter:
    rows = -(-sum(ranks) // ROWS_AT_ONCE) * ROWS_AT_ONCE
    a_RI, scales_R = torch.zeros(rows, inputs), torch.zeros(rows)
    parts, first, start = [], 0, 0
    for count, rank in zip(outputs, ranks, strict=True):
        if rank:
            a_RI[first : first + rank] = torch.randn(rank, inputs)
            scales_R[first : first + rank] = 0.1 + 0.2 * rank
            b_rO = torch.randn(rank, count).to(dtype)
            parts.append((b_rO, first, start))
        first, start = first + rank, start + count
    return Adapter(guarded(a_RI.to(dtype)), guarded(scales_R), parts)


def run(
    functions: tuple[NativeFunction, NativeFunction],
    adapters: Sequence[Adapter],
    tokens: Sequence[Sequence[int]],
    input_TI: Tensor,
    output_TO: Tensor,
    *,
    threads: int = 1,
) -> None:
    """`tokens`: those of each adapter. Descriptors are the second of two layers'."""
    width = DESCRIPTOR_FIELDS + PART_FIELDS * max(len(each.parts) for each in adapters)
    descriptors = []
    for adapter in adapters:
        fields = (ctypes.c_int64 * (2 * width))()
        fields[width : width + len(adapter.describe())] = adapter.describe()
        descriptors.append(fields)
    ends = list(itertools.accumulate(map(len, tokens)))
    segments = guarded(
        torch.tensor(
            [
                [ctypes.addressof(fields), end - len(of_adapter), end]
                for fields, of_adapter, end in zip(descriptors, tokens, ends, strict=True)
            ]
        )
    )
    assert segments.shape[1] == SEGMENT_FIELDS
    indices = guarded(torch.tensor([token for each in tokens for token in each]))
    stride = max(len(adapter.a_RI) for adapter in adapters)
    hidden = guarded(torch.full((len(indices), stride), torch.nan))
    table = guarded(
        torch.tensor(
            [len(adapters), segments.data_ptr(), indices.data_ptr(), hidden.data_ptr(), stride]
        )
    )
    assert len(table) == TABLE_FIELDS
    for function, tensor in zip(functions, (input_TI, output_TO), strict=True):
        assert tensor.is_contiguous()
        where = table.data_ptr(), 8 * width
        function(*where, tensor.data_ptr(), tensor.shape[1], threads=threads)


def add_in_double(
    adapters: Sequence[Adapter],
    tokens: Sequence[Sequence[int]],
    input_TI: Tensor,
    output_TO: Tensor,
) -> Tensor:
    """The slow reference: each token's product on its own."""
    sums_TO = output_TO.double()
    for adapter, of_adapter in zip(adapters, tokens, strict=True):
        for token in of_adapter:
            hidden_R = adapter.a_RI.double() @ input_TI[token].double() * adapter.scales_R.double()
            for b_rO, first, start in adapter.parts:
                rank, count = b_rO.shape
                added_O = hidden_R[first : first + rank] @ b_rO.double()
                sums_TO[token, start : start + count] += added_O
    return sums_TO


def load(machine: tuple[Functions, torch.dtype]) -> tuple[NativeFunction, NativeFunction]:
    compile_, dtype = machine
    name = DTYPE_NAMES[dtype]
    return compile_("lora_shrink", name), compile_("lora_expand", name)


@pytest.mark.parametrize(
    ("inputs", "outputs"), [(16, (16,)), (1040, (64, 32, 16)), (256, (176, 176)), (48, (144,))]
)
@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_products_of_many_adapters(
    machine: tuple[Functions, torch.dtype], inputs: int, outputs: tuple[int, ...], threads: int
) -> None:
    """Ranks of all sizes, layers that an adapter leaves out, memory that ends at the tensors."""
    functions, dtype = load(machine), machine[1]
    ranks = [(1, 4, 0), (8, 8, 8), (0, 0, 3), (70, 5, 1)]
    taken = [each[: len(outputs)] for each in ranks if any(each[: len(outputs)])]
    adapters = [make_adapter(inputs, outputs, each, dtype) for each in taken]
    tokens = [[5], [0, 1, 8], [7], [3, 2]][: len(adapters)]
    input_TI = guarded(torch.randn(9, inputs).to(dtype))
    output_TO = guarded(torch.randn(9, sum(outputs)).to(dtype))
    before_TO = output_TO.clone()
    expected_TO = add_in_double(adapters, tokens, input_TI, output_TO)
    run(functions, adapters, tokens, input_TI, output_TO, threads=threads)
    assert distance(output_TO.double(), expected_TO) <= WITHIN[dtype]
    left = sorted(set(range(9)) - {token for each in tokens for token in each})
    assert torch.equal(output_TO[left], before_TO[left])
    for start, count in zip(itertools.accumulate(outputs, initial=0), outputs, strict=False):
        columns = slice(start, start + count)
        assert not torch.equal(output_TO[:, columns], before_TO[:, columns])


def test_bits_depend_on_neither_segment_nor_threads(
    machine: tuple[Functions, torch.dtype],
) -> None:
    functions, dtype = load(machine), machine[1]
    one, other = (make_adapter(512, (96, 32), ranks, dtype) for ranks in ((8, 3), (64, 32)))
    input_TI = torch.randn(6, 512).to(dtype)
    before_TO = torch.randn(6, 128).to(dtype)
    alone_TO = before_TO.clone()
    run(functions, [one], [[4]], input_TI, alone_TO)
    for adapters, tokens in (
        ([one], [[1, 4, 2]]),
        ([other, one], [[0, 3], [4]]),
        ([one, other], [[5, 0, 4], [1]]),
    ):
        for threads in (1, 2, 5):
            output_TO = before_TO.clone()
            run(functions, adapters, tokens, input_TI, output_TO, threads=threads)
            assert torch.equal(output_TO[4], alone_TO[4])


def test_what_is_not_finite_stays_in_its_token(machine: tuple[Functions, torch.dtype]) -> None:
    functions, dtype = load(machine), machine[1]
    adapter, poisoned = (make_adapter(64, (32,), (4,), dtype) for _ in range(2))
    input_TI, before_TO = torch.randn(4, 64).to(dtype), torch.randn(4, 32).to(dtype)
    expected_TO = before_TO.clone()
    run(functions, [adapter], [[0, 3]], input_TI, expected_TO)
    input_TI[1], poisoned.a_RI[0, 0] = torch.nan, torch.inf
    output_TO = before_TO.clone()
    run(functions, [adapter, poisoned], [[0, 1, 3], [2]], input_TI, output_TO)
    assert torch.equal(output_TO[[0, 3]], expected_TO[[0, 3]])
    assert not output_TO[[1, 2]].isfinite().any()


def test_structures_are_those_of_the_generator() -> None:
    assert generator.ROWS_AT_ONCE == ROWS_AT_ONCE
    assert generator.BLOCK_OUTPUTS == BLOCK_OUTPUTS
    assert generator.SMALL_BLOCK_OUTPUTS == SMALL_BLOCK_OUTPUTS
    assert generator.SEGMENT_FIELDS == SEGMENT_FIELDS
    assert generator.DESCRIPTOR_FIELDS == DESCRIPTOR_FIELDS
    assert generator.PART_FIELDS == PART_FIELDS


@pytest.mark.parametrize(
    ("dtype", "device", "sizes", "has"),
    [
        (torch.float32, "cpu", (64, 16), True),
        (torch.bfloat16, "cpu", (64, 16), True),
        (torch.float16, "cpu", (64, 16), False),
        (torch.float32, "meta", (64, 16), False),
        (torch.float32, "cpu", (64, 24), False),
    ],
)
def test_which_layers_have_machine_code(
    dtype: torch.dtype, device: str, sizes: tuple[int, ...], has: bool
) -> None:
    assert (load_low_rank(dtype, torch.device(device), sizes) is not None) == has
