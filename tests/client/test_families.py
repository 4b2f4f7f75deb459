"""Every family generates through three spans what transformers generates alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from tests.client.local_models import left_padded, local_model, random_ids
from tests.engine.tiny_models import (
    BLOCKS,
    FAMILIES,
    LEAST_DISTINCT,
    NEW_TOKENS,
    prompt_ids,
    reference,
)
from tests.same_tokens import assert_same_tokens

Pair = tuple[DistributedModelForCausalLM, PreTrainedModel]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def pair(request: pytest.FixtureRequest, tiny: Callable[[str], Path]) -> Iterator[Pair]:
    folder = tiny(request.param)
    with local_model(folder) as model:
        yield model, reference(folder)


@pytest.mark.parametrize("length", [12, 700])
def test_greedy_tokens_equal_those_of_transformers(pair: Pair, length: int) -> None:
    model, alone = pair
    ids = torch.tensor([prompt_ids(length)])
    ours = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert_same_tokens(alone, ours, ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert len(set(ours[0, length:].tolist())) >= LEAST_DISTINCT


def test_left_padded_batch_equals_that_of_transformers(pair: Pair) -> None:
    model, alone = pair
    ids, mask = left_padded([5, 17, 11])
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    ours = model.generate(ids, attention_mask=mask, **options)
    assert_same_tokens(alone, ours, ids, mask, **options)


def test_hidden_states_are_within_1e_4(pair: Pair) -> None:
    """Of each block alone, though nodes hold two: embeddings first, the last after the norm."""
    model, alone = pair
    ids = random_ids(2, 90)
    with torch.no_grad():
        theirs = alone(ids, output_hidden_states=True)
    ours = model(ids, output_hidden_states=True)
    assert len(ours.hidden_states) == len(theirs.hidden_states) == BLOCKS + 1
    for mine, expected in zip(
        (*ours.hidden_states, ours.logits), (*theirs.hidden_states, theirs.logits), strict=True
    ):
        assert mine.shape == expected.shape
        assert (mine - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_logits_are_within_1e_4(pair: Pair) -> None:
    model, alone = pair
    ids = random_ids(2, 90)
    with torch.no_grad():
        theirs = alone(ids).logits
    ours = model(ids).logits
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()
