"""History of an orchestrator: for its snapshot store, the dashboard and the decision log."""

from __future__ import annotations

import math
import re
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from nesa_node.core.decision_log import LoggedDecision
from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.routing.placement.moves import RebalancePlan
from nesa_node.server.orchestrator.learner import LearnedExponents
from nesa_node.server.orchestrator.planner import PlacementDecision
from nesa_node.server.orchestrator.snapshot_store import SnapshotStore
from nesa_node.swarm.dht.sealing import PlacementNotice
from nesa_node.topology.changes.triggers import HistoryEntry, Trigger, trigger_readings
from nesa_node.topology.forecast import forecast_departures
from nesa_node.topology.report import topology_report
from nesa_node.topology.shape.stability import MAX_HEIGHTS, connection_heights
from nesa_node.topology.snapshot import Snapshot, snapshot_digest

log = get_logger(__name__)

MAX_SHOWN_LOOKS = 2880
"""A day, at two per minute."""
_PER_DECISION_PARAMETERS = frozenset({"cost_s"})


class History:
    """History of snapshots. Thread-safe; its methods block and do not belong on an event loop.

    `store` may be None: then nothing outlives the process.
    """

    def __init__(self, store: SnapshotStore | None = None) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._looks: deque[HistoryEntry] = deque(maxlen=MAX_SHOWN_LOOKS)
        self._heights: deque[dict[Any, float]] = deque(maxlen=MAX_HEIGHTS)
        self._latest: Snapshot | None = None
        self._active_placement: dict[str, Any] | None = None
        self._is_leader = False
        self.version = 0
        """Rises with each change to the report."""

    def load(self) -> None:
        """Load what the store holds. An unreadable store is logged and left unchanged."""
        if self._store is None:
            return
        try:
            looks = self._store.looks(MAX_SHOWN_LOOKS)
            heights = [connection_heights(each) for each in self._store.snapshots(MAX_HEIGHTS)]
        except ConfigError as error:
            log.warning("history_not_loaded", reason=str(error))
            return
        with self._lock:
            self._looks.extendleft(reversed(looks))
            self._heights.extendleft(reversed(heights))

    def record(
        self,
        snapshot: Snapshot,
        decision: PlacementDecision | None,
        active: PlacementNotice | None,
        *,
        leads: bool,
        triggers: Sequence[Trigger] = (),
        tuned: LearnedExponents | None = None,
    ) -> None:
        """Record a snapshot and what was decided on it.

        `decision` is None for an observer, which may pass `triggers` instead. `active` is the
        placement in force; `tuned` the greedy rule's exponents, if they differ from the shipped
        ones.
        """
        look = _look(
            snapshot, decision, active, tuned or LearnedExponents(), leads=leads, triggers=triggers
        )
        heights = connection_heights(snapshot)
        with self._lock:
            self._looks.append(look)
            self._heights.append(heights)
            self._latest = snapshot
            self._active_placement = (
                _placement_body(active) if active is not None else self._active_placement
            )
            self._is_leader = leads
            self.version += 1
        if self._store is None:
            return
        eventful = bool(look.fired_triggers) or bool(decision and decision.moves)
        try:
            self._store.add(look, snapshot, always=eventful)
        except (OSError, ValueError) as error:
            log.warning("snapshot_not_stored", reason=str(error))

    def forecast(self, snapshot: Snapshot) -> dict[PeerId, float]:
        """The nodes that are likely to leave within the hour, and when (seconds since the epoch);
        none without a store of some days, or if it is unreadable, which is logged."""
        if self._store is None:
            return {}
        peers = [node.peer_id for node in (*snapshot.nodes, *snapshot.joining)]
        try:
            here_TN, seen_T = self._store.presence(peers, snapshot.taken_at)
        except ConfigError as error:
            log.warning("departures_not_forecast", reason=str(error))
            return {}
        return forecast_departures(peers, here_TN, seen_T, snapshot.taken_at)

    def document(self) -> dict[str, Any] | None:
        """`topology_report` of the latest snapshot; None without one."""
        with self._lock:
            snapshot, looks, heights = self._latest, tuple(self._looks), tuple(self._heights)
            active, leads = self._active_placement, self._is_leader
        if snapshot is None:
            return None
        return topology_report(snapshot, looks=looks, heights=heights, active=active, leads=leads)


