"""State of the dashboard: a state machine from observations to the sections that viewers get."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from nesa_node import __version__
from nesa_node.client.activity import Activity
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.dashboard.entries import event_entries, model_entry, node_entry, shown_nodes
from nesa_node.dashboard.events import Event, EventLog
from nesa_node.dashboard.links import LinksView
from nesa_node.dashboard.models import Holes, ModelView, view_models
from nesa_node.dashboard.sections import Sections
from nesa_node.dashboard.sessions import MAX_SESSIONS, OwnSessions
from nesa_node.dashboard.sightings import LOST_S, Sightings
from nesa_node.swarm.notices import Placement
from nesa_node.swarm.records import NodeRecord

POINT_EVERY_S = 5.0
POINTS = 720
"""Points of a chart: one hour."""
CHARTED_MODELS = 4
_MAX_PLACEMENTS = 256


class Board:
    """Dashboard state. Times are seconds since the epoch and must not decrease."""

    def __init__(self, *, playground: bool, look_every_s: float) -> None:
        self.sections = Sections()
        self.models: list[ModelView] = []
        self._sightings = Sightings()
        self._sessions = OwnSessions()
        self._holes = Holes()
        self._log = EventLog()
        self._told_events = 0
        self._links: dict[ModelId, LinksView] = {}
        self._numbers: dict[ModelId, int] = {}
        self._counter = itertools.count()
        self._placements: dict[str, None] = {}
        self._next_point = 0.0
        self._about: dict[str, Any] = {
            "version": __version__,
            "playground": playground,
            "look_every_s": look_every_s,
            "lost_shown_s": LOST_S,
            "points": POINTS,
        }
        self.sections.replace("about", {**self._about, "starting": True})

    def records_of(self, model: ModelView) -> list[NodeRecord]:
        """Records of the model's nodes that are not lost, in the order of their arrival."""
        return [
            sighting.record
            for sighting in self._sightings.nodes.values()
            if sighting.lost_at is None and sighting.record.model_id == model.model_id
        ]

    def look(self, records: Iterable[NodeRecord], now: float) -> None:
        """Update the state from all valid records, including withdrawals."""
        self._tell(self._sightings.look(records, now))
        self._refresh(now)

    def tick(self, now: float, activity: Activity | None) -> bool:
        """Advance the time and read the sessions; returns whether there is news for viewers."""
        known = self.sections.version
        count = len(self._sightings.nodes)
        for session in () if activity is None else (*activity.sessions(), *activity.ended()):
            for peer, at in session.failed:
                self._sightings.failed(peer, at)
        events = self._sightings.tick(now)
        if events or len(self._sightings.nodes) != count:
            self._tell(events)
            self._refresh(now)
        if activity is not None:
            self.sections.replace("sessions", self._sessions.look(activity, now))
            self._tell(self._sessions.new_failovers(activity.failovers(), self._sightings.nodes))
        self._draw(now)
        self._publish_events()
        return self.sections.version != known

    def pinged(self, peer: PeerId, *, answered: bool) -> None:
        """Record the result of a ping; the next tick reports a change."""
        self._sightings.pinged(peer, answered=answered)

    def measure(self, model: ModelId, links: LinksView) -> None:
        self._links[model] = links
        measured = {each.model_id for each in self.models[:CHARTED_MODELS]}
        self._links = {each: self._links[each] for each in self._links if each in measured}
        entries: dict[str, Any] = {}
        for view in self._links.values():
            entries |= view.entries
        self.sections.replace("links", entries)

    def place(self, placements: Sequence[Placement], now: float) -> None:
        """Report placements that are new as events."""
        events = []
        for placement in placements:
            if placement.name not in self._placements:
                self._placements[placement.name] = None
                events.append(self._placement(placement, now))
        for name in list(self._placements)[:-_MAX_PLACEMENTS]:
            del self._placements[name]
        self._tell(events)

    def _placement(self, placement: Placement, now: float) -> Event:
        sighting = self._sightings.nodes.get(placement.signer)
        count = len(placement.moves)
        words = f"asks for {count} move{'' if count == 1 else 's'}: {placement.reason}"
        return Event(
            at=min(placement.issued_at, now),  # the signer's clock may be ahead
            kind="placement",
            text=words,
            model=ModelId(placement.model_id),
            peer=placement.signer,
            name=sighting.record.public_name if sighting else "An orchestrator",
        )

    def _refresh(self, now: float) -> None:
        nodes = self._sightings.nodes
        self.models = view_models(nodes)
        self._numbers = {
            model.model_id: self._numbers.get(model.model_id, -1) for model in self.models
        }
        for model_id, number in self._numbers.items():
            self._numbers[model_id] = number if number >= 0 else next(self._counter)
        self._tell(self._holes.look(self.models, now))
        shown = shown_nodes(nodes)
        self.sections.replace("nodes", {peer: node_entry(each) for peer, each in shown.items()})
        self.sections.replace(
            "models",
            {
                model.model_id: model_entry(model, order, self._numbers[model.model_id])
                for order, model in enumerate(self.models)
            },
        )
        about = {
            "starting": False,
            "cut_off": bool(nodes) and all(each.lost_at is not None for each in nodes.values()),
            "nodes": len(nodes),
            "nodes_left_out": len(nodes) - len(shown),
            "sessions_left_out": max(0, len(self._sessions.open) - MAX_SESSIONS),
        }
        self.sections.replace("about", {**self._about, **about})

    def _draw(self, now: float) -> None:
        """Add a point to the charts, if one is due."""
        if now < self._next_point or not self._numbers:
            return
        self._next_point = now + POINT_EVERY_S
        point = {
            "own": [self._sessions.tokens_per_s, self._sessions.token_ms],
            "models": {
                self._numbers[model.model_id]: self._figures(model)
                for model in self.models[:CHARTED_MODELS]
            },
        }
        self.sections.put("series", {str(round(now)): point}, keep=POINTS)

    def _figures(self, model: ModelView) -> list[float | None]:
        links = self._links.get(model.model_id, LinksView())
        step_ms = None if links.step_s is None else round(links.step_s * 1000, 3)
        rtt_ms = None if links.median_rtt_ms is None else round(links.median_rtt_ms, 3)
        return [round(model.tokens_per_s, 2), step_ms, rtt_ms, model.serving]

    def _tell(self, events: Sequence[Event]) -> None:
        self._log.add(events)

    def _publish_events(self) -> None:
        if self._log.total != self._told_events:
            self._told_events = self._log.total
            self.sections.replace("events", event_entries(self._log.kept))
