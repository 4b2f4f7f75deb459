"""How likely a node is there when it is needed: R of eq. 18, from what was seen and what is said.

What this machine has seen itself (a node's time in the swarm, its ends with and without notice)
makes most of it. What others report counts by their own standing, is bounded and fades: whoever
reports may lie, and identities are free. So

- a reporter that has served for a while counts as one at most, however much it says;
- all reporters that nobody knows count as one *together*, over all the peers that they accuse;
- whoever accuses many has that much less to say of each;
- all reports together make a node at worst `MIN_FACTOR` as reliable, the unknown alone half.

Even so one report of a stranger is enough for the next chain to go around the accused node, if
there is another: a wrong detour costs little and is over soon.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from nesa_node.core.ids import PeerId

HALF_LIFE_S = 60.0
MAX_BLAME = 3.0
MIN_FACTOR = 1.0 / (1.0 + MAX_BLAME)
NEWCOMER_S, FULL_STANDING_S = 60.0, 660.0
"""From when on a node's word begins to count, and in full."""
LONG_STANDING_S = 3600.0
"""From when on it counts in full where what it says is believed for as long."""
HORIZON_S = 600.0
"""A session's length: what has to be survived."""
PRIOR_S, PRIOR_FAILURES = 3600.0, 0.1
"""What is thought of a node before anything is known of it: one failure in ten hours."""
DRAIN_WEIGHT = 0.1
"""Of a planned end in failures: sessions are handed over, which costs a pause."""
CLAIMED_UPTIME_S = 3600.0
"""So much of an uptime is believed that nobody here has seen."""
_BLAME_S = 10.0
# Of two neighbours that stall only one may be at fault, and the client cannot tell which.
_SEVERITY = {"lost": 1.0, "wrong": 1.0, "stalled": 0.5, "slow": 0.3, "refused": 0.3}


@dataclass(frozen=True, slots=True)
class Accusation:
    """What one reporter says of one peer: the kind of failure, and how long ago."""

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
    """The chance, 0 to 1, that a node is there for a session's length.

    `uptime_s`: its time in the swarm, over which `failures` ends without notice and `drains`
    planned ones were seen. `blame`: what reports amount to (`blames`). `stability`: of its place
    in the network, 0 to 1 (homology); its square root counts: uptime knows a part of it already.
    """
    events = PRIOR_FAILURES + max(failures, 0.0) + DRAIN_WEIGHT * max(drains, 0.0)
    per_s = events / (PRIOR_S + max(uptime_s, 0.0))
    place: float = math.sqrt(min(max(stability, 0.0), 1.0))
    return math.exp(-HORIZON_S * per_s) * place * blame_factor(blame)


def blame_factor(blame: float) -> float:
    """What is left of a node's reliability; from 1 without blame to `MIN_FACTOR`."""
    return 1.0 / (1.0 + min(max(blame, 0.0), MAX_BLAME))


def blame_penalty_s(blame: float) -> float:
    """Seconds by which a chain through the accused seems longer, while reports are fresh."""
    return _BLAME_S * min(max(blame, 0.0), MAX_BLAME)


def believed_uptime_s(claimed_s: float, known_s: float) -> float:
    """What a node says of its uptime, as far as it can be believed."""
    return min(claimed_s, known_s + CLAIMED_UPTIME_S)


def standing(known_s: float, reliability: float) -> float:
    """What the word of a serving node counts, 0 to 1: by its time here and by its own record."""
    seniority = (known_s - NEWCOMER_S) / (FULL_STANDING_S - NEWCOMER_S)
    return min(max(seniority, 0.0), 1.0) * min(max(reliability, 0.0), 1.0)


def long_standing(known_s: float, reliability: float) -> float:
    """What its word counts for what is believed as long as an hour (`Claims.reported`), 0 to 1.

    By its time here beyond that of `standing`, since what is planned on it lasts longer than a
    detour: a node that has been here for a quarter of an hour says nothing about speeds.
    """
    seniority = (known_s - FULL_STANDING_S) / (LONG_STANDING_S - FULL_STANDING_S)
    return min(max(seniority, 0.0), 1.0) * min(max(reliability, 0.0), 1.0)


def corroborated(words: Iterable[float]) -> float:
    """The weight of reports that no single reporter can make: without the one that counts most."""
    counted = sorted(words)
    return sum(counted[:-1])


def blames(
    accusations: Iterable[Accusation], standing_of: Callable[[PeerId], float]
) -> Mapping[PeerId, float]:
    """How much every accused peer is blamed, in reporters of full standing; at most `MAX_BLAME`.

    `standing_of` a reporter is 0 for a stranger. Nobody's word about himself counts.
    """
    fresh = _latest(accusations)
    accused = Counter(accusation.reporter for accusation in fresh)
    word = {
        reporter: min(max(standing_of(reporter), 0.0), 1.0) / count
        for reporter, count in accused.items()
    }
    # A reporter that has begun to be known belongs to the unknown with the rest of its word.
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
    """Of each reporter about each peer, what weighs most."""
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
