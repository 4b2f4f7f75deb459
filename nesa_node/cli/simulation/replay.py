"""Replay of recorded snapshots through the planner: cost of sessions, and moves it would make."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nesa_node.core.errors import ConfigError
from nesa_node.core.span import Span
from nesa_node.routing.chain_request import ChainRequest
from nesa_node.routing.chains import ChainChooser
from nesa_node.routing.placement.moves import RebalancePlan
from nesa_node.routing.placement.plan import WhatIfSettings, measure_swarm
from nesa_node.routing.placement.rebalance import rebalance, require_repeated_gain
from nesa_node.routing.placement.score import Goal
from nesa_node.server.orchestrator.snapshot_store import is_snapshot_store, read_snapshots
from nesa_node.topology.snapshot import Snapshot
from nesa_node.topology.snapshot_json import MAX_SNAPSHOT_BYTES, snapshot_from_json


@dataclass(frozen=True, slots=True)
class ReplayedSnapshot:
    """Results for one snapshot, `at_s` after the first. `moves` are confirmed by two snapshots."""

    at_s: float
    nodes: int
    latency_s: float
    steps_per_s: float
    fewest_holders: int
    holes: tuple[Span, ...]
    moves: RebalancePlan


def replay_snapshots(
    path: Path, *, goal: Goal, replicas: int, strategy: ChainChooser
) -> list[ReplayedSnapshot]:
    """Plan for each snapshot as it was recorded; moves have no effect on the next one.

    The client is at the most central node of each. Raises `ConfigError` that names the line of a
    file that cannot be read.
    """
    rows: list[ReplayedSnapshot] = []
    earlier: RebalancePlan | None = None
    first_at = 0.0
    for snapshot in _read_snapshots(path):
        requests = [_make_central_request(snapshot)]
        question = WhatIfSettings(
            requests=requests, goal=goal, replicas=replicas, strategy=strategy
        )
        found = rebalance(
            snapshot,
            requests,
            goal=goal,
            replicas=replicas,
            policy=question.policy,
            costs=question.costs,
        )
        seen = measure_swarm(snapshot, question)
        first_at = first_at if rows else snapshot.taken_at
        rows.append(
            ReplayedSnapshot(
                at_s=snapshot.taken_at - first_at,
                nodes=len(snapshot.nodes),
                latency_s=seen.latency_s,
                steps_per_s=seen.steps_per_s,
                fewest_holders=min(seen.coverage),
                holes=snapshot.holes(),
                moves=require_repeated_gain(earlier, found),
            )
        )
        earlier = found
    if not rows:
        raise ConfigError(f"--replay {path}: no snapshot in it; a line holds one JSON document")
    return rows


def _read_snapshots(path: Path) -> list[Snapshot]:
    """Read an orchestrator's snapshot store, or a file with one JSON document per line."""
    try:
        found = read_snapshots(path) if is_snapshot_store(path) else _read_json_lines(path)
    except OSError as error:
        raise ConfigError(f"--replay {path}: {error.strerror or error}") from None
    for at, snapshot in enumerate(found, 1):
        if snapshot.num_blocks < 1 or not snapshot.nodes:
            raise ConfigError(f"{path}, snapshot {at}: a snapshot without nodes or blocks")
    return found


def _read_json_lines(path: Path) -> list[Snapshot]:
    lines: list[bytes] = []
    left = MAX_SNAPSHOT_BYTES
    with path.open("rb") as file:
        while line := file.readline(left + 1):
            left -= len(line)
            if left < 0:
                raise ConfigError(
                    f"--replay {path} has more than {MAX_SNAPSHOT_BYTES} bytes; replay a part of it"
                )
            if line.strip():
                lines.append(line)
    return [
        snapshot_from_json(line, where=f"{path}, line {at}") for at, line in enumerate(lines, 1)
    ]


def _make_central_request(snapshot: Snapshot) -> ChainRequest:
    peers = [node.peer_id for node in snapshot.nodes]
    whole = Span(0, snapshot.num_blocks)
    if snapshot.links is None:
        return ChainRequest(span=whole)
    rtt_ms_NN = snapshot.links.select(peers).rtt_ms_NN
    nearest = int(np.nan_to_num(rtt_ms_NN, nan=1e4).sum(axis=1).argmin())
    known = zip(peers, rtt_ms_NN[nearest].tolist(), strict=True)
    return ChainRequest(span=whole, entry_rtt_ms={peer: ms for peer, ms in known if ms == ms})
