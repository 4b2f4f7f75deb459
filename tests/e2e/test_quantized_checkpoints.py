"""Nodes that serve quantized checkpoints, against transformers with whole weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.client.local_models import random_ids
from tests.e2e.joining import joined
from tests.engine.stored_weights import KINDS, write_quantized
from tests.engine.tiny_models import BLOCKS, reference
from tests.first_is_fast import first_is_fast
from tests.same_tokens import assert_same_as, run_reference
from tests.swarms import daemons, in_process_swarm, thirds

SAME = 1e-4
"""Of the greatest of the reference's logits."""
OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}


def _compare(alone: Any, ours: Any) -> None:
    ids_BL = random_ids(2, 30)
    mask_BL = torch.ones_like(ids_BL)
    new_BL = ours.generate(ids_BL, attention_mask=mask_BL, **OPTIONS)
    assert_same_as(run_reference(alone, ids_BL, mask_BL, **OPTIONS), new_BL)
    with torch.no_grad():
        theirs: Tensor = alone(ids_BL).logits
    assert (ours(ids_BL).logits - theirs).abs().max() <= SAME * theirs.abs().max()


@pytest.mark.parametrize("kind", first_is_fast(*KINDS))
def test_three_nodes_give_the_tokens_of_transformers(
    kind: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    family, pack, config = KINDS[kind]
    model = write_quantized(tiny(family), tmp_path, pack, config)
    (tmp_path / "swarm").mkdir()
    with (
        in_process_swarm(model.folder, thirds(BLOCKS), tmp_path / "swarm") as addresses,
        joined(model.folder, addresses, "chain") as ours,
    ):
        _compare(reference(model.plain), ours)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_daemons_serve_a_quantized_checkpoint(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    family, pack, config = KINDS["gptq in 4 bits"]
    model = write_quantized(tiny(family), tmp_path, pack, config)
    with daemons(model.folder, tmp_path) as nodes:
        nodes.start_all(thirds(BLOCKS))
        with joined(model.folder, nodes.addresses, "chain") as ours:
            _compare(reference(model.plain), ours)
