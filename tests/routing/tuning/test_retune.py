"""Tuning on recorded snapshots: what is learnt counts only where it gains on what came later."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from nesa_node.routing.search.exact import exact_latency
from nesa_node.routing.search.greedy import GreedyParameters
from nesa_node.routing.tuner import (
    MIN_SNAPSHOTS,
    RULE_GENES,
    SHIPPED_TUNING,
    Tuning,
    parse_published,
    retune,
)
from nesa_node.routing.tuning_scenario import (
    CLIENTS_PER_SNAPSHOT,
    make_scenarios,
    request_beside_node,
    sample_snapshots,
)
from nesa_node.topology.simulation.world import make_world
from nesa_node.topology.snapshot import Snapshot
from tests.topology.simulation.churn import simulate_churn

BAD = Tuning(rule=GreedyParameters(alpha=3.0, reliability_weight=3.0))
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
        current=SHIPPED_TUNING,
        seconds=9.0,
        clock=_ticking(),
    )
    assert found.tuning == SHIPPED_TUNING
    assert f"{MIN_SNAPSHOTS} are needed" in found.rule.reason
    assert found.rule.candidates == 0


def test_parameters_that_are_no_better_than_shipped_ones_go_back() -> None:
    history = _history(30)
    found = retune(history, np.random.default_rng(1), current=BAD, seconds=100.0, clock=_ticking())
    later = make_scenarios(history[20:], history, np.random.default_rng(2))
    assert RULE_GENES.fitness(BAD.rule, later) > RULE_GENES.fitness(SHIPPED_TUNING.rule, later)
    assert found.tuning == SHIPPED_TUNING
    assert "no longer better" in found.rule.reason


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
        for shipped in (BAD, SHIPPED_TUNING)
    }
    assert found[BAD].tuning not in (BAD, SHIPPED_TUNING)
    assert found[BAD].rule.gain > max(0.01, 3 * found[BAD].rule.gain_error)
    later = make_scenarios(history[20:], history, np.random.default_rng(5))
    assert RULE_GENES.fitness(found[BAD].rule.parameters, later) < RULE_GENES.fitness(
        BAD.rule, later
    )
    assert found[SHIPPED_TUNING].tuning == SHIPPED_TUNING
    assert "nothing changes" in found[SHIPPED_TUNING].rule.reason
    assert found[SHIPPED_TUNING].rule.candidates > 0


def test_recorded_sessions_take_the_steps_and_failures_of_later_snapshots() -> None:
    """A node is slower later on, one leaves, one restarts; the past says which were unstable."""
    (first,) = _history(1)
    assert first.links is not None
    nodes = first.nodes
    slow, gone, restarted = nodes[0], nodes[1], nodes[2]
    rtt_ms_NN = first.links.rtt_ms_NN.copy()
    rtt_ms_NN[4, 5:] *= 3.0
    rtt_ms_NN[5:, 4] *= 3.0
    history = [
        replace(
            first,
            taken_at=60.0 * turn,
            links=replace(first.links, rtt_ms_NN=rtt_ms_NN) if turn % 2 else first.links,
        )
        for turn in range(8)
    ]
    last = replace(
        first,
        taken_at=480.0,
        nodes=(
            replace(slow, load=slow.load + 1.0),
            replace(restarted, uptime_s=0.0),
            *nodes[3:],
        ),
    )
    scenarios = make_scenarios(history[-1:], [*history, last], np.random.default_rng(0))
    assert len(scenarios) == CLIENTS_PER_SNAPSHOT
    for scenario in scenarios:
        problem, outcome = scenario.prepared.problem, scenario.outcome
        row = problem.peers.index
        assert outcome.busy_block_s_N[row(slow.peer_id)] == pytest.approx(
            problem.block_s_N[row(slow.peer_id)] * (2.0 + slow.load)
        )
        lost = {gone.peer_id, restarted.peer_id}
        failed = {peer for peer in problem.peers if scenario.failures_N[row(peer)]}
        assert failed == lost & set(problem.peers)
        assert outcome.transfer_s_NN[4, 6] == pytest.approx(problem.transfer_s_NN[4, 6], rel=0.7)
        assert outcome.transfer_s_NN[4, 6] < problem.transfer_s_NN[4, 6]
        assert problem.stability_N.argmin() == 4
        assert scenario.time_ratio(exact_latency(outcome)) >= 1.0
    assert make_scenarios([last], [*history, last], np.random.default_rng(0)) == []


def test_a_candidate_that_takes_too_long_is_not_tried() -> None:
    found = retune(
        _history(30),
        np.random.default_rng(1),
        current=SHIPPED_TUNING,
        seconds=1.0,
        clock=_ticking(),
    )
    assert found.tuning == SHIPPED_TUNING
    assert "takes too long" in found.rule.reason


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
    host = 3
    request = request_beside_node(snapshot, snapshot.nodes[host].peer_id)
    assert isinstance(request.entry_rtt_ms, np.ndarray)
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
        ("stability_weight", 2.1),
        ("cost_failure", 0.0),
        ("cost_stability", -0.1),
        ("cost_load", 5.0),
        ("starts", 1e9),
    ],
)
def test_published_parameters_are_believed_only_where_a_search_would_look(
    name: str, value: float
) -> None:
    told = SHIPPED_TUNING.published()
    assert parse_published(told) == SHIPPED_TUNING
    assert parse_published(told | {name: value}) is None
    assert parse_published({}) is None
