"""More sessions than the nodes have room for: all wait for each other, and all finish."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.errors import BusyError
from nesa_node.engine.cache.pages import PAGE_TOKENS
from tests.client.local_models import random_ids
from tests.engine.tiny_models import BLOCKS, reference
from tests.same_tokens import assert_same_tokens
from tests.swarms import in_process_swarm, thirds

NEW_TOKENS = 4


def _generate(model: DistributedModelForCausalLM, seed: int) -> tuple[Tensor, Tensor]:
    ids_BL = random_ids(1, 8, seed=seed)
    output_BL: Tensor = model.generate(
        ids_BL,
        attention_mask=torch.ones_like(ids_BL),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    return ids_BL, output_BL


@pytest.mark.parametrize(
    ("sessions", "room"),
    [(24, 3), pytest.param(200, 50, marks=[pytest.mark.slow, pytest.mark.timeout(300)])],
)
def test_all_finish_though_the_nodes_have_room_for_a_few(
    tiny: Callable[[str], Path], tmp_path: Path, sessions: int, room: int
) -> None:
    """Two clients with threads, over nodes of which each may be the one without room."""
    folder = tiny("llama")
    with (
        in_process_swarm(
            folder, thirds(BLOCKS), tmp_path, attn_cache_tokens=room * PAGE_TOKENS
        ) as addresses,
        ExitStack() as stack,
        ThreadPoolExecutor(sessions) as threads,
    ):
        models = [
            stack.enter_context(
                AutoDistributedModelForCausalLM.from_pretrained(
                    # Room comes and goes for longer than anything may fail.
                    folder,
                    initial_peers=addresses,
                    recovery_timeout_s=1.0,
                )
            )
            for _ in range(2)
        ]
        work = [threads.submit(_generate, models[i % 2], i) for i in range(sessions)]
        results = [future.result() for future in work]
    alone = reference(folder)
    for ids_BL, output_BL in results:
        assert_same_tokens(
            alone,
            output_BL,
            ids_BL,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )


def test_who_does_not_want_to_wait_is_told_that_nodes_are_busy(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny("llama")
    with (
        in_process_swarm(
            folder, thirds(BLOCKS), tmp_path, attn_cache_tokens=PAGE_TOKENS
        ) as addresses,
        AutoDistributedModelForCausalLM.from_pretrained(
            folder, initial_peers=addresses, queue_timeout_s=0.5
        ) as model,
        model.inference_session(PAGE_TOKENS),
    ):
        started = time.monotonic()
        with pytest.raises(BusyError, match="waited"):
            model.inference_session(PAGE_TOKENS)
        assert time.monotonic() - started < 3.0
