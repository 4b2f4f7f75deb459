"""Pipelines of several networks: in a folder, and on the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nesa_node.core.errors import CorruptCheckpointError, ModelNotFoundError, UnsupportedModelError
from nesa_node.engine.graphs.model_graph import RequestSizes, example_inputs, make_model
from nesa_node.engine.weights.checkpoint import Checkpoint, compute_model_id, open_folder
from nesa_node.engine.weights.families import read_network_config
from nesa_node.engine.weights.hub import open_checkpoint
from nesa_node.engine.weights.pipeline_folder import read_pipeline_index
from nesa_node.engine.weights.skeleton import ModelTensors
from tests.engine.fake_hub import FakeHub, fake_hub
from tests.engine.tiny_pipelines import save_pipeline

TITLE = "StableDiffusion3Pipeline"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("pipelines") / "tiny"
    return folder, save_pipeline(TITLE, folder)


@pytest.fixture
def hub(saved: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with fake_hub(saved[0]) as served:
        yield served


def opened(hub: FakeHub, cache_dir: Path) -> Checkpoint:
    return open_checkpoint(
        "org/tiny", cache_dir=cache_dir, endpoint=hub.url, read=read_network_config
    )


def test_each_networks_weights_are_read(saved: tuple[Path, Any]) -> None:
    folder, pipeline = saved
    checkpoint = open_folder(folder, read_network_config)
    assert checkpoint.resolve_dtype("auto") is torch.float32
    model = make_model(folder, name="tiny", dtype=torch.float32)
    tensors = ModelTensors(checkpoint, model)
    names = tensors.tensor_names
    tensors.load(names, dtype=None, device=torch.device("cpu"), task="loading")
    found = tensors.take(names)
    parts = read_pipeline_index(folder, name="tiny").parts
    assert parts == ("text_encoder", "text_encoder_2", "text_encoder_3", "transformer", "vae")
    for part in parts:
        expected = getattr(pipeline, part).state_dict()
        assert set(expected) == {
            name.removeprefix(f"{part}.") for name in names if name.startswith(f"{part}.")
        }
        for name, value in expected.items():
            assert torch.equal(found[f"{part}.{name}"], value)


def test_an_id_tells_weights_and_configs_apart(saved: tuple[Path, Any], tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    save_pipeline(TITLE, folder)
    first = compute_model_id(open_folder(folder, read_network_config))
    assert first == compute_model_id(open_folder(saved[0], read_network_config))
    config = folder / "vae" / "config.json"
    raw = json.loads(config.read_text())
    config.write_text(json.dumps({**raw, "scaling_factor": 2.0}))
    assert compute_model_id(open_folder(folder, read_network_config)) != first


def test_the_hub_gives_what_is_needed(
    saved: tuple[Path, Any], hub: FakeHub, tmp_path: Path
) -> None:
    checkpoint = opened(hub, tmp_path)
    local = open_folder(saved[0], read_network_config)
    assert set(checkpoint.tensors) == set(local.tensors)
    weights = {info.file for info in checkpoint.stored.values()}
    before = hub.downloads.copy()
    folder = checkpoint.fetch_side_files()
    assert not (hub.downloads - before).keys() & weights
    for name in ("model_index.json", "scheduler/scheduler_config.json", "vae/config.json"):
        assert (folder / name).read_bytes() == (saved[0] / name).read_bytes()
    assert (folder / "tokenizer_3" / "tokenizer.json").is_file()
    names = [name for name in checkpoint.tensors if name.startswith("vae.")]
    checkpoint.fetch(names)
    assert {name for name in hub.downloads - before if name in weights} == {
        "vae/diffusion_pytorch_model.safetensors"
    }
    for name in names:
        assert torch.equal(checkpoint.read(name), local.read(name))


def test_components_of_other_libraries_are_left_out(tmp_path: Path) -> None:
    """As Stable Diffusion 1.5 names its safety checker, a class of its pipeline's own module."""
    save_pipeline("StableDiffusionPipeline", tmp_path)
    path = tmp_path / "model_index.json"
    raw = json.loads(path.read_text())
    raw["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    raw["../../elsewhere"] = ["transformers", "CLIPTokenizer"]
    path.write_text(json.dumps(raw))
    index = read_pipeline_index(tmp_path, name="tiny")
    assert index.parts == ("text_encoder", "unet", "vae")
    assert index.components["safety_checker"] is None
    assert "../../elsewhere" not in index.components


def captured_inputs(folder: Path) -> object:
    model = make_model(folder, name="tiny", dtype=torch.float32)
    return example_inputs(model, RequestSizes())


def test_a_pipeline_of_other_networks_is_refused(saved: tuple[Path, Any], tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    save_pipeline(TITLE, folder)
    config = folder / "transformer" / "config.json"
    raw = json.loads(config.read_text())
    for sides in ("a", 10**7, [32, -1]):
        config.write_text(json.dumps({**raw, "sample_size": sides}))
        with pytest.raises((UnsupportedModelError, CorruptCheckpointError)):
            captured_inputs(folder)
    config.write_text(json.dumps(raw))
    for part, other in (("vae", "text_encoder"), ("text_encoder", "vae")):
        content = (folder / part / "config.json").read_text()
        (folder / part / "config.json").write_text((folder / other / "config.json").read_text())
        with pytest.raises(UnsupportedModelError, match="cannot be served"):
            captured_inputs(folder)
        (folder / part / "config.json").write_text(content)


def _refused(folder: Path, index: object) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps(index))
    read_network_config(folder, name="tiny")


@pytest.mark.parametrize(
    ("index", "error", "reason"),
    [
        ([], CorruptCheckpointError, "names no _class_name"),
        ({"_class_name": "A"}, UnsupportedModelError, "have a text_encoder, unet or transformer"),
        ({"_class_name": "A", "unet": ["evil", "B"]}, UnsupportedModelError, "have a text_encoder"),
        (
            {"_class_name": "A", "unet": ["diffusers", "B.c"]},
            UnsupportedModelError,
            "have a text_encoder",
        ),
        (
            {
                "_class_name": "A",
                **{key: ["diffusers", "B"] for key in ("text_encoder", "unet", "vae")},
            },
            ModelNotFoundError,
            "lacks text_encoder/config.json",
        ),
    ],
)
def test_other_indices_are_refused(
    index: object, error: type[Exception], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=reason):
        _refused(tmp_path / "tiny", index)
