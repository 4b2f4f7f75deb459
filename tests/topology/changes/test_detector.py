import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from nesa_node.topology.changes.detector import (
    BlockHoldings,
    ChangeReport,
    ChangeState,
    Observation,
    PlanCostPair,
    judge_snapshot,
)
from nesa_node.topology.changes.triggers import Sensitivity, Trigger, make_connectivity
from nesa_node.topology.shape.merge_tree import make_filtration

COUNT = 12
PEERS = tuple(f"n{node}" for node in range(COUNT))
CALM = 20  # snapshots until thresholds are learned


def round_trips(seed: int, added_s: float = 0.0) -> NDArray[np.float64]:
    """Two halves, 100 ms apart or `added_s` more, with 2 % of noise."""
    half_N = np.arange(COUNT) >= COUNT // 2
    seconds_NN = np.where(half_N[:, None] == half_N, 0.01, 0.1 + added_s)
    seconds_NN = np.triu(
        seconds_NN * np.random.default_rng(seed).lognormal(0, 0.02, (COUNT, COUNT)), 1
    )
    return seconds_NN + seconds_NN.T


def seen(
    seconds_NN: NDArray[np.float64],
    *,
    peers: tuple[str, ...] = PEERS,
    holdings: BlockHoldings | None = None,
    plan: PlanCostPair | None = None,
) -> Observation:
    connections = make_connectivity(peers, make_filtration(seconds_NN))
    return Observation(connections=connections, holdings=holdings, plan=plan)


def calm_state(**sensitivity: float) -> ChangeState:
    state = ChangeState(sensitivity=replace(Sensitivity(), **sensitivity))  # type: ignore[arg-type]
    for seed in range(CALM):
        state, report = judge_snapshot(state, seen(round_trips(seed)))
        assert not report.fired
    return state


def named(report: ChangeReport, name: str) -> Trigger:
    return next(trigger for trigger in report.triggers if trigger.name == name)


def test_a_detour_fires_at_its_second_snapshot_and_once() -> None:
    state = calm_state()
    state, first = judge_snapshot(state, seen(round_trips(100, added_s=0.08)))
    state, second = judge_snapshot(state, seen(round_trips(101, added_s=0.08)))
    state, third = judge_snapshot(state, seen(round_trips(102, added_s=0.08)))
    assert not first.fired
    assert set(second.fired) == {"shift", "round trips", "places"}
    assert not third.fired
    shift = named(second, "shift")
    assert shift.figure > shift.threshold
    assert shift.in_a_row == 2
    assert f"{shift.figure:.1%}" in shift.reason
    # The half of pairs that is across moved by 80 of a median of about 100 ms.
    assert shift.figure == pytest.approx(6 / 11 * 0.8, rel=0.15)


def test_its_end_fires_again() -> None:
    state = calm_state()
    for seed in range(100, 106):
        state, _ = judge_snapshot(state, seen(round_trips(seed, added_s=0.08)))
    state, _ = judge_snapshot(state, seen(round_trips(7)))
    _, report = judge_snapshot(state, seen(round_trips(8)))
    assert report.fired


def test_one_bad_snapshot_is_jitter_and_is_learned() -> None:
    state = calm_state()
    before = named(judge_snapshot(state, seen(round_trips(50)))[1], "shift").threshold
    state, _ = judge_snapshot(state, seen(round_trips(100, added_s=0.08)))
    state, report = judge_snapshot(state, seen(round_trips(51)))
    assert not report.fired
    assert state.shift is not None
    assert state.shift.shift.pending == ()
    assert max(state.shift.shift.calm_figures) > 0.3
    # Two in twenty are above the 95th percentile.
    state, _ = judge_snapshot(state, seen(round_trips(101, added_s=0.08)))
    state, _ = judge_snapshot(state, seen(round_trips(53)))
    assert named(judge_snapshot(state, seen(round_trips(52)))[1], "shift").threshold > before


