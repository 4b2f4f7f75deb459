"""Sessions of this process that the dashboard shows: open and recently ended ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nesa_node.client.activity import Activity, Failover, SessionActivity
from nesa_node.core.ids import PeerId
from nesa_node.dashboard.entries import session_entry
from nesa_node.dashboard.events import Event
from nesa_node.dashboard.sightings import Sighting

MAX_SESSIONS = 100
ENDED_S = 6.0
"""Time for which an ended session is still shown."""
_REMEMBERED = 400


class OwnSessions:
    def __init__(self) -> None:
        self.open: tuple[SessionActivity, ...] = ()
        self._told: dict[tuple[float, str], None] = {}

    def look(self, activity: Activity, now: float) -> dict[str, Any]:
        """Views of the oldest `MAX_SESSIONS` open sessions and of recently ended ones, by id."""
        self.open = tuple(activity.sessions())
        shown = {session.id: session_entry(session) for session in self.open[:MAX_SESSIONS]}
        for session in activity.ended():
            if session.ended_at is not None and now - session.ended_at < ENDED_S:
                shown[session.id] = session_entry(session)
        return shown

    @property
    def tokens_per_s(self) -> float:
        return sum(session.tokens_per_s for session in self.open if session.state == "decode")

    @property
    def token_ms(self) -> float | None:
        """Median time per token of the open sessions, in ms; None if none decodes."""
        rates = sorted(session.tokens_per_s for session in self.open if session.state == "decode")
        rates = [rate for rate in rates if rate > 0]
        return 1000 / rates[len(rates) // 2] if rates else None

    def new_failovers(
        self, failovers: Sequence[Failover], nodes: Mapping[PeerId, Sighting]
    ) -> list[Event]:
        """Events of the failovers that were not reported yet."""
        events = []
        for failover in failovers:
            which = failover.at, failover.session_id
            if which not in self._told:
                self._told[which] = None
                names = ", ".join(_name(peer, nodes) for peer in failover.lost) or "a node"
                words = f"Session {failover.session_id[:8]} went on without {names}"
                words += f" after {failover.took_ms:.0f} ms"
                events.append(Event(at=failover.at, kind="failover", text=words))
        for which in list(self._told)[:-_REMEMBERED]:
            del self._told[which]
        return events


def _name(peer: PeerId, nodes: Mapping[PeerId, Sighting]) -> str:
    sighting = nodes.get(peer)
    return (sighting.record.public_name if sighting else None) or f"…{peer[-6:]}"
