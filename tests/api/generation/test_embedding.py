"""Embeddings are the means of transformers' last hidden states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nesa_node.api.generation.embedding import (
    MAX_SESSION_ROWS,
    MAX_SESSION_TOKENS,
    group_by_length,
)
from nesa_node.core.errors import ContextLengthError
from tests.api.served import served_locally
from tests.engine.tiny_models import POSITIONS, prompt_ids, reference


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt_neox"])
async def test_they_equal_what_transformers_computes(
    tiny: Callable[[str], Path], family: str
) -> None:
    lengths = [3, 1, 700, 40, 40, 3]
    prompts = [prompt_ids(length, seed=seed) for seed, length in enumerate(lengths)]
    prompts[4] = prompts[3]
    async with served_locally(tiny(family)) as served:
        made = await served.embed(prompts)
    model = reference(tiny(family)).base_model
    for prompt, vector_D in zip(prompts, made, strict=True):
        with torch.inference_mode():
            hidden_LD = model(torch.tensor([prompt])).last_hidden_state[0]
        expected_D = torch.nn.functional.normalize(hidden_LD.mean(0), dim=0)
        assert vector_D.dtype == torch.float32
        torch.testing.assert_close(vector_D, expected_D, atol=1e-5, rtol=0)


async def test_empty_and_too_long_texts_are_refused(tiny: Callable[[str], Path]) -> None:
    async with served_locally(tiny("llama")) as served:
        with pytest.raises(ValueError, match="text 1 has no tokens"):
            await served.embed([[1], []])
        with pytest.raises(ContextLengthError, match=f"text 0 has {POSITIONS + 1} tokens"):
            await served.embed([prompt_ids(POSITIONS + 1)])


def test_texts_share_sessions_within_bounds() -> None:
    lengths = [5, 3000, 5, 9000, *[100] * 40]
    made = list(group_by_length(lengths))
    assert sorted(index for batch in made for index in batch) == list(range(len(lengths)))
    for batch in made:
        assert len(batch) <= MAX_SESSION_ROWS
        longest = max(lengths[index] for index in batch)
        assert len(batch) == 1 or longest * len(batch) <= MAX_SESSION_TOKENS
