"""Reliability of nodes (R of eq. 18) from local observations and from reports by peers.

Local observations (a node's time in the swarm, its exits with and without notice) dominate. Reports
are weighted by the standing of the reporter, bounded, and decay: reporters may lie, and identities
are free. Therefore

- a reporter of full standing counts as one at most, however many reports it signs;
- all unknown reporters *together* count as one, over all the peers that they accuse;
- a reporter's weight is divided by the number of peers that it accuses;
- all reports together reduce reliability to 1 / (1 + `MAX_BLAME`) at worst, unknown reporters alone
to half.

One report by an unknown peer still makes the next chain avoid the accused node if there is an
alternative: a wrong detour costs little and ends soon.

Also here: decaying penalties for peers that failed recently (`FailurePenalties`), and announced
speeds capped by measurements from outside (`SpeedClaims`).
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from nesa_node.core.ids import PeerId
from nesa_node.routing.chain_request import RECOVERY_S, TOKENS_PER_SESSION
from nesa_node.topology.snapshot import NodeState

BLAME_HALF_LIFE_S = 60.0
"""Half-life of a report's weight."""
MAX_BLAME = 3.0
NEWCOMER_S, FULL_STANDING_S = 60.0, 660.0
"""Time in the swarm from which a node's reports begin to count, and count in full."""
LONG_STANDING_S = 3600.0
"""Time in the swarm from which reports with a lasting effect (speed claims) count in full."""
SESSION_HORIZON_S = 600.0
"""Length of a session, which a node should survive."""
PRIOR_S, PRIOR_FAILURES = 3600.0, 0.1
"""Prior of an unknown node: one failure in ten hours."""
DRAIN_WEIGHT = 0.1
"""Weight of a planned exit, in failures: sessions are handed over, which costs a pause."""
MAX_UNSEEN_UPTIME_S = 3600.0
"""Announced uptime that is accepted beyond the time observed locally."""
PRIOR_AUDITS = 100
"""Passed audits that an unknown node counts as having."""
MAX_LOST_AUDITS = 3
"""Audits in a row that a node's lost connections prevented, from which on it is a last resort."""
_PENALTY_PER_BLAME_S = 10.0
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
) -> float:
    """The probability, 0 to 1, that a node stays available for the length of a session.

    `uptime_s`: its time in the swarm, in which `failures` exits without notice and `drains` planned
    ones were observed. `blame`: aggregate of reports (`aggregate_blame`).
    """
    events = PRIOR_FAILURES + max(failures, 0.0) + DRAIN_WEIGHT * max(drains, 0.0)
    per_s = events / (PRIOR_S + max(uptime_s, 0.0))
    return math.exp(-SESSION_HORIZON_S * per_s) * blame_factor(blame)


def blame_factor(blame: float) -> float:
    """Factor on a node's reliability, from 1 without blame down to 1 / (1 + `MAX_BLAME`)."""
    return 1.0 / (1.0 + min(max(blame, 0.0), MAX_BLAME))


def blame_penalty_s(blame: float) -> float:
    """Penalty in seconds for chains through an accused node."""
    return _PENALTY_PER_BLAME_S * min(max(blame, 0.0), MAX_BLAME)


def distrust_s(passed_audits: int, lost_audits: int = 0) -> float:
    """Expected seconds per token that a node costs whose work may be wrong, by its passed audits.

    A session with a wrong node is computed once more, which is taken to cost what a lost node
    does, with the probability of the rule of succession: one in a hundred for a node of which
    nothing is known. `lost_audits` are those that the node prevented in a row, counted as failed
    ones; from `MAX_LOST_AUDITS` on other nodes are used, where there are any.
    """
    if lost_audits >= MAX_LOST_AUDITS:
        return RECOVERY_S
    seen = PRIOR_AUDITS + max(passed_audits, 0) + lost_audits
    return RECOVERY_S * (1 + lost_audits) / seen / TOKENS_PER_SESSION


def clamp_uptime_s(claimed_s: float, known_s: float) -> float:
    """The announced uptime, capped at `MAX_UNSEEN_UPTIME_S` above the observed one."""
    return min(claimed_s, known_s + MAX_UNSEEN_UPTIME_S)


