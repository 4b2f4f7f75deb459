from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from nesa_node.engine.weights.checkpoint import compute_model_id
from tests.engine.chained import open_local
from tests.engine.layouts import Tensors, rewritten, set_config
from tests.engine.tiny_models import reference, save_tiny_model


@pytest.fixture
def folder(models_dir: Path) -> Path:
    return save_tiny_model("llama", models_dir)


def test_an_id_is_the_name_and_sixteen_digits(folder: Path) -> None:
    assert re.fullmatch(r"llama-6-0@[0-9a-f]{16}", compute_model_id(open_local(folder)))


def test_copies_and_shards_of_one_model_share_an_id(folder: Path, tmp_path: Path) -> None:
    copy = rewritten(folder, tmp_path / "a" / folder.name)
    set_config(copy, transformers_version="4.0.0", _name_or_path="/somewhere", use_cache=False)
    shards = tmp_path / "b" / folder.name
    reference(folder).save_pretrained(shards, max_shard_size="200KB")
    ids = {compute_model_id(open_local(path)) for path in (folder, copy, shards)}
    assert len(ids) == 1


def _trained(tensors: Tensors) -> Tensors:
    generator = torch.Generator().manual_seed(5)
    name = "model.layers.3.mlp.up_proj.weight"
    noise = torch.randn(tensors[name].shape, generator=generator)
    return {**tensors, name: tensors[name] + 1e-3 * noise}


def _renamed(tensors: Tensors) -> Tensors:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def _cast(tensors: Tensors) -> Tensors:
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


@pytest.mark.parametrize("change", [_trained, _renamed, _cast])
def test_other_weights_have_another_id(folder: Path, tmp_path: Path, change: object) -> None:
    changed = rewritten(folder, tmp_path / folder.name, change)  # type: ignore[arg-type]
    assert compute_model_id(open_local(changed)) != compute_model_id(open_local(folder))


def test_another_architecture_has_another_id(folder: Path, tmp_path: Path) -> None:
    changed = set_config(rewritten(folder, tmp_path / folder.name), rms_norm_eps=1e-5)
    assert compute_model_id(open_local(changed)) != compute_model_id(open_local(folder))


def test_another_name_is_another_id(folder: Path, tmp_path: Path) -> None:
    mine, theirs = (
        compute_model_id(open_local(rewritten(folder, tmp_path / "mine"))),
        compute_model_id(open_local(folder)),
    )
    assert mine != theirs
    assert mine.partition("@")[2] == theirs.partition("@")[2]
