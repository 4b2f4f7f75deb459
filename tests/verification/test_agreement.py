"""Groups of nodes that agree, against a search over all subsets; and what agrees over a session."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
import torch

from nesa_node.verification.agreement import RULES, AgreementHistory, largest_group
from nesa_node.verification.comparison import Measure, Threshold


@pytest.mark.parametrize("members", range(6))
def test_the_largest_group_is_found(members: int) -> None:
    rng = random.Random(members)
    for _ in range(200):
        pairs = {pair for pair in combinations(range(members), 2) if rng.random() < 0.5}

        def agree(one: int, other: int, pairs: set[tuple[int, int]] = pairs) -> bool:
            return (one, other) in pairs

        found = largest_group(members, agree)
        cliques = [
            group
            for size in range(members + 1)
            for group in combinations(range(members), size)
            if pairs.issuperset(combinations(group, 2))
        ]
        assert found in cliques
        assert len(found) == max(map(len, cliques))


def test_the_paper_wants_more_than_half_as_many_others() -> None:
    rule = RULES["paper"]
    assert rule.needed - 1 > rule.copies // 2
    assert rule.needed == rule.copies
    assert RULES["2of3"].needed == 2


def history(bound: float = 0.1, mean: float = 0.01) -> AgreementHistory:
    return AgreementHistory(Measure("relative-l2", bytes(32)), Threshold(bound, mean, bound, 1))


def test_one_that_is_far_off_is_not_in_the_group() -> None:
    right = torch.randn(4, 64)
    outputs = [right, right * 1.5, right * 1.0001]
    assert history().find_group(["a", "b", "c"], outputs) == (0, 2)


def test_small_errors_of_many_tokens_add_up() -> None:
    """No token is beyond the bound of one, but their mean is, once there are enough of them."""
    kept, found = history(), []
    for _ in range(20):
        right = torch.randn(1, 64)
        found.append(kept.find_group(["a", "b", "c"], [right, right * 1.05, right]))
    assert found[0] == (0, 1, 2)
    assert found[-1] == (0, 2)


def test_nodes_that_join_later_are_judged_by_what_they_computed() -> None:
    kept = history()
    for _ in range(20):
        right = torch.randn(1, 64)
        kept.find_group(["a", "b", "c"], [right, right * 1.05, right])
    right = torch.randn(1, 64)
    assert kept.find_group(["a", "c", "d"], [right, right, right]) == (0, 1, 2)


def test_steps_without_outputs_say_nothing() -> None:
    nothing = torch.empty(0, 64)
    assert history().find_group(["a", "b", "c"], [nothing] * 3) == (0, 1, 2)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_agrees_with_nothing(value: float) -> None:
    right, wrong = torch.randn(2, 64), torch.randn(2, 64)
    wrong[0, 0] = value
    assert history().find_group(["a", "b", "c"], [wrong, right, right]) == (1, 2)
    assert history().find_group(["a", "b"], [wrong, wrong]) == (0,)
