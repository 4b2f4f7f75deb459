import itertools
from pathlib import Path

import numpy as np
import pytest

from benchmarks import changes, stability
from benchmarks.options import Options
from benchmarks.recorded_trace import load_round_trips, replay
from benchmarks.toy_plans import COMPUTE_S, STAGES, UNSERVED_S, Placement, Smoothed, plan_cost
from benchmarks.traces import TraceEvent, TraceSettings, generate_trace


def test_plan_cost_is_that_of_the_best_chains() -> None:
    world = TraceSettings(nodes=11, regions=2)
    step = next(generate_trace(world, 1, np.random.default_rng(0)))
    stages = [*range(STAGES), 0, 3, 5]
    holders = [[n for n, held in enumerate(stages) if held == stage] for stage in range(STAGES)]
    best = []
    for client in np.flatnonzero(step.fixed_N).tolist():
        chains = (
            sum(step.true_s_NN[a, b] for a, b in itertools.pairwise((client, *chain, client))) / 2
            for chain in itertools.product(*holders)
        )
        best.append(min(chains) + STAGES * COMPUTE_S)
    assert plan_cost(stages, step, step.true_s_NN) == pytest.approx(np.mean(best))
    assert plan_cost([0] * 11, step, step.true_s_NN) == UNSERVED_S


def test_placement_follows_churn_and_never_gets_worse() -> None:
    rng = np.random.default_rng(1)
    placement = None
    for step in generate_trace(TraceSettings(nodes=20, regions=3), 5, rng):
        placement = placement or Placement(step, rng, proposals=10)
        placement.follow(step)
        stages = placement.stages(step)
        assert len(stages) == len(step.peers)
        better = placement.improved(step, step.true_s_NN, proposals=20)
        costs = [plan_cost(of, step, step.true_s_NN) for of in (better, stages)]
        assert costs[0] <= costs[1]


def test_smoothing_takes_the_median_of_three() -> None:
    smoothed, rng = Smoothed(), np.random.default_rng(2)
    steps = list(generate_trace(TraceSettings(nodes=8, regions=2, churn=0.0), 3, rng))
    seconds = [smoothed.add(step) for step in steps]
    expected = np.median([step.measured_s_NN for step in steps], axis=0)
    np.testing.assert_array_equal(seconds[2], expected)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rng = np.random.default_rng(3)
    seconds_TNN = rng.lognormal(-2.0, 0.2, (80, 18, 18)).astype(np.float32)
    seconds_TNN[3, 1, 2] = seconds_TNN[3, 2, 1] = 0.0
    seconds_TNN[4, 1, 2] = 0.0
    path = tmp_path / "table.npz"
    np.savez(path, rtt_s=seconds_TNN)
    return path


def test_recorded_round_trips_are_symmetric_and_missing_ones_are_no_edges(table: Path) -> None:
    seconds_TNN = load_round_trips(table)
    assert np.array_equal(seconds_TNN, seconds_TNN.transpose(0, 2, 1))
    assert np.isinf(seconds_TNN[3, 1, 2])
    assert 0 < seconds_TNN[4, 1, 2] < np.inf
    assert (np.diagonal(seconds_TNN, axis1=1, axis2=2) == 0).all()


def test_replayed_events_touch_the_region_only(table: Path) -> None:
    seconds_TNN = load_round_trips(table)
    event = TraceEvent(kind="regional loss", at=2)
    steps = list(replay(seconds_TNN, 4, np.random.default_rng(4), churn=0.0, event=event))
    assert [int((step.region_N == 0).sum()) for step in steps] == [3, 3, 0, 0]
    event = TraceEvent(kind="partition", at=1)
    steps = list(replay(seconds_TNN, 2, np.random.default_rng(5), churn=0.0, event=event))
    across = steps[1].region_N[:, None] != steps[1].region_N
    assert np.array_equal(np.isinf(steps[1].true_s_NN), across)


@pytest.mark.slow
def test_both_benchmarks_run_on_a_recorded_table(table: Path) -> None:
    rows = changes.run(Options(runs=1, snapshots=20, matrix=str(table)))
    assert rows[0]["quiet"]["snapshots"] == 20
    assert rows[0]["found"]["partition"]["any"] == 1.0
    assert set(stability.PREDICTORS) < set(stability.run(Options(matrix=str(table)))[0])
