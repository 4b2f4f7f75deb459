"""How often drafts are right and what tokens cost is learned from what happened."""

from __future__ import annotations

import random

import pytest

from nesa_node.client.speculation.acceptance import AcceptanceTable, StepTimes
from nesa_node.client.speculation.drafts import DraftKind

LOOKUP = DraftKind("lookup", 3)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_chance_of_a_kind_is_its_share_of_right_tokens(share: float) -> None:
    table, rng = AcceptanceTable(), random.Random(3)
    before = table.chance(DraftKind("lookup", 4))
    for _ in range(400):
        table.record(LOOKUP, rng.random() < share)
    assert table.chance(LOOKUP) == pytest.approx(share, abs=0.15)
    assert table.mean_chance("lookup") == pytest.approx(share, abs=0.15)
    assert table.chance(DraftKind("lookup", 4)) == before


def test_what_is_not_known_is_assumed_by_the_level() -> None:
    table = AcceptanceTable()
    chances = [table.chance(DraftKind("lookup", level)) for level in range(2, 7)]
    assert chances == sorted(chances)
    assert table.chance(DraftKind("model", 7)) > 0.9 > 0.1 > table.chance(DraftKind("model", 0))


@pytest.mark.parametrize(("single_s", "slope_s"), [(0.1, 0.002), (0.02, 0.004), (0.02, 0.015)])
def test_a_line_is_fitted_to_the_times_of_steps(single_s: float, slope_s: float) -> None:
    times, rng = StepTimes(), random.Random(1)
    for _ in range(300):
        sent = rng.choice([1, 1, 3, 5, 8])
        noise = rng.uniform(0.95, 1.05)
        times.record(sent, 1, (single_s + (sent - 1) * slope_s) * noise)
    assert times.slope_s == pytest.approx(slope_s, rel=0.4)
    assert times.single_s(1) == pytest.approx(single_s, rel=0.25)


def test_before_steps_of_several_tokens_a_further_one_is_assumed_to_cost_little() -> None:
    times = StepTimes()
    for _ in range(20):
        times.record(1, 1, 0.1)
    assert times.is_known
    assert 0.0 < times.slope_s < 0.02
    assert times.token_s == pytest.approx(0.1)


def test_a_failover_counts_for_three_steps_at_most() -> None:
    times = StepTimes()
    for _ in range(50):
        times.record(1, 1, 0.1)
    times.record(1, 1, 20.0)
    assert times.single_s(1) < 0.13
