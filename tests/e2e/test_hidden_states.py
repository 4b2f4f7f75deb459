"""`output_hidden_states` over a network: blocks of real nodes, one session each.

B rows, L columns.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from nesa_node.core.errors import MissingBlocksError
from nesa_node.core.ids import Span
from tests.client.local_models import left_padded
from tests.e2e.joining import both_routes, joined
from tests.engine.tiny_models import BLOCKS
from tests.swarms import daemons, in_process_swarm, thirds

CACHE_TOKENS = 128
"""Four pages: room for the batch below once, not for two sessions of it."""


def states_alone(alone: Any, ids_BL: torch.Tensor, mask_BL: torch.Tensor) -> list[torch.Tensor]:
    """Hidden states, then logits."""
    with torch.no_grad():
        theirs = alone(
            ids_BL,
            attention_mask=mask_BL,
            position_ids=(mask_BL.cumsum(1) - 1).clamp(min=0),
            output_hidden_states=True,
        )
    return [*theirs.hidden_states, theirs.logits]


def assert_equal(ours: Any, expected: list[torch.Tensor], mask_BL: torch.Tensor) -> None:
    shown = mask_BL != 0
    for mine, its in zip((*ours.hidden_states, ours.logits), expected, strict=True):
        assert (mine[shown] - its[shown]).abs().max() <= 1e-4 * its[shown].abs().max()


def test_every_block_of_a_node_gives_its_own(
    folder: Path, alone: PreTrainedModel, tmp_path: Path
) -> None:
    ids_BL, mask_BL = left_padded([40, 50])
    expected = states_alone(alone, ids_BL, mask_BL)
    spans = thirds(BLOCKS)
    with (
        in_process_swarm(folder, spans, tmp_path, attn_cache_tokens=CACHE_TOKENS) as addresses,
        both_routes(folder, addresses) as models,
    ):
        for model in (*models.values(), *models.values()):
            ours = model(ids_BL, attention_mask=mask_BL, output_hidden_states=True)
            assert_equal(ours, expected, mask_BL)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_node_that_dies_is_replaced_and_missing_blocks_are_named(
    folder: Path, alone: PreTrainedModel, tmp_path: Path
) -> None:
    ids_BL, mask_BL = left_padded([300, 400])
    expected = states_alone(alone, ids_BL, mask_BL)
    first, second = Span(0, 3), Span(3, BLOCKS)
    with daemons(folder, tmp_path) as swarm:
        _, *twins = swarm.start_all([first, second, second])
        with joined(
            folder, swarm.addresses, "chain", recovery_timeout_s=5, queue_timeout_s=5
        ) as model:

            def ask() -> Any:
                return model(ids_BL, attention_mask=mask_BL, output_hidden_states=True)

            def ask_until(killed: threading.Event) -> list[Any]:
                """Before the kill, while it happens and once after it."""
                answers = []
                while not killed.is_set():
                    answers.append(ask())
                return [*answers, ask()]

            assert_equal(ask(), expected, mask_BL)
            for node in twins:
                killed = threading.Event()
                with ThreadPoolExecutor(1) as worker:
                    asked = worker.submit(ask_until, killed)
                    time.sleep(0.3)
                    swarm.kill(node)
                    killed.set()
                    if node is twins[0]:
                        for ours in asked.result():
                            assert_equal(ours, expected, mask_BL)
                    else:
                        with pytest.raises(MissingBlocksError, match=r"no node .* blocks"):
                            asked.result()