def test_a_partition_fires_though_heights_are_infinite() -> None:
    state = calm_state()
    seconds_NN = round_trips(100, added_s=math.inf)
    state, _ = judge_snapshot(state, seen(seconds_NN))
    state, report = judge_snapshot(state, seen(seconds_NN))
    assert set(report.fired) == {"shift", "round trips", "places"}
    assert math.isfinite(named(report, "shift").figure)
    _, report = judge_snapshot(state, seen(seconds_NN))
    assert named(report, "shift").figure == 0.0
    assert named(report, "round trips").figure < 1e-6  # remembered in float32


def noisy_round_trips(seed: int, added_s: float = 0.0) -> NDArray[np.float64]:
    """24 nodes of which the last four move by `added_s`; a tenth of all pairs is measured badly."""
    rng = np.random.default_rng(seed)
    seconds_NN = np.full((24, 24), 0.1) + 0.002 * rng.random((24, 24))
    seconds_NN += np.where(rng.random((24, 24)) < 0.1, rng.exponential(0.2, (24, 24)), 0.0)
    away_N = np.arange(24) >= 20
    seconds_NN += np.where(away_N[:, None] != away_N, added_s, 0.0)
    seconds_NN = np.triu(seconds_NN, 1)
    return seconds_NN + seconds_NN.T


def test_a_place_that_moved_is_found_among_pairs_that_are_measured_wildly() -> None:
    peers = tuple(f"n{node:02}" for node in range(24))
    state = ChangeState()
    for seed in range(60):
        state, report = judge_snapshot(state, seen(noisy_round_trips(seed), peers=peers))
        assert "places" not in report.fired
    state, _ = judge_snapshot(state, seen(noisy_round_trips(100, 0.08), peers=peers))
    state, report = judge_snapshot(state, seen(noisy_round_trips(101, 0.08), peers=peers))
    assert "places" in report.fired
    # Four of 24 nodes moved by 80 of a median of about 100 ms, less what they varied by before.
    assert 0.05 < named(report, "places").figure < 4 / 24 * 0.8


def test_an_event_before_thresholds_are_learned_is_found_too() -> None:
    state, _ = judge_snapshot(ChangeState(), seen(round_trips(0)))
    state, _ = judge_snapshot(state, seen(round_trips(1, added_s=0.08)))
    _, report = judge_snapshot(state, seen(round_trips(2, added_s=0.08)))
    assert "shift" in report.fired


def test_nodes_that_come_and_go_are_no_shift() -> None:
    state = calm_state(least_threshold=0.05)
    for seed in range(10):
        there = np.sort(np.random.default_rng(seed).permutation(COUNT)[:10])
        peers = tuple(PEERS[node] for node in there)
        seconds_NN = round_trips(200 + seed)[np.ix_(there, there)]
        state, report = judge_snapshot(state, seen(seconds_NN, peers=peers))
        assert not {"shift", "round trips", "places"}.intersection(report.fired)


def test_nobody_in_common_begins_anew() -> None:
    others = tuple(f"other{node}" for node in range(COUNT))
    state = calm_state()
    for seed in range(2):
        state, report = judge_snapshot(state, seen(round_trips(seed, added_s=0.5), peers=others))
        assert named(report, "shift").figure == 0.0
    _, report = judge_snapshot(state, seen(round_trips(9, added_s=0.5), peers=others))
    assert not report.fired


def test_observing_changes_neither_argument() -> None:
    state = calm_state()
    observation = seen(round_trips(100, added_s=0.08))
    first = judge_snapshot(state, observation)
    second = judge_snapshot(state, observation)
    assert first[1] == second[1]


def test_a_block_without_a_holder_fires_for_as_long_as_that_is_so() -> None:
    state = calm_state()
    state, _ = judge_snapshot(state, seen(round_trips(0), holdings=BlockHoldings((3, 3, 3), 9.0)))
    for seed in (1, 2):
        now = seen(round_trips(seed), holdings=BlockHoldings((3, 0, 3), 9.0))
        state, report = judge_snapshot(state, now)
        assert "coverage" in report.fired
        assert report.should_move
    assert "(1)" in named(report, "coverage").reason


