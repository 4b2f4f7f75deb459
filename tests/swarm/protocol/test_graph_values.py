"""Values of graphs as payloads."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch
from torch import Tensor

from nesa_node.core.errors import NesaError, ProtocolError
from nesa_node.swarm.protocol.any_message import decode_message, encode_message, payload_nbytes
from nesa_node.swarm.protocol.graph_messages import (
    ITEM_BYTES,
    GraphRun,
    ValueMeta,
    payload_bytes,
)
from nesa_node.swarm.protocol.graph_values import decode_values, encode_values


def made() -> dict[int, Tensor]:
    torch.manual_seed(0)
    values = {}
    for index, name in enumerate(ITEM_BYTES):
        shape = ((), (3,), (2, 0), (2, 3, 5))[index % 4]
        values[7 * index] = (torch.randn(shape) * 20).to(getattr(torch, name))
    values[3] = torch.tensor([float("-inf"), float("nan"), 1.0])
    values[4] = torch.arange(5)[None, -1:].as_strided((1, 1), (600, 600), 4)
    return values


def test_values_come_as_they_went() -> None:
    values = made()
    metas, payload = encode_values(values)
    assert payload_bytes(metas, max_bytes=1 << 20) == len(payload)
    found = decode_values(metas, payload)
    assert list(found) == list(values)
    for index, value in values.items():
        assert found[index].dtype == value.dtype
        assert torch.equal(found[index].nan_to_num(), value.nan_to_num())


def test_other_bytes_than_truth_values() -> None:
    meta = ValueMeta(0, "bool", (3,))
    (found,) = decode_values((meta,), bytearray(b"\x00\x02\xff")).values()
    assert found.tolist() == [False, True, True]
    assert found.view(torch.uint8).tolist() == [0, 1, 1]


def test_what_is_refused() -> None:
    with pytest.raises(ProtocolError, match="complex64"):
        encode_values({0: torch.zeros(2, dtype=torch.complex64)})
    twice = ValueMeta(1, "float32", (1,))
    with pytest.raises(ProtocolError, match="twice"):
        decode_values((twice, twice), bytearray(20))
    large = ValueMeta(1, "float64", ((1 << 31) - 1,) * 8)
    with pytest.raises(ProtocolError, match="at most 4096 fit"):
        payload_bytes((large,), max_bytes=4096)


def test_damaged_messages_are_refused_or_bounded() -> None:
    rng = random.Random(0)
    metas, _ = encode_values(made())
    header = encode_message(GraphRun(request=1, blocks=(0, 2), sizes=(3, 4), values=metas))
    for _ in range(3000):
        damaged = bytearray(header)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            message = decode_message(damaged)
            assert payload_nbytes(message, max_bytes=1 << 20) <= 1 << 20
        except NesaError:
            continue
    fields = msgspec.msgpack.decode(header)
    fields["values"] = [[0, "float32", [1]]] * 513
    with pytest.raises(ProtocolError):
        decode_message(msgspec.msgpack.encode(fields))


def test_empty_tensors_of_impossible_sizes_are_refused() -> None:
    huge = ValueMeta(1, "float32", (0, (1 << 31) - 1, (1 << 31) - 1, (1 << 31) - 1))
    with pytest.raises(ProtocolError, match="no tensor is"):
        decode_values((huge,), bytearray())
