from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree

import pytest
import torch

from nesa_node.core.errors import (
    CorruptCheckpointError,
    DiskLimitError,
    ModelNotFoundError,
    UnsafeCheckpointError,
)
from nesa_node.core.ids import Span
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.checkpoint import Checkpoint, compute_model_id
from nesa_node.engine.weights.hub import HubCheckpoint, open_checkpoint
from tests.engine.chained import forward, new_row, open_local
from tests.engine.fake_hub import COMMIT, FakeHub, fake_hub
from tests.engine.tiny_models import reference, save_tiny_model


@pytest.fixture
def hub(models_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A sharded model, one file per block or so."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    folder = tmp_path / "repository"
    reference(save_tiny_model("llama", models_dir)).save_pretrained(folder, max_shard_size="150KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer.bin").write_bytes(b"no side file")
    with fake_hub(folder) as served:
        yield served


def opened(
    hub: FakeHub,
    tmp_path: Path,
    *,
    model: str = "org/tiny",
    revision: str | None = None,
    token: str | None = None,
    max_disk_bytes: int | None = None,
    max_model_bytes: int | None = None,
) -> Checkpoint:
    return open_checkpoint(
        model,
        revision=revision,
        token=token,
        cache_dir=tmp_path / "cache",
        max_disk_bytes=max_disk_bytes,
        max_model_bytes=max_model_bytes,
        endpoint=hub.url,
    )


def shards_of(checkpoint: Checkpoint, block: int) -> set[str]:
    return {info.file for name, info in checkpoint.stored.items() if f"layers.{block}." in name}


def load(checkpoint: Checkpoint, span: Span) -> float:
    blocks = load_blocks(checkpoint, span, dtype=torch.float32, device="cpu")
    return float(forward(blocks, torch.ones(3, 64), new_row(blocks)).sum())


def test_opening_reads_headers_and_no_weights(hub: FakeHub, tmp_path: Path) -> None:
    checkpoint = opened(hub, tmp_path)
    assert checkpoint.name == "org/tiny"
    assert {name: info.shape for name, info in checkpoint.tensors.items()} == {
        name: info.shape for name, info in open_local(hub.folder).tensors.items()
    }
    assert list((tmp_path / "cache").rglob("*.safetensors")) == []


def with_header(hub: FakeHub, content: bytes) -> None:
    """Let the first weight file have another header, before the same data."""
    path = min(hub.folder.glob("*.safetensors"))
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    path.write_bytes(struct.pack("<Q", len(content)) + content + data[8 + length :])


def test_a_long_header_is_read_whole(hub: FakeHub, tmp_path: Path) -> None:
    path = min(hub.folder.glob("*.safetensors"))
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    header = json.loads(path.read_bytes()[8 : 8 + length])
    header["__metadata__"] = {"notes": "x" * 150_000}
    with_header(hub, json.dumps(header).encode())
    assert opened(hub, tmp_path).tensors == open_local(hub.folder).tensors


@pytest.mark.parametrize(
    ("header", "told"),
    [
        (b'{"a":[' + b"[]," * 600_000 + b"[]]}", "more values than any model's"),
        (b"[" * 40_000, "not JSON"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,5]}}', "bad header entry 'a'"),
    ],
)
def test_a_header_that_no_model_has_is_refused(
    hub: FakeHub, tmp_path: Path, header: bytes, told: str
) -> None:
    with_header(hub, header)
    with pytest.raises(CorruptCheckpointError, match=told):
        opened(hub, tmp_path)


def test_a_span_downloads_its_own_files_only(hub: FakeHub, tmp_path: Path) -> None:
    checkpoint = opened(hub, tmp_path)
    hub.downloads.clear()
    assert load(checkpoint, Span(3, 4)) == load(open_local(hub.folder), Span(3, 4))
    assert set(hub.downloads) == shards_of(checkpoint, 3)
    hub.downloads.clear()
    load(opened(hub, tmp_path), Span(3, 4))
    sizes = {file: (hub.folder / file).stat().st_size for file in shards_of(checkpoint, 3)}
    assert all(hub.downloads[file] <= min(sizes[file], 100_001) for file in sizes)


def test_a_revision_is_pinned_to_its_commit(hub: FakeHub, tmp_path: Path) -> None:
    checkpoint = opened(hub, tmp_path, revision="main")
    assert isinstance(checkpoint, HubCheckpoint)
    assert checkpoint._repository.commit == COMMIT
    with pytest.raises(ModelNotFoundError, match="no such revision"):
        opened(hub, tmp_path, revision="v9")


def test_a_file_that_is_not_what_the_hub_states_is_refused_and_removed(
    hub: FakeHub, tmp_path: Path
) -> None:
    checkpoint = opened(hub, tmp_path)
    hub.spoiled = shards_of(checkpoint, 3)
    with pytest.raises(CorruptCheckpointError, match="not what the hub states"):
        load(checkpoint, Span(3, 4))
    hub.spoiled = set()
    assert load(checkpoint, Span(3, 4)) == load(open_local(hub.folder), Span(3, 4))


