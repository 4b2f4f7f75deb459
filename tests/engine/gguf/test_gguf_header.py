"""Headers of GGUF files are read as the package `gguf` reads them; hostile ones are refused."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import LlamaConfig

from nesa_node.core.errors import CorruptCheckpointError, ModelError, UnsupportedModelError
from nesa_node.engine.gguf.checkpoint import open_gguf
from nesa_node.engine.gguf.header import BLOCK_TYPES, read_gguf_header
from nesa_node.engine.gguf.tensors import CHUNK_ELEMENTS, Parameter, StoredPart, read_parameter
from tests.engine.gguf_files import (
    Kind,
    add_byte_tokenizer,
    make_random_model,
    random_blocks,
    write_gguf,
)

MUTATIONS = 2000
SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_random_model(LlamaConfig(**SMALL))
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    return write_gguf(model, path, kind=Kind.Q8_0, tokenizer=add_byte_tokenizer)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(
    name: str = "token_embd.weight",
    shape: tuple[int, ...] = (4, 4),
    kind: int = 0,
    offset: int = 0,
) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


ARCHITECTURE = entry("general.architecture", 8, text("llama"))


def file(
    metadata: tuple[bytes, ...] = (ARCHITECTURE,),
    tensors: tuple[bytes, ...] = (tensor(),),
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    data: int = 64,
) -> bytes:
    num_tensors, num_metadata = counts or (len(tensors), len(metadata))
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_metadata)
    head += b"".join(metadata) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


def test_a_header_is_read_as_the_package_reads_it(small: Path) -> None:
    header = read_gguf_header(small)
    expected = gguf.GGUFReader(small)
    assert {
        (each.name, tuple(reversed(each.shape.tolist())), int(each.tensor_type), each.data_offset)
        for each in expected.tensors
    } == {(each.name, each.shape, each.kind, each.offset) for each in header.tensors.values()}
    assert all(header.tensors[each.name].nbytes == each.n_bytes for each in expected.tensors)
    own = {k: f.contents() for k, f in expected.fields.items() if not k.startswith("GGUF.")}
    assert dict(header.metadata) == own


def test_types_of_blocks_are_those_of_the_package() -> None:
    readable = {*gguf.quants._type_traits, Kind.F32, Kind.F16}
    assert {int(kind) for kind in readable} == set(BLOCK_TYPES)
    for number, block in BLOCK_TYPES.items():
        assert Kind(number).name == block.name
        assert gguf.GGML_QUANT_SIZES[Kind(number)] == (block.elements, block.nbytes)


def test_the_second_version_is_read(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(file(version=2))
    assert list(read_gguf_header(tmp_path / "m.gguf").tensors) == ["token_embd.weight"]


def array(items: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", items, count) + values


HOSTILE: dict[str, tuple[bytes, str]] = {
    "another magic": (b"GGML" + bytes(60), "does not begin with GGUF"),
    "empty": (b"", "ends within its header"),
    "cut in the counts": (b"GGUF" + struct.pack("<I", 3), "ends within its header"),
    "version 1": (file(version=1), "version 1"),
    "big-endian": (file(version=3 << 24), "big-endian"),
    "2^63 tensors": (file(counts=(1 << 63, 1)), "claims 9223372036854775808 tensors"),
    "2^63 values": (file(counts=(1, 1 << 63)), "values of metadata"),
    "a key of 2^60 bytes": (
        file((struct.pack("<Q", 1 << 60) + b"x" * 60,)),
        "claims 1152921504606846976 bytes",
    ),
    "a text of 2^60 bytes": (file((text("a") + struct.pack("<IQ", 8, 1 << 60),)), "claims"),
    "no UTF-8": (file((entry("a", 8, struct.pack("<Q", 2) + b"\xff\xfe"),)), "not UTF-8"),
    "a key twice": (file((ARCHITECTURE, ARCHITECTURE)), "twice"),
    "an unknown type of value": (file((entry("a", 99, b""),)), "unknown type 99"),
    "a list of lists": (file((entry("a", 9, array(9, 1)),)), "list of the type 9"),
    "a list of 2^62 numbers": (file((entry("a", 9, array(12, 1 << 62)),)), "numbers in 'a'"),
    "a list of 2^62 texts": (file((entry("a", 9, array(8, 1 << 62)),)), "texts in 'a'"),
    "no dimensions": (file(tensors=(tensor(shape=()),)), "0 dimensions"),
    "five dimensions": (file(tensors=(tensor(shape=(1,) * 5),)), "5 dimensions"),
    "2^32 dimensions": (
        file(tensors=(text("t") + struct.pack("<I", (1 << 32) - 1) + bytes(32),)),
        "4294967295 dimensions",
    ),
    "no rows": (file(tensors=(tensor(shape=(4, 0)),)), "not made of blocks"),
    "half a block": (file(tensors=(tensor(shape=(33, 4), kind=8),)), "blocks of 32"),
    "2^126 numbers": (file(tensors=(tensor(shape=(1 << 63, 1 << 63)),)), "beyond the end"),
    "an unknown type": (file(tensors=(tensor(kind=77),)), "ggml's type 77"),
    "a type of intermediate results": (file(tensors=(tensor(kind=15),)), "ggml's type 15"),
    "a tensor twice": (file(tensors=(tensor(), tensor(offset=64)), data=128), "twice"),
    "beyond the end": (file(tensors=(tensor(offset=32),)), "beyond the end"),
    "an offset of 2^64-32": (file(tensors=(tensor(offset=(1 << 64) - 32),)), "beyond the end"),
    "unaligned": (file(tensors=(tensor(offset=8),), data=128), "not aligned to 32"),
    "overlapping": (file(tensors=(tensor(), tensor("b", offset=32)), data=128), "overlap"),
    "an alignment of 0": (
        file((ARCHITECTURE, entry("general.alignment", 4, struct.pack("<I", 0)))),
        "aligned to 0 bytes",
    ),
    "an alignment of 24": (
        file((ARCHITECTURE, entry("general.alignment", 4, struct.pack("<I", 24)))),
        "aligned to 24 bytes",
    ),
    "an alignment that is a text": (
        file((ARCHITECTURE, entry("general.alignment", 8, text("32")))),
        "aligned to '32' bytes",
    ),
    "no architecture": (file(()), "no general.architecture"),
    "an architecture that is a number": (
        file((entry("general.architecture", 4, bytes(4)),)),
        "no general.architecture",
    ),
    "no sizes": (file(), "block_count is missing"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    content, said = HOSTILE[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises((CorruptCheckpointError, UnsupportedModelError), match=said) as raised:
            open_gguf(path, tmp_path / "cache")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "\n" not in str(raised.value)
    assert peak < 2 << 20


def test_every_cut_of_a_file_is_refused(small: Path, tmp_path: Path) -> None:
    content = small.read_bytes()
    path = tmp_path / "cut.gguf"
    start = min(each.offset for each in read_gguf_header(small).tensors.values())
    for length in [*range(0, start, 97), start, len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(CorruptCheckpointError):
            read_gguf_header(path)


def _mutate(content: bytearray, header_bytes: int, generator: random.Random) -> None:
    for _ in range(generator.choice((1, 1, 2, 5))):
        at = generator.randrange(header_bytes)
        match generator.randrange(4):
            case 0:
                content[at] ^= 1 << generator.randrange(8)
            case 1:
                content[at] = generator.choice((0, 1, 127, 128, 255))
            case 2:
                value = generator.choice((0, 1, 255, 1 << 31, (1 << 32) - 1))
                content[at : at + 4] = struct.pack("<I", value)
            case _:
                value = generator.choice((0, 1 << 20, 1 << 40, 1 << 63, (1 << 64) - 1))
                content[at : at + 8] = struct.pack("<Q", value)


def test_two_thousand_mutations_of_a_header_are_read_or_refused(
    small: Path, tmp_path: Path
) -> None:
    """With typed errors of one line, and no more memory than a few times the file's size."""
    content = small.read_bytes()
    header_bytes = min(each.offset for each in read_gguf_header(small).tensors.values())
    path = tmp_path / "mutated.gguf"
    generator = random.Random(20_000)
    outcomes = {"read": 0, "refused": 0}
    lines: set[int] = set()
    tracemalloc.start()
    try:
        for number in range(MUTATIONS):
            changed = bytearray(content)
            _mutate(changed, header_bytes, generator)
            path.write_bytes(changed)
            tracemalloc.reset_peak()
            try:
                read_gguf_header(path)
                outcomes["read"] += 1
            except ModelError as error:
                outcomes["refused"] += 1
                lines.add(str(error).count("\n"))
            assert tracemalloc.get_traced_memory()[1] < 20 * len(content), number
    finally:
        tracemalloc.stop()
    assert lines == {0}
    assert min(outcomes.values()) > MUTATIONS // 10, outcomes


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mutations_of_a_file_are_opened_or_refused(small: Path, tmp_path: Path) -> None:
    """Also its config and its tokenizer."""
    content = small.read_bytes()
    header_bytes = min(each.offset for each in read_gguf_header(small).tensors.values())
    path = tmp_path / "mutated.gguf"
    generator = random.Random(7)
    opened, lines = 0, set()
    for _ in range(MUTATIONS):
        changed = bytearray(content)
        _mutate(changed, header_bytes, generator)
        path.write_bytes(changed)
        try:
            open_gguf(path, tmp_path / "cache").fetch_side_files()
            opened += 1
        except ModelError as error:
            lines.add(str(error).count("\n"))
    assert lines == {0}
    assert MUTATIONS // 20 < opened < MUTATIONS


