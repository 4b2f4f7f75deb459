"""Hidden states that are bytes here and a tensor there, and always the same."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from nesa_node.compression import tensors
from nesa_node.compression.tensors import MAX_SMALL_BYTES, HiddenStates, TensorMeta
from nesa_node.core.errors import ProtocolError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOKENS = 5


def sent(tensor_TD: torch.Tensor, codec: str = "none") -> tuple[TensorMeta, bytearray]:
    meta, payload = tensors.encode(tensor_TD, codec=codec)
    return meta, bytearray(payload)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, MAX_SMALL_BYTES])
def test_bytes_and_tensor_are_the_same(dtype: torch.dtype, width: int) -> None:
    tensor_TD = torch.randn(TOKENS, width).to(dtype)
    meta, payload = sent(tensor_TD)
    for states in (
        HiddenStates.from_tensor(tensor_TD),
        HiddenStates.from_tensor(tensor_TD.clone().requires_grad_()),
        HiddenStates.from_tensor(tensor_TD.t().contiguous().t()),
        HiddenStates.from_payload(meta, payload, max_bytes=len(payload)),
    ):
        assert (states.meta, states.dtype, states.num_tokens) == (meta, dtype, TOKENS)
        assert states.nbytes == len(payload)
        assert bytes(states.payload) == bytes(payload)
        assert torch.equal(states.tensor_TD, tensor_TD)
        assert not states.tensor_TD.requires_grad
        for start, end in ((0, TOKENS), (1, 3), (4, 5), (2, 2)):
            place = states.buffer_range(start, end)
            assert ctypes.string_at(*place) == bytes(sent(tensor_TD[start:end])[1])


@pytest.mark.parametrize("codec", ["blockwise8", "lossless", "bfloat16"])
def test_what_came_compressed_is_what_decode_makes_of_it(codec: str) -> None:
    meta, payload = sent(torch.randn(TOKENS, 256), codec)
    states = HiddenStates.from_payload(meta, bytearray(payload), max_bytes=1 << 20)
    decoded = tensors.decode(meta, payload, max_bytes=1 << 20)
    assert torch.equal(states.tensor_TD, decoded)
    assert states.meta.codec == "none"


@pytest.mark.parametrize("dtype", DTYPES)
def test_room_is_written_to_either_way(dtype: torch.dtype) -> None:
    room = HiddenStates.zeros((TOKENS, 8), dtype)
    assert not room.tensor_TD.any()
    values_TD = torch.randn(TOKENS, 8).to(dtype)
    room.tensor_TD[1:3] = values_TD[1:3]
    ctypes.memmove(
        room.buffer_range(3, 5).address, bytes(sent(values_TD[3:])[1]), room.nbytes // 5 * 2
    )
    assert torch.equal(room.tensor_TD[1:], values_TD[1:])
    assert bytes(room.payload) == bytes(sent(room.tensor_TD)[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, MAX_SMALL_BYTES])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(dtype: torch.dtype, width: int, value: float) -> None:
    for place in ((0, 0), (2, 17), (TOKENS - 1, width - 1)):
        tensor_TD = torch.randn(TOKENS, width).to(dtype)
        tensor_TD[place] = value
        with pytest.raises(ProtocolError, match="NaN or infinite"):
            HiddenStates.from_payload(*sent(tensor_TD), max_bytes=1 << 21)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_are_finite(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    for value in (most, -most, 1e38 if dtype != torch.float16 else 6e4, 0.0, -0.0, 1e-40):
        tensor_TD = torch.full((TOKENS, 64), value, dtype=dtype)
        states = HiddenStates.from_payload(*sent(tensor_TD), max_bytes=1 << 20)
        assert torch.equal(states.tensor_TD, tensor_TD)


def test_bytes_that_are_not_what_was_described_are_refused() -> None:
    meta, payload = sent(torch.randn(TOKENS, 64))
    for bad_meta, bad, max_bytes in (
        (meta, payload[:-1], len(payload)),
        (meta, payload + b"0", len(payload) + 1),
        (meta, payload, len(payload) - 1),
        (TensorMeta("float64", meta.shape), payload, len(payload)),
        (TensorMeta("float32", (-1, -TOKENS * 64)), payload, len(payload)),
        (TensorMeta("float32", meta.shape, size=4), payload, len(payload)),
    ):
        with pytest.raises(ProtocolError) as refused:
            HiddenStates.from_payload(bad_meta, bad, max_bytes=max_bytes)
        assert refused.value.code == "bad_tensor"