def test_a_spoiled_config_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    hub.spoiled = {"config.json"}
    with pytest.raises(CorruptCheckpointError, match=r"config\.json is not what"):
        opened(hub, tmp_path)


def test_the_disk_limit_is_kept_before_downloading(hub: FakeHub, tmp_path: Path) -> None:
    checkpoint = opened(hub, tmp_path, max_disk_bytes=500_000)
    load(checkpoint, Span(3, 4))
    hub.downloads.clear()
    with pytest.raises(DiskLimitError, match=r"org/tiny needs .* raise the disk limit"):
        load(checkpoint, Span(0, 6))
    assert not hub.downloads


def names_of(checkpoint: Checkpoint, *blocks: int) -> list[str]:
    return [name for name in checkpoint.tensors if any(f"layers.{b}." in name for b in blocks)]


def test_one_models_files_have_a_limit_however_many_spans_are_asked_for(
    hub: FakeHub, tmp_path: Path
) -> None:
    plain = opened(hub, tmp_path)
    sizes = plain.download_sizes(names_of(plain, 3))
    assert sizes == {file: (hub.folder / file).stat().st_size for file in shards_of(plain, 3)}
    limit = sum(sizes.values()) + 20_000  # the config and the index count, too
    checkpoint = opened(hub, tmp_path, max_model_bytes=limit)
    checkpoint.require_download_allowed(names_of(checkpoint, 3))
    load(checkpoint, Span(3, 4))
    hub.downloads.clear()
    checkpoint.require_download_allowed(names_of(checkpoint, 3))
    for blocks in ((0,), (3, 4), range(6)):
        with pytest.raises(DiskLimitError, match="--pool-max-download-gib: files of org/tiny"):
            checkpoint.require_download_allowed(names_of(checkpoint, *blocks))
    with pytest.raises(DiskLimitError, match="--pool-max-download-gib"):
        load(checkpoint, Span(0, 1))
    assert not hub.downloads


def test_a_gated_model_needs_a_token(hub: FakeHub, tmp_path: Path) -> None:
    hub.token = "hf_secret"
    with pytest.raises(ModelNotFoundError, match="gated") as caught:
        opened(hub, tmp_path, token="hf_wrong")
    assert "hf_wrong" not in str(caught.value)
    assert opened(hub, tmp_path, token="hf_secret").num_blocks == 6


def test_a_model_that_does_not_exist_says_so(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="neither a folder here nor a model on the hub"):
        opened(hub, tmp_path, model="org/typo")


def test_a_folder_in_the_cache_is_found_by_its_name(hub: FakeHub, tmp_path: Path) -> None:
    """Machines of a pool find it in the same way."""
    copytree(hub.folder, tmp_path / "cache" / "org" / "tiny")
    hub.url = "http://127.0.0.1:9"
    assert not isinstance(opened(hub, tmp_path), HubCheckpoint)
    with pytest.raises(ModelNotFoundError, match="does not answer"):
        opened(hub, tmp_path, revision="main")
    for path in ("org/../org/tiny", "../cache/org/tiny"):
        with pytest.raises(ModelNotFoundError):
            opened(hub, tmp_path, model=path)


def test_a_hub_that_does_not_answer_says_so(hub: FakeHub, tmp_path: Path) -> None:
    hub.url = "http://127.0.0.1:9"
    with pytest.raises(ModelNotFoundError, match="does not answer") as caught:
        opened(hub, tmp_path)
    assert "use that name" not in str(caught.value)
    copytree(hub.folder, tmp_path / "cache" / "tiny")
    with pytest.raises(ModelNotFoundError, match=r"does not answer .*; tiny lies in .*cache: use"):
        opened(hub, tmp_path)


def test_pickled_weights_on_the_hub_are_refused(hub: FakeHub, tmp_path: Path) -> None:
    for file in hub.folder.glob("model*"):
        file.unlink()
    (hub.folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(UnsafeCheckpointError, match="org/tiny"):
        opened(hub, tmp_path)


def test_side_files_are_the_tokenizer_and_no_weights(hub: FakeHub, tmp_path: Path) -> None:
    folder = opened(hub, tmp_path).fetch_side_files()
    names = {path.name for path in folder.iterdir()}
    assert {"tokenizer.json", "config.json"} <= names
    assert not [name for name in names if name.endswith((".bin", ".safetensors"))]


def test_an_id_follows_the_hubs_hashes(hub: FakeHub, tmp_path: Path) -> None:
    before = compute_model_id(opened(hub, tmp_path))
    assert before == compute_model_id(opened(hub, tmp_path))
    config = json.loads((hub.folder / "config.json").read_text())
    (hub.folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    assert compute_model_id(opened(hub, tmp_path / "elsewhere")) != before


def test_downloads_report_their_progress(hub: FakeHub, tmp_path: Path) -> None:
    checkpoint, seen = opened(hub, tmp_path), []
    names = [name for name in checkpoint.tensors if "layers.2." in name]
    checkpoint.fetch(names, lambda task, done, total: seen.append((done, total)))
    total = sum((hub.folder / file).stat().st_size for file in shards_of(checkpoint, 2))
    assert seen[-1] == (total, total)
