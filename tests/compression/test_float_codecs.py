from __future__ import annotations

import struct

import pytest
import torch
import zstandard

from nesa_node.compression.codec import DTYPES
from nesa_node.compression.tensors import TensorMeta, check_meta, decode, encode
from nesa_node.core.errors import ProtocolError
from tests.compression.hidden_states import KINDS, values

MAX_BYTES = 1 << 20


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_comes_back(dtype: str, kind: str) -> None:
    tensor = values(kind, (9, 333), DTYPES[dtype])
    tensor[0, 0] = -0.0
    meta, payload = encode(tensor, codec="lossless")
    back = decode(meta, payload, max_bytes=MAX_BYTES)
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))
    assert meta.size == payload.nbytes <= tensor.nbytes + 16


def test_planes_are_what_the_document_says() -> None:
    tensor = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
    _, payload = encode(tensor, codec="lossless")
    assert bytes(payload) == bytes.fromhex("02000000 3fc0 02000000 8000")


@pytest.mark.parametrize("size", [None, 0, 7, 2 * 1000 + 9, -1])
def test_an_impossible_size_is_refused_before_the_payload(size: int | None) -> None:
    meta = TensorMeta(dtype="bfloat16", shape=(10, 100), codec="lossless")
    if size is not None:
        meta = TensorMeta(dtype="bfloat16", shape=(10, 100), codec="lossless", size=size)
    with pytest.raises(ProtocolError, match="size"):
        check_meta(meta, max_bytes=MAX_BYTES)


def test_few_bytes_do_not_buy_much_memory() -> None:
    meta = TensorMeta(dtype="bfloat16", shape=(2**20, 2**10), codec="lossless", size=100)
    with pytest.raises(ProtocolError, match="at most"):
        check_meta(meta, max_bytes=MAX_BYTES)
    with pytest.raises(ProtocolError, match="at most"):
        decode(meta, bytes(100), max_bytes=MAX_BYTES)


def _frame(plain: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(plain)


@pytest.mark.parametrize(
    "frame",
    [
        _frame(bytes(999)),
        _frame(bytes(1001)),
        _frame(bytes(1 << 26)),
        _frame(bytes(1000)) + b"\0",
        _frame(bytes(500)) + _frame(bytes(500)),
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000)),
        b"",
        b"no frame at all",
    ],
)
def test_a_plane_of_anything_else_is_refused(frame: bytes) -> None:
    length = struct.pack("<I", len(frame))
    payload = length + frame + struct.pack("<I", 1000) + bytes(1000)
    meta = TensorMeta("bfloat16", (10, 100), "lossless", len(payload))
    with pytest.raises(ProtocolError) as caught:
        decode(meta, payload, max_bytes=1 << 30)
    assert caught.value.code == "bad_tensor"


def test_other_codecs_announce_no_size() -> None:
    with pytest.raises(ProtocolError, match="announces no size"):
        check_meta(TensorMeta("float32", (2,), "none", 8), max_bytes=MAX_BYTES)
