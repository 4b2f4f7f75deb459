"""Every token is found by trial, also behind a secret rotation or permutation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nesa_node.privacy.attacks.public_model import PublicModel
from nesa_node.privacy.attacks.ridge_probe import nearest_rows
from nesa_node.privacy.attacks.vocabulary_search import (
    Signature,
    inner_products,
    search_tokens,
    sorted_values,
    states_as_they_are,
)
from tests.privacy.attacks.models import VOCABULARY, random_llama, states_after

BLOCKS, LENGTH, HIDDEN = 2, 12, 32


def rotated(states_LD: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    turn_DD: Tensor = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=generator)).Q
    return states_LD @ turn_DD


def permuted(states_LD: Tensor) -> Tensor:
    return states_LD[:, torch.randperm(HIDDEN, generator=torch.Generator().manual_seed(6))]


@pytest.mark.parametrize(
    ("hide", "signature"),
    [
        (lambda states_LD: states_LD, states_as_they_are),
        (rotated, inner_products),
        (permuted, sorted_values),
    ],
)
def test_every_token_is_found(hide: Callable[[Tensor], Tensor], signature: Signature) -> None:
    model = random_llama()
    secret = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(1))
    seen_LD = hide(states_after(model, secret, BLOCKS))
    found = list(search_tokens(seen_LD, PublicModel(model, BLOCKS), signature))
    assert [match.token for match in found] == secret.tolist()
    known = secret[:3].tolist()
    rest = search_tokens(seen_LD, PublicModel(model, BLOCKS), signature, known=known)
    assert [match.token for match in rest] == secret[3:].tolist()
    assert max(match.error for match in found) < 1e-4


def test_hidden_states_do_not_match_as_they_are() -> None:
    """What a rotation and a permutation do keep from an attacker that only compares."""
    model = random_llama()
    secret = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(1))
    table_VD = model.get_input_embeddings().weight.detach()
    states_LD = states_after(model, secret, 0)
    assert nearest_rows(states_LD, table_VD).tolist() == secret.tolist()
    for hide in (rotated, permuted):
        hits = nearest_rows(hide(states_LD), table_VD) == secret
        assert hits.float().mean() < 0.2
        match = next(search_tokens(hide(states_LD), PublicModel(model, 1)))
        assert match.error > 0.1


def test_candidates_are_computed_as_the_text_is() -> None:
    model = random_llama()
    secret = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(2))
    public = PublicModel(model, BLOCKS)
    expected_LD = states_after(model, secret, BLOCKS)
    assert torch.allclose(public.text_states(secret), expected_LD, atol=1e-5)
    for position in (0, 1, 5, 3):
        tried = torch.tensor([7, int(secret[position]), 9])
        states_CD = public.states(secret[:position].tolist(), tried)
        assert torch.allclose(states_CD[1], expected_LD[position], atol=1e-5)
        assert not torch.allclose(states_CD[0], expected_LD[position], atol=1e-2)


def test_likely_tokens_are_tried_first() -> None:
    model = random_llama()
    prefix = [3, 5, 8]
    order = PublicModel(model, BLOCKS).likely_tokens(prefix)
    with torch.inference_mode():
        logits_V = model(torch.tensor([prefix])).logits[0, -1]
    assert int(order[0]) == int(logits_V.argmax())
    assert sorted(order.tolist()) == list(range(VOCABULARY))