def _look(
    snapshot: Snapshot,
    decision: PlacementDecision | None,
    active: PlacementNotice | None,
    tuned: LearnedExponents,
    *,
    leads: bool,
    triggers: Sequence[Trigger],
) -> HistoryEntry:
    about: dict[str, Any] = {"seen": trigger_readings(triggers)}
    if decision is not None:
        about = {
            "seen": trigger_readings(decision.triggers),
            "latency_s": decision.latency_before_s,
            "steps_per_s": decision.steps_per_s_before,
            "strategy": decision.strategy,
            "schema": decision.schema_name,
            "reason": decision.reason,
            "parameters": {
                name: value
                for name, value in decision.parameters.items()
                if name not in _PER_DECISION_PARAMETERS
            },
        }
    return HistoryEntry(
        at=snapshot.taken_at,
        digest=snapshot.digest(),
        nodes=len(snapshot.nodes),
        leads=leads,
        placement=None if active is None else active.name,
        exponents=tuned.values,
        why_exponents=tuned.why,
        **about,
    )


def _placement_body(placement: PlacementNotice) -> dict[str, Any]:
    return {
        "name": placement.name,
        "signer": placement.peer_id,
        "epoch": placement.epoch,
        "issued_at": placement.issued_at,
        "expires_at": placement.expires_at,
        "based_on": placement.based_on,
        "moves": [move.model_dump(mode="json") for move in placement.moves],
        **_figures(placement),
        "exponents": None if placement.exponents is None else placement.exponents.model_dump(),
    }


def _figures(of: PlacementDecision | PlacementNotice) -> dict[str, Any]:
    """What a decision and the placement that publishes it say alike."""
    return {
        "strategy": of.strategy,
        "schema": of.schema_name,
        "trigger": of.trigger,
        "reason": of.reason,
        "gain": of.gain,
        "repairs": of.repairs,
        "latency_s": [of.latency_before_s, of.latency_after_s],
        "steps_per_s": [of.steps_per_s_before, of.steps_per_s_after],
        "parameters": dict(of.parameters),
    }


_NUMBER = re.compile(r"\d+(\.\d+)?")


def decision_entry(
    name: str | None, decision: PlacementDecision, snapshot: Snapshot, *, epoch: int
) -> LoggedDecision:
    """The log entry of a decision, shown by `nesa-node explain`. `name` is the placement's; None if
    none was published, then the snapshot's digest names it.

    The body is JSON; None stands for unknown values, such as the time of a step through a swarm
    with holes.
    """
    based_on = snapshot_digest(snapshot)
    costs = _costs_by_peer(decision.planned)
    moves = [
        {"peer": move.peer, "was": list(move.was), "to": list(move.to), "gain": move.gain}
        | costs.get(move.peer, {})
        for move in decision.moves
    ]
    body = {
        "published": name is not None,
        "model": snapshot.model_id,
        "epoch": epoch,
        "nodes": len(snapshot.nodes),
        "num_blocks": snapshot.num_blocks,
        "based_on": based_on,
        "taken_at": snapshot.taken_at,
        "planning": decision.planning,
        "refused": decision.planned.refused if decision.planned else "",
        "triggers": [trigger_body(trigger) for trigger in decision.triggers],
        "moves": moves,
        **_figures(decision),
    }
    return LoggedDecision("placement", name or f"none-{based_on[:12]}", snapshot.taken_at, body)


def is_same_reason(one: str, other: str) -> bool:
    """Whether two reasons differ only in their numbers, which change with every snapshot."""
    return _NUMBER.sub("", one) == _NUMBER.sub("", other)


def trigger_body(trigger: Trigger) -> dict[str, Any]:
    return {
        "name": trigger.name,
        "fired": trigger.fired,
        "figure": trigger.figure if math.isfinite(trigger.figure) else None,
        "threshold": trigger.threshold,
        "reason": trigger.reason,
    }


def _costs_by_peer(planned: RebalancePlan | None) -> dict[str, dict[str, float]]:
    return {
        move.peer_id: {
            "load_bytes": move.load_bytes,
            "load_s": move.load_s,
            "hand_over_tokens": move.cache_tokens,
            "hand_over_s": move.hand_over_s,
            "wave": move.wave,
        }
        for move in (planned.moves if planned else ())
    }
