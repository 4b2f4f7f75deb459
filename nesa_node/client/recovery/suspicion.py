"""Rules for when a silent hop is lost, a link between hops stalled, and a chain too slow.

Pure: the session's `FailureDetector` sends probes and reports events. Timeouts adapt to usual
answer times; `docs/decisions/019` gives the reasons.

An output is late → its hops are probed → an answer is late as well → replacements are looked for →
one answers and the hop does not → the hop is lost.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Literal

from nesa_node.swarm.protocol.messages import Pong

LATE_FACTOR = 4.0
"""An output is late after this many usual steps, within the bounds below."""
MIN_LATE_S, MAX_LATE_S = 0.2, 0.5
"""Bounds of the wait for an output before its hops are probed. A probe has about 100 bytes."""
PROBE_INTERVAL_S = 0.5
"""Seconds from a probe's answer to the next probe, while the output is late."""
POLL_INTERVAL_S = 0.05
"""Seconds between checks of hops that have not answered."""
SUSPECT_FACTOR = 2.0
MIN_SUSPECT_S, MAX_SUSPECT_S = 0.25, 1.0
"""Bounds of the wait for a probe's answer before replacements are looked for."""
LOST_FACTOR = 4.0
MIN_LOST_S, MAX_LOST_S = 1.0, 5.0
"""Bounds of the wait for a probe's answer before a hop is replaced by a node that answers. Event
loops of busy machines were seen to answer after 0.4 s."""
MAX_SILENCE_S = 8.0
"""Seconds of silence after which a hop is lost even without a replacement."""
MIN_OVERSLEEP_S = 0.05
"""Smallest delay of a timer that shows that this process did not run, and so could not receive."""
MAX_SAMPLES = 16
"""Most step times, and most answer times, that are kept."""

SuspicionEvent = Literal["raised", "withdrawn", "confirmed"]


class HopState(Enum):
    TRUSTED = "trusted"
    PROBED = "probed"
    """An output is late: the hop was probed."""
    SUSPECTED = "suspected"
    """The probe's answer is late as well: replacements are looked for."""
    LOST = "lost"


TRANSITIONS: dict[HopState, frozenset[HopState]] = {
    HopState.TRUSTED: frozenset({HopState.PROBED}),
    HopState.PROBED: frozenset({HopState.TRUSTED, HopState.SUSPECTED}),
    HopState.SUSPECTED: frozenset({HopState.TRUSTED, HopState.LOST}),
    HopState.LOST: frozenset(),
}


@dataclass(slots=True)
class _HopStatus:
    state: HopState = HopState.TRUSTED
    since: float = 0.0
    """When the pending probe was sent; in `TRUSTED`, when the next probe is due."""
    received_bytes: int = 0
    """Bytes received from the hop by then."""

    def transition_to(self, state: HopState) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state} to {state}"
        self.state = state