def test_lost_replicas_fire_once() -> None:
    state, _ = judge_snapshot(
        ChangeState(), seen(round_trips(0), holdings=BlockHoldings((3, 2, 1), 9.0))
    )
    now = seen(round_trips(1), holdings=BlockHoldings((2, 1, 1), 9.0))
    state, report = judge_snapshot(state, now)
    # Block 0 has two left, block 2 never had more than one.
    assert "replicas" in report.fired
    assert named(report, "replicas").figure == 1.0
    assert not judge_snapshot(state, now)[1].fired


def test_lost_capacity_fires_against_the_most_there_was() -> None:
    state = ChangeState()
    fired = []
    for capacity in (100.0, 120.0, 110.0, 107.0, 107.0, 95.0):
        holdings = BlockHoldings((9,), capacity)
        state, report = judge_snapshot(state, seen(round_trips(0), holdings=holdings))
        fired.append("capacity" in report.fired)
    assert fired == [False, False, False, True, False, True]


def test_a_model_with_other_blocks_is_refused() -> None:
    state, _ = judge_snapshot(
        ChangeState(), seen(round_trips(0), holdings=BlockHoldings((1, 1), 1.0))
    )
    with pytest.raises(ValueError, match="blocks became"):
        judge_snapshot(state, seen(round_trips(0), holdings=BlockHoldings((1,), 1.0)))


def test_what_was_not_looked_at_keeps_its_state() -> None:
    state, _ = judge_snapshot(
        ChangeState(), seen(round_trips(0), holdings=BlockHoldings((2,), 9.0))
    )
    state, report = judge_snapshot(state, seen(round_trips(1)))
    names = {trigger.name for trigger in report.triggers}
    assert names == {"shift", "round trips", "places", "departures", "region"}
    state, report = judge_snapshot(state, seen(round_trips(1), holdings=BlockHoldings((2,), 1.0)))
    assert report.fired == ("capacity",)


def test_a_shift_alone_asks_the_planner_and_moves_nothing() -> None:
    state = calm_state()
    plan = PlanCostPair(current=1.05, best=1.0)
    for seed in (100, 101):
        state, report = judge_snapshot(state, seen(round_trips(seed, added_s=0.08), plan=plan))
    assert report.fired
    assert not report.should_move


def test_a_plan_that_stays_better_by_more_than_its_error_moves() -> None:
    state = ChangeState()
    fired, moves = [], []
    for current in (1.3, 1.3, 1.3, 1.3, 1.12, 1.12, 1.12, 1.12, 1.0):
        plan = PlanCostPair(current=current, best=1.0)
        state, report = judge_snapshot(state, seen(round_trips(0), plan=plan))
        fired.append("plan" in report.fired)
        moves.append(report.should_move)
    assert fired == [False, *[True] * 7, False]
    assert moves == [False, False, False, True, *[False] * 5]


def test_another_plan_has_to_last_as_long_as_the_one_given_up() -> None:
    state, better = ChangeState(), PlanCostPair(current=1.5, best=1.0)
    gains = []
    for plan in (better, better, better, None, better, better, better, better):
        state, report = judge_snapshot(state, seen(round_trips(0), plan=plan))
        gains.append(report.plan_gained)
    assert gains == [False] * 7 + [True]


def test_a_plan_that_cannot_run_is_worse_than_any() -> None:
    plan = PlanCostPair(current=math.inf, best=1.0)
    state, _ = judge_snapshot(ChangeState(), seen(round_trips(0), plan=plan))
    assert "plan" in judge_snapshot(state, seen(round_trips(0), plan=plan))[1].fired
    none = PlanCostPair(current=math.inf, best=math.inf)
    assert named(judge_snapshot(state, seen(round_trips(0), plan=none))[1], "plan").figure == 1.0