@pytest.mark.parametrize("number", BLOCK_TYPES, ids=lambda number: Kind(number).name)
@pytest.mark.parametrize("shape", [(3, 512), (2, 5, 256), (2048,)], ids=str)
def test_a_tensor_is_read_in_parts_as_the_package_dequantizes_it_whole(
    tmp_path: Path, number: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nesa_node.engine.gguf.tensors.CHUNK_ELEMENTS", 600)
    kind = Kind(number)
    raw = random_blocks(shape, kind, scale=0.5)
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = read_gguf_header(path).tensors["t.weight"]
    assert tensor.shape == shape
    expected = gguf.quants.dequantize(raw, kind)
    found = read_parameter(Parameter(shape, (StoredPart(tensor),)))
    assert np.array_equal(found.float().numpy(), expected.reshape(shape), equal_nan=True)


def test_reading_a_tensor_takes_little_memory_beside_it(tmp_path: Path) -> None:
    shape = (4096, 4096)
    raw = random_blocks(shape, Kind.Q4_K, scale=0.5)
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t.weight", raw, raw_dtype=Kind.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = read_gguf_header(path).tensors["t.weight"]
    del raw
    tracemalloc.start()
    try:
        read_parameter(Parameter(shape, (StoredPart(tensor),)))
        peak = tracemalloc.get_traced_memory()[1]  # numpy's arrays; the tensor is torch's
    finally:
        tracemalloc.stop()
    assert peak < 16 * 4 * CHUNK_ELEMENTS


def test_a_file_that_became_shorter_is_corrupt(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(small.read_bytes())
    checkpoint = open_gguf(path, tmp_path / "cache")
    path.write_bytes(small.read_bytes()[:20_000])
    with pytest.raises(CorruptCheckpointError, match="ended early"):
        checkpoint.read(max(checkpoint.tensors, key=lambda name: checkpoint.stored[name].offset))
