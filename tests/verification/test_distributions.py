"""Distances of next-token distributions, against their definition and against coupled draws."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch

from nesa_node.verification.agreement import RULES, AgreementHistory
from nesa_node.verification.comparison import Threshold
from nesa_node.verification.distributions import (
    MAX_HEAD_TOKENS,
    TOTAL_VARIATION,
    DistributionMeasure,
)

HIDDEN, VOCABULARY = 16, 7


def make_head(scale: float = 1.0) -> torch.nn.Module:
    torch.manual_seed(0)
    matrix = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
    matrix.weight.data *= scale
    return torch.nn.Sequential(torch.nn.RMSNorm(HIDDEN), matrix).requires_grad_(False)


def chances_of(head: torch.nn.Module, hidden_TD: torch.Tensor) -> np.ndarray:
    logits = head(hidden_TD).double().numpy()
    exponents = np.exp(logits - logits.max(1, keepdims=True))
    found: np.ndarray = exponents / exponents.sum(1, keepdims=True)
    return found


def test_distances_are_the_largest_differences_of_any_event() -> None:
    head = make_head()
    outputs = [torch.randn(5, HIDDEN) for _ in range(3)]
    found = DistributionMeasure(head).errors_of_pairs(outputs)
    events = [
        list(event) for size in range(VOCABULARY) for event in combinations(range(VOCABULARY), size)
    ]
    for one, other in combinations(range(3), 2):
        one_TV, other_TV = chances_of(head, outputs[one]), chances_of(head, outputs[other])
        expected = np.max(
            [abs(one_TV[:, event].sum(1) - other_TV[:, event].sum(1)) for event in events], axis=0
        )
        assert found[one, other].dtype == torch.float64
        np.testing.assert_allclose(found[one, other].numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, MAX_HEAD_TOKENS // 3, MAX_HEAD_TOKENS // 3 + 1, 150])
def test_long_texts_are_compared_in_parts(tokens: int) -> None:
    head, sizes = make_head(), []

    def noted(hidden_TD: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden_TD))
        logits_TV: torch.Tensor = head(hidden_TD)
        return logits_TV

    outputs = [torch.randn(tokens, HIDDEN) for _ in range(3)]
    found = DistributionMeasure(noted).errors_of_pairs(outputs)
    assert max(sizes) <= MAX_HEAD_TOKENS
    for one, other in combinations(range(3), 2):
        one_TV, other_TV = chances_of(head, outputs[one]), chances_of(head, outputs[other])
        expected = np.abs(one_TV - other_TV).sum(1) / 2
        np.testing.assert_allclose(found[one, other].numpy(), expected, atol=1e-6)


def test_equal_outputs_have_equal_distributions() -> None:
    output_TD = torch.randn(9, HIDDEN)
    found = DistributionMeasure(make_head()).errors_of_pairs([output_TD, output_TD.clone()])
    assert not found[0, 1].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_agrees_with_nothing(value: float) -> None:
    right, wrong = torch.randn(2, HIDDEN), torch.randn(2, HIDDEN)
    wrong[0, 0] = value
    allowed = Threshold(0.5, 0.5, 0.5, 1)
    measure = DistributionMeasure(make_head())
    found = AgreementHistory(measure, allowed).find_group(["a", "b", "c"], [wrong, right, right])
    assert found == (1, 2)
    assert len(AgreementHistory(measure, allowed).find_group(["a", "b"], [wrong, wrong])) == 1


def test_lengths_before_the_final_norm_are_not_seen() -> None:
    output_TD = torch.randn(9, HIDDEN)
    measure = DistributionMeasure(make_head())
    assert measure.errors_of_pairs([output_TD, 1.05 * output_TD])[0, 1].max() < 1e-6


def test_where_a_token_is_certain_next_to_nothing_is_seen() -> None:
    output_TD = torch.randn(200, HIDDEN)
    noisy_TD = output_TD + 0.05 * torch.randn_like(output_TD)
    plain, certain = (
        DistributionMeasure(make_head(scale)).errors_of_pairs([output_TD, noisy_TD])[0, 1]
        for scale in (1.0, 200.0)
    )
    assert plain.median() > 1e-3
    assert certain.median() < 1e-6


def test_the_rule_compares_chains_of_which_two_may_agree() -> None:
    rule = RULES["cdv"]
    assert (rule.copies, rule.needed, rule.fewest) == (3, 2, 2)
    assert rule.of_chains
    assert rule.scheme == TOTAL_VARIATION
    assert RULES["2of3"].fewest == 3
