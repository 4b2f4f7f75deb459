"""Tuning on recorded snapshots: what is learnt counts only where it gains on what came later."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from nesa_node.routing.search.greedy import SHIPPED_PARAMETERS, GreedyParameters
from nesa_node.routing.tuner import (
    MIN_SNAPSHOTS,
    make_scenarios,
    parse_published,
    published_values,
    request_beside_node,
    retune,
    sample_snapshots,
    time_ratios,
)
from nesa_node.topology.simulation.world import make_world
from nesa_node.topology.snapshot import Snapshot
from tests.topology.simulation.churn import simulate_churn

BAD = GreedyParameters(alpha=3.0, reliability_weight=3.0)
"""Within bounds, and afraid of every node: its chains are long."""


def _history(count: int, *, seed: int = 0) -> list[Snapshot]:
    rng = np.random.default_rng(seed)
    world = make_world(16, 12, rng)
    return [each.snapshot for each in simulate_churn(world, count, rng)]


def _ticking() -> Callable[[], float]:
    """A second passes with each look: a candidate takes one, whatever the machine does."""
    ticks = itertools.count()
    return lambda: float(next(ticks))


def test_a_few_snapshots_change_nothing() -> None:
    found = retune(
        _history(5),
        np.random.default_rng(0),
        current=SHIPPED_PARAMETERS,
        seconds=9.0,
        clock=_ticking(),
    )
    assert found.parameters == SHIPPED_PARAMETERS
    assert f"{MIN_SNAPSHOTS} are needed" in found.reason
    assert found.candidates == 0


def test_parameters_that_are_no_better_than_shipped_ones_go_back() -> None:
    history = _history(30)
    found = retune(history, np.random.default_rng(1), current=BAD, seconds=100.0, clock=_ticking())
    later = make_scenarios(history[20:], np.random.default_rng(2))
    assert time_ratios(BAD, later).mean() > time_ratios(SHIPPED_PARAMETERS, later).mean()
    assert found.parameters == SHIPPED_PARAMETERS
    assert "no longer better" in found.reason


def test_what_gains_on_later_snapshots_is_taken_and_the_rest_is_not() -> None:
    """With a bad rule shipped there is much to gain; with the good one, next to nothing."""
    history = _history(30)
    found = {
        shipped: retune(
            history,
            np.random.default_rng(1),
            current=shipped,
            shipped=shipped,
            seconds=100.0,
            clock=_ticking(),
        )
        for shipped in (BAD, SHIPPED_PARAMETERS)
    }
    assert found[BAD].parameters not in (BAD, SHIPPED_PARAMETERS)
    assert found[BAD].gain > max(0.01, 3 * found[BAD].gain_error)
    later = make_scenarios(history[20:], np.random.default_rng(5))
    assert time_ratios(found[BAD].parameters, later).mean() < time_ratios(BAD, later).mean()
    assert found[SHIPPED_PARAMETERS].parameters == SHIPPED_PARAMETERS
    assert "nothing changes" in found[SHIPPED_PARAMETERS].reason
    assert found[SHIPPED_PARAMETERS].candidates > 0


def test_a_candidate_that_takes_too_long_is_not_tried() -> None:
    found = retune(
        _history(30),
        np.random.default_rng(1),
        current=SHIPPED_PARAMETERS,
        seconds=1.0,
        clock=_ticking(),
    )
    assert found.parameters == SHIPPED_PARAMETERS
    assert "takes too long" in found.reason


def test_snapshots_are_spread_over_time_and_useless_ones_are_left_out() -> None:
    history = _history(20)
    blind = replace(history[3], links=None)
    gone = replace(history[4], nodes=())
    chosen = sample_snapshots([*history[:3], blind, gone, *history[5:]], 5)
    assert [each.taken_at for each in chosen] == sorted(each.taken_at for each in chosen)
    assert len(chosen) == 5
    assert chosen[0] is history[0]
    assert chosen[-1] is history[-1]
    assert sample_snapshots([blind, gone], 5) == []


def test_a_client_beside_a_node_is_as_far_from_others_as_it_is() -> None:
    (snapshot,) = _history(1)
    assert snapshot.links is not None
    request = request_beside_node(snapshot, np.random.default_rng(3))
    assert isinstance(request.entry_rtt_ms, np.ndarray)
    host = int(np.argmin(request.entry_rtt_ms))
    rtt_ms_N = snapshot.links.rtt_ms_NN[host]
    others = np.arange(len(snapshot.nodes)) != host
    assert request.entry_rtt_ms[others] == pytest.approx(np.maximum(rtt_ms_N[others], 1.0))
    assert request.entry_rtt_ms[host] == 1.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gamma", float("nan")),
        ("gamma", 100.0),
        ("alpha", 0.0),
        ("transfer_weight", -1.0),
        ("load_weight", 0.5),
        ("starts", 1e9),
    ],
)
def test_published_parameters_are_believed_only_where_a_search_would_look(
    name: str, value: float
) -> None:
    told = published_values(SHIPPED_PARAMETERS)
    assert parse_published(told, SHIPPED_PARAMETERS) == SHIPPED_PARAMETERS
    assert parse_published(told | {name: value}, SHIPPED_PARAMETERS) is None
    assert parse_published({}, SHIPPED_PARAMETERS) is None
