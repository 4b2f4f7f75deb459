"""Event log of a swarm, with the newest events of each kind."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from nesa_node.core.ids import ModelId, PeerId

EventKind = Literal[
    "watching",
    "joined",
    "serving",
    "draining",
    "moved",
    "left",
    "failing",
    "lost",
    "back",
    "restarted",
    "hole",
    "healed",
    "failover",
    "placement",
]

MAX_EVENTS_PER_KIND = 40
MAX_EVENTS_PER_BURST = 12
"""Maximum events of one kind and model in one batch; more are collapsed into one with a count."""
_BURST_NOUNS: dict[EventKind, str] = {"failover": "sessions", "placement": "plans"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardEvent:
    """One event. `name` is the public name of the node `peer`; the page shows `text` after it.

    Both are untrusted text, never markup. `at` is seconds since the epoch.
    """

    at: float
    kind: EventKind
    text: str
    model: ModelId | None = None
    peer: PeerId | None = None
    name: str | None = None


class EventLog:
    """The newest `MAX_EVENTS_PER_KIND` events of each kind.

    The limit is per kind so that a node which joins and leaves all day, under changing names, does
    not displace other kinds of events.
    """

    def __init__(self) -> None:
        self.num_added = 0
        """Number of events ever added. Events are numbered from 0."""
        self._events_by_kind: dict[EventKind, deque[tuple[int, DashboardEvent]]] = {}

    @property
    def kept(self) -> dict[int, DashboardEvent]:
        """Events by number, the oldest first."""
        numbered = itertools.chain.from_iterable(self._events_by_kind.values())
        return dict(sorted(numbered, key=lambda one: one[0]))

    def add(self, events: Iterable[DashboardEvent]) -> None:
        for event in _collapse_bursts(list(events)):
            kind = self._events_by_kind.setdefault(event.kind, deque(maxlen=MAX_EVENTS_PER_KIND))
            kind.append((self.num_added, event))
            self.num_added += 1


def _collapse_bursts(events: list[DashboardEvent]) -> list[DashboardEvent]:
    """Collapse bursts, so that an attacker with many identities cannot displace other events."""
    counts = Counter((event.kind, event.model) for event in events)
    told: set[tuple[EventKind, ModelId | None]] = set()
    short: list[DashboardEvent] = []
    for event in events:
        which = event.kind, event.model
        if counts[which] <= MAX_EVENTS_PER_BURST:
            short.append(event)
        elif which not in told:
            told.add(which)
            words = f"{counts[which]} {_BURST_NOUNS.get(event.kind, 'nodes')} at once: {event.kind}"
            short.append(
                DashboardEvent(at=event.at, kind=event.kind, text=words, model=event.model)
            )
    return short
