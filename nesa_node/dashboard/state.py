"""State of the dashboard: a state machine from observations to the sections that viewers get."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nesa_node import __version__
from nesa_node.client.model.activity import Activity, SessionActivity, SessionFailover
from nesa_node.client.verification.audit_history import AuditHistory
from nesa_node.core.errors import MissingBlocksError
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.dashboard.feed import VersionedSections
from nesa_node.dashboard.node_tracker import (
    LOST_RETENTION_S,
    DashboardEvent,
    EventLog,
    NodeTracker,
    TrackedNode,
)
from nesa_node.dashboard.views import (
    HoleTracker,
    ModelSummary,
    choose_shown_nodes,
    event_entries,
    model_entry,
    node_entry,
    plan_entry,
    pool_entries,
    session_entry,
    summarize_models,
)
from nesa_node.routing.chain_request import ChainRequest
from nesa_node.routing.chains import chain_cost_s, plan_chain
from nesa_node.sharding.graph_plan import GraphPlan
from nesa_node.swarm.dht.pool_notices import Offer, PoolStatus
from nesa_node.swarm.dht.records import NodeRecord
from nesa_node.swarm.dht.sealing import PlacementNotice
from nesa_node.topology.links.matrix import Links, assemble_links
from nesa_node.topology.snapshot import Snapshot

MAX_LINKED_NODES = 300
"""Maximum nodes of the link matrices, which grow with the square; the oldest are used."""
MAX_SHOWN_LINKS = 1200


@dataclass(frozen=True, slots=True)
class LinksSummary:
    """Links of one model. `entries` are keyed by "peer|peer".

    `step_s` is the time of one token from the first to the last node of the fastest chain, in
    seconds; None without a chain.
    """

    entries: dict[str, Any] = field(default_factory=dict)
    median_rtt_ms: float | None = None
    step_s: float | None = None


def summarize_links(model: ModelId, records: Sequence[NodeRecord], num_blocks: int) -> LinksSummary:
    """Summarize the links of a model's present nodes. Takes 20 ms for 300: call it in a thread."""
    records = records[:MAX_LINKED_NODES]
    measured = {PeerId(record.peer_id): record.measured_links() for record in records}
    links = assemble_links(measured)
    shortest = links.shortest_pairs(MAX_SHOWN_LINKS)
    return LinksSummary(
        entries={
            f"{links.peers[a]}|{links.peers[b]}": _link_entry(links, a, b) for a, b in shortest.rows
        },
        median_rtt_ms=shortest.median_rtt_ms,
        step_s=_fastest_step_s(model, records, num_blocks, links),
    )


def _link_entry(links: Links, a: int, b: int) -> dict[str, Any]:
    """View of one link; the rates are from `a` to `b` and back, None without a measurement."""
    return {
        "rtt_ms": _round_to_2_digits(links.rtt_ms_NN[a, b]),
        "bytes_per_s": [
            _round_to_2_digits(links.rate_bytes_per_s_NN[a, b]),
            _round_to_2_digits(links.rate_bytes_per_s_NN[b, a]),
        ],
        "age_min": round(float(links.age_s_NN[a, b]) / 60),
    }


def _round_to_2_digits(value: float) -> float | None:
    return float(f"{value:.2g}") if math.isfinite(value) else None


def _fastest_step_s(
    model: ModelId, records: Sequence[NodeRecord], num_blocks: int, links: Links
) -> float | None:
    nodes = tuple(
        record.node_state()
        for record in records
        if record.state == "serving" and record.num_blocks == num_blocks
    )
    snapshot = Snapshot(model, num_blocks, nodes, 0.0, links=links)
    peers = [node.peer_id for node in nodes]
    at_once = dict.fromkeys(peers, math.inf)
    request = ChainRequest(
        span=Span(0, num_blocks),
        entry_rtt_ms=dict.fromkeys(peers, 0.0),
        entry_bytes_per_s=at_once,
        exit_bytes_per_s=at_once,
    )
    try:
        return chain_cost_s(snapshot, request, plan_chain(snapshot, request))
    except MissingBlocksError:
        return None


MAX_SHOWN_SESSIONS = 100
ENDED_RETENTION_S = 6.0
"""Time for which an ended session is still shown."""
_MAX_REPORTED_FAILOVERS = 400


