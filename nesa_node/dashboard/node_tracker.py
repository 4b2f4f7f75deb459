"""Tracker of a swarm's nodes: their last records, failures and losses, and the log of its events.

A state machine without I/O: input are records, pings and the time; output are nodes and events.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.swarm.dht.records import NodeRecord

_NodeEventKind = Literal[
    "joined", "serving", "draining", "moved", "left", "failing", "lost", "back", "restarted"
]
EventKind = Literal[_NodeEventKind, "watching", "hole", "healed", "failover", "placement"]

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


LOST_RETENTION_S = 600.0
"""Time for which a node is still shown after its record expired."""
FAILURE_VALID_S = 15.0
"""Time for which a node that failed a session is shown as failing, unless it renews its record."""
MAX_TRACKED_NODES = 8192
_SHORTEST_RATE_S, _LONGEST_RATE_S = 1.0, 120.0


@dataclass(slots=True)
class TrackedNode:
    """A node with its last record. `lost_at` is when that expired; None while it is valid."""

    record: NodeRecord
    lost_at: float | None = None
    tokens_per_s: float = 0.0
    """Tokens/s through its blocks, between two records at least `_SHORTEST_RATE_S` apart."""
    counted_since: NodeRecord | None = None
    """Record from which its tokens are counted, if that is not `record`."""
    failing_since: float | None = None
    """Time since which it fails sessions or pings although its record is valid."""
    failed_at: float | None = None
    """Time of its last failure in a session."""
    has_answered: bool = False
    """Whether it has ever answered a ping; one that never did may be unreachable from here only."""
    is_silent: bool = False
    """Whether it did not answer the last ping, but an earlier one."""

    def is_failing(self, now: float) -> bool:
        """Whether it is known to fail: it is silent, or failed a session lately."""
        failed = self.failed_at is not None and (
            now - self.failed_at < FAILURE_VALID_S and self.record.issued_at <= self.failed_at
        )
        return self.lost_at is None and (self.is_silent or failed)


class NodeTracker:
    """Present and lost nodes; a node that withdraws its record is removed at once."""

    def __init__(self) -> None:
        self.nodes: dict[PeerId, TrackedNode] = {}
        self._is_initialized = False

    def update_records(self, records: Iterable[NodeRecord], now: float) -> list[DashboardEvent]:
        """Update from records, including withdrawals. The first call gives one event for all."""
        events: list[DashboardEvent] = []
        for record in sorted(records, key=lambda record: record.issued_at):
            if record.expires_at > now:
                events += self._apply_record(record, now)
        if not self._is_initialized:
            self._is_initialized = True
            words = f"Watching; {len(self.nodes)} nodes were here already"
            events = [DashboardEvent(at=now, kind="watching", text=words)]
        return events + self.advance_time(now)

    def record_ping(self, peer: PeerId, *, answered: bool) -> None:
        """Record the result of a ping to `peer`; the next `advance_time` reports a change."""
        sighting = self.nodes.get(peer)
        if sighting is not None:
            sighting.has_answered = sighting.has_answered or answered
            sighting.is_silent = sighting.has_answered and not answered

    def record_failure(self, peer: PeerId, at: float) -> None:
        """Record that `peer` failed a session of this process; `advance_time` reports it."""
        sighting = self.nodes.get(peer)
        if sighting is not None and at > (sighting.failed_at or 0.0):
            sighting.failed_at = at

    def advance_time(self, now: float) -> list[DashboardEvent]:
        """Advance the time: records expire, and nodes are removed `LOST_RETENTION_S` after that."""
        events: list[DashboardEvent] = []
        for sighting in self.nodes.values():
            record = sighting.record
            events += _update_failing(sighting, now)
            if sighting.lost_at is None and record.expires_at <= now:
                sighting.lost_at, sighting.tokens_per_s = record.expires_at, 0.0
                silent_s = now - record.issued_at
                words = f"is lost: its record expired, and it was silent for {silent_s:.0f} s"
                events.append(_node_event("lost", words, record, now))
        over = [
            peer
            for peer, sighting in self.nodes.items()
            if sighting.lost_at is not None and now - sighting.lost_at >= LOST_RETENTION_S
        ]
        for peer in over:
            del self.nodes[peer]
        self._evict_excess()
        return events

    def _apply_record(self, record: NodeRecord, now: float) -> Iterator[DashboardEvent]:
        peer = PeerId(record.peer_id)
        known = self.nodes.get(peer)
        if known is not None and record.seq <= known.record.seq:
            return
        if record.state == "withdrawn":
            if known is not None:
                del self.nodes[peer]
                yield _node_event("left", "left in order", record, now)
            return
        if known is None:
            self.nodes[peer] = TrackedNode(record)
            yield _node_event("joined", f"joined, {_describe_blocks(record)}", record, now)
            return
        yield from _change_events(known, record, now)
        since = known.counted_since or known.record
        soon = 0 <= record.issued_at - since.issued_at < _SHORTEST_RATE_S
        if soon and record.uptime_s >= since.uptime_s:
            known.counted_since = since
        else:
            known.tokens_per_s, known.counted_since = _tokens_per_s(since, record), None
        if known.lost_at is not None or record.uptime_s < known.record.uptime_s:
            known.is_silent = False
        known.record, known.lost_at = record, None

    def _evict_excess(self) -> None:
        """Evict lost nodes first, then the newest, so that new nodes cannot displace old ones."""
        nodes = self.nodes
        excess = len(nodes) - MAX_TRACKED_NODES
        if excess <= 0:
            return
        order = {peer: number for number, peer in enumerate(nodes)}
        first_to_go = sorted(order, key=lambda peer: (nodes[peer].lost_at is None, -order[peer]))
        for peer in first_to_go[:excess]:
            del nodes[peer]


def _update_failing(sighting: TrackedNode, now: float) -> Iterator[DashboardEvent]:
    """Events of a node that starts to fail or works again."""
    fails, record = sighting.is_failing(now), sighting.record
    if fails and sighting.failing_since is None:
        sighting.failing_since = now
        words = (
            "does not answer pings" if sighting.is_silent else "failed a session of this gateway"
        )
        yield _node_event("failing", words, record, now)
    elif not fails and sighting.failing_since is not None:
        failing_s = now - sighting.failing_since
        sighting.failing_since = None
        if sighting.lost_at is None and record.expires_at > now:
            yield _node_event("back", f"works again after {failing_s:.0f} s", record, now)


def _change_events(known: TrackedNode, record: NodeRecord, now: float) -> Iterator[DashboardEvent]:
    before = known.record
    if known.lost_at is not None:
        words = f"is back after {now - known.lost_at:.0f} s, {_describe_blocks(record)}"
        yield _node_event("back", words, record, now)
        return
    if record.uptime_s < before.uptime_s:
        yield _node_event("restarted", f"has restarted, {_describe_blocks(record)}", record, now)
        return
    if record.span != before.span or record.model_id != before.model_id:
        words = f"moved from blocks {Span(*before.span)} to {Span(*record.span)}"
        yield _node_event("moved", words, record, now)
    if record.state == before.state:
        return
    if record.state == "serving":
        yield _node_event("serving", f"serves blocks {Span(*record.span)}", record, now)
    elif record.state == "draining":
        where = f" to move to blocks {Span(*record.next_span)}" if record.next_span else ""
        yield _node_event("draining", f"finishes its sessions{where}", record, now)


def _describe_blocks(record: NodeRecord) -> str:
    verbs = {"joining": "loading", "serving": "serving", "draining": "draining"}
    return f"{verbs.get(record.state, record.state)} blocks {Span(*record.span)}"


def _node_event(kind: _NodeEventKind, text: str, record: NodeRecord, now: float) -> DashboardEvent:
    return DashboardEvent(
        at=now,
        kind=kind,
        text=text,
        model=ModelId(record.model_id),
        peer=PeerId(record.peer_id),
        name=record.public_name,
    )


def _tokens_per_s(before: NodeRecord, record: NodeRecord) -> float:
    """Tokens/s between two records; 0 across a restart or a long silence."""
    seconds = record.issued_at - before.issued_at
    tokens = record.tokens - before.tokens
    if not 0 < seconds <= _LONGEST_RATE_S or tokens < 0 or record.uptime_s < before.uptime_s:
        return 0.0
    return tokens / seconds
