"""What spreading holders over failure domains saves when a region is lost, and what it costs.

Swarms whose operators give 2 to 3 times the memory that the model needs are placed for latency with
two replicas of each block. Then holders are spread over domains that come from the merge tree of
round trips ("homology"), from the true regions ("labels"), from declared places ("geography"), or
not at all. All have the same nodes and memory. A loss takes all nodes of one region; it leaves no
hole if every block has another holder. "Possible" are the losses after which the other nodes'
memory still holds the model.

A recorded matrix (`--matrix`) has no regions and no places. There the domains come from its first
slices, and losses are of the branches that its last slices have.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.estimate import read_matrix
from benchmarks.options import Options
from benchmarks.results import print_table
from benchmarks.routing_worlds import Source, client_request, sources
from nesa_node.core.arrays import Bools, Floats
from nesa_node.routing.placement.placement_problem import (
    Assignment,
    PlacementProblem,
    make_placement_problem,
)
from nesa_node.routing.placement.plan import find_assignment
from nesa_node.routing.placement.score import score_assignment
from nesa_node.routing.placement.spread import spread_holders
from nesa_node.topology.links.matrix import Links
from nesa_node.topology.shape.failure_domains import (
    failure_domains,
    members_DN,
    persistent_branches,
)
from nesa_node.topology.shape.merge_tree import geographic_filtration, merge_tree
from nesa_node.topology.simulation.world import World

DEFAULTS = Options(model="70b", nodes=(12, 20, 40, 80), runs=200)
QUICK = Options(model="70b", nodes=(12,), runs=4)
MEMORY_GIVEN = (2.05, 2.5, 3.0)
"""Blocks that all nodes together hold, over those of the model."""
MIN_SEPARATION_KM = 200.0
METHODS = ("none", "homology", "labels", "geography")


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A swarm, the groups of nodes that are lost, and the domains that each method knows."""

    source: str
    room: PlacementProblem
    losses_LN: Bools
    domains: Mapping[str, Bools]


def run(options: Options) -> list[dict[str, Any]]:
    """A row per source, memory and method; each swarm is placed with each memory."""
    samples: dict[tuple[str, float, str], list[dict[str, float]]] = defaultdict(list)
    for number in range(options.runs):
        for memory in MEMORY_GIVEN:
            case = make_case(options, number, memory)
            for method, sample in place(case):
                samples[case.source, memory, method].append(sample)
    rows = [
        {"world": source, "memory": memory, "method": method}
        | {
            key: float(np.mean([each[key] for each in of]))
            for key in ("latency_ratio", "throughput_ratio", "moves", "seconds")
        }
        | {
            "share_without_hole": sum(each["survived"] for each in of) / _losses(of),
            "share_possible": sum(each["possible"] for each in of) / _losses(of),
            "losses": _losses(of),
            "runs": [
                {key: each[key] for key in ("survived", "losses", "latency_ratio")} for each in of
            ],
        }
        for (source, memory, method), of in sorted(samples.items())
    ]
    show(rows)
    return rows


def _losses(samples: Sequence[Mapping[str, float]]) -> float:
    return sum(each["losses"] for each in samples)


