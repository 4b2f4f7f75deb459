"""When a hop that says nothing is taken for lost: by what it usually takes, not by a fixed timeout.

Pure: a session's `Flow` sends the probes and tells what came. `docs/decisions/019` says why.
An output is late → its hops are probed → an answer is late, too → a replacement is looked for →
it answers and the hop does not → the hop is lost.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

LATE_FACTOR = 4.0
MIN_LATE_S, MAX_LATE_S = 0.2, 0.5
"""Bounds of the wait for an output before its hops are probed: a probe is a hundred bytes."""
PROBE_EVERY_S = 0.5
"""Between a probe's answer and the next probe, while the output does not come."""
TICK_S = 0.05
"""Between two looks at hops that have not answered yet."""
SUSPECT_FACTOR = 2.0
MIN_SUSPECT_S, MAX_SUSPECT_S = 0.25, 1.0
"""Bounds of the wait for a probe's answer before a replacement is looked for."""
LOST_FACTOR = 4.0
MIN_LOST_S, MAX_LOST_S = 1.0, 5.0
"""Bounds of the wait for a probe's answer before a hop is given up for a replacement that answers.
An event loop of a busy machine was seen to answer after 0.4 s."""
HOPELESS_S = 8.0
"""A hop that says nothing for so long is lost, whether there is a replacement or not."""
OVERSLEPT_S = 0.05
"""A timer of this process that is later than that: it did not run, and could not have heard."""
SAMPLES = 16

SuspicionEvent = Literal["raised", "withdrawn", "confirmed"]


class HopState(Enum):
    TRUSTED = "trusted"
    PROBED = "probed"
    """An output is late: the hop was asked whether it is there."""
    SUSPECTED = "suspected"
    """Its answer is late, too: a replacement is looked for, and the first answer wins."""
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
    """When the probe was sent that is not answered; in `TRUSTED`, when the next one is due."""
    heard: int = 0
    """Bytes that had come from it by then."""

    def become(self, state: HopState) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state} to {state}"
        self.state = state


class Suspicion:
    """Of all hops of one session. `clock` returns seconds and never goes back.

    Time in which this process did not run counts for nothing (`overslept`).
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
        """Seconds that this process was awake."""
        return self._clock() - self._overslept_s

    @property
    def suspected(self) -> frozenset[Hashable]:
        """The hops for which replacements are looked for."""
        return frozenset(hop for hop, its in self._hops.items() if its.state is HopState.SUSPECTED)

    @property
    def usual_step_s(self) -> float | None:
        """The median of the last decode steps."""
        return sorted(self._steps_s)[len(self._steps_s) // 2] if self._steps_s else None

    @property
    def late_after_s(self) -> float:
        """How long an output is waited for before its hops are probed."""
        usual_s = self.usual_step_s
        if usual_s is None:
            return MAX_LATE_S
        return min(max(LATE_FACTOR * usual_s, MIN_LATE_S), MAX_LATE_S)

    @property
    def suspect_after_s(self) -> float:
        """How long a probe's answer is waited for before a replacement is looked for."""
        return min(max(SUSPECT_FACTOR * self._usual_answer_s, MIN_SUSPECT_S), MAX_SUSPECT_S)

    @property
    def lost_after_s(self) -> float:
        """How long a probe's answer is waited for if a replacement answers meanwhile."""
        return min(max(LOST_FACTOR * self._usual_answer_s, MIN_LOST_S), MAX_LOST_S)

    @property
    def _usual_answer_s(self) -> float:
        """The longest of the last answers; until there is one, a step, which passes all hops."""
        return max(self._answers_s) if self._answers_s else self.usual_step_s or 0.0

    def overslept(self, seconds: float) -> None:
        """A timer of this process came so late: what had come meanwhile could not be heard."""
        if seconds > OVERSLEPT_S:
            self._overslept_s += seconds

    def stepped(self, seconds: float) -> None:
        """A decode step's output has come, so long after the step was sent."""
        self._steps_s.append(seconds)

    def progress(self, names: Iterable[Hashable]) -> None:
        """An output has come: the hops that it passed are there."""
        if self._hops:
            for name in names:
                hop = self._hops.pop(name, None)
                if hop is not None and hop.state is HopState.SUSPECTED:
                    self.events["withdrawn"] += 1

    def keep_only(self, names: Iterable[Hashable]) -> None:
        """The session has these hops: what is known of others is forgotten."""
        if self._hops:
            kept = set(names)
            for name in [name for name in self._hops if name not in kept]:
                if self._hops.pop(name).state is HopState.SUSPECTED:
                    # It was lost before its time was over: its stream ended.
                    self.events["confirmed"] += 1

    def state(self, name: Hashable) -> HopState:
        hop = self._hops.get(name)
        return HopState.TRUSTED if hop is None else hop.state

    def wants_probe(self, name: Hashable) -> bool:
        """Whether the hop is to be probed now, if an output is late that it is to pass."""
        hop = self._hops.get(name)
        return hop is None or (hop.state is HopState.TRUSTED and self.now >= hop.since)

    def probed(self, name: Hashable, heard: int) -> None:
        """A probe goes to the hop, from which `heard` bytes have come so far."""
        hop = self._hops.setdefault(name, _Hop())
        hop.become(HopState.PROBED)
        hop.since, hop.heard = self.now, heard

    def look(
        self, name: Hashable, heard: int, *, replaceable: bool, behind_s: float = 0.0
    ) -> HopState:
        """The hop's state now that `heard` bytes have come from it.

        `replaceable`: another node with its blocks has answered since it was suspected. The probe
        went behind bytes that may need `behind_s` for their way.
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
        """How long the hop has not answered its probe."""
        hop = self._hops.get(name)
        waits = hop is not None and hop.state is not HopState.TRUSTED
        return self.now - hop.since if hop is not None and waits else 0.0
