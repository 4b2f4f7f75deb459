from __future__ import annotations

import math

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nesa_node.compression.tensors import (
    DTYPES,
    MAX_DIM,
    MAX_SMALL_BYTES,
    TensorMeta,
    check_meta,
    decode,
    encode,
)
from nesa_node.core.errors import ProtocolError

MAX_BYTES = 1 << 20
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@given(dtype=st.sampled_from(sorted(DTYPES)), shape=SHAPES, seed=st.integers(0, 2**31))
def test_a_tensor_survives_the_wire_bit_for_bit(
    dtype: str, shape: tuple[int, ...], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(shape, generator=generator).to(DTYPES[dtype])
    meta, payload = encode(tensor)
    assert payload.nbytes == meta.nbytes == tensor.nbytes
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(meta), type=TensorMeta)
    for data in (bytes(payload), bytearray(payload), memoryview(bytes(payload))):
        back = decode(travelled, data, max_bytes=MAX_BYTES)
        assert back.dtype == tensor.dtype
        assert back.shape == tensor.shape
        assert torch.equal(back, tensor)


def test_the_bytes_are_little_endian_and_row_major() -> None:
    _, payload = encode(torch.tensor([[1.0, 2.0], [-2.0, 0.5]], dtype=torch.bfloat16).t())
    assert bytes(payload) == bytes.fromhex("803f 00c0 0040 003f")


def test_encoding_and_decoding_share_memory_where_they_can() -> None:
    tensor = torch.ones(2, 3)
    _, payload = encode(tensor)
    tensor[0, 0] = 0.0
    buffer = bytearray(payload)
    meta = TensorMeta(dtype="float32", shape=(2, 3))
    back = decode(meta, buffer, max_bytes=MAX_BYTES)
    assert back[0, 0] == 0.0
    back.fill_(1.0)
    assert buffer == bytearray(bytes.fromhex("0000803f") * 6)


@pytest.mark.parametrize(
    ("meta", "size"),
    [
        (TensorMeta(dtype="float32", shape=(2,), codec="pickle"), 8),
        (TensorMeta(dtype="int64", shape=(1,)), 8),
        (TensorMeta(dtype="float32", shape=(-1, -2)), 8),
        (TensorMeta(dtype="float32", shape=(MAX_DIM + 1, 0)), 0),
        (TensorMeta(dtype="float32", shape=(MAX_DIM, MAX_DIM)), 8),
        (TensorMeta(dtype="float32", shape=(1, 1, 1, 1, 2)), 8),
        (TensorMeta(dtype="float32", shape=(2,)), 7),
        (TensorMeta(dtype="float32", shape=(2,)), 9),
        (TensorMeta(dtype="float32", shape=(MAX_BYTES // 4 + 1,)), MAX_BYTES + 4),
    ],
)
def test_what_the_description_does_not_allow_is_refused(meta: TensorMeta, size: int) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(meta, bytes(size), max_bytes=MAX_BYTES)
    assert caught.value.code == "bad_tensor"


def test_a_size_is_refused_before_the_payload_exists() -> None:
    meta = TensorMeta(dtype="bfloat16", shape=(1000, 1000))
    assert check_meta(meta, max_bytes=2_000_000) == 2_000_000
    with pytest.raises(ProtocolError, match="2000000 bytes"):
        check_meta(meta, max_bytes=1_999_999)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("tokens", [3, MAX_SMALL_BYTES // 8])
def test_values_that_are_not_finite_are_refused(value: float, dtype: str, tokens: int) -> None:
    tensor = torch.zeros(tokens, 5, dtype=DTYPES[dtype])
    tensor[2, 4] = value
    meta, payload = encode(tensor)
    with pytest.raises(ProtocolError) as caught:
        decode(meta, payload, max_bytes=MAX_BYTES)
    assert caught.value.code == "not_finite"


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("tokens", [3, MAX_SMALL_BYTES // 8])
def test_every_finite_value_passes(dtype: str, tokens: int) -> None:
    info = torch.finfo(DTYPES[dtype])
    tensor = torch.tensor(
        [info.max, info.min, info.smallest_normal / 2, -info.smallest_normal, -0.0],
        dtype=DTYPES[dtype],
    ).repeat(tokens, 1)
    meta, payload = encode(tensor)
    assert torch.equal(decode(meta, payload, max_bytes=MAX_BYTES), tensor)


def test_integers_cannot_be_sent() -> None:
    with pytest.raises(ProtocolError, match="int64"):
        encode(torch.arange(3))


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_a_tensor_that_wants_a_gradient_is_sent_without_it(dtype: str) -> None:
    tensor = torch.randn(2, 3).to(DTYPES[dtype]).requires_grad_()
    meta, payload = encode(tensor)
    back = decode(meta, payload, max_bytes=MAX_BYTES)
    assert not back.requires_grad
    assert torch.equal(back, tensor)


class OlderMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What peers of protocol 1.1 read and write."""

    dtype: str
    shape: tuple[int, ...]
    codec: str = "none"


def test_without_a_codec_the_description_is_that_of_older_peers() -> None:
    meta, _ = encode(torch.ones(2, 3, dtype=torch.bfloat16))
    older = msgspec.msgpack.encode(OlderMeta("bfloat16", (2, 3)))
    assert msgspec.msgpack.encode(meta) == older
    assert msgspec.msgpack.decode(older, type=TensorMeta) == meta
    lossless, _ = encode(torch.ones(2, 3), codec="lossless")
    with pytest.raises(msgspec.ValidationError, match="size"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(lossless), type=OlderMeta)
