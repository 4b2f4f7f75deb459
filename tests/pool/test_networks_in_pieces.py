"""A swarm of a network that is no language model, made of machines without a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nesa_node import RemoteNetwork
from nesa_node.engine.model.devices import free_memory_bytes
from tests.e2e.test_networks import inputs
from tests.pool.machines import open_pool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NAME = "tiny-vit"
HF: Any = transformers


@torch.no_grad()
def test_pieces_are_built_used_and_removed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    config = HF.ViTConfig(image_size=32, patch_size=8, num_attention_heads=4, **sizes)
    model = HF.ViTForImageClassification(config).eval()
    model.save_pretrained(tmp_path / "cache" / NAME)
    total = sum(each.nbytes for each in model.parameters())
    # Of what is free: one machine cannot hold all of it.
    share = f"{0.8 * total / free_memory_bytes('cpu'):.12f}"
    with open_pool(tmp_path, [("--pool-memory-share", share)] * 3) as pool:
        planned = pool.swarm(
            "create", NAME, "--dry-run", "--json", "--cache-dir", str(pool.cache_dir)
        )
        assert planned.returncode == 0, planned.stderr
        assert json.loads(planned.stdout)
        built = pool.swarm("create", NAME)
        assert built.returncode == 0, built.stderr
        assert f"{NAME}: serving, 1 of 1 replicas on" in built.stdout
        assert len(pool.held(NAME, "serving")) > 1
        with RemoteNetwork.from_pretrained(
            pool.cache_dir / NAME, initial_peers=pool.addresses
        ) as remote:
            for batch in (1, 3):
                given = inputs(model, batch)
                found: Any = remote(**given)
                assert torch.allclose(found.logits, model(**given).logits, atol=1e-5)
        removed = pool.swarm("remove", NAME)
        assert removed.returncode == 0, removed.stderr
        pool.wait(lambda: not pool.held(NAME, "serving"), 60, "the machines to be free again")
