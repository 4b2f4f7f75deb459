"""Files that came from a hub or from another machine."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig

from nesa_node.engine.adapters.peft_folder import CONFIG_FILE, WEIGHTS_FILE, PeftFolder
from nesa_node.engine.gguf.checkpoint import open_gguf
from nesa_node.engine.gguf.header import read_gguf_header
from nesa_node.engine.weights.adapter_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_WEIGHTS_FILE,
    check_adapter_folder,
    combine_digests,
    read_adapter_folder,
)
from nesa_node.engine.weights.checkpoint import list_weight_files
from nesa_node.engine.weights.families import read_config, read_raw_config, require_known_type
from nesa_node.engine.weights.files import (
    DTYPES,
    INDEX_FILE,
    parse_header,
    parse_json,
    read_header,
)
from nesa_node.engine.weights.formats.quantization_config import find_format
from nesa_node.engine.weights.formats.stored_format import map_tensors
from nesa_node.topology.simulation.swarm_file import parse_swarm_file
from nesa_node.topology.snapshot_json import snapshot_from_json
from tests.engine.adapter_folders import LAYERS, write_adapter
from tests.engine.gguf_files import Kind, add_byte_tokenizer, make_random_model, write_gguf
from tests.fuzz.mutation import JSON, MAX_INPUT_BYTES
from tests.fuzz.target import Parse, Target

_MEMORY = Path("/dev/shm")

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
_SWARM = {
    "num_blocks": 8,
    "nodes": [
        {"name": "a", "device": "rtx3090", "region": "frankfurt", "span": "0:4"},
        {"name": "b", "device": "a100", "count": 2, "region": "london", "datacenter": True},
        {"name": "c", "tokens_per_s": 40, "max_blocks": 8, "location": [48.1, 11.6]},
    ],
    "round_trips_ms": {"a": {"c": 18}},
    "client": {"region": "paris"},
}


@contextmanager
def in_memory_folder() -> Iterator[Path]:
    where = _MEMORY if _MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="nesa-fuzz-", dir=where) as name:
        yield Path(name)


def _file(name: str, read: Callable[[Path], object]) -> Callable[[], Any]:
    """Opens what writes its input to the file `name` of a folder and has `read` read that."""

    @contextmanager
    def opened() -> Iterator[Parse]:
        with in_memory_folder() as folder:

            def parse(data: bytes) -> None:
                (folder / name).write_bytes(data)
                read(folder)

            yield parse

    return opened


def _raw_config(folder: Path) -> None:
    require_known_type(read_raw_config(folder, name="m").get("model_type"), name="m")


def _config(folder: Path) -> None:
    read_config(folder, name="m")


def _header(folder: Path) -> None:
    for info in read_header(folder / "model.safetensors", "model.safetensors").values():
        assert info.numel >= 0


def _index(folder: Path) -> None:
    list_weight_files({INDEX_FILE, "a.safetensors"}, folder, name="m")


GGUF: tuple[bytes, ...] = (
    b"general.architecture", b"llama", b"gpt2", b"tokenizer.ggml.tokens", b"blk.0.attn_q.weight",
    b"\x00" * 8, b"\xff" * 8, b"\x00" * 7 + b"\x80",
    *(bytes([kind, 0, 0, 0]) for kind in range(45)),
)  # fmt: skip
"""Keys, counts, and numbers of types of values and tensors."""


def _gguf(folder: Path) -> None:
    checkpoint = open_gguf(folder / "model.gguf", folder / "cache")
    checkpoint.fetch_side_files()
    for name in checkpoint.tensors:
        checkpoint.read(name)
    shutil.rmtree(folder / "cache")


def _gguf_seeds() -> list[bytes]:
    """A model of one block, and a list of tensors of other kinds."""
    sizes: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
    }
    heads: dict[str, Any] = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    }
    model = make_random_model(LlamaConfig(**sizes, **heads))
    with in_memory_folder() as folder:
        path = write_gguf(model, folder / "a.gguf", kind=Kind.Q4_0, tokenizer=add_byte_tokenizer)
        whole = path.read_bytes()
    assert len(whole) < MAX_INPUT_BYTES
    return [whole, _few_tensors()]


def _few_tensors() -> bytes:
    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    head = b"GGUF" + struct.pack("<IQQ", 3, 2, 3)
    head += text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
    head += text(b"general.alignment") + struct.pack("<II", 4, 32)
    head += text(b"llama.list") + struct.pack("<IIQ2I", 9, 4, 2, 7, 8)
    head += text(b"a") + struct.pack("<I2QIQ", 2, 32, 2, 8, 0)
    head += text(b"b") + struct.pack("<IQIQ", 1, 8, 0, 96)
    return head + bytes(-len(head) % 32) + bytes(160)


def header_seeds() -> list[bytes]:
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    half = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}
    text = json.dumps({"__metadata__": {"format": "pt"}, "a": entry, "b": half}).encode()
    return [struct.pack("<Q", len(text)) + text + bytes(32)]


@contextmanager
def _headers() -> Iterator[Parse]:
    """The length in front is put right, so that the JSON is read, unless the first bit says no."""
    with _file("model.safetensors", _header)() as read:

        def parse(data: bytes) -> None:
            if len(data) > 8 and not data[0] & 1:
                text = data[8:].rpartition(b"}")
                header = text[0] + text[1]
                data = struct.pack("<Q", len(header)) + header + text[2]
            read(data)

        yield parse


@contextmanager
def _quantized() -> Iterator[Parse]:
    """A config, a zero byte, and a header of weights, in front of which its length is put."""

    def parse(data: bytes) -> None:
        config, _, header = data.partition(b"\0")
        raw = parse_json(config, what="m")
        if not isinstance(raw, dict):
            return
        content = struct.pack("<Q", len(header)) + header

        def read(start: int, count: int) -> bytes:
            return content[start : start + count]

        stored = parse_header(read, len(content) + (1 << 40), "m", where="m")
        stored_format = find_format(raw, name="m")
        for info in map_tensors(stored, stored_format, torch.float32, name="m").values():
            assert 0 <= info.numel <= 4 * sum(each.nbytes for each in stored.values())

    yield parse


def _quantized_seeds() -> list[bytes]:
    group = {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}
    compressed = {"format": "pack-quantized", "config_groups": {"a": group}}
    half, word = "F16", "I32"
    columns = {"a.qzeros": (word, [2, 4]), "a.scales": (half, [2, 32])}
    made = (
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32},
            columns | {"a.qweight": (word, [8, 32])},
        ),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 32},
            columns | {"a.qweight": (word, [64, 4])},
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [32, 32]},
            {"a.weight": ("F8_E4M3", [64, 64]), "a.weight_scale_inv": ("F32", [2, 2])},
        ),
        (
            {"quant_method": "mxfp4"},
            {"a_blocks": ("U8", [2, 4, 2, 16]), "a_scales": ("U8", [2, 4, 2])},
        ),
        (
            {"quant_method": "compressed-tensors", **compressed},
            {
                "a.weight_packed": (word, [32, 8]),
                "a.weight_scale": (half, [32, 2]),
                "a.weight_shape": ("I64", [2]),
                "b.weight": ("I8", [32, 64]),
                "b.weight_scale": (half, [32, 1]),
            },
        ),
    )
    seeds = []
    for config, tensors in made:
        end, header = 0, {}
        for name, (dtype, shape) in tensors.items():
            begin, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        raw = {"quantization_config": config}
        seeds.append(json.dumps(raw).encode() + b"\0" + json.dumps(header).encode())
    return seeds


def _adapter(folder: Path) -> None:
    if not (folder / WEIGHTS_FILE).exists():
        (folder / WEIGHTS_FILE).write_bytes(_adapter_weights())
    PeftFolder.open(folder).modules("model.layers", 4, ["self_attn.q_proj"])


def _adapter_weights() -> bytes:
    """A header of two matrices for each of three blocks, which share their bytes."""
    entries = {
        f"base_model.model.model.layers.{block}.self_attn.q_proj.lora_{side}.weight": {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [0, 256],
        }
        for block in range(3)
        for side, shape in (("A", [4, 16]), ("B", [16, 4]))
    }
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + bytes(256)


def _peft_config_seeds() -> list[bytes]:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": True, "bias": "none"}
    patterns = {"q_proj": 4, r"layers\.[0-1]\..*k_proj": 8, "^model.layers.2|v_proj": 2}
    return [
        json.dumps(config).encode(),
        json.dumps({**config, "rank_pattern": patterns, "alpha_pattern": patterns}).encode(),
    ]


def _index_seeds() -> list[bytes]:
    return [json.dumps({"metadata": {}, "weight_map": {"x": "a.safetensors"}}).encode()]


@contextmanager
def _adapters() -> Iterator[Parse]:
    """Two bytes of the config's length, the config, the weights, whose header's length is put
    right unless the first bit says no. The digest is always right: a peer can compute it."""
    with in_memory_folder() as folder:
        config_path, weights_path = folder / ADAPTER_CONFIG_FILE, folder / ADAPTER_WEIGHTS_FILE

        def parse(data: bytes) -> None:
            length = int.from_bytes(data[:2], "little")
            config, weights = data[2 : 2 + length], data[2 + length :]
            if len(weights) > 8 and not weights[0] & 1:
                before, brace, after = weights[8:].partition(b"}}")
                header = before + brace
                weights = struct.pack("<Q", len(header)) + header + after
            config_path.write_bytes(config)
            weights_path.write_bytes(weights)
            digest = combine_digests(config, hashlib.sha256(weights).digest())
            for layers in (LAYERS, None):
                check_adapter_folder(folder, digest, layers)

        yield parse


def _adapter_seeds() -> list[bytes]:
    """Whole adapters, and configs with patterns."""
    seeds = []
    with in_memory_folder() as folder:
        patterns = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 3.0}}
        changed: list[dict[str, Any]] = [{}, patterns]
        for number, changes in enumerate(changed):
            source = write_adapter(folder / str(number), rank=2, **changes)
            config = read_adapter_folder(source, "tiny").config
            weights = (source / ADAPTER_WEIGHTS_FILE).read_bytes()
            seeds.append(len(config).to_bytes(2, "little") + config + weights)
    return seeds


@contextmanager
def _swarm_files() -> Iterator[Parse]:
    yield lambda data: parse_swarm_file(data, np.random.default_rng(0))


@contextmanager
def _snapshots() -> Iterator[Parse]:
    yield snapshot_from_json


def _snapshot_seeds() -> list[bytes]:
    from nesa_node.topology.snapshot_json import snapshot_to_json

    read = parse_swarm_file(json.dumps(_SWARM), np.random.default_rng(0))
    return [snapshot_to_json(read.snapshot)]


@contextmanager
def _training_data() -> Iterator[Parse]:
    """The first bytes choose the kind of file."""
    from nesa_node.client.training.data.records import read_examples
    from tests.client.training.data.chat_tokenizers import WITH_TOOLS, make_tokenizer

    tokenizer = make_tokenizer(WITH_TOOLS)
    with in_memory_folder() as folder:

        def parse(data: bytes) -> None:
            begin = data.lstrip()[:1]
            kind = {b"[": "json", b"{": "jsonl"}.get(begin, "txt")
            path = folder / f"data.{kind}"
            path.write_bytes(data)
            for example in read_examples(path, tokenizer, max_length=64).examples:
                assert example.num_targets
                assert len(example) <= 64

        yield parse


def _training_data_seeds() -> list[bytes]:
    call = {"function": {"name": "look", "arguments": {"at": 1}}}
    messages = [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sat"},
        {"role": "assistant", "content": "on the mat"},
    ]
    records = [
        {"messages": messages, "tools": [{"type": "function", "function": {"name": "look"}}]},
        {"prompt": messages[:1], "completion": messages[1:]},
        {"prompt": "the cat", "completion": " sat"},
        {"text": "the cat sat"},
    ]
    lines = [json.dumps(record) for record in records]
    texts = ["\n".join(lines), json.dumps(records, indent=1), "the cat\nsat\n\non the mat\n"]
    return [text.encode() for text in (*texts, *lines)]


TARGETS: dict[str, Target] = {
    "raw_config": Target(
        open=_file("config.json", _raw_config),
        seeds=lambda: [json.dumps(CONFIG).encode()],
        tokens=JSON,
        weight=0.4,
    ),
    "model_config": Target(
        open=_file("config.json", _config),
        seeds=lambda: [json.dumps(CONFIG).encode()],
        tokens=JSON,
        weight=0.01,
    ),
    "safetensors": Target(open=_headers, seeds=header_seeds, tokens=JSON),
    "gguf_header": Target(
        open=_file("model.gguf", lambda folder: read_gguf_header(folder / "model.gguf")),
        seeds=_gguf_seeds,
        tokens=GGUF,
    ),
    "gguf": Target(
        open=_file("model.gguf", _gguf), seeds=_gguf_seeds, tokens=GGUF, weight=0.01, slow_s=0.5
    ),
    "quantized": Target(
        open=_quantized,
        seeds=_quantized_seeds,
        tokens=(*JSON, b".weight", b"_scale", b"group_size", b"F8_E4M3", b"I32", b"U8"),
        weight=0.4,
    ),
    "checkpoint_index": Target(
        open=_file(INDEX_FILE, _index),
        seeds=_index_seeds,
        tokens=(*JSON, b".safetensors", b"../"),
        weight=0.4,
    ),
    "adapter_config": Target(
        open=_file(CONFIG_FILE, _adapter),
        seeds=_peft_config_seeds,
        tokens=(*JSON, b".*", b"[0-9]+", b"\\\\.", b"q_proj"),
        weight=0.4,
    ),
    "adapter": Target(
        open=_adapters,
        seeds=_adapter_seeds,
        tokens=(*JSON, b"lora_A.weight", b"target_modules", b"base_model.model.", b"F16", b"I64"),
        weight=0.2,
        slow_s=0.5,
    ),
    "swarm_file": Target(
        open=_swarm_files, seeds=lambda: [json.dumps(_SWARM).encode()], tokens=JSON, weight=0.2
    ),
    "snapshot": Target(open=_snapshots, seeds=_snapshot_seeds, tokens=JSON, weight=0.3),
    "training_data": Target(
        open=_training_data,
        seeds=_training_data_seeds,
        tokens=(*JSON, b'"role"', b'"content"', b'"assistant"', b'"prompt"', b'"completion"'),
        weight=0.1,
        slow_s=0.5,
    ),
}
