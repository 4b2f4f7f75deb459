"""Against bitsandbytes itself, whose blocks are ours where they end with the rows."""

from __future__ import annotations

from typing import Any

import bitsandbytes.functional
import pytest
import torch

from nesa_node.compression.codec import DTYPES
from nesa_node.compression.integer_codecs import dynamic_map
from nesa_node.compression.tensors import decode, encode
from tests.compression.hidden_states import values

bnb: Any = bitsandbytes.functional


def test_the_map_is_theirs() -> None:
    assert torch.equal(dynamic_map(torch.device("cpu")), bnb.create_dynamic_map())


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("block", [64, 256])
@pytest.mark.parametrize("kind", ["random", "outliers", "structured", "zeros"])
def test_bytes_and_values_are_theirs(dtype: str, block: int, kind: str) -> None:
    tensor = values(kind, (50, 512), DTYPES[dtype])
    codes, state = bnb.quantize_blockwise(tensor, blocksize=block)
    meta, payload = encode(tensor, codec=f"blockwise8:{block}:0")
    scales_nbytes = 4 * 50 * 512 // block
    absmax = torch.frombuffer(bytearray(payload[:scales_nbytes]), dtype=torch.float32)
    assert torch.equal(absmax, state.absmax)
    assert bytes(payload[scales_nbytes:]) == codes.numpy().tobytes()
    back = decode(meta, payload, max_bytes=1 << 20)
    assert torch.equal(back, bnb.dequantize_blockwise(codes, state))


def test_a_row_that_is_no_multiple_ends_its_block() -> None:
    tensor = values("random", (3, 100), torch.float32)
    tensor[1] *= 1e6
    meta, payload = encode(tensor, codec="blockwise8:64:0")
    back = decode(meta, payload, max_bytes=1 << 20)
    for row, got in zip(tensor, back, strict=True):
        for start in (0, 64):
            codes, state = bnb.quantize_blockwise(row[start : start + 64], blocksize=64)
            assert torch.equal(got[start : start + 64], bnb.dequantize_blockwise(codes, state))


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_what_is_set_apart_is_in_16_bits_and_nothing_in_its_block(dtype: str) -> None:
    tensor = values("random", (20, 512), DTYPES[dtype])
    apart = list(range(5, 512, 64))
    tensor[:, apart] *= 1000
    meta, payload = encode(tensor, codec="blockwise8")
    back = decode(meta, payload, max_bytes=1 << 20)
    assert memoryview(payload[4:20]).cast("H").tolist() == apart
    others = tensor.clone()
    others[:, apart] = 0
    expected = bnb.dequantize_blockwise(*bnb.quantize_blockwise(others, blocksize=64))
    expected[:, apart] = back[:, apart]
    assert torch.equal(back, expected)
    expected = tensor[:, apart].float()
    # float16 has room for all of the other two, bfloat16's exponents aside.
    bound = 0.0 if dtype != "float32" else 2.0**-11
    assert ((back[:, apart].float() - expected).abs() <= expected.abs() * bound).all()


def test_one_channel_in_64_is_set_apart() -> None:
    for width, count in ((63, 0), (64, 1), (200, 3), (512, 8), (4096, 8)):
        tensor = values("random", (4, width), torch.float32)
        tensor[:, -10:] *= 1e4
        meta, payload = encode(tensor, codec="blockwise8")
        error = (decode(meta, payload, max_bytes=1 << 20) - tensor).abs() / tensor.abs()
        exact = (error <= 2.0**-11).all(0).nonzero().view(-1)
        assert (exact >= width - 10).sum() >= count
        assert payload.nbytes - 4 * width - 16 * -(-width // 64) == (6 * count + 4 if count else 0)
