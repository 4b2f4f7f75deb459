"""How many blocks a node serves, and how much cache it promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nesa_node.core.errors import InsufficientMemoryError
from nesa_node.core.ids import Span
from nesa_node.core.settings.models import NodeConfig
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.devices import (
    RESERVE_BYTES,
    cache_bytes_per_token,
    compute_block_bytes,
)
from nesa_node.privacy.parameters import RingParameters
from nesa_node.privacy.ring import Ring
from nesa_node.server.node import node_model
from nesa_node.server.node.node_model import count_cache_tokens
from nesa_node.server.node.span_choice import open_node_model
from nesa_node.server.private.encoded_blocks import SCHEMES
from tests.engine.tiny_models import BLOCKS, save_tiny_model


@pytest.mark.parametrize(
    ("free_tokens", "asked", "promised"),
    [(1000, None, 500), (256, None, 128), (10**6, None, 65_536), (1000, 900, 900)],
)
def test_half_of_the_free_memory_is_promised_as_cache(
    blocks: ModelBlocks,
    monkeypatch: pytest.MonkeyPatch,
    free_tokens: int,
    asked: int | None,
    promised: int,
) -> None:
    _leave(monkeypatch, free_tokens * blocks.cache_bytes_per_token)
    assert count_cache_tokens(NodeConfig(model="m", attn_cache_tokens=asked), blocks) == promised


@pytest.mark.parametrize(("free_tokens", "asked"), [(255, None), (1000, 1001)])
def test_cache_that_does_not_fit_is_refused(
    blocks: ModelBlocks, monkeypatch: pytest.MonkeyPatch, free_tokens: int, asked: int | None
) -> None:
    _leave(monkeypatch, free_tokens * blocks.cache_bytes_per_token)
    with pytest.raises(InsufficientMemoryError):
        count_cache_tokens(NodeConfig(model="m", attn_cache_tokens=asked), blocks)


@pytest.mark.parametrize("scheme", ["ckks", "masks"])
def test_blocks_are_as_many_as_are_in_memory_encoded(
    scheme: str, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_model("llama", models_dir)
    asked: dict[str, Any] = {
        "model": str(folder),
        "torch_dtype": "float32",
        "attn_cache_tokens": 128,
    }
    model = open_node_model(NodeConfig(**asked))
    encoded = SCHEMES[scheme](Ring(RingParameters()), model.checkpoint, Span(0, 1)).nbytes

    def count(free_bytes: int, **options: Any) -> int:
        _leave(monkeypatch, RESERVE_BYTES + free_bytes)
        return model.count_fitting(NodeConfig(**asked, **options))

    plain = max(compute_block_bytes(model.checkpoint, model.dtype)) + 128 * cache_bytes_per_token(
        model.checkpoint, model.dtype
    )
    free = 3 * plain + 2 * encoded
    assert count(free) == BLOCKS
    assert count(free, private=scheme) == 2
    assert count(free, private=scheme, private_cache_gib=1.5 * encoded / 2**30) == 1
    assert count(plain, private=scheme) == 1, "one block is served, its weights in a file"


def _leave(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    monkeypatch.setattr(node_model, "free_memory_bytes", lambda _: free_bytes)
