"""How much cache a node promises."""

from __future__ import annotations

import pytest

from nesa_node.core.errors import InsufficientMemoryError
from nesa_node.core.settings.models import NodeConfig
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.server.node import node_model
from nesa_node.server.node.node_model import count_cache_tokens


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


def _leave(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    monkeypatch.setattr(node_model, "free_memory_bytes", lambda _: free_bytes)
