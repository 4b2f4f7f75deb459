"""Reliability of nodes (R of eq. 18) from local observations and from reports by peers.

Local observations (a node's time in the swarm, its exits with and without notice) dominate. Reports
are weighted by the standing of the reporter, bounded, and decay: reporters may lie, and identities
are free. Therefore

- a reporter of full standing counts as one at most, however many reports it signs;
- all unknown reporters *together* count as one, over all the peers that they accuse;
- a reporter's weight is divided by the number of peers that it accuses;
- all reports together reduce reliability to `MIN_FACTOR` at worst, unknown reporters alone to half.

One report by an unknown peer still makes the next chain avoid the accused node if there is an
alternative: a wrong detour costs little and ends soon.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from nesa_node.core.ids import PeerId

HALF_LIFE_S = 60.0
"""Half-life of a report's weight."""
MAX_BLAME = 3.0
MIN_FACTOR = 1.0 / (1.0 + MAX_BLAME)
NEWCOMER_S, FULL_STANDING_S = 60.0, 660.0
"""Time in the swarm from which a node's reports begin to count, and count in full."""
LONG_STANDING_S = 3600.0
"""Time in the swarm from which reports with a lasting effect (speed claims) count in full."""
HORIZON_S = 600.0
"""Length of a session, which a node should survive."""
PRIOR_S, PRIOR_FAILURES = 3600.0, 0.1
"""Prior of an unknown node: one failure in ten hours."""
DRAIN_WEIGHT = 0.1
"""Weight of a planned exit, in failures: sessions are handed over, which costs a pause."""
CLAIMED_UPTIME_S = 3600.0
"""Announced uptime that is accepted beyond the time observed locally."""
_BLAME_S = 10.0
"""Chain penalty in seconds per unit of blame."""
# If two adjacent nodes stall only one may be at fault, and the client cannot tell which.
_SEVERITY = {"lost": 1.0, "wrong": 1.0, "stalled": 0.5, "slow": 0.3, "refused": 0.3}


@dataclass(frozen=True, slots=True)
class Accusation:
    """A report by one peer about another: the kind of failure and its age."""

    reporter: PeerId
    peer: PeerId
    kind: str
    age_s: float


def reliability(
    uptime_s: float,
    failures: float,
    drains: float,
    blame: float = 0.0,
    stability: float = 1.0,
) -> float:
    """The probability, 0 to 1, that a node stays available for the length of a session.

    `uptime_s`: its time in the swarm, in which `failures` exits without notice and `drains` planned
    ones were observed. `blame`: aggregate of reports (`blames`). `stability`: topological stability
    (homology), 0 to 1; its square root is used, since uptime reflects a part of it already.
    """
    events = PRIOR_FAILURES + max(failures, 0.0) + DRAIN_WEIGHT * max(drains, 0.0)
    per_s = events / (PRIOR_S + max(uptime_s, 0.0))
    place: float = math.sqrt(min(max(stability, 0.0), 1.0))
    return math.exp(-HORIZON_S * per_s) * place * blame_factor(blame)


def blame_factor(blame: float) -> float:
    """Factor on a node's reliability, from 1 without blame down to `MIN_FACTOR`."""
    return 1.0 / (1.0 + min(max(blame, 0.0), MAX_BLAME))


def blame_penalty_s(blame: float) -> float:
    """Penalty in seconds for chains through an accused node."""
    return _BLAME_S * min(max(blame, 0.0), MAX_BLAME)


def believed_uptime_s(claimed_s: float, known_s: float) -> float:
    """The announced uptime, capped at `CLAIMED_UPTIME_S` above the observed one."""
    return min(claimed_s, known_s + CLAIMED_UPTIME_S)


def standing(known_s: float, reliability: float) -> float:
    """Weight of a serving node's reports, 0 to 1, by its time in the swarm and its reliability."""
    seniority = (known_s - NEWCOMER_S) / (FULL_STANDING_S - NEWCOMER_S)
    return min(max(seniority, 0.0), 1.0) * min(max(reliability, 0.0), 1.0)


def long_standing(known_s: float, reliability: float) -> float:
    """Weight, 0 to 1, of reports whose effect lasts an hour (`Claims.reported`).

    Stricter than `standing`, since the effect outlasts a detour: after a quarter of an hour in the
    swarm the weight of a node's reports about speeds is still close to 0.
    """
    seniority = (known_s - FULL_STANDING_S) / (LONG_STANDING_S - FULL_STANDING_S)
    return min(max(seniority, 0.0), 1.0) * min(max(reliability, 0.0), 1.0)


def corroborated(words: Iterable[float]) -> float:
    """The sum of weights without the largest: no single reporter can make it positive."""
    counted = sorted(words)
    return sum(counted[:-1])


def blames(
    accusations: Iterable[Accusation], standing_of: Callable[[PeerId], float]
) -> Mapping[PeerId, float]:
    """Blame of every accused peer, in reporters of full standing, at most `MAX_BLAME`.

    `standing_of` returns 0 for an unknown reporter. Reports of peers about themselves are ignored.
    """
    fresh = _latest(accusations)
    accused = Counter(accusation.reporter for accusation in fresh)
    word = {
        reporter: min(max(standing_of(reporter), 0.0), 1.0) / count
        for reporter, count in accused.items()
    }
    # The rest of the weight of a partly known reporter counts with the unknown reporters.
    unknown = {reporter: 1.0 / count - word[reporter] for reporter, count in accused.items()}
    blame: defaultdict[PeerId, float] = defaultdict(float)
    rumour: defaultdict[PeerId, float] = defaultdict(float)
    strangers = sum(1.0 - min(max(standing_of(reporter), 0.0), 1.0) for reporter in accused)
    for accusation in fresh:
        weight = _SEVERITY.get(accusation.kind, 0.3) * _left(accusation.age_s)
        blame[accusation.peer] += weight * word[accusation.reporter]
        rumour[accusation.peer] += weight * unknown[accusation.reporter]
    share = 1.0 / max(strangers, 1.0)
    return {peer: min(blame[peer] + rumour[peer] * share, MAX_BLAME) for peer in blame}


def _left(age_s: float) -> float:
    return math.exp2(-max(age_s, 0.0) / HALF_LIFE_S)


def _latest(accusations: Iterable[Accusation]) -> list[Accusation]:
    """The heaviest accusation of each pair of reporter and peer."""
    best: dict[tuple[PeerId, PeerId], Accusation] = {}
    for accusation in accusations:
        if accusation.reporter == accusation.peer:
            continue
        at = accusation.reporter, accusation.peer
        if at not in best or _weight(accusation) > _weight(best[at]):
            best[at] = accusation
    return list(best.values())


def _weight(accusation: Accusation) -> float:
    return _SEVERITY.get(accusation.kind, 0.3) * _left(accusation.age_s)
