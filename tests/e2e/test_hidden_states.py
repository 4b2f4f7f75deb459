"""`output_hidden_states` over a network: blocks of real nodes, one session each.

B rows, L columns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.client.local_models import left_padded
from tests.e2e.joining import both_routes
from tests.engine.tiny_models import BLOCKS
from tests.swarms import in_process_swarm, thirds

CACHE_TOKENS = 128
"""Four pages: room for the batch below once, not for two sessions of it."""


def test_every_block_of_a_node_gives_its_own(
    folder: Path, alone: PreTrainedModel, tmp_path: Path
) -> None:
    ids_BL, mask_BL = left_padded([40, 50])
    shown = mask_BL != 0
    forward: Any = alone.__call__
    with torch.no_grad():
        theirs = forward(
            ids_BL,
            attention_mask=mask_BL,
            position_ids=(mask_BL.cumsum(1) - 1).clamp(min=0),
            output_hidden_states=True,
        )
    expected = (*theirs.hidden_states, theirs.logits)
    spans = thirds(BLOCKS)
    with (
        in_process_swarm(folder, spans, tmp_path, attn_cache_tokens=CACHE_TOKENS) as addresses,
        both_routes(folder, addresses) as models,
    ):
        for model in (*models.values(), *models.values()):
            ours = model(ids_BL, attention_mask=mask_BL, output_hidden_states=True)
            for mine, its in zip((*ours.hidden_states, ours.logits), expected, strict=True):
                limit = 1e-4 * its[shown].abs().max()
                assert (mine[shown] - its[shown]).abs().max() <= limit
