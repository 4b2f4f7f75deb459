"""What a gateway fetches of models that strangers announce: nothing unasked, and not too much."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from nesa_node.api.models.discovery import (
    DISCOVERED_FOLDER,
    AnnouncedModel,
    locate,
    open_discovered,
)
from nesa_node.core.errors import (
    BusyError,
    CorruptCheckpointError,
    DiskLimitError,
    ModelNotFoundError,
)
from nesa_node.core.ids import ModelId
from nesa_node.core.settings.models import GatewayConfig
from nesa_node.engine.weights.checkpoint import Checkpoint, compute_model_id
from nesa_node.engine.weights.hub import compute_folder_bytes, open_checkpoint
from tests.engine.fake_hub import FakeHub, fake_hub
from tests.engine.tiny_models import save_tiny_model

FALSE_ID = frozenset({ModelId("org/tiny@0123456789abcdef")})


@pytest.fixture
def hub(models_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    folder = tmp_path / "repository"
    folder.mkdir()
    for path in save_tiny_model("llama", models_dir).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "tokenizer.json").write_text("{}")
    (folder / "unknown.json").write_text("{}")
    with fake_hub(folder) as served:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield served


@pytest.fixture
def config(tmp_path: Path) -> GatewayConfig:
    return GatewayConfig(cache_dir=tmp_path / "cache", discovered_disk_gib=1)


def true_ids(hub: FakeHub, tmp_path: Path) -> frozenset[ModelId]:
    checkpoint = open_checkpoint("org/tiny", cache_dir=tmp_path / "other", endpoint=hub.url)
    hub.downloads.clear()
    return frozenset({compute_model_id(checkpoint)})


def everything(checkpoint: Checkpoint) -> Path:
    """What a gateway needs of a model, and more."""
    checkpoint.fetch(checkpoint.tensors)
    return checkpoint.fetch_side_files()


async def test_discovery_fetches_nothing(hub: FakeHub, config: GatewayConfig) -> None:
    (false_id,) = FALSE_ID
    assert await locate(config, AnnouncedModel(false_id, 6, ())) == "org/tiny"
    assert not hub.downloads
    assert not config.cache_dir.exists()


def test_what_is_asked_for_lies_in_a_folder_of_its_own(
    hub: FakeHub, config: GatewayConfig, tmp_path: Path
) -> None:
    folder = open_discovered(
        config, "org/tiny", true_ids(hub, tmp_path), everything, endpoint=hub.url
    )
    assert (config.cache_dir / DISCOVERED_FOLDER) in folder.parents
    assert set(hub.downloads) == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"
    }  # fmt: skip


def test_a_false_id_is_found_out_before_weights_come(hub: FakeHub, config: GatewayConfig) -> None:
    with pytest.raises(ModelNotFoundError, match="not the same"):
        open_discovered(config, "org/tiny", FALSE_ID, everything, endpoint=hub.url)
    weights = (hub.folder / "model.safetensors").stat().st_size
    assert "tokenizer.json" not in hub.downloads
    # Its header, of which the hub's client asks for the first 100 kB.
    assert hub.downloads["model.safetensors"] < min(weights, 100_002)


@pytest.mark.parametrize(("name", "size"), [("config.json", 1 << 20), ("tokenizer.json", 40 << 20)])
def test_a_side_file_beyond_its_size_is_refused_before_it_comes(
    hub: FakeHub, config: GatewayConfig, tmp_path: Path, name: str, size: int
) -> None:
    ids = true_ids(hub, tmp_path)
    content = (hub.folder / name).read_bytes()
    (hub.folder / name).write_bytes(content + b" " * (size + 1 - len(content)))
    with pytest.raises(CorruptCheckpointError, match=f"{name} of org/tiny has"):
        open_discovered(config, "org/tiny", ids, everything, endpoint=hub.url)
    assert hub.downloads[name] == 0


def test_more_than_the_disk_limit_is_not_fetched(
    hub: FakeHub, config: GatewayConfig, tmp_path: Path
) -> None:
    weights = (hub.folder / "model.safetensors").stat().st_size
    tight = config.model_copy(update={"discovered_disk_gib": weights / 2**30})
    with pytest.raises(DiskLimitError):
        open_discovered(tight, "org/tiny", true_ids(hub, tmp_path), everything, endpoint=hub.url)


def test_the_least_recently_used_makes_room(
    hub: FakeHub, config: GatewayConfig, tmp_path: Path
) -> None:
    cache, weights = config.cache_dir / DISCOVERED_FOLDER / "hub", 1 << 20
    for age, name in enumerate(("newest--one", "older--two", "oldest--three")):
        blob = cache / f"models--{name}" / "blobs" / "weights"
        blob.parent.mkdir(parents=True)
        blob.write_bytes(bytes(weights))
        at = 1_700_000_000 - age
        os.utime(cache / f"models--{name}", (at, at))
    tiny = sum(path.stat().st_size for path in hub.folder.iterdir())
    limit = 2 * weights + tiny + (64 << 10)
    tight = config.model_copy(update={"discovered_disk_gib": limit / 2**30})
    open_discovered(tight, "org/tiny", true_ids(hub, tmp_path), everything, endpoint=hub.url)
    assert {path.name for path in cache.glob("models--*")} == {
        "models--newest--one", "models--older--two", "models--org--tiny"
    }  # fmt: skip
    assert compute_folder_bytes(cache) <= limit


def test_two_gateways_do_not_download_into_one_folder_at_once(
    hub: FakeHub, config: GatewayConfig
) -> None:
    (config.cache_dir / DISCOVERED_FOLDER).mkdir(parents=True)
    with (
        FileLock(config.cache_dir / DISCOVERED_FOLDER / ".lock"),
        pytest.raises(BusyError, match="another gateway"),
    ):
        open_discovered(config, "org/tiny", FALSE_ID, everything, endpoint=hub.url)
    assert not hub.downloads
