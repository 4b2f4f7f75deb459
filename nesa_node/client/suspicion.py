"""Rules for when a silent hop counts as lost, and when a link between hops counts as stalled.

Pure: the session's `Flow` sends probes and reports events. Timeouts adapt to usual answer times;
`docs/decisions/019` gives the reasons.

An output is late → its hops are probed → an answer is late as well → replacements are looked for →
one answers and the hop does not → the hop is lost.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

LATE_FACTOR = 4.0
"""An output is late after this many usual steps, within the bounds below."""
MIN_LATE_S, MAX_LATE_S = 0.2, 0.5
"""Bounds of the wait for an output before its hops are probed. A probe has about 100 bytes."""
PROBE_EVERY_S = 0.5
"""Seconds from a probe's answer to the next probe, while the output is late."""
TICK_S = 0.05
"""Seconds between checks of hops that have not answered."""
SUSPECT_FACTOR = 2.0
MIN_SUSPECT_S, MAX_SUSPECT_S = 0.25, 1.0
"""Bounds of the wait for a probe's answer before replacements are looked for."""
LOST_FACTOR = 4.0
MIN_LOST_S, MAX_LOST_S = 1.0, 5.0
"""Bounds of the wait for a probe's answer before a hop is replaced by a node that answers. Event
loops of busy machines were seen to answer after 0.4 s."""
HOPELESS_S = 8.0
"""Seconds of silence after which a hop is lost even without a replacement."""
OVERSLEPT_S = 0.05
"""Smallest delay of a timer that shows that this process did not run, and so could not receive."""
SAMPLES = 16
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
class _Hop:
    state: HopState = HopState.TRUSTED
    since: float = 0.0
    """When the pending probe was sent; in `TRUSTED`, when the next probe is due."""
    heard: int = 0
    """Bytes received from the hop by then."""

    def become(self, state: HopState) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state} to {state}"
        self.state = state


class Suspicion:
    """Suspicion of each hop of one session. `clock` returns monotonic seconds.

    Time in which this process did not run is not counted (`overslept`).
    """

    def __init__(
        self, clock: Callable[[], float], events: Counter[SuspicionEvent] | None = None
    ) -> None:
        self.events: Counter[SuspicionEvent] = Counter() if events is None else events
        self._clock = clock
        self._overslept_s = 0.0
        self._hops: dict[Hashable, _Hop] = {}
        self._steps_s: deque[float] = deque(maxlen=SAMPLES)
        self._answers_s: deque[float] = deque(maxlen=SAMPLES)

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

    def overslept(self, seconds: float) -> None:
        """Subtract the delay of a timer: messages could not be received meanwhile."""
        if seconds > OVERSLEPT_S:
            self._overslept_s += seconds

    def stepped(self, seconds: float) -> None:
        """Note the time of a decode step, from sending to output."""
        self._steps_s.append(seconds)

    def progress(self, names: Iterable[Hashable]) -> None:
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

    def probed(self, name: Hashable, heard: int) -> None:
        """Note that a probe is sent to the hop, from which `heard` bytes have come so far."""
        hop = self._hops.setdefault(name, _Hop())
        hop.become(HopState.PROBED)
        hop.since, hop.heard = self.now, heard

    def look(
        self, name: Hashable, heard: int, *, replaceable: bool, behind_s: float = 0.0
    ) -> HopState:
        """Update the hop's state, `heard` bytes having come from it so far; return the state.

        `replaceable`: a node with the same blocks has answered. `behind_s` is the time that data
        ahead of the probe may take.
        """
        hop = self._hops.get(name)
        if hop is None or hop.state in (HopState.TRUSTED, HopState.LOST):
            return self.state(name)
        silent_s = self.now - hop.since
        if heard != hop.heard:
            self._answers_s.append(silent_s)
            if hop.state is HopState.SUSPECTED:
                self.events["withdrawn"] += 1
            hop.become(HopState.TRUSTED)
            hop.since = self.now + PROBE_EVERY_S
            return hop.state
        silent_s -= behind_s
        if hop.state is HopState.PROBED:
            if silent_s >= self.suspect_after_s:
                hop.become(HopState.SUSPECTED)
                self.events["raised"] += 1
        elif silent_s >= (self.lost_after_s if replaceable else HOPELESS_S):
            hop.become(HopState.LOST)
            self.events["confirmed"] += 1
        return hop.state

    def silent_s(self, name: Hashable) -> float:
        """Seconds for which the hop has not answered its probe; 0 without a pending probe."""
        hop = self._hops.get(name)
        waits = hop is not None and hop.state is not HopState.TRUSTED
        return self.now - hop.since if hop is not None and waits else 0.0
