"""What holds for every codec, whatever the tensor."""

from __future__ import annotations

import math
import subprocess
import sys

import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nesa_node.compression.codec import DTYPES, FLOAT16_MAX
from nesa_node.compression.codecs import FAMILIES, expand_codec, parse_codec
from nesa_node.compression.integer_codecs import (
    five_bits_nbytes,
    hadamard_transform,
    pack_five_bits,
    unpack_five_bits,
)
from nesa_node.compression.tensors import TensorMeta, check_meta, decode, encode
from nesa_node.core.errors import ProtocolError
from tests.compression.error_bounds import error_bound
from tests.compression.hidden_states import CODECS, KINDS, LOSSY, values

MAX_BYTES = 1 << 24
FLOAT32_MAX = torch.finfo(torch.float32).max
BFLOAT16_MAX = torch.finfo(torch.bfloat16).max
SHAPES = st.one_of(
    st.lists(st.integers(0, 5), max_size=4),
    st.lists(st.integers(0, 140), min_size=1, max_size=2),
    st.sampled_from([[1, 576], [3, 1024], [2, 1000], [1, 1, 2, 65], [70, 1], [0, 576]]),
).map(tuple)


@settings(max_examples=400)
@given(
    codec=st.sampled_from(CODECS),
    dtype=st.sampled_from(sorted(DTYPES)),
    kind=st.sampled_from(KINDS),
    shape=SHAPES,
    seed=st.integers(0, 2**31),
)
@example(codec="int4", dtype="float16", kind="large", shape=(2, 64), seed=0)
@example(codec="bfloat16", dtype="float16", kind="large", shape=(2, 64), seed=0)
def test_no_value_is_further_off_than_stated(
    codec: str, dtype: str, kind: str, shape: tuple[int, ...], seed: int
) -> None:
    tensor = values(kind, shape, DTYPES[dtype], seed)
    before = tensor.clone()
    meta, payload = encode(tensor, codec=codec)
    assert torch.equal(tensor, before)
    assert payload.nbytes == meta.nbytes == check_meta(meta, max_bytes=MAX_BYTES)
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(meta), type=TensorMeta)
    back = decode(travelled, bytes(payload), max_bytes=MAX_BYTES)
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    bound = error_bound(tensor, codec=codec)
    assert bound.shape == tensor.shape
    assert bool(((back.double() - tensor.double()).abs() <= bound).all())
    assert torch.equal(decode(meta, bytearray(payload), max_bytes=MAX_BYTES), back)
    if codec in ("none", "lossless"):
        assert not bound.any()


@pytest.mark.parametrize("codec", ["bfloat16", "blockwise8:64:0"])
def test_all_of_float32_stays_within_the_bound(codec: str) -> None:
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-149, 127, (500, 96), generator=generator)
    tensor = torch.randn(500, 96, generator=generator).sign() * 2.0**exponents
    tensor[0, :2] = torch.tensor([3.38e38, -3.38e38])
    meta, payload = encode(tensor, codec=codec)
    error = (decode(meta, payload, max_bytes=MAX_BYTES).double() - tensor.double()).abs()
    assert bool((error <= error_bound(tensor, codec=codec)).all())


@pytest.mark.parametrize("codec", ["blockwise8", "int8", "int8:16:0", "int4"])
def test_whatever_the_exponents_values_stay_within_the_bound(codec: str) -> None:
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-149, 100, (500, 96), generator=generator)
    # Rows, then blocks, then values far apart; the largest that is not refused among them.
    exponents[:200] = exponents[:200, :1]
    exponents[200:300] = exponents[200:300, ::16].repeat_interleave(16, dim=1)
    tensor = torch.randn(500, 96, generator=generator).sign() * 2.0**exponents
    tensor[0, :2] = torch.tensor([2.0**100, -(2.0**100)])
    for part in (tensor, tensor[1:] * 2.0**-60, tensor[:1], tensor[300:] * 2.0**-140):
        meta, payload = encode(part, codec=codec)
        error = (decode(meta, payload, max_bytes=MAX_BYTES).double() - part.double()).abs()
        assert bool((error <= error_bound(part, codec=codec)).all())


