"""A stranger's config of which no model can be made is refused, whatever a library raises."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nesa_node.api.models.discovery import AnnouncedModel, locate, open_discovered
from nesa_node.api.models.served_model import open_served_model
from nesa_node.core.errors import InsufficientMemoryError, ModelError, ModelNotFoundError
from nesa_node.core.ids import ModelId
from nesa_node.core.settings.models import GatewayConfig
from nesa_node.engine.model import devices as memory
from nesa_node.engine.weights import skeleton
from nesa_node.engine.weights.checkpoint import Checkpoint, compute_model_id, open_folder
from tests.cli.tiny import BLOCKS, write_tiny_model

REFUSED: list[dict[str, Any]] = [
    {"num_attention_heads": -4},
    {"head_dim": -1},
    {"intermediate_size": -1},
    {"num_key_value_heads": 0},
    {"pad_token_id": 9999},
    {"rope_parameters": {"rope_type": "evil"}},
    {"rope_parameters": {"rope_type": "yarn", "factor": "x"}},
    {"dtype": 5},
    {"hidden_act": "evil"},
    {"max_position_embeddings": -5},
    {"max_position_embeddings": 10**30},
    {"sub_configs": {"x": 1}, "x": {}},
]
IMPLEMENTATIONS: list[dict[str, Any]] = [
    {"attn_implementation": "evil/kernel@main"},
    {"_attn_implementation": "evil/kernel"},
    {"attn_implementation": {"": "evil/kernel"}},
    {"attn_implementation": "flash_attention_2"},
    {"attn_implementation": "evil/a", "_attn_implementation": "evil/b"},
    {"_experts_implementation": "evil/kernel"},
    {"experts_implementation": "evil"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "cache" / "tiny")


def edit(path: Path, changes: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def opened(folder: Path) -> frozenset[int]:
    """The tokens that end an answer of what the swarm announces under this folder's id."""
    ids = frozenset({compute_model_id(open_folder(folder))})
    config = GatewayConfig(torch_dtype="float32", cache_dir=folder.parent)
    load = partial(open_served_model, config, discovered=True)
    served = open_discovered(config, str(folder), ids, load)
    served._close()
    return served.vocabulary.eos_ids


@pytest.mark.parametrize("changes", REFUSED, ids=str)
def test_a_config_of_which_no_model_can_be_made_is_refused(
    folder: Path, changes: dict[str, Any]
) -> None:
    edit(folder / "config.json", changes)
    with pytest.raises(ModelError):
        opened(folder)


async def test_a_folder_that_cannot_be_read_ends_no_search(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise KeyError("evil")

    monkeypatch.setattr("nesa_node.api.models.discovery.open_local", fails)
    config = GatewayConfig(cache_dir=folder.parent)
    with pytest.raises(ModelNotFoundError, match="KeyError"):
        await locate(config, AnnouncedModel(ModelId("tiny@0"), BLOCKS, ()))


@pytest.mark.parametrize("ids", [["a", 1], [[1]], {"a": 1}, "<end>", [None], True, 1.5], ids=str)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_what_is_no_token_ends_no_answer(folder: Path, ids: Any, name: str) -> None:
    edit(folder / name, {"eos_token_id": ids})
    try:
        found = opened(folder)
    except ModelError:
        return
    assert found <= {0, 1}
    assert not any(isinstance(one, bool) for one in found)


@pytest.mark.parametrize("changes", IMPLEMENTATIONS, ids=str)
def test_a_config_chooses_no_code_to_fetch(
    folder: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[object] = []

    def fetch(*args: Any, **_: Any) -> Any:
        called.append(args)
        raise RuntimeError("fetched")

    kernels: Any = ModuleType("kernels")
    kernels.get_kernel = fetch
    monkeypatch.setitem(sys.modules, "kernels", kernels)
    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", fetch)
    monkeypatch.setattr("transformers.integrations.hub_kernels.get_kernel", fetch)
    expected = skeleton.Skeleton(open_folder(folder)).model.config
    edit(folder / "config.json", changes)
    opened(folder)
    found = skeleton.Skeleton(open_folder(folder)).model.config
    assert called == []
    assert found._attn_implementation == expected._attn_implementation
    assert found._experts_implementation == expected._experts_implementation


def test_ends_for_which_there_is_no_room_are_refused_before_they_are_fetched(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory_bytes", lambda _: memory.RESERVE_BYTES + 20_000)
    monkeypatch.setattr(Checkpoint, "read", None)
    with pytest.raises(InsufficientMemoryError, match="--model"):
        opened(folder)
