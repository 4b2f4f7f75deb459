"""A daemon holds the weights of its span and no others.

T packed tokens, D hidden.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from nesa_node.client.routing.request import ConnectionOptions
from nesa_node.client.session.connection import open_connection
from nesa_node.core.ids import Span
from nesa_node.engine.model.devices import cache_bytes_per_token, compute_block_bytes
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.engine.weights.hub import open_checkpoint
from nesa_node.swarm.protocol.messages import RowSlice
from tests.engine.tiny_models import save_tiny_model
from tests.swarms import daemons

BLOCKS, TEN, ALL = 30, Span(10, 20), Span(0, 30)
CACHE_TOKENS = 1024
FLAGS = ("--attn-cache-tokens", str(CACHE_TOKENS))


def _save_model(folder: Path) -> Checkpoint:
    """Of 30 blocks with 411 MiB of weights, random ones."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=576,
        intermediate_size=1600,
        num_hidden_layers=BLOCKS,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    auto: Any = AutoModelForCausalLM
    auto.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return open_checkpoint(str(folder), cache_dir=folder)


async def _fill_cache(checkpoint: Checkpoint, span: Span, addresses: Sequence[str]) -> None:
    """A session through `span` alone that holds as many tokens as the node has promised."""
    options = ConnectionOptions(initial_peers=tuple(addresses), routing="star")
    hidden = int(checkpoint.config.hidden_size)
    async with (
        open_connection(checkpoint, options, torch.float32) as connection,
        connection.open_session(span, rows=1, max_tokens=CACHE_TOKENS) as session,
    ):
        for position, count in [(0, CACHE_TOKENS - 8), *((CACHE_TOKENS - n, 1) for n in (8, 7))]:
            output_TD = await session.step(
                torch.randn(count, hidden), [RowSlice(0, position, count)]
            )
            assert output_TD.isfinite().all()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ten_of_thirty_blocks_take_the_memory_of_ten(tmp_path: Path) -> None:
    """At most a daemon without weights, 1.3 x the span's weights, and its cache.

    The daemon without weights is one of a tiny model: it has imported, joined and measured itself.
    One with all blocks must exceed the limit, or the limit would prove nothing.
    """
    checkpoint = _save_model(tmp_path / "large")
    sizes = compute_block_bytes(checkpoint, torch.float32)
    cache = CACHE_TOKENS * len(TEN) * cache_bytes_per_token(checkpoint, torch.float32)
    with ExitStack() as stack:
        nothing = stack.enter_context(
            daemons(save_tiny_model("llama", tmp_path, num_blocks=1), tmp_path, *FLAGS)
        ).start(Span(0, 1))
        (tmp_path / "nodes").mkdir()
        nodes = stack.enter_context(daemons(tmp_path / "large", tmp_path / "nodes", *FLAGS))
        ten = nodes.start(TEN)
        asyncio.run(_fill_cache(checkpoint, TEN, nodes.addresses))
        peaks = {"nothing": nothing.peak_memory_bytes(), "ten": ten.peak_memory_bytes()}
        peaks["all"] = nodes.start(ALL).peak_memory_bytes()
    weights = sum(sizes[TEN.start : TEN.end])
    limit = peaks["nothing"] + 1.3 * weights + cache
    print({name: f"{peak / 2**20:.0f} MiB" for name, peak in peaks.items()})
    print(f"span {weights / 2**20:.0f}, cache {cache / 2**20:.0f}, limit {limit / 2**20:.0f} MiB")
    assert peaks["ten"] <= limit < peaks["all"]
