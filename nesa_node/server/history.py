"""What an orchestrator has seen and decided, for its snapshot store and for the dashboard."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from nesa_node.core.errors import ConfigError
from nesa_node.core.logging import get_logger
from nesa_node.server.learner import Tuned
from nesa_node.server.planner import Decision
from nesa_node.server.snapshot_store import SnapshotStore
from nesa_node.swarm.notices import Placement
from nesa_node.topology.changes.triggers import Trigger
from nesa_node.topology.looks import Look, seen_of
from nesa_node.topology.report import heights_of, topology_report
from nesa_node.topology.snapshot import Snapshot

log = get_logger(__name__)

SHOWN_LOOKS = 2880
"""A day, at two per minute."""
HEIGHTS = 60
_OF_ONE_DECISION = frozenset({"cost_s"})


class History:
    """History of snapshots. Thread-safe; its methods block and do not belong on an event loop.

    `store` may be None: then nothing outlives the process.
    """

    def __init__(self, store: SnapshotStore | None = None) -> None:
        self._store = store
        self._guard = threading.Lock()
        self._looks: deque[Look] = deque(maxlen=SHOWN_LOOKS)
        self._heights: deque[dict[Any, float]] = deque(maxlen=HEIGHTS)
        self._latest: Snapshot | None = None
        self._active: dict[str, Any] | None = None
        self._leads = False
        self.version = 0
        """Rises with each change to the report."""

    def recall(self) -> None:
        """Load what the store holds. An unreadable store is logged and left unchanged."""
        if self._store is None:
            return
        try:
            looks = self._store.looks(SHOWN_LOOKS)
            heights = [heights_of(each) for each in self._store.snapshots(HEIGHTS)]
        except ConfigError as error:
            log.warning("history_not_loaded", reason=str(error))
            return
        with self._guard:
            self._looks.extendleft(reversed(looks))
            self._heights.extendleft(reversed(heights))

    def saw(
        self,
        snapshot: Snapshot,
        decision: Decision | None,
        active: Placement | None,
        *,
        leads: bool,
        triggers: Sequence[Trigger] = (),
        tuned: Tuned | None = None,
    ) -> None:
        """Record a snapshot and what was decided on it.

        `decision` is None for an observer, which may pass `triggers` instead. `active` is the
        placement in force; `tuned` the greedy rule's exponents, if they differ from the shipped
        ones.
        """
        look = _look(snapshot, decision, active, tuned or Tuned(), leads=leads, triggers=triggers)
        heights = heights_of(snapshot)
        with self._guard:
            self._looks.append(look)
            self._heights.append(heights)
            self._latest = snapshot
            self._active = _placement(active) if active is not None else self._active
            self._leads = leads
            self.version += 1
        if self._store is None:
            return
        eventful = bool(look.fired) or bool(decision and decision.moves)
        try:
            self._store.add(look, snapshot, always=eventful)
        except (OSError, ValueError) as error:
            log.warning("snapshot_not_stored", reason=str(error))

    def document(self) -> dict[str, Any] | None:
        """`topology_report` of the latest snapshot; None without one."""
        with self._guard:
            snapshot, looks, heights = self._latest, tuple(self._looks), tuple(self._heights)
            active, leads = self._active, self._leads
        if snapshot is None:
            return None
        return topology_report(snapshot, looks=looks, heights=heights, active=active, leads=leads)


def _look(
    snapshot: Snapshot,
    decision: Decision | None,
    active: Placement | None,
    tuned: Tuned,
    *,
    leads: bool,
    triggers: Sequence[Trigger],
) -> Look:
    about: dict[str, Any] = {"seen": seen_of(triggers)}
    if decision is not None:
        about = {
            "seen": seen_of(decision.triggers),
            "latency_s": decision.latency_before_s,
            "steps_per_s": decision.steps_per_s_before,
            "strategy": decision.strategy,
            "schema": decision.schema_name,
            "reason": decision.reason,
            "parameters": {
                name: value
                for name, value in decision.parameters.items()
                if name not in _OF_ONE_DECISION
            },
        }
    return Look(
        at=snapshot.taken_at,
        digest=snapshot.digest(),
        nodes=len(snapshot.nodes),
        leads=leads,
        placement=None if active is None else active.name,
        exponents=tuned.values,
        why_exponents=tuned.why,
        **about,
    )


def _placement(placement: Placement) -> dict[str, Any]:
    return {
        "name": placement.name,
        "signer": placement.peer_id,
        "epoch": placement.epoch,
        "issued_at": placement.issued_at,
        "expires_at": placement.expires_at,
        "based_on": placement.based_on,
        "strategy": placement.strategy,
        "schema": placement.schema_name,
        "trigger": placement.trigger,
        "reason": placement.reason,
        "gain": placement.gain,
        "repairs": placement.repairs,
        "latency_s": [placement.latency_before_s, placement.latency_after_s],
        "steps_per_s": [placement.steps_per_s_before, placement.steps_per_s_after],
        "moves": [move.model_dump(mode="json") for move in placement.moves],
        "parameters": dict(placement.parameters),
        "exponents": None if placement.exponents is None else placement.exponents.model_dump(),
    }