def test_no_scale_of_int8_is_below_its_block() -> None:
    tensor = values("ranges", (500, 96), torch.float32)
    _, payload = encode(tensor, codec="int8:16:0")
    codes = torch.frombuffer(bytearray(payload[-tensor.numel() :]), dtype=torch.int8)
    most = codes.view(-1, 16).int().abs().amax(-1)
    # Rounded up by an eighth of an octave at most: 127 / 2^(1/8) = 116.5.
    assert most.min() >= 116
    assert most.max() == 127


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("kind", ["random", "outliers"])
def test_a_bound_is_not_far_above_the_errors(codec: str, kind: str) -> None:
    tensor = values(kind, (64, 576), torch.float32)
    meta, payload = encode(tensor, codec=codec)
    error = (decode(meta, payload, max_bytes=MAX_BYTES) - tensor).abs().double()
    bound = error_bound(tensor, codec=codec)
    # The errors of all the rotated values of a block rarely add up.
    assert bool((error > bound * (0.1 if codec.startswith("int4") else 0.8)).any())


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != "none"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_values_that_are_not_finite_are_refused(codec: str, value: float, dtype: str) -> None:
    for place in (0, 70):
        tensor = torch.zeros(3, 71, dtype=DTYPES[dtype])
        tensor[1, place] = value
        with pytest.raises(ProtocolError) as caught:
            encode(tensor, codec=codec)
        assert caught.value.code == "not_finite"


@pytest.mark.parametrize(
    ("codec", "value"), [("float16", 1e30), ("float16", 65_520.0), ("bfloat16", 3.4e38)]
)
def test_a_value_that_a_cast_cannot_hold_is_refused(codec: str, value: float) -> None:
    with pytest.raises(ProtocolError, match="does not fit"):
        encode(torch.tensor([1.0, value]), codec=codec)


@pytest.mark.parametrize("codec", ["blockwise8", "int4", "int8"])
def test_what_would_overflow_is_refused(codec: str) -> None:
    with pytest.raises(ProtocolError, match="too large"):
        encode(torch.full((1, 64), 1e31), codec=codec)


@settings(max_examples=400)
@given(
    codec=st.sampled_from(CODECS),
    dtype=st.sampled_from(sorted(DTYPES)),
    numbers=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=128),
)
@example(codec="blockwise8", dtype="float32", numbers=[FLOAT32_MAX])
@example(codec="blockwise8", dtype="bfloat16", numbers=[BFLOAT16_MAX])
def test_what_can_be_encoded_is_finite_when_it_is_decoded(
    codec: str, dtype: str, numbers: list[float]
) -> None:
    most = torch.finfo(DTYPES[dtype]).max
    tensor = torch.zeros(2, 128, dtype=DTYPES[dtype])
    tensor[1, : len(numbers)] = torch.tensor(numbers).clamp(-most, most).to(tensor.dtype)
    try:
        meta, payload = encode(tensor, codec=codec)
    except ProtocolError:
        return  # it is sent as it is
    assert decode(meta, payload, max_bytes=MAX_BYTES).isfinite().all()


def test_a_float16_close_to_the_largest_does_not_become_infinite() -> None:
    tensor = torch.full((4, 64), FLOAT16_MAX, dtype=torch.float16)
    for codec in LOSSY:
        meta, payload = encode(tensor, codec=codec)
        assert decode(meta, payload, max_bytes=MAX_BYTES).isfinite().all()


@pytest.mark.parametrize("codec", ["int8", "blockwise8", "int4"])
def test_huge_channels_spoil_nothing(codec: str) -> None:
    calm = values("random", (16, 576), torch.float32)
    hidden = calm.clone()
    hidden[:, 100] = 2000.0
    hidden[0, 400] = -25_000.0
    meta, payload = encode(hidden, codec=codec)
    error = (decode(meta, payload, max_bytes=MAX_BYTES) - hidden).abs()
    error[:, 100] = error[0, 400] = 0
    assert error.max() < (0.7 if codec == "int4" else 0.05)


@pytest.mark.parametrize("codec", ["int8:16:0", "int8:64:0", "blockwise8:64:0"])
def test_a_huge_channel_spoils_no_other_block(codec: str) -> None:
    hidden = values("random", (16, 200), torch.float32)
    hidden[3, 100] = 1e6
    meta, payload = encode(hidden, codec=codec)
    error = (decode(meta, payload, max_bytes=MAX_BYTES) - hidden).abs()
    error[3, 64:128] = 0
    assert error.max() < 0.05


