"""Whatever bytes and descriptions arrive: a tensor of the announced shape, or `ProtocolError`."""

from __future__ import annotations

import random
import time
import tracemalloc

import msgspec
import pytest
import torch

from nesa_node.compression.codec import DTYPES
from nesa_node.compression.codecs import expand_codec
from nesa_node.compression.tensors import TensorMeta, check_meta, decode, encode
from nesa_node.core.errors import ProtocolError
from tests.compression.hidden_states import CODECS, KINDS, values

MUTATIONS = 24_000
MAX_BYTES = 1 << 16
SHAPES = ((), (1,), (3, 0), (1, 64), (2, 300), (2, 2, 3, 7), (5, 33))
TEXTS = (
    *map(expand_codec, CODECS), "int4@2:4:3", "int4:8:64", "int8@2:4096", "int8:64:16",
    "lossless@2", "int8@2:999999", "", "zstd", "int4::", "int8@2:0",
)  # fmt: skip
NUMBERS = (-1, 0, 1, 2, 63, 64, 65, 255, 4096, 2**16, 2**31 - 1, 2**31, 2**63 - 1)


def mutated_meta(meta: TensorMeta, rng: random.Random) -> TensorMeta:
    """Another dtype, codec, size, dimension or number of dimensions."""
    fields = msgspec.structs.asdict(meta)
    match rng.randrange(6):
        case 0:
            fields["dtype"] = rng.choice([*DTYPES, "int8", ""])
        case 1:
            fields["codec"] = rng.choice(TEXTS)
        case 2:
            fields["size"] = rng.choice([*NUMBERS, msgspec.UNSET])
        case 3:
            fields["shape"] = (*meta.shape, rng.choice(NUMBERS))
        case 4:
            fields["shape"] = meta.shape[1:]
        case _:
            text = list(meta.codec)
            text[rng.randrange(len(text))] = rng.choice("0123456789:@int")
            fields["codec"] = "".join(text)
    if rng.random() < 0.5 and fields["shape"]:
        dims = list(fields["shape"])
        dims[rng.randrange(len(dims))] = rng.choice(NUMBERS)
        fields["shape"] = tuple(dims)
    return TensorMeta(**fields)


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """Other bytes, more of them or fewer."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        if changed:
            # Headers, lists and lengths come first.
            most = len(changed) if rng.random() < 0.5 else min(40, len(changed))
            changed[rng.randrange(most)] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
    match rng.randrange(6):
        case 0:
            return bytes(changed[: rng.randrange(len(changed) + 1)])
        case 1:
            return bytes(changed) + rng.randbytes(rng.randrange(1, 70))
        case _:
            return bytes(changed)


@pytest.mark.timeout(120)
def test_mutated_encodings_never_crash_hang_or_take_memory() -> None:
    rng = random.Random(5)
    originals = [
        encode(values(kind, shape, dtype), codec=codec)
        for codec in CODECS
        for shape in SHAPES
        for dtype in DTYPES.values()
        for kind in (rng.choice(KINDS),)
    ]
    for meta, payload in originals:
        decode(meta, payload, max_bytes=MAX_BYTES)
    accepted = refused = 0
    codes: set[str] = set()
    slowest_s = 0.0
    tracemalloc.start()
    try:
        for _ in range(MUTATIONS):
            meta, payload = rng.choice(originals)
            data = bytes(payload)
            if rng.random() < 0.6:
                data = mutated_bytes(data, rng)
            if rng.random() < 0.6:
                meta = mutated_meta(meta, rng)
            if rng.random() < 0.3:
                # Else almost every other description fails for its size.
                try:
                    data = data[: check_meta(meta, max_bytes=MAX_BYTES)]
                    data += bytes(meta.nbytes - len(data))
                except ProtocolError:
                    pass
            tracemalloc.reset_peak()
            before, started = tracemalloc.get_traced_memory()[0], time.perf_counter()
            try:
                tensor = decode(meta, data, max_bytes=MAX_BYTES)
            except ProtocolError as error:
                codes.add(error.code)
                refused += 1
            else:
                accepted += 1
                assert tensor.shape == meta.shape
                assert tensor.dtype == DTYPES[meta.dtype]
                assert tensor.isfinite().all()
            slowest_s = max(slowest_s, time.perf_counter() - started)
            # numpy's and zstandard's memory and copies of the payload; torch's is bounded by shape.
            assert tracemalloc.get_traced_memory()[1] - before < 4 * MAX_BYTES
    finally:
        tracemalloc.stop()
    assert min(accepted, refused) > MUTATIONS / 10
    assert codes <= {"bad_tensor", "not_finite"}
    assert slowest_s < 1


@pytest.mark.parametrize("codec", CODECS)
def test_an_announced_size_bounds_payload_and_tensor(codec: str) -> None:
    tensor = torch.zeros(64, 1024)
    meta, payload = encode(tensor, codec=codec)
    larger = max(tensor.nbytes, payload.nbytes)
    assert check_meta(meta, max_bytes=larger) == payload.nbytes
    for refuse in (
        lambda: check_meta(meta, max_bytes=larger - 1),
        lambda: decode(meta, payload, max_bytes=larger - 1),
    ):
        with pytest.raises(ProtocolError, match="at most"):
            refuse()
