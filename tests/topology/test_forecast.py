"""Departures within the next hour, against a direct count and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from nesa_node.core.arrays import Bools
from nesa_node.core.ids import PeerId
from nesa_node.topology.forecast import (
    PAST_SLOTS,
    SLOT_S,
    chance_here,
    forecast_departures,
    slot_of,
)

DAY = 144


def _direct_chance(here: Bools, seen: Bools, node: int, ahead: int) -> float:
    """The formula of the module's docstring, slot by slot."""
    last = len(here) - 1
    state = bool(here[last, node])
    looks = alike = later = 0
    for day in range(1, 15):
        for at in range(last - day * DAY - 3, last - day * DAY + 4):
            if at < 0 or not seen[at] or not seen[at + ahead]:
                continue
            looks += 1
            if here[at, node] == state:
                alike += 1
                later += here[at + ahead, node]
    if looks < 21:
        return float(state)

    def lived(at: int, one: int) -> tuple[bool, int]:
        """State and age of a node at a slot; slots without a look keep the state before."""
        states = [bool(here[0, one])]
        for slot in range(1, at + 1):
            states.append(bool(here[slot, one]) if seen[slot] else states[-1])
        age = 0
        while age < at and states[at - age - 1] == states[at]:
            age += 1
        return states[at], min(age, DAY - 1)

    all_alike, all_later = 1, int(state)
    mine = lived(last, node)
    for one in range(here.shape[1]):
        for at in range(last - ahead + 1):
            if seen[at] and seen[at + ahead] and lived(at, one) == mine:
                all_alike += 1
                all_later += here[at + ahead, one]
    return (later / 7 + 2 * all_later / all_alike) / (alike / 7 + 2)


@pytest.mark.parametrize("seed", range(3))
def test_chances_are_those_of_a_direct_count(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = 4 * DAY + 10
    here = np.repeat(rng.random((slots // 20 + 1, 3)) < 0.6, 20, axis=0)[:slots]
    seen = rng.random(slots) < 0.95
    seen[[0, -1]] = True
    here[~seen] = rng.random((int((~seen).sum()), 3)) < 0.5  # means nothing
    for ahead in (1, 6):
        found = chance_here(here, seen, ahead)
        wanted = [_direct_chance(here, seen, node, ahead) for node in range(3)]
        assert found == pytest.approx(wanted)


def _daily(start: float, end: float, now_h: float, days: int = 14) -> tuple[Bools, Bools]:
    """One node that is here from `start` to `end` o'clock, one that stays; `now_h`: time of day."""
    now = 10_000 * DAY + round(now_h * 6)
    hours = np.arange(now - PAST_SLOTS, now + 1) % DAY / 6
    here = np.stack([(start <= hours) & (hours < end), np.ones(len(hours), dtype=bool)], axis=1)
    seen = np.arange(now - PAST_SLOTS, now + 1) >= now - days * DAY
    here[~seen] = False
    here[-1] = seen[-1] = True
    return here, seen


def _departures(here: Bools, seen: Bools, now_h: float) -> dict[PeerId, float]:
    now_s = (10_000 * DAY + round(now_h * 6)) * SLOT_S + 1.0
    assert slot_of(now_s) == 10_000 * DAY + round(now_h * 6)
    found = forecast_departures([PeerId("home"), PeerId("always")], here, seen, now_s)
    return {peer: at_s / 3600 % 24 for peer, at_s in found.items()}


def test_a_node_that_leaves_at_six_each_day_is_expected_to_leave_at_six() -> None:
    assert _departures(*_daily(10, 18, 17.5), 17.5) == {"home": pytest.approx(18.0, abs=0.35)}
    for now_h in (11.0, 14.0, 16.5):
        assert _departures(*_daily(10, 18, now_h), now_h) == {}


def test_a_short_history_forecasts_nothing() -> None:
    here, seen = _daily(10, 18, 17.5, days=2)
    assert chance_here(here, seen).tolist() == [1.0, 1.0]
    assert _departures(here, seen, 17.5) == {}
    here[-1, 0] = False
    assert chance_here(here, seen).tolist() == [0.0, 1.0]
    # Four days suffice.
    assert set(_departures(*_daily(10, 18, 17.5, days=4), 17.5)) == {"home"}


def test_a_habit_that_changed_is_forgotten_in_two_weeks() -> None:
    here, seen = _daily(10, 18, 17.5)
    here[-11 * DAY :, 0] = True
    assert _departures(here, seen, 17.5) == {}


def test_nodes_without_habits_are_rarely_expected_to_leave() -> None:
    rng = np.random.default_rng(5)
    slots, nodes = PAST_SLOTS + 300, 30
    here = np.zeros((slots, nodes), dtype=bool)
    state = rng.random(nodes) < 0.6
    for at in range(slots):
        state = np.where(rng.random(nodes) < 1 / 48, ~state, state)
        here[at] = state
    seen = np.ones(PAST_SLOTS + 1, dtype=bool)
    expected = there = 0
    for at in range(PAST_SLOTS, slots, 6):
        chances = chance_here(here[at - PAST_SLOTS : at + 1], seen)
        expected += int(((chances < 0.5) & here[at]).sum())
        there += int(here[at].sum())
    assert there > 500
    assert expected < 0.01 * there