@pytest.mark.parametrize("hidden_size", [64, 256, 320, 576, 1024, 2048, 4096, 16_384])
@pytest.mark.parametrize("tokens", [1, 2, 57, 512])
def test_sizes_are_what_was_asked_for(hidden_size: int, tokens: int) -> None:
    tensor = values("random", (tokens, hidden_size), torch.bfloat16)
    ratios = {}
    for codec in ("blockwise8", "int8", "int4", "blockwise8:64:0", "bfloat16", "float16"):
        _, payload = encode(tensor, codec=codec)
        ratios[codec] = payload.nbytes / tensor.nbytes
    small = 48 / tensor.nbytes if tensor.nbytes < 1 << 16 else 0
    assert ratios["blockwise8"] <= 0.54 + small
    assert ratios["int8"] <= (0.54 if hidden_size >= 576 else 0.57) + small
    assert ratios["blockwise8:64:0"] == 0.53125
    assert ratios["int4"] < 0.35 + small
    assert ratios["bfloat16"] == ratios["float16"] == 1


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("none", "none"),
        ("int8", "int8@2:16:8"),
        ("int8:32", "int8@2:32:8"),
        ("int8@2:64:0", "int8@2:64:0"),
        ("blockwise8:128", "blockwise8@2:128:8"),
        ("blockwise8@2:64:0", "blockwise8@2:64:0"),
        ("int4", "int4@2:32:48"),
        ("int4:64", "int4@2:64:48"),
        ("int4@2:32:0", "int4@2:32:0"),
        ("lossless", "lossless"),
    ],
)
def test_a_text_has_one_form(text: str, canonical: str) -> None:
    assert expand_codec(text) == expand_codec(canonical) == parse_codec(canonical).text == canonical
    meta, _ = encode(torch.ones(2, 2), codec=text)
    assert meta.codec == canonical


@pytest.mark.parametrize(
    "text",
    [
        "", "None", "pickle", "int8:", "int8@2:63", "int8@2:064", "int8@2:64:257", "int8@2:8192",
        "int8@2:-64", "blockwise8:32", "int4@2:32:1", "int4@2:32:5000", "int4@2:512", "lossless:3",
        "none:1", "int8\n", "int8@2:٦٤", " int8", "int8@0", "int8" * 20, "bfloat16:2",
    ],
)  # fmt: skip
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        TensorMeta(dtype="float32", shape=(2,), codec=text).nbytes  # noqa: B018
    assert caught.value.code == "bad_tensor"


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_format_of_the_future_is_refused_by_its_number(name: str) -> None:
    has = FAMILIES[name].version
    with pytest.raises(ProtocolError, match=f"format {has + 1}, this node has {has}"):
        parse_codec(f"{name}@{has + 1}")


@pytest.mark.parametrize(
    "codec", ["int4", "int4:8:64", "int4@1:32:48", "int8", "int8:64:16", "int8@1:16:8"]
)
def test_the_first_formats_are_refused_by_their_number(codec: str) -> None:
    meta = TensorMeta(dtype="float32", shape=(2, 64), codec=codec)
    with pytest.raises(ProtocolError, match=f"codec {codec[:4]}: format 1, this node has 2"):
        decode(meta, bytes(200), max_bytes=MAX_BYTES)


def test_what_peers_make_it_parse_is_not_kept_for_ever() -> None:
    for share in range(2, 4097):
        parse_codec(f"int4@2:32:{share}")
    assert parse_codec.cache_info().currsize <= 256


@pytest.mark.parametrize("block", [1, 2, 8, 32, 256])
def test_the_rotation_is_that_of_its_formula(block: int) -> None:
    places = range(block)
    matrix = [[(-1) ** (i & j).bit_count() for i in places] for j in places]
    values_NB = torch.randint(-50, 50, (7, block))
    assert torch.equal(
        hadamard_transform(values_NB.float()).long(), values_NB @ torch.tensor(matrix)
    )


@pytest.mark.parametrize("block", [32, 256])
def test_sums_of_levels_are_exact_however_torch_multiplies(block: int) -> None:
    levels_NB = torch.randint(0, 32, (5000, block)) * 2 - 31
    expected = hadamard_transform(levels_NB.float())
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(hadamard_transform(levels_NB.float()), expected)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, 1000])
def test_five_bits_are_where_the_protocol_says(count: int) -> None:
    codes = torch.randint(0, 32, (count,), dtype=torch.uint8)
    packed = pack_five_bits(codes)
    assert len(packed) == five_bits_nbytes(count)
    assert torch.equal(unpack_five_bits(packed, count), codes)
    bytes_of, part = bytes(packed.tolist()), -(-count // 8)
    for place, code in enumerate(codes.tolist()):
        of, at = divmod(place, part)
        low = bytes_of[place % (4 * part)] >> (4 if of >= 4 else 0) & 15
        fifth = bytes_of[4 * part + at] >> of & 1
        assert code == low + 16 * fifth


def test_importing_the_codecs_loads_neither_bitsandbytes_nor_zstandard() -> None:
    program = (
        "import sys, torch; from nesa_node.compression import tensors;"
        "meta, data = tensors.encode(torch.ones(2, 64), codec='int8');"
        "tensors.decode(meta, data, max_bytes=999);"
        "meta = tensors.TensorMeta('float32', (1, 64), 'blockwise8@2:64:0');"
        "tensors.decode(meta, bytes(68), max_bytes=999);"
        "sys.exit('bitsandbytes' in sys.modules or 'zstandard' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