class LocalSessions:
    """Sessions of this process: open and recently ended ones, and their failovers."""

    def __init__(self) -> None:
        self.open: tuple[SessionActivity, ...] = ()
        self._reported_failovers: dict[tuple[float, str], None] = {}

    def update_sessions(self, activity: Activity, now: float) -> dict[str, Any]:
        """Views by id of the oldest `MAX_SHOWN_SESSIONS` open sessions and of those just ended."""
        self.open = tuple(activity.sessions())
        shown = {session.id: session_entry(session) for session in self.open[:MAX_SHOWN_SESSIONS]}
        for session in activity.ended_sessions():
            if session.ended_at is not None and now - session.ended_at < ENDED_RETENTION_S:
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
        self, failovers: Sequence[SessionFailover], nodes: Mapping[PeerId, TrackedNode]
    ) -> list[DashboardEvent]:
        """Events of the failovers that were not reported yet."""
        events = []
        for failover in failovers:
            which = failover.at, failover.session_id
            if which not in self._reported_failovers:
                self._reported_failovers[which] = None
                names = ", ".join(_display_name(peer, nodes) for peer in failover.lost) or "a node"
                words = f"Session {failover.session_id[:8]} went on without {names}"
                words += f" after {failover.took_ms:.0f} ms"
                events.append(DashboardEvent(at=failover.at, kind="failover", text=words))
        for which in list(self._reported_failovers)[:-_MAX_REPORTED_FAILOVERS]:
            del self._reported_failovers[which]
        return events


def _display_name(peer: PeerId, nodes: Mapping[PeerId, TrackedNode]) -> str:
    sighting = nodes.get(peer)
    return (sighting.record.public_name if sighting else None) or f"…{peer[-6:]}"


CHART_INTERVAL_S = 5.0
MAX_CHART_POINTS = 720
"""Points of a chart: one hour."""
MAX_CHARTED_MODELS = 4
_MAX_REPORTED_PLACEMENTS = 256


