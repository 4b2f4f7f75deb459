from __future__ import annotations

import numpy as np

from benchmarks import forecast
from nesa_node.core.ids import Span


def _trace(*, habits: bool = True) -> forecast.Trace:
    return forecast.make_trace(24, np.random.default_rng(1), habits=habits)


def test_forecasts_know_nothing_of_the_time_that_they_are_for() -> None:
    """What is later than a look, and later than what regressions learn from, changes nothing."""
    trace = _trace()
    at = forecast.HELD_OUT + 500
    changed_TN = trace.on_TN.copy()
    changed_TN[at + 1 :] = ~changed_TN[at + 1 :]
    other = forecast.Trace(
        changed_TN, trace.region_N, trace.hour_TR, trace.height_TR, trace.max_blocks_N
    )
    before, after = (
        forecast.presence_forecasts(each, forecast.HELD_OUT) for each in (trace, other)
    )
    assert set(before) == set(forecast.MODELS)
    for model in forecast.MODELS:
        assert np.array_equal(before[model][: at + 1], after[model][: at + 1])


def test_a_day_that_repeats_is_forecast() -> None:
    steps = np.arange(forecast.DAYS * forecast.DAY)
    daily_T1 = (steps % forecast.DAY < 60).astype(np.float64)[:, None]
    guess_T1 = forecast.seasonal(daily_T1, forecast.AHEAD)
    learnt = slice(8 * forecast.DAY, -forecast.AHEAD)
    later_T1 = daily_T1[8 * forecast.DAY + forecast.AHEAD :]
    assert np.abs(guess_T1[learnt] - later_T1).mean() < 0.05


def test_survival_is_the_share_that_lasted_an_hour_longer() -> None:
    """Of nodes that are on for exactly 30 looks, those of age 25 and more are off in an hour."""
    on_TN = (np.arange(4000)[:, None] // 30 % 2 == 0).repeat(3, axis=1)
    chance_TN = forecast.survival(on_TN, 4000)
    age_TN = forecast.run_lengths(on_TN)
    assert age_TN.max() == 30
    assert (chance_TN[on_TN & (age_TN > 24)] < 0.05).all()
    assert (chance_TN[on_TN & (age_TN <= 24)] > 0.95).all()


def test_known_leavers_are_replaced_before_they_leave() -> None:
    """One holder of each half leaves; a third node could take over, and does so only if told."""
    looks = 40
    on_TN = np.ones((looks, 3), dtype=bool)
    on_TN[20:, 0] = False
    trace = forecast.Trace(
        on_TN,
        np.zeros(3, dtype=np.int64),
        np.zeros((looks, 1)),
        np.zeros((looks, 1)),
        np.full(3, 4),
    )
    spans = [Span(0, 4), Span(4, 8), Span(4, 8)]
    plain = forecast.follow(trace, spans, range(looks), replicas=1, leaving_TN=None)
    leaving_TN = forecast.true_leavers(trace)
    assert leaving_TN[14, 0]
    assert not leaving_TN[13].any()
    ahead = forecast.follow(trace, spans, range(looks), replicas=1, leaving_TN=leaving_TN)
    assert plain.hole_block_minutes > 0
    assert ahead.hole_block_minutes == 0
    assert plain.moves == ahead.moves == 1