def reporter_standing(known_s: float, reliability: float) -> float:
    """Weight of a serving node's reports, 0 to 1, by its time in the swarm and its reliability."""
    seniority = (known_s - NEWCOMER_S) / (FULL_STANDING_S - NEWCOMER_S)
    return min(max(seniority, 0.0), 1.0) * min(max(reliability, 0.0), 1.0)


def long_term_standing(known_s: float, reliability: float) -> float:
    """Weight, 0 to 1, of reports whose effect lasts an hour (`SpeedClaims.record_reports`).

    Stricter than `reporter_standing`, since the effect outlasts a detour: after a quarter of an
    hour in the swarm the weight of a node's reports about speeds is still close to 0.
    """
    seniority = (known_s - FULL_STANDING_S) / (LONG_STANDING_S - FULL_STANDING_S)
    return min(max(seniority, 0.0), 1.0) * min(max(reliability, 0.0), 1.0)


def corroborated_weight(words: Iterable[float]) -> float:
    """The sum of weights without the largest: no single reporter can make it positive."""
    counted = sorted(words)
    return sum(counted[:-1])


def aggregate_blame(
    accusations: Iterable[Accusation], standing_by_peer: Callable[[PeerId], float]
) -> Mapping[PeerId, float]:
    """Blame of every accused peer, in reporters of full standing, at most `MAX_BLAME`.

    `standing_by_peer` returns 0 for an unknown reporter. Reports of peers about themselves are
    ignored.
    """
    fresh = _heaviest_accusations(accusations)
    accused = Counter(accusation.reporter for accusation in fresh)
    word = {
        reporter: min(max(standing_by_peer(reporter), 0.0), 1.0) / count
        for reporter, count in accused.items()
    }
    # The rest of the weight of a partly known reporter counts with the unknown reporters.
    unknown = {reporter: 1.0 / count - word[reporter] for reporter, count in accused.items()}
    blame: defaultdict[PeerId, float] = defaultdict(float)
    rumour: defaultdict[PeerId, float] = defaultdict(float)
    strangers = sum(1.0 - min(max(standing_by_peer(reporter), 0.0), 1.0) for reporter in accused)
    for accusation in fresh:
        weight = _accusation_weight(accusation)
        blame[accusation.peer] += weight * word[accusation.reporter]
        rumour[accusation.peer] += weight * unknown[accusation.reporter]
    share = 1.0 / max(strangers, 1.0)
    return {peer: min(blame[peer] + rumour[peer] * share, MAX_BLAME) for peer in blame}


def _heaviest_accusations(accusations: Iterable[Accusation]) -> list[Accusation]:
    """The heaviest accusation of each pair of reporter and peer."""
    best: dict[tuple[PeerId, PeerId], Accusation] = {}
    for accusation in accusations:
        if accusation.reporter == accusation.peer:
            continue
        at = accusation.reporter, accusation.peer
        if at not in best or _accusation_weight(accusation) > _accusation_weight(best[at]):
            best[at] = accusation
    return list(best.values())


def _accusation_weight(accusation: Accusation) -> float:
    decay = math.exp2(-max(accusation.age_s, 0.0) / BLAME_HALF_LIFE_S)
    return _SEVERITY.get(accusation.kind, 0.3) * decay


_MAX_PENALIZED_PEERS = 4096
_MIN_PENALTY_S = 1e-3


