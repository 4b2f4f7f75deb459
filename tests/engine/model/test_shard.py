"""Blocks made of what an owner sends: equal to the checkpoint's, and without its names."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nesa_node.core.errors import ModelError, ProtocolError, UnsupportedModelError
from nesa_node.core.ids import Span
from nesa_node.engine.cache.paged_attention import RowChunk
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.model.shard import (
    ShardLoader,
    hash_layout,
    make_shard_config,
    read_shard,
)
from nesa_node.engine.weights.checkpoint import LocalCheckpoint, open_folder
from nesa_node.engine.weights.skeleton import Skeleton
from tests.engine.tiny_models import BLOCKS, FAMILIES, HIDDEN

CPU = torch.device("cpu")


def opened(folder: Path) -> LocalCheckpoint:
    checkpoint = open_folder(folder)
    if checkpoint.config.model_type == "gpt2":
        checkpoint.config.scale_attn_by_inverse_layer_idx = False
    return checkpoint


def shard_bytes(folder: Path, span: Span, dtype: torch.dtype = torch.float32) -> bytes:
    skeleton = Skeleton(opened(folder))
    tensors = read_shard(skeleton, span, dtype)
    return b"".join(each.reshape(-1).view(torch.uint8).numpy().tobytes() for each in tensors)


def make_shard(folder: Path, span: Span, dtype: torch.dtype = torch.float32) -> ModelBlocks:
    config = make_shard_config(opened(folder), span)
    loader = ShardLoader(config, len(span), dtype=dtype, device=CPU)
    data = shard_bytes(folder, span, dtype)
    assert loader.nbytes == len(data)
    loader.begin()
    for start in range(0, len(data), 10_007):
        loader.add(data[start : start + 10_007])
    return loader.finish()


def run(blocks: ModelBlocks, hidden_LD: torch.Tensor) -> torch.Tensor:
    pool = blocks.new_pool(4096)
    table = pool.reserve(8).new_table()
    outputs = []
    for start, end in ((0, 100), (100, 101), (101, 120)):  # beyond the windows of 64 tokens
        table.reserve(end)
        part = hidden_LD[start:end]
        outputs.append(blocks.forward(part, [RowChunk(table, end - start)]))
    return torch.cat(outputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shard_computes_what_the_checkpoints_blocks_do(
    family: str, tiny: Callable[[str], Path]
) -> None:
    folder, span = tiny(family), Span(2, 5)
    expected = load_blocks(opened(folder), span, dtype=torch.float32, device=CPU)
    made = make_shard(folder, span)
    hidden_LD = torch.randn(120, HIDDEN, generator=torch.Generator().manual_seed(1))
    assert made.span == Span(0, 3)
    assert made.weight_bytes == expected.weight_bytes
    assert torch.equal(run(made, hidden_LD), run(expected, hidden_LD))


@pytest.mark.parametrize("family", FAMILIES)
def test_both_sides_have_one_layout(family: str, tiny: Callable[[str], Path]) -> None:
    checkpoint = opened(tiny(family))
    skeleton = Skeleton(checkpoint)
    loader = ShardLoader(
        make_shard_config(checkpoint, Span(1, 2)), 1, dtype=torch.float32, device=CPU
    )
    layers = getattr(skeleton.decoder, skeleton.family.layers_name)
    assert {hash_layout(layer) for layer in layers} == {loader.layout}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_tells_of_a_layer_only(family: str, tiny: Callable[[str], Path]) -> None:
    checkpoint = opened(tiny(family))
    checkpoint.config._model_name_or_path = "owner/secret"  # as some checkpoints have it
    texts = [make_shard_config(checkpoint, Span(at, at + 2)) for at in range(BLOCKS - 1)]
    types = [json.loads(text).pop("layer_types", None) for text in texts]
    without = [json.loads(text) for text in texts]
    for each in without:
        each.pop("layer_types", None)
        assert str(each.get("vocab_size")) == "8"
    assert all(each == without[0] for each in without)
    assert all(each is None or len(each) == 2 for each in types)
    assert "secret" not in str(texts)
    assert not re.search(rf"\b{checkpoint.config.vocab_size}\b", str(texts))


def test_layers_that_compute_with_their_place_are_refused(tiny: Callable[[str], Path]) -> None:
    checkpoint = opened(tiny("gpt2"))
    checkpoint.config.scale_attn_by_inverse_layer_idx = True
    with pytest.raises(UnsupportedModelError, match="place of a layer"):
        make_shard_config(checkpoint, Span(1, 3))


def test_too_few_and_too_many_bytes_are_refused(tiny: Callable[[str], Path]) -> None:
    folder, span = tiny("llama"), Span(1, 2)
    config = make_shard_config(opened(folder), span)
    data = shard_bytes(folder, span)
    loader = ShardLoader(config, 1, dtype=torch.float32, device=CPU)
    loader.begin()
    loader.add(data[:-1])
    with pytest.raises(ProtocolError, match="missing"):
        loader.finish()
    with pytest.raises(ProtocolError, match="more bytes"):
        loader.add(b"ab")


@pytest.mark.parametrize(
    "config",
    [
        b"",
        b"[]",
        b"{}",
        b'{"model_type": 3}',
        b'{"model_type": "bert"}',
        b'{"model_type": "llama", "num_hidden_layers": 2}',
        b'{"model_type": "llama", "num_hidden_layers": 1e9}',
        b'{"model_type": "llama", "auto_map": {"AutoConfig": "x.Y"}, "hidden_size": "a"}',
        b"[" * 30_000,
    ],
)
def test_bad_configs_are_refused(config: bytes) -> None:
    with pytest.raises(ModelError):
        ShardLoader(config, 1, dtype=torch.float32, device=CPU)


SCAN = """
import re, sys
from pathlib import Path
import torch
from nesa_node.core.ids import Span
from nesa_node.engine.model.shard import ShardLoader

folder, blocks = Path(sys.argv[1]), int(sys.argv[2])


def names():
    found = set()
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb") as memory:
        for line in maps:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if "r" not in line.split()[1] or "[v" in line:
                continue
            try:
                memory.seek(start)
                data = memory.read(end - start)
            except (OSError, ValueError):
                continue
            found |= set(re.findall(b"laye" + rb"rs\\.\\d+\\.[\\w.]+weight", data))
    return found


before = names()
loader = ShardLoader(
    (folder / "config").read_bytes(), blocks, dtype=torch.float32, device=torch.device("cpu")
)
loader.begin()
loader.add((folder / "weights").read_bytes())
made = loader.finish()
print(sorted(names() - before))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_name_that_tells_a_place_is_in_memory(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, span = tiny("llama"), Span(1, 5)
    (tmp_path / "config").write_bytes(make_shard_config(opened(folder), span))
    (tmp_path / "weights").write_bytes(shard_bytes(folder, span))
    found = subprocess.run(
        [sys.executable, "-c", SCAN, str(tmp_path), str(len(span))],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "[]", found.stdout