@pytest.mark.parametrize("best", [1.0, 1.2])
def test_costs_that_are_no_numbers_are_refused(best: float) -> None:
    with pytest.raises(ValueError, match="costs"):
        judge_snapshot(
            ChangeState(), seen(round_trips(0), plan=PlanCostPair(current=math.nan, best=best))
        )


def test_peers_must_be_as_many_as_nodes_and_differ() -> None:
    with pytest.raises(ValueError, match="different peers"):
        make_connectivity(("a", "a"), make_filtration(np.zeros((2, 2))))
    with pytest.raises(ValueError, match="different peers"):
        make_connectivity(("a",), make_filtration(np.zeros((2, 2))))


def test_a_large_swarm_is_judged_by_some_of_its_nodes() -> None:
    """1,200 nodes: heights of 400 of them, round trips of 200."""
    count = 1200
    peers = tuple(f"n{node:04}" for node in range(count))
    half_N = np.arange(count) % 2
    near = half_N[:, None] == half_N
    state = ChangeState()
    for added_s in (0.0, 0.0, 0.08, 0.08):
        seconds_NN = np.where(near, 0.01, 0.1 + added_s)
        np.fill_diagonal(seconds_NN, 0.0)
        state, report = judge_snapshot(state, seen(seconds_NN, peers=peers))
    assert set(report.fired) == {"shift", "round trips", "places"}
    shift = named(report, "shift")
    assert 0.3 < shift.figure < 10.0


def test_many_leaving_at_once_asks_the_planner_and_moves_nothing() -> None:
    state = calm_state()
    there = np.arange(COUNT - 3)
    now = seen(round_trips(30)[np.ix_(there, there)], peers=PEERS[:-3])
    state, report = judge_snapshot(state, now)
    assert report.fired == ("departures",)
    assert named(report, "departures").figure == 3 / 12
    assert not report.should_move
    assert not judge_snapshot(state, now)[1].fired


def three_sites(seed: int, nodes: tuple[int, ...]) -> Observation:
    """Of 68 nodes, the first three on one site and the others on two; others leave at random."""
    site_N = np.array([0] * 3 + [1] * 32 + [2] * 33)
    seconds_NN = np.where(site_N[:, None] == site_N, 0.01, 0.1)
    noise_NN = np.random.default_rng(seed).lognormal(0, 0.02, seconds_NN.shape)
    seconds_NN = np.triu(seconds_NN * noise_NN, 1)
    seconds_NN = (seconds_NN + seconds_NN.T)[np.ix_(nodes, nodes)]
    return seen(seconds_NN, peers=tuple(f"n{node}" for node in nodes))


def test_a_small_region_that_leaves_whole_is_told_from_others_that_leave() -> None:
    everybody = tuple(range(68))
    state = ChangeState()
    rng = np.random.default_rng(3)
    for seed in range(CALM):
        out = rng.choice(np.arange(3, 68), 4, replace=False).tolist()
        state, report = judge_snapshot(state, three_sites(seed, tuple(set(everybody) - set(out))))
        assert "region" not in report.fired
    # One record expires first, the other two with the next snapshot.
    state, report = judge_snapshot(state, three_sites(50, everybody[1:]))
    assert not report.fired
    state, report = judge_snapshot(state, three_sites(51, everybody[3:]))
    assert report.fired == ("region",)
    assert named(report, "region").figure == 3
    assert not report.should_move
    assert not judge_snapshot(state, three_sites(52, everybody[3:]))[1].fired


def test_a_shift_has_to_exceed_the_usual_jitter_by_half() -> None:
    state = calm_state(least_threshold=0.0)
    assert state.shift is not None
    past = state.shift.shift.calm_figures
    shift = named(judge_snapshot(state, seen(round_trips(60)))[1], "shift")
    assert shift.threshold == pytest.approx(1.5 * np.percentile(past, 95))
