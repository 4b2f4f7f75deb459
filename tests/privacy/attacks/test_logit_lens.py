from __future__ import annotations

from typing import Any

import torch

from nesa_node.privacy.attacks.logit_lens import read_next_tokens
from tests.privacy.attacks.models import VOCABULARY, random_llama, states_after


def test_late_states_tell_the_next_token_and_early_ones_less() -> None:
    model: Any = random_llama()
    ids_L = torch.randint(0, VOCABULARY, (64,), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        next_L = model(ids_L[None]).logits[0].argmax(-1)

    def agreement(blocks: int) -> float:
        # The last of transformers' states has its norm already.
        norm = torch.nn.Identity() if blocks == 4 else model.model.norm
        found_L = read_next_tokens(
            states_after(model, ids_L, blocks), lambda part_TD: model.lm_head(norm(part_TD))
        )
        return float((found_L == next_L).float().mean())

    assert agreement(4) == 1
    assert agreement(0) < agreement(3)
