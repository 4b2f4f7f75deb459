"""A quantized model on the hub: what is downloaded, and what is not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nesa_node.core.errors import CorruptCheckpointError, DiskLimitError
from nesa_node.core.ids import Span
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.checkpoint import Checkpoint, compute_model_id
from nesa_node.engine.weights.hub import HubCheckpoint, compute_folder_bytes, open_checkpoint
from nesa_node.engine.weights.skeleton import Skeleton
from tests.engine.chained import forward, new_row, open_local
from tests.engine.fake_hub import FakeHub, fake_hub
from tests.engine.stored_weights import gptq, gptq_config, write_quantized


def _place(name: str) -> str:
    """The file of a tensor: scales of all blocks lie in one, apart from their numbers."""
    if name.endswith(".scales"):
        return "scales"
    block = re.search(r"layers\.(\d+)\.", name)
    return f"block-{block[1]}" if block else "ends"


@pytest.fixture
def hub(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeHub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    folder = write_quantized(tiny("llama"), tmp_path / "made", gptq(4), gptq_config(4)).folder
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{_place(name)}.safetensors" for name in tensors}
    for file in set(weight_map.values()):
        held = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
        save_file(held, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with fake_hub(folder) as served:
        yield served


def opened(hub: FakeHub, tmp_path: Path, *, max_model_bytes: int | None = None) -> Checkpoint:
    return open_checkpoint(
        "org/tiny",
        cache_dir=tmp_path / "cache",
        endpoint=hub.url,
        max_model_bytes=max_model_bytes,
    )


def load(checkpoint: Checkpoint, span: Span) -> float:
    blocks = load_blocks(checkpoint, span, dtype=torch.float32, device="cpu")
    return float(forward(blocks, torch.ones(3, 64), new_row(blocks)).sum())


def block_names(checkpoint: Checkpoint, block: int) -> list[str]:
    skeleton = Skeleton(checkpoint)
    return skeleton.source_names(skeleton.block_names(Span(block, block + 1)))


FILES = {"model-block-3.safetensors", "model-scales.safetensors"}


def test_a_span_downloads_the_files_that_its_weights_are_made_from(
    hub: FakeHub, tmp_path: Path
) -> None:
    checkpoint = opened(hub, tmp_path)
    assert isinstance(checkpoint, HubCheckpoint)
    assert list((tmp_path / "cache").rglob("*.safetensors")) == []
    names = block_names(checkpoint, 3)
    sizes = {file: (hub.folder / file).stat().st_size for file in FILES}
    assert checkpoint.download_sizes(names) == sizes
    hub.downloads.clear()
    assert load(checkpoint, Span(3, 4)) == load(open_local(hub.folder), Span(3, 4))
    assert set(hub.downloads) == FILES


def test_files_of_quantized_weights_count_against_the_limit(hub: FakeHub, tmp_path: Path) -> None:
    opened(hub, tmp_path)
    limit = sum((hub.folder / file).stat().st_size for file in FILES)
    limit += compute_folder_bytes(tmp_path / "cache")  # the config and the index count, too
    checkpoint = opened(hub, tmp_path, max_model_bytes=limit)
    checkpoint.require_download_allowed(block_names(checkpoint, 3))
    two = [*block_names(checkpoint, 2), *block_names(checkpoint, 3)]
    with pytest.raises(DiskLimitError, match="--pool-max-download-gib"):
        checkpoint.require_download_allowed(two)


def test_a_spoiled_file_of_scales_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    checkpoint = opened(hub, tmp_path)
    hub.spoiled = {"model-scales.safetensors"}
    with pytest.raises(CorruptCheckpointError, match="not what the hub states"):
        load(checkpoint, Span(3, 4))


def test_an_id_is_of_all_files(hub: FakeHub, tmp_path: Path) -> None:
    first = compute_model_id(opened(hub, tmp_path))
    path = hub.folder / "model-scales.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values()))[0, 0] += 1
    save_file(tensors, path, {"format": "pt"})
    assert compute_model_id(opened(hub, tmp_path / "other")) != first
