"""Tuning scenarios made from recorded snapshots of a live swarm.

N nodes. Snapshots do not record clients. A client is placed beside a random node and has that
node's round trips.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from nesa_node.core.errors import MissingBlocksError
from nesa_node.core.span import Span
from nesa_node.routing.build import Request, build_problem
from nesa_node.routing.fitness import Scenario
from nesa_node.topology.snapshot import Snapshot

MAX_PAIRS = 16_000_000
"""Pairs of nodes in all scenarios that are in memory at once, at 8 bytes each."""
CLIENTS = 3
"""Clients per snapshot: the result of a single one depends too much on its position."""
_BESIDE_MS = 1.0


def spread(snapshots: Sequence[Snapshot], most: int) -> list[Snapshot]:
    """At most `most` of the usable snapshots, evenly spaced, within the memory of `MAX_PAIRS`."""
    useful = [each for each in snapshots if _is_useful(each)]
    largest = max((len(each.nodes) for each in useful), default=1)
    count = min(len(useful), most, MAX_PAIRS // (CLIENTS * largest**2))
    if count == 0:
        return []
    return [useful[int(row)] for row in np.unique(np.linspace(0, len(useful) - 1, count).round())]


def scenarios(snapshots: Sequence[Snapshot], rng: np.random.Generator) -> list[Scenario]:
    """`CLIENTS` scenarios per snapshot; none if no links connect its blocks."""
    found = []
    for snapshot in snapshots:
        for _ in range(CLIENTS):
            problem = build_problem(snapshot, beside_one(snapshot, rng))
            with suppress(MissingBlocksError):
                found.append(Scenario.of(problem, rng))
    return found


def beside_one(snapshot: Snapshot, rng: np.random.Generator) -> Request:
    """The request of a client beside a random node, with that node's round trips.

    Snapshots do not record where clients are.
    """
    request = Request(span=Span(0, snapshot.num_blocks))
    if snapshot.links is None:
        return request
    rtt_ms_NN, _ = snapshot.links.between([node.peer_id for node in snapshot.nodes])
    host = int(rng.integers(len(snapshot.nodes)))
    return replace(request, entry_rtt_ms=np.maximum(rtt_ms_NN[host], _BESIDE_MS))


def _is_useful(snapshot: Snapshot) -> bool:
    return snapshot.num_blocks > 0 and snapshot.links is not None and not snapshot.holes()
