"""Keys and values in 8 bits: how far they are off, what they take, what is refused.

S slots, L tokens, H heads, D head size, B bytes.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nesa_node.core.errors import ProtocolError
from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import CacheDtype
from nesa_node.engine.cache.cache_side import CacheSide, dequantize_heads, quantize_heads
from nesa_node.engine.cache.pages import PAGE_TOKENS, PagePool
from nesa_node.engine.weights.families import CacheHeads
from tests.engine.int8_cache import round_to_127ths

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def side(cache_dtype: CacheDtype = "int8", dtype: torch.dtype = torch.float32) -> CacheSide:
    return CacheSide.allocate((20, 2, 8), dtype=dtype, cache_dtype=cache_dtype, device=CPU)


def pool(cache_dtype: CacheDtype = "int8", **options: object) -> PagePool:
    given = {"dtype": torch.float32, "device": CPU, "tokens": 96, **options}
    return PagePool(Span(0, 2), CacheHeads(2, 8), cache_dtype=cache_dtype, **given)  # type: ignore[arg-type]


@given(
    seed=st.integers(0, 2**32), scale=st.floats(-20, 20), outlier=st.sampled_from([1.0, 30.0, 1e4])
)
def test_no_value_is_further_off_than_half_a_step(seed: int, scale: float, outlier: float) -> None:
    values_LHD = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(seed)) * 10**scale
    values_LHD[..., 5] *= outlier
    codes, scales = quantize_heads(values_LHD)
    found = dequantize_heads(codes, scales, torch.float32)
    largest_LH1 = values_LHD.abs().amax(-1, keepdim=True)
    assert ((found - values_LHD).abs() <= largest_LH1 / 127 / 2 * (1 + 2**-7)).all()
    assert codes.abs().amax(-1).eq(127).all(), "all of the range is used"


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_those_of_an_independent_rounding(dtype: torch.dtype) -> None:
    values_LHD = torch.randn(50, 3, 64).to(dtype)
    found = dequantize_heads(*quantize_heads(values_LHD), dtype)
    assert torch.equal(found, round_to_127ths(values_LHD))


def test_zeros_stay_zeros_and_what_vanishes_becomes_them() -> None:
    values_LHD = torch.zeros(3, 1, 8)
    values_LHD[1] = 1e-36
    values_LHD[2, 0, 3] = -0.0
    codes, scales = quantize_heads(values_LHD)
    assert not codes.any()
    assert not dequantize_heads(codes, scales, torch.float32).any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_does_not_come_back_finite(value: float) -> None:
    """A node notices it in its outputs, as it does without 8 bits."""
    values_LHD = torch.ones(2, 2, 8)
    values_LHD[1, 1, 4] = value
    found = dequantize_heads(*quantize_heads(values_LHD), torch.float32)
    assert not found[1, 1].isfinite().all()
    assert found[0].isfinite().all()
    assert found[1, 0].isfinite().all()


def test_quantizing_what_was_quantized_changes_nothing() -> None:
    codes, scales = quantize_heads(torch.randn(200, 4, 64))
    again = quantize_heads(dequantize_heads(codes, scales, torch.float32))
    assert torch.equal(codes, again[0])
    assert torch.equal(scales, again[1])


@pytest.mark.parametrize("slots", [slice(3, 8), torch.tensor([9, 0, 4, 19, 5])])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_is_read_and_nothing_else_changes(
    slots: slice | Tensor, dtype: torch.dtype
) -> None:
    made = side(dtype=dtype)
    for tensor in made.tensors:
        tensor.fill_(1)
    values_LHD = torch.randn(5, 2, 8).to(dtype)
    made.write(slots, values_LHD)
    assert torch.equal(made.read(slots), round_to_127ths(values_LHD))
    others = torch.ones(20, dtype=torch.bool)
    others[slots] = False
    assert (made.read(torch.arange(20)[others]) == 1).all()


@pytest.mark.parametrize(
    ("dim", "dtype", "most"),
    [
        (64, torch.bfloat16, 0.53),
        (128, torch.bfloat16, 0.53),
        (64, torch.float32, 0.265),
        # Two bytes of 32 are too much for 0.53.
        (32, torch.bfloat16, 0.532),
    ],
)
def test_pages_in_8_bits_take_about_half(dim: int, dtype: torch.dtype, most: float) -> None:
    heads = CacheHeads(3, dim)
    plain, small = (
        PagePool(Span(0, 2), heads, tokens=64, dtype=dtype, device=CPU, cache_dtype=each)
        for each in ("auto", "int8")
    )
    taken = [sum(tensor.nbytes for tensor in each.tensors) for each in (plain, small)]
    assert taken[1] <= most * taken[0]
    assert taken[1] == 64 * 2 * heads.bytes_per_token(dtype, "int8")
    assert taken[0] == 64 * 2 * heads.bytes_per_token(dtype)


def filled(cache_dtype: CacheDtype = "int8", **options: object) -> PagePool:
    made = pool(cache_dtype, **options)
    for each in (*made.keys, *made.values):
        each.write(slice(0, 96), torch.randn(96, *each.stored_SHD.shape[1:]).to(each.dtype))
    return made


@pytest.mark.parametrize("uneven", [False, True])
def test_bytes_go_over_as_they_are(uneven: bool) -> None:
    heads = [CacheHeads(2, 8), CacheHeads(1, 16, values=(1, 4))] if uneven else CacheHeads(2, 8)
    options = {"dtype": torch.bfloat16, "device": CPU, "tokens": 96, "cache_dtype": "int8"}
    donor, taker = (PagePool(Span(0, 2), heads, **options) for _ in range(2))  # type: ignore[arg-type]
    for each in (*donor.keys, *donor.values):
        each.write(slice(0, 96), torch.randn(96, *each.stored_SHD.shape[1:]).bfloat16())
    sent = donor.export_bytes(slice(3, 40), donor.span)
    assert sent.shape == (37, donor.slot_bytes(donor.span))
    taker.import_bytes(torch.arange(50, 87), taker.span, sent)
    for one, other in zip(donor.tensors, taker.tensors, strict=True):
        assert torch.equal(one[3:40], other[50:87])


@pytest.mark.parametrize("kinds", [("int8", "auto"), ("auto", "int8")])
def test_pools_of_two_kinds_exchange_values(kinds: tuple[CacheDtype, CacheDtype]) -> None:
    donor, taker = filled(kinds[0]), pool(kinds[1])
    sent = donor.export_tokens(slice(3, 40), donor.span)
    assert sent.dtype == torch.float32
    taker.import_tokens(slice(50, 87), taker.span, sent)
    for one, other in zip((*donor.keys, *donor.values), (*taker.keys, *taker.values), strict=True):
        assert torch.equal(other.read(slice(50, 87)), round_to_127ths(one.read(slice(3, 40))))


def test_a_page_that_is_shared_is_copied_with_its_scales() -> None:
    made = filled(tokens=128)
    reservation = made.reserve(4)
    row = reservation.new_table()
    row.reserve(PAGE_TOKENS + 5)
    row.length = PAGE_TOKENS + 5
    twin = reservation.new_table()
    twin.adopt_pages(row.pages, row.length)
    before = [made.export_bytes(row.slots(0, row.length), made.span) for _ in range(2)]
    twin.reserve(row.length + 1)
    assert twin.pages[1] != row.pages[1]
    made.keys[0].write(twin.slots(row.length, row.length + 1), torch.randn(1, 2, 8))
    after = [made.export_bytes(each.slots(0, row.length), made.span) for each in (row, twin)]
    assert all(map(torch.equal, before, after))


def _set_scale(bytes_LB: Tensor, value: float) -> None:
    # Of the first block's keys: behind 16 codes.
    bytes_LB[1, 16:18] = torch.tensor([value], dtype=torch.bfloat16).view(torch.uint8)


@pytest.mark.parametrize(
    ("dtype", "value", "code"),
    [
        (torch.float32, torch.nan, "not_finite"),
        (torch.float32, torch.inf, "not_finite"),
        (torch.float32, 3e38, "not_finite"),
        (torch.float16, 1000.0, "not_finite"),
        (torch.float32, -1.0, "bad_tensor"),
    ],
)
def test_scales_that_no_cache_has_are_refused(dtype: torch.dtype, value: float, code: str) -> None:
    made = filled(dtype=dtype)
    sent = made.export_bytes(slice(0, 4), made.span)
    _set_scale(sent, value)
    before = [tensor.clone() for tensor in made.keys[0].tensors]
    with pytest.raises(ProtocolError) as refused:
        made.import_bytes(slice(8, 12), made.span, sent)
    assert refused.value.code == code
    assert all(map(torch.equal, before, made.keys[0].tensors))


@given(sent=st.binary(min_size=4 * 80, max_size=4 * 80))
def test_bytes_of_a_peer_are_refused_or_give_finite_values(sent: bytes) -> None:
    made = pool(dtype=torch.float16)
    assert made.slot_bytes(made.span) == 80
    bytes_LB = torch.frombuffer(bytearray(sent), dtype=torch.uint8).view(4, 80)
    with suppress(ProtocolError):
        made.import_bytes(slice(8, 12), made.span, bytes_LB)
        assert made.export_tokens(slice(8, 12), made.span).isfinite().all()


def test_a_code_that_no_cache_has_is_refused() -> None:
    made = filled()
    sent = made.export_bytes(slice(0, 4), made.span)
    sent[2, 3] = 128  # -128
    with pytest.raises(ProtocolError, match="below -127"):
        made.import_bytes(slice(8, 12), made.span, sent)
