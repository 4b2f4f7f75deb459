"""Tuning of the greedy rule in a live swarm, judged on held-out snapshots."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from nesa_node.routing.fitness import fitness, ratios
from nesa_node.routing.greedy import Parameters
from nesa_node.routing.problem import Floats
from nesa_node.routing.recorded import scenarios, spread
from nesa_node.routing.tuned import TUNED
from nesa_node.routing.tuner import Report, tune
from nesa_node.topology.snapshot import Snapshot

LEAST = 24
"""Snapshots needed for tuning."""
MOST = 96
HELD_OUT = 1 / 3
STRETCHES = 6
"""Periods into which held-out sessions are split for the standard error."""
MIN_GAIN = 0.01
"""Relative gain in session time needed for a change."""
ERRORS = 3.0
"""Gain needed for a change, in standard errors."""
_POPULATION = 24
_MOST_GENERATIONS = 20


@dataclass(frozen=True, slots=True)
class Retuned:
    """The parameters to use, and the reason.

    `gain`: relative gain of the best candidate over those in use, on held-out sessions;
    `gain_error`: its standard error. Both are 0 if nothing was tried.
    """

    parameters: Parameters
    reason: str
    gain: float = 0.0
    gain_error: float = 0.0
    learnt_from: int = 0
    held_out: int = 0
    candidates: int = 0


def retune(
    snapshots: Sequence[Snapshot],
    rng: np.random.Generator,
    *,
    now: Parameters,
    seconds: float,
    clock: Callable[[], float],
    shipped: Parameters = TUNED,
) -> Retuned:
    """Parameters for the swarm of `snapshots` (oldest first), in about `seconds` of `clock`.

    They are searched on the older snapshots and judged on the newest, which are held out.
    Snapshots of one swarm are correlated, so that standard errors are taken over a few periods, not
    over sessions; and hourly tuning makes many comparisons, so that a gain must exceed three.

    `now` (in use) stays unless a candidate gains on held-out snapshots. Tuned parameters (`now` is
    not `shipped`) are replaced by `shipped` if they no longer gain there.
    """
    chosen = spread(snapshots, MOST)
    if len(chosen) < LEAST:
        return Retuned(now, f"{len(chosen)} snapshots are too few to tune on, {LEAST} are needed")
    cut = round(len(chosen) * (1 - HELD_OUT))
    learn, held_out = scenarios(chosen[:cut], rng), scenarios(chosen[cut:], rng)
    if len(learn) < LEAST // 2 or len(held_out) < STRETCHES:
        return Retuned(now, "too few snapshots have a chain to tune on")
    before = ratios(now, held_out)
    if now != shipped and before.mean() >= ratios(shipped, held_out).mean():
        return Retuned(shipped, "the tuned parameters are no longer better than the shipped ones")
    began = clock()
    fitness(now, learn)
    generations = _affordable(seconds, clock() - began)
    if generations < 1:
        return Retuned(now, f"one candidate takes too long for {seconds:g} s")
    report = tune(learn, held_out, rng, before=now, population=_POPULATION, generations=generations)
    return judge(report, before, ratios(report.winner, held_out), learnt_from=len(learn))


def judge(report: Report, before: Floats, after: Floats, *, learnt_from: int) -> Retuned:
    """The winner if it gains enough, else the parameters before.

    `before`, `after`: time ratios of the held-out scenarios in chronological order.
    """
    saved = 1.0 - after / before
    means = np.array([part.mean() for part in np.array_split(saved, STRETCHES)])
    gain, error = float(saved.mean()), float(means.std(ddof=1) / math.sqrt(len(means)))
    least = max(ERRORS * error, MIN_GAIN)
    found = f"{gain:.2%} +- {error:.2%} gained on {len(saved)} held-out sessions"
    gains = gain > least
    return Retuned(
        parameters=report.winner if gains else report.before,
        reason=found if gains else f"{found}: less than {least:.2%}, nothing changes",
        gain=gain,
        gain_error=error,
        learnt_from=learnt_from,
        held_out=len(saved),
        candidates=report.evaluations,
    )


def _affordable(seconds: float, candidate_s: float) -> int:
    """Generations that fit into `seconds`; random search then evaluates as many candidates."""
    candidates = seconds / (2 * max(candidate_s, 1e-6))
    return min(int(candidates / _POPULATION) - 1, _MOST_GENERATIONS)