class FailurePenalties:
    """Per-peer penalties in seconds: raised by each failure, halved every `half_life_s`.

    A penalty is not a ban: a chain still goes through a failed peer that alone holds a block.
    `clock` returns monotonic seconds (`time.monotonic`).
    """

    def __init__(
        self,
        clock: Callable[[], float],
        half_life_s: float = 30.0,
        *,
        failure_s: float = 10.0,
        max_penalty_s: float = 300.0,
    ) -> None:
        if half_life_s <= 0:
            raise ValueError(f"half_life_s must be positive, got {half_life_s}")
        self._clock = clock
        self._half_life_s = half_life_s
        self._failure_s = failure_s
        self._max_penalty_s = max_penalty_s
        self._penalties: dict[PeerId, tuple[float, float]] = {}

    def record_failure(self, peer: PeerId) -> None:
        """Record one failure of `peer`; repeated failures add up to at most `max_penalty_s`."""
        penalty_s = min(self.penalty_s(peer) + self._failure_s, self._max_penalty_s)
        self._penalties[peer] = (penalty_s, self._clock())
        if len(self._penalties) > _MAX_PENALIZED_PEERS:
            smallest = min(list(self._penalties), key=self.penalty_s)
            self._penalties.pop(smallest, None)

    def penalty_s(self, peer: PeerId) -> float:
        """Seconds to add to the cost of a hop through `peer`; 0 for a peer that never failed."""
        # Planner threads read while the event loop removes entries.
        found = self._penalties.get(peer)
        if found is None:
            return 0.0
        penalty_s, since = found
        left_s: float = penalty_s * 0.5 ** ((self._clock() - since) / self._half_life_s)
        if left_s < _MIN_PENALTY_S:
            self._penalties.pop(peer, None)
            return 0.0
        return left_s


REPORTABLE_RATIO = 4.0
"""Claims above this multiple of the measured speed are reported: load alone cannot explain it."""
MIN_CORROBORATION = 0.5
"""Corroboration needed to act on reports, in reporters of full standing beside the first."""
MAX_CLAIM_RATIO = 1.25
"""Claims up to this multiple of the measured speed are accepted: load and network vary."""
MEASUREMENT_TTL_S = 3600.0
"""Seconds for which a measurement caps a claim."""
_MAX_MEASURED_PEERS = 4096


class SpeedClaims:
    """Decode speeds of nodes measured from outside, with which their claims are capped.

    `clock` returns monotonic seconds (`time.monotonic`).
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._measured: OrderedDict[PeerId, tuple[float, float]] = OrderedDict()

    def record_measurement(self, peer: PeerId, tokens_per_s: float) -> None:
        """Record the decode speed of `peer` through its whole span, for one session."""
        if not tokens_per_s > 0:
            raise ValueError(f"{tokens_per_s} tokens/s is no speed")
        self._measured[peer] = (tokens_per_s, self._clock())
        self._measured.move_to_end(peer)
        if len(self._measured) > _MAX_MEASURED_PEERS:
            self._measured.popitem(last=False)

    def record_unmeasurable(self, node: NodeState) -> None:
        """Halve the accepted speed of `node`, which could not be measured."""
        if node.decode_tokens_per_s > 0:
            believed = self.clamp(node).decode_tokens_per_s
            self.record_measurement(node.peer_id, believed / 2 / MAX_CLAIM_RATIO)

    def record_reports(self, node: NodeState, doubt: float) -> None:
        """Cap the speed of `node`, which peers report as overstated, as if measured here.

        The cap is the claim divided by `REPORTABLE_RATIO`. `doubt`: weight of the reports, as
        `corroborated_weight` counts it; below `MIN_CORROBORATION` nothing changes.
        """
        speed = node.decode_tokens_per_s
        if (
            doubt >= MIN_CORROBORATION
            and speed > 0
            and self.measurement_age_s(node.peer_id) > MEASUREMENT_TTL_S
        ):
            self.record_measurement(node.peer_id, speed / REPORTABLE_RATIO / MAX_CLAIM_RATIO)

    def measurement_age_s(self, peer: PeerId) -> float:
        """Seconds since `peer` was measured; inf if never."""
        known = self._measured.get(peer)
        return float("inf") if known is None else self._clock() - known[1]

    def clamp(self, node: NodeState) -> NodeState:
        """`node` with capped speeds: prefill shrinks by the same ratio as decode."""
        if (
            self.measurement_age_s(node.peer_id) > MEASUREMENT_TTL_S
            or node.decode_tokens_per_s <= 0
        ):
            return node
        most = MAX_CLAIM_RATIO * self._measured[node.peer_id][0]
        share = min(most / node.decode_tokens_per_s, 1.0)
        if share == 1.0:
            return node
        return replace(
            node,
            decode_tokens_per_s=share * node.decode_tokens_per_s,
            prefill_tokens_per_s=share * node.prefill_tokens_per_s,
        )
