"""Models with trained blocks as folders, read by transformers.

R rows, L tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nesa_node.engine.weights.model_folder import write_model
from tests.engine.chained import distance, open_local
from tests.engine.tiny_models import FAMILIES, reference, save_tiny_model


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_transformers_loads_what_was_trained(family: str, models_dir: Path, tmp_path: Path) -> None:
    folder = save_tiny_model(family, models_dir)
    checkpoint = open_local(folder)
    model = reference(folder).float().eval()
    path = checkpoint.family.layers_path
    layers = model.get_submodule(path)
    generator = torch.Generator().manual_seed(3)
    for value in layers.parameters():
        value += 0.05 * value.std() * torch.randn(value.shape, generator=generator)
    blocks = {f"{path}.{name}": value.detach() for name, value in layers.named_parameters()}
    write_model(tmp_path / "trained", checkpoint, blocks, torch.float32)
    auto: Any = AutoModelForCausalLM
    loaded = auto.from_pretrained(tmp_path / "trained", trust_remote_code=False).eval()
    assert loaded.dtype == torch.float32
    ids_RL = torch.randint(3, 300, (2, 24), generator=generator)
    assert distance(loaded(ids_RL).logits, model(ids_RL).logits) < 1e-6
    assert not list((tmp_path / "trained").glob(".*"))
    # Its blocks can be served, and trained further.
    assert open_local(tmp_path / "trained").num_blocks == checkpoint.num_blocks