def make_case(options: Options, number: int, memory: float) -> Case:
    of = sources(options)
    source = of[number % len(of)]
    sizes = source.sizes()
    count = sizes[number // len(of) % len(sizes)]
    world = source.world(count, options.seed + 10_000 + number)
    requests = [client_request(world, client) for client in range(world.num_clients)]
    room = make_placement_problem(world.snapshot, requests, replicas=2)
    blocks = room.problem.num_blocks
    share = memory * blocks / max(int(room.max_blocks_N.sum()), 1)
    given_N = np.clip(np.ceil(room.max_blocks_N * share), 1, blocks - 1).astype(np.int64)
    room = PlacementProblem(room.problem, given_N, room.replicas, room.other_clients)
    peers = room.problem.peers
    domains = {"homology": members_DN(failure_domains(world.snapshot), peers)}
    if source.name == "matrix":
        later = replace(world.snapshot, links=_last_slices(source, world))
        return Case(source.name, room, members_DN(failure_domains(later), peers), domains)
    regions = np.unique(world.region_N)
    labels_LN: Bools = np.equal(world.region_N, regions[:, None])
    domains["labels"] = labels_LN
    places_N2 = np.array([node.location for node in world.snapshot.nodes])
    tree = merge_tree(geographic_filtration(places_N2[:, 0], places_N2[:, 1]))
    branches = list(persistent_branches(tree, min_height=MIN_SEPARATION_KM))
    domains["geography"] = np.zeros((len(branches), len(peers)), dtype=np.bool_)
    for row_N, branch in zip(domains["geography"], branches, strict=True):
        row_N[branch] = True
    return Case(source.name, room, labels_LN, domains)


def _last_slices(source: Source, world: World) -> Links:
    assert source.options.matrix is not None, "only then is this source used"
    rtt_ms_NN = read_matrix(source.options.matrix, last=True).rtt_ms_NN
    filled_NN = np.where(np.isnan(rtt_ms_NN), np.nanmedian(rtt_ms_NN), rtt_ms_NN)
    return replace(world.links, rtt_ms_NN=filled_NN)


def place(case: Case) -> Iterator[tuple[str, dict[str, float]]]:
    """What each method's placement survives, and its latency over the one without spreading."""
    began = time.perf_counter()
    plain, _, _ = find_assignment(case.room, "latency")
    searched_s = time.perf_counter() - began
    before = score_assignment(case.room, plain)
    for method in METHODS:
        if method != "none" and method not in case.domains:
            continue
        assignment, seconds = plain, searched_s
        if method != "none":
            began = time.perf_counter()
            room = replace(case.room, domains_DN=case.domains[method])
            assignment = spread_holders(room, plain, "latency")
            seconds = time.perf_counter() - began
        after = score_assignment(case.room, assignment)
        yield (
            method,
            {
                "survived": float(survives_L(case, assignment).sum()),
                "possible": float((_memory_left_L(case) >= case.room.problem.num_blocks).sum()),
                "losses": float(len(case.losses_LN)),
                "latency_ratio": after.latency_s / before.latency_s,
                "throughput_ratio": after.steps_per_s / before.steps_per_s,
                "moves": float((assignment.starts_N != plain.starts_N).sum()),
                "seconds": seconds,
            },
        )


def survives_L(case: Case, assignment: Assignment) -> Bools:
    """Whether each loss leaves a holder of every block."""
    holds_NB = assignment.holds_NB(case.room.problem.num_blocks)
    left_LB = (~case.losses_LN).astype(np.int64) @ holds_NB.astype(np.int64)
    return np.asarray((left_LB > 0).all(axis=1))


def _memory_left_L(case: Case) -> Floats:
    return np.asarray((~case.losses_LN) @ case.room.max_blocks_N, dtype=np.float64)


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    labels = {
        (row["world"], row["memory"]): row["share_without_hole"]
        for row in rows
        if row["method"] == "labels"
    }
    cells = []
    for row in rows:
        best = labels.get((row["world"], row["memory"]))
        cells.append(
            (
                row["world"],
                f"{row['memory']:g}",
                row["method"],
                f"{row['losses']:.0f}",
                f"{row['share_possible']:.3f}",
                f"{row['share_without_hole']:.3f}",
                f"{row['share_without_hole'] / best:.3f}" if best else "",
                f"{row['latency_ratio']:.4f}",
                f"{row['throughput_ratio']:.4f}",
                f"{row['moves']:.1f}",
                f"{row['seconds']:.3f}",
            )
        )
    print_table(
        "Losses of a region that leave no hole, by what holders are spread over",
        "worlds|memory|domains|losses|possible|no hole|of labels'|latency|tokens/s|moves|seconds",
        cells,
    )
