"""Sessions as they could have been in recorded snapshots: what a live swarm's tuning learns from.

N nodes. Snapshots do not say where clients were. A client is put beside a node drawn at random:
it is as far from the others as that node is.
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
"""Of nodes, in all scenarios that are kept at once: each takes a number of eight bytes."""
CLIENTS = 3
"""For each snapshot: one alone would say little of it."""
_BESIDE_MS = 1.0


def spread(snapshots: Sequence[Snapshot], most: int) -> list[Snapshot]:
    """At most `most` of them, evenly over time; fewer where the swarm is so large that their
    matrices would take too much memory. Those that nothing can be learnt from are left out.
    """
    useful = [each for each in snapshots if _is_useful(each)]
    largest = max((len(each.nodes) for each in useful), default=1)
    count = min(len(useful), most, MAX_PAIRS // (CLIENTS * largest**2))
    if count == 0:
        return []
    return [useful[int(row)] for row in np.unique(np.linspace(0, len(useful) - 1, count).round())]


def scenarios(snapshots: Sequence[Snapshot], rng: np.random.Generator) -> list[Scenario]:
    """`CLIENTS` sessions for each snapshot; none where no links lead through the model."""
    found = []
    for snapshot in snapshots:
        for _ in range(CLIENTS):
            problem = build_problem(snapshot, beside_one(snapshot, rng))
            with suppress(MissingBlocksError):
                found.append(Scenario.of(problem, rng))
    return found


def beside_one(snapshot: Snapshot, rng: np.random.Generator) -> Request:
    """What a client asks that sits beside one of the nodes."""
    request = Request(span=Span(0, snapshot.num_blocks))
    if snapshot.links is None:
        return request
    rtt_ms_NN, _ = snapshot.links.between([node.peer_id for node in snapshot.nodes])
    host = int(rng.integers(len(snapshot.nodes)))
    return replace(request, entry_rtt_ms=np.maximum(rtt_ms_NN[host], _BESIDE_MS))


def _is_useful(snapshot: Snapshot) -> bool:
    return snapshot.num_blocks > 0 and snapshot.links is not None and not snapshot.holes()