class DashboardState:
    """Dashboard state. Times are seconds since the epoch and must not decrease."""

    def __init__(self, *, playground: bool, poll_interval_s: float) -> None:
        self.sections = VersionedSections()
        self.models: list[ModelSummary] = []
        self._tracker = NodeTracker()
        self._sessions = LocalSessions()
        self._hole_tracker = HoleTracker()
        self._log = EventLog()
        self._published_events = 0
        self._audits = AuditHistory(None)
        self._links: dict[ModelId, LinksSummary] = {}
        self._plans: dict[str, dict[str, Any]] = {}
        self._numbers: dict[ModelId, int] = {}
        self._next_number = itertools.count()
        self._reported_placements: dict[str, None] = {}
        self._next_point_at = 0.0
        self._about_fields: dict[str, Any] = {
            "version": __version__,
            "playground": playground,
            "look_every_s": poll_interval_s,
            "lost_shown_s": LOST_RETENTION_S,
            "points": MAX_CHART_POINTS,
        }
        self.sections.replace_entries("about", {**self._about_fields, "starting": True})

    def records_of(self, model: ModelSummary) -> list[NodeRecord]:
        """Records of the model's nodes that are not lost, in the order of their arrival."""
        return [
            sighting.record
            for sighting in self._tracker.nodes.values()
            if sighting.lost_at is None and sighting.record.model_id == model.model_id
        ]

    def update_records(self, records: Iterable[NodeRecord], now: float) -> None:
        """Update the state from all valid records, including withdrawals."""
        self._log.add(self._tracker.update_records(records, now))
        self._refresh_sections(now)

    def update_audits(self, audits: AuditHistory) -> None:
        """Show what audits said of each node; with the next records."""
        self._audits = audits

    def advance_time(self, now: float, activity: Activity | None) -> bool:
        """Advance the time and read the sessions; returns whether there is news for viewers."""
        known = self.sections.version
        nodes = self._tracker.nodes
        count = len(nodes)
        if activity is not None:
            for session in (*activity.sessions(), *activity.ended_sessions()):
                for peer, at in session.failed:
                    self._tracker.record_failure(peer, at)
        events = self._tracker.advance_time(now)
        if events or len(nodes) != count:
            self._log.add(events)
            self._refresh_sections(now)
        if activity is not None:
            self.sections.replace_entries("sessions", self._sessions.update_sessions(activity, now))
            self._log.add(self._sessions.new_failovers(activity.failovers(), nodes))
        self._add_chart_point(now)
        if self._log.num_added != self._published_events:
            self._published_events = self._log.num_added
            self.sections.replace_entries("events", event_entries(self._log.kept))
        return self.sections.version != known

    def record_ping(self, peer: PeerId, *, answered: bool) -> None:
        """Record the result of a ping; the next `advance_time` reports a change."""
        self._tracker.record_ping(peer, answered=answered)

    def update_links(self, model: ModelId, links: LinksSummary) -> None:
        self._links[model] = links
        measured = {each.model_id for each in self.models[:MAX_CHARTED_MODELS]}
        self._links = {each: self._links[each] for each in self._links if each in measured}
        entries: dict[str, Any] = {}
        for view in self._links.values():
            entries |= view.entries
        self.sections.replace_entries("links", entries)

    def update_plan(self, model: ModelId, plan: GraphPlan) -> None:
        """Show how a network is cut into pieces; of each model that has nodes."""
        self._plans[model] = plan_entry(plan)
        self._refresh_plans()

    def _refresh_plans(self) -> None:
        self._plans = {each: self._plans[each] for each in self._plans if each in self._numbers}
        self.sections.replace_entries("plans", self._plans)

    def update_pool(self, offers: Iterable[Offer], statuses: Iterable[PoolStatus]) -> None:
        """Update machines without a model, and the swarms that are made of them."""
        swarms, machines = pool_entries(offers, statuses)
        self.sections.replace_entries("swarms", swarms)
        self.sections.replace_entries("machines", machines)

    def update_trainings(self, trainings: dict[str, Any]) -> None:
        """Update the loss curves of trainings on this machine (`TrainingCurves.read`)."""
        self.sections.replace_entries("trainings", trainings)

    def report_placements(self, placements: Sequence[PlacementNotice], now: float) -> None:
        """Report placements that are new as events."""
        events = []
        for placement in placements:
            if placement.name not in self._reported_placements:
                self._reported_placements[placement.name] = None
                events.append(self._placement_event(placement, now))
        for name in list(self._reported_placements)[:-_MAX_REPORTED_PLACEMENTS]:
            del self._reported_placements[name]
        self._log.add(events)

    def _placement_event(self, placement: PlacementNotice, now: float) -> DashboardEvent:
        sighting = self._tracker.nodes.get(placement.signer)
        count = len(placement.moves)
        words = f"asks for {count} move{'' if count == 1 else 's'}: {placement.reason}"
        return DashboardEvent(
            at=min(placement.issued_at, now),  # the signer's clock may be ahead
            kind="placement",
            text=words,
            model=ModelId(placement.model_id),
            peer=placement.signer,
            name=sighting.record.public_name if sighting else "An orchestrator",
        )

    def _refresh_sections(self, now: float) -> None:
        nodes = self._tracker.nodes
        self.models = summarize_models(nodes)
        self._numbers = {
            model.model_id: self._numbers.get(model.model_id, -1) for model in self.models
        }
        for model_id, number in self._numbers.items():
            self._numbers[model_id] = number if number >= 0 else next(self._next_number)
        self._log.add(self._hole_tracker.update_models(self.models, now))
        self._refresh_plans()
        shown = choose_shown_nodes(nodes)
        self.sections.replace_entries(
            "nodes", {peer: node_entry(each, self._audits) for peer, each in shown.items()}
        )
        self.sections.replace_entries(
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
            "sessions_left_out": max(0, len(self._sessions.open) - MAX_SHOWN_SESSIONS),
        }
        self.sections.replace_entries("about", {**self._about_fields, **about})

    def _add_chart_point(self, now: float) -> None:
        """Add a point to the charts, if one is due."""
        if now < self._next_point_at or not self._numbers:
            return
        self._next_point_at = now + CHART_INTERVAL_S
        point = {
            "own": [self._sessions.tokens_per_s, self._sessions.token_ms],
            "models": {
                self._numbers[model.model_id]: self._chart_values(model)
                for model in self.models[:MAX_CHARTED_MODELS]
            },
        }
        self.sections.set_entries("series", {str(round(now)): point}, keep=MAX_CHART_POINTS)

    def _chart_values(self, model: ModelSummary) -> list[float | None]:
        links = self._links.get(model.model_id, LinksSummary())
        step_ms = None if links.step_s is None else round(links.step_s * 1000, 3)
        rtt_ms = None if links.median_rtt_ms is None else round(links.median_rtt_ms, 3)
        return [round(model.tokens_per_s, 2), step_ms, rtt_ms, model.serving]
