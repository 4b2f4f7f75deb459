"""Decisions of an orchestrator as entries of the decision log, shown by `nesa-node explain`."""

from __future__ import annotations

import math
import re
from typing import Any

from nesa_node.core.decision_log import Decision as Kept
from nesa_node.routing.placement.moves import Moves
from nesa_node.server.planner import Decision
from nesa_node.swarm.notices import Move
from nesa_node.topology.changes.triggers import Trigger
from nesa_node.topology.digest import digest
from nesa_node.topology.snapshot import Snapshot

_NUMBER = re.compile(r"\d+(\.\d+)?")


def decided(name: str | None, decision: Decision, snapshot: Snapshot, *, epoch: int) -> Kept:
    """The log entry of a decision. `name` is the placement's; None if none was published, then the
    snapshot's digest names it.

    The body is JSON; None stands for unknown values, such as the time of a step through a swarm
    with holes.
    """
    based_on = digest(snapshot)
    costs = _costs(decision.planned)
    body = {
        "published": name is not None,
        "model": snapshot.model_id,
        "epoch": epoch,
        "nodes": len(snapshot.nodes),
        "num_blocks": snapshot.num_blocks,
        "based_on": based_on,
        "taken_at": snapshot.taken_at,
        "strategy": decision.strategy,
        "schema": decision.schema_name,
        "trigger": decision.trigger,
        "reason": decision.reason,
        "refused": decision.planned.refused if decision.planned else "",
        "triggers": [trigger_body(trigger) for trigger in decision.triggers],
        "gain": decision.gain,
        "repairs": decision.repairs,
        "latency_s": [decision.latency_before_s, decision.latency_after_s],
        "steps_per_s": [decision.steps_per_s_before, decision.steps_per_s_after],
        "moves": [_move(move, costs.get(move.peer, {})) for move in decision.moves],
        "parameters": dict(decision.parameters),
    }
    return Kept("placement", name or f"none-{based_on[:12]}", snapshot.taken_at, body)


def same_reason(one: str, other: str) -> bool:
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


def _move(move: Move, cost: dict[str, float]) -> dict[str, Any]:
    return {
        "peer": move.peer,
        "was": list(move.was),
        "to": list(move.to),
        "gain": move.gain,
        **cost,
    }


def _costs(planned: Moves | None) -> dict[str, dict[str, float]]:
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
