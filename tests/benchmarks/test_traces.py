import itertools

import numpy as np
import pytest

from benchmarks.traces import (
    TraceEvent,
    TraceEventKind,
    TraceSettings,
    TraceStep,
    generate_trace,
)


def steps(
    snapshots: int,
    event: TraceEvent | None = None,
    seed: int = 0,
    world: TraceSettings | None = None,
) -> list[TraceStep]:
    return list(
        generate_trace(world or TraceSettings(), snapshots, np.random.default_rng(seed), event)
    )


def test_a_seed_is_a_trace() -> None:
    first, second = steps(5), steps(5)
    assert [step.peers for step in first] == [step.peers for step in second]
    np.testing.assert_array_equal(first[4].measured_s_NN, second[4].measured_s_NN)
    assert not np.array_equal(first[0].measured_s_NN, steps(1, seed=1)[0].measured_s_NN)


def test_matrices_are_what_a_filtration_takes() -> None:
    for step in steps(3):
        measured_NN = step.measured_s_NN
        assert np.array_equal(measured_NN, measured_NN.T)
        assert (np.diagonal(measured_NN) == 0).all()
        off_diagonal = ~np.eye(len(measured_NN), dtype=bool)
        assert (measured_NN[off_diagonal] > 0).all()
        assert np.isfinite(measured_NN).all()


def test_measurements_scatter_round_the_truth() -> None:
    world = TraceSettings(churn=0.0, congested=0.0, drift=0.0)
    ratios = [
        (step.measured_s_NN / np.where(step.true_s_NN > 0, step.true_s_NN, 1))[
            np.triu_indices(world.nodes, 1)
        ]
        for step in steps(20, world=world)
    ]
    assert np.median(ratios) == pytest.approx(1.0, abs=0.05)
    assert 0.005 < (np.array(ratios) > 3).mean() < 0.02  # spikes


def test_three_percent_leave_and_as_many_come() -> None:
    seen = steps(200)
    pairs = list(itertools.pairwise(seen))
    left = [len(set(a.peers) - set(b.peers)) for a, b in pairs]
    # The fixed nodes, one in eight, stay.
    assert np.mean(left) == pytest.approx(48 * 0.03 * 7 / 8, rel=0.2)
    assert all(42 <= len(step.peers) <= 48 for step in seen)
    assert {
        peer for peer, fixed in zip(seen[0].peers, seen[0].fixed_N, strict=True) if fixed
    } <= set(seen[-1].peers)


@pytest.mark.parametrize("kind", ["partition", "detour", "bad pair"])
def test_events_lengthen_what_they_say(kind: TraceEventKind) -> None:
    world = TraceSettings(churn=0.0)
    before, after = steps(2, TraceEvent(kind=kind, at=1, region=2), world=world)
    added_NN = after.true_s_NN - before.true_s_NN
    inside = before.region_N == 2
    to = before.region_N == 3 if kind == "bad pair" else ~inside
    expected = np.inf if kind == "partition" else 0.08
    assert added_NN[np.ix_(inside, to)] == pytest.approx(expected)
    untouched = ~(inside[:, None] & to | to[:, None] & inside)
    assert added_NN[untouched] == pytest.approx(0.0)
    assert np.isinf(after.measured_s_NN).any() == (kind == "partition")


def test_a_lost_region_stays_lost() -> None:
    seen = steps(30, TraceEvent(kind="regional loss", at=5, region=1))
    assert (seen[4].region_N == 1).any()
    assert not any((step.region_N == 1).any() for step in seen[5:])


def test_frail_nodes_are_congested_more_often() -> None:
    world = TraceSettings(churn=0.0, frailty=1.0)
    seen = steps(300, world=world)
    share_N = (np.array([step.congestion_s_N for step in seen]) > 0).mean(axis=0)
    assert np.corrcoef(share_N, seen[0].frailty_N)[0, 1] > 0.7
    assert share_N.mean() == pytest.approx(world.congested, rel=0.5)


def test_more_regions_than_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        steps(1, world=TraceSettings(nodes=2))