class Suspicion:
    """Suspicion of each hop of one session. `clock` returns monotonic seconds.

    Time in which this process did not run is not counted (`record_oversleep`).
    """

    def __init__(
        self, clock: Callable[[], float], events: Counter[SuspicionEvent] | None = None
    ) -> None:
        self.events: Counter[SuspicionEvent] = Counter() if events is None else events
        self._clock = clock
        self._overslept_s = 0.0
        self._hops: dict[Hashable, _HopStatus] = {}
        self._steps_s: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._answers_s: deque[float] = deque(maxlen=MAX_SAMPLES)

    @property
    def now(self) -> float:
        """Seconds by the clock without time overslept."""
        return self._clock() - self._overslept_s

    @property
    def suspected(self) -> frozenset[Hashable]:
        """Hops in `SUSPECTED`."""
        return frozenset(hop for hop, its in self._hops.items() if its.state is HopState.SUSPECTED)

    @property
    def usual_step_s(self) -> float | None:
        """Median of the last decode steps, in seconds."""
        return sorted(self._steps_s)[len(self._steps_s) // 2] if self._steps_s else None

    @property
    def late_after_s(self) -> float:
        """Wait for an output before its hops are probed."""
        usual_s = self.usual_step_s
        if usual_s is None:
            return MAX_LATE_S
        return min(max(LATE_FACTOR * usual_s, MIN_LATE_S), MAX_LATE_S)

    @property
    def suspect_after_s(self) -> float:
        """Wait for a probe's answer before replacements are looked for."""
        return min(max(SUSPECT_FACTOR * self._usual_answer_s, MIN_SUSPECT_S), MAX_SUSPECT_S)

    @property
    def lost_after_s(self) -> float:
        """Wait for a probe's answer before a hop is lost, if a replacement answers."""
        return min(max(LOST_FACTOR * self._usual_answer_s, MIN_LOST_S), MAX_LOST_S)

    @property
    def _usual_answer_s(self) -> float:
        """Longest of the last answers; without answers a step's time, which includes all hops."""
        return max(self._answers_s) if self._answers_s else self.usual_step_s or 0.0

    def record_oversleep(self, seconds: float) -> None:
        """Subtract the delay of a timer: messages could not be received meanwhile."""
        if seconds > MIN_OVERSLEEP_S:
            self._overslept_s += seconds

    def record_step(self, seconds: float) -> None:
        """Note the time of a decode step, from sending to output."""
        self._steps_s.append(seconds)

    def record_output(self, names: Iterable[Hashable]) -> None:
        """Trust the hops that an output has passed."""
        if self._hops:
            for name in names:
                hop = self._hops.pop(name, None)
                if hop is not None and hop.state is HopState.SUSPECTED:
                    self.events["withdrawn"] += 1

    def keep_only(self, names: Iterable[Hashable]) -> None:
        """Forget all hops except `names`, those of the current chain."""
        if self._hops:
            kept = set(names)
            for name in [name for name in self._hops if name not in kept]:
                if self._hops.pop(name).state is HopState.SUSPECTED:
                    # Lost early, since its stream ended.
                    self.events["confirmed"] += 1

    def state(self, name: Hashable) -> HopState:
        hop = self._hops.get(name)
        return HopState.TRUSTED if hop is None else hop.state

    def wants_probe(self, name: Hashable) -> bool:
        """Whether the hop is to be probed now, given that an output is late."""
        hop = self._hops.get(name)
        return hop is None or (hop.state is HopState.TRUSTED and self.now >= hop.since)

    def record_probe(self, name: Hashable, received_bytes: int) -> None:
        """Note that a probe is sent to the hop, from which `received_bytes` have come so far."""
        hop = self._hops.setdefault(name, _HopStatus())
        hop.transition_to(HopState.PROBED)
        hop.since, hop.received_bytes = self.now, received_bytes

    def update(
        self,
        name: Hashable,
        received_bytes: int,
        *,
        replaceable: bool,
        probe_transit_s: float = 0.0,
    ) -> HopState:
        """Update the hop's state, `received_bytes` having come from it so far; return the state.

        `replaceable`: a node with the same blocks has answered. `probe_transit_s` is the time that
        data ahead of the probe may take.
        """
        hop = self._hops.get(name)
        if hop is None or hop.state in (HopState.TRUSTED, HopState.LOST):
            return self.state(name)
        silent_s = self.now - hop.since
        if received_bytes != hop.received_bytes:
            self._answers_s.append(silent_s)
            if hop.state is HopState.SUSPECTED:
                self.events["withdrawn"] += 1
            hop.transition_to(HopState.TRUSTED)
            hop.since = self.now + PROBE_INTERVAL_S
            return hop.state
        silent_s -= probe_transit_s
        if hop.state is HopState.PROBED:
            if silent_s >= self.suspect_after_s:
                hop.transition_to(HopState.SUSPECTED)
                self.events["raised"] += 1
        elif silent_s >= (self.lost_after_s if replaceable else MAX_SILENCE_S):
            hop.transition_to(HopState.LOST)
            self.events["confirmed"] += 1
        return hop.state

    def silent_s(self, name: Hashable) -> float:
        """Seconds for which the hop has not answered its probe; 0 without a pending probe."""
        hop = self._hops.get(name)
        if hop is None or hop.state is HopState.TRUSTED:
            return 0.0
        return self.now - hop.since


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """A node's answer to a probe that was sent at `sent_at`."""

    pong: Pong
    sent_at: float


class StallDetector:
    """Detects links of a chain that are stalled between two nodes that both answer the client.

    Judges by their pongs: one node has begun to push a step, and the next node has not received it,
    is idle, and receives no bytes. `docs/decisions/023` gives the reasons. Times are those of the
    session's `Suspicion`.
    """

    def __init__(self) -> None:
        self._last_arrival: dict[Hashable, tuple[int, float]] = {}
        """By the receiving node: bytes received, and when that number was first seen."""

    def clear(self) -> None:
        """Start over after an output or a change of the chain."""
        self._last_arrival.clear()

    def find_stall(
        self, chain: Sequence[tuple[Hashable, ProbeReport | None]], epoch: int, now: float
    ) -> tuple[int, float] | None:
        """Find the first stalled link of `chain`, nodes in order, each with its last report.

        Returns the receiving node's index, and the stall's least duration in seconds.
        """
        found: tuple[int, float] | None = None
        for place, ((_, before), (name, report)) in enumerate(pairwise(chain), 1):
            came = _received_of_pushed(before, report, epoch)
            if came is None or report is None:
                self._last_arrival.pop(name, None)
                continue
            known, since = self._last_arrival.get(name, (-1, now))
            if came != known:
                since = now
            self._last_arrival[name] = came, since
            # Earlier probes may describe the time before the step was pushed.
            stalled_s = report.sent_at - since
            if stalled_s > 0 and found is None:
                found = place, stalled_s
        return found


def _received_of_pushed(
    before: ProbeReport | None, report: ProbeReport | None, epoch: int
) -> int | None:
    """Bytes received by a node that waits for a step which, by its pong, the one before pushes."""
    if before is None or report is None:
        return None
    sender, receiver = before.pong, report.pong
    if sender.epoch != epoch or receiver.epoch != epoch or receiver.busy:
        return None
    if sender.pushed is None or receiver.upstream_bytes is None:
        return None
    return receiver.upstream_bytes if sender.pushed > receiver.step else None


MEDIAN_STEPS = 12
"""Steps in the compared median: a few slow ones in a row are usually another session's prefill."""
SLOWDOWN_FACTOR = 1.5
"""Ratio of the median to the expected or best step time above which steps are slow."""
SLACK_S = 0.02
"""Allowance for noise in short steps, in seconds."""
FIRST_CHECK_PAUSE_S = 30.0
"""Pause after the first alarm, in seconds. Each further pause doubles."""
MAX_CHECK_PAUSE_S = 1800.0
"""Longest pause, in seconds."""


class SlowdownDetector:
    """Compares decode steps with the plan and the best median so far. `clock`: monotonic, in s."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._expected_s = self._best_s = math.inf
        self._steps_s: deque[float] = deque(maxlen=MEDIAN_STEPS)
        self._not_before = 0.0
        self._pause_s = FIRST_CHECK_PAUSE_S

    def start_chain(self, expected_s: float | None) -> None:
        """Start over with a new chain. Its steps should take `expected_s`, if known."""
        self._expected_s = math.inf if expected_s is None else expected_s
        self._best_s = math.inf
        self._steps_s.clear()
        self._not_before = self._clock() + FIRST_CHECK_PAUSE_S / 2

    def record_step(self, step_s: float) -> None:
        """Add the seconds of one decode step."""
        self._steps_s.append(step_s)
        if len(self._steps_s) == MEDIAN_STEPS:
            self._best_s = min(self._best_s, self.step_s)

    @property
    def step_s(self) -> float:
        """Median of the last steps. Needs at least one."""
        return statistics.median(self._steps_s)

    def should_reconsider(self) -> bool:
        """Whether to search for a better chain now; after True, False for a pause."""
        if len(self._steps_s) < MEDIAN_STEPS or self._clock() < self._not_before:
            return False
        if self.step_s <= SLOWDOWN_FACTOR * min(self._expected_s, self._best_s) + SLACK_S:
            return False
        self._not_before = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_CHECK_PAUSE_S)
        return True
