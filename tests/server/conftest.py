"""Blocks that tests of the server share."""

from pathlib import Path

import pytest
import torch

from nesa_node.core.ids import Span
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.loading import load_blocks
from tests.engine.chained import open_local
from tests.engine.tiny_models import save_tiny_model


@pytest.fixture(scope="session")
def blocks(models_dir: Path) -> ModelBlocks:
    """Two blocks of a tiny Llama."""
    checkpoint = open_local(save_tiny_model("llama", models_dir))
    return load_blocks(checkpoint, Span(1, 3), dtype=torch.float32, device="cpu")
