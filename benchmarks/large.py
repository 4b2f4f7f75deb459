"""Chains and placements of 10,000 and 50,000 nodes: time, memory, and what candidates cost.

A made-up world knows the true link of every pair, computed on demand. The planners see what records
carry: the pairs that each node has measured (at most 16), and declared places; a client has
measured its round trips to 48 nodes. A process of its own per size gives times and the peak of
memory; on a machine that does other things, too, CPU seconds say more than the clock. "Fit" (links)
and "prepare" are done for a snapshot, "chain" for every session.

Then chains of candidates are compared with the exact chain over all nodes and true links. Exact is
a search among the nodes that lower bounds do not exclude: those bounds know access links and the
least way between regions. Candidates come branch by branch; by the cost of all blocks on nodes like
each, the way to the client included ("cost"), in all or of each block; by their nearness to the
client; or at random. The search sees the same estimated links, and the true time of its chain
counts.

Placements are compared with those of the planner that sees all true pairs, for 3,000 nodes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.footprint import peak_bytes
from benchmarks.options import Options
from benchmarks.results import print_table
from benchmarks.scale import BLOCKS
from nesa_node.core.arrays import Bools, Floats, Ints
from nesa_node.core.ids import Span
from nesa_node.routing.chain_request import (
    ChainProblem,
    ChainRequest,
    build_problem,
    client_seconds,
    step_time,
)
from nesa_node.routing.chains import Hop, hops_to_visits, plan_chain
from nesa_node.routing.large_swarm import (
    MAX_CHAIN_CANDIDATES,
    LargeSwarm,
    add_missing_holders,
    choose_candidates,
    plan_large_chain,
    prepare_large_swarm,
)
from nesa_node.routing.placement.large_plan import (
    choose_plan_candidates,
    plan_large_placement,
    rebalance_large,
)
from nesa_node.routing.placement.plan import plan_placement, with_spans
from nesa_node.routing.search.exact import solve_latency
from nesa_node.topology.geography import locations_array
from nesa_node.topology.links.matrix import Links
from nesa_node.topology.links.sparse import SparseLinks, estimate_sparse_links
from nesa_node.topology.simulation.world import LargeWorld, make_large_world

DEFAULTS = Options(model="70b", nodes=(10_000, 50_000), runs=3)
QUICK = Options(model="70b", nodes=(6_000,), runs=1)
COUNTS = (32, 64, 192, MAX_CHAIN_CANDIDATES)
"""Candidates in the comparison."""
PLAN_NODES = 3000
MAX_EXACT_NODES = 8000
"""Nodes among which the exact chain is searched: 0.5 GB per matrix."""
CHAINS_TIMED = 10
"""Chains per client."""
ONE_THREAD = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
"""Short vectors gain nothing from more threads, which wait for each other on a busy machine."""
WHOLE = ChainRequest(span=Span(0, BLOCKS))


def run(options: Options) -> list[dict[str, Any]]:
    rows = []
    for nodes in options.nodes:
        argv = [sys.executable, "-m", "benchmarks.large", str(nodes), str(options.seed)]
        done = subprocess.run(argv, check=True, capture_output=True, text=True, env=ONE_THREAD)
        rows.append({"part": "time", **json.loads(done.stdout)})
    for nodes in options.nodes:
        for num_regions in (8, 20):
            rows += compare_chains(nodes, num_regions, options)
    rows += compare_plans(min(PLAN_NODES, *options.nodes), options)
    show(rows)
    return rows


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A world, what planners know of it, and a request per client."""

    world: LargeWorld
    links: SparseLinks
    swarm: LargeSwarm
    requests: Sequence[ChainRequest]


def make_case(nodes: int, seed: int, *, num_regions: int = 8, places: bool = True) -> Case:
    world = make_large_world(nodes, BLOCKS, seed, num_regions=num_regions)
    links = fit_links(world, seed, places=places)
    swarm = prepare_large_swarm(world.snapshot, links, WHOLE)
    return Case(world, links, swarm, client_requests(world, links))


def fit_links(world: LargeWorld, seed: int, *, places: bool = True) -> SparseLinks:
    nodes = world.snapshot.nodes
    places_N2 = locations_array([node.location if places else None for node in nodes])
    peers = [node.peer_id for node in nodes]
    return estimate_sparse_links(peers, places_N2, world.measured, np.random.default_rng(seed))


def client_requests(world: LargeWorld, links: SparseLinks) -> list[ChainRequest]:
    """With round trips that a client expects from those that it has measured."""
    return [
        replace(WHOLE, entry_rtt_ms=links.expect_from(rows, rtt_ms_N[rows]))
        for rows, rtt_ms_N in zip(world.client_pings_CA, world.client_rtt_ms_CN, strict=True)
    ]


def measure(nodes: int, seed: int) -> dict[str, Any]:
    """Times and memory of one size, of this process."""
    seconds: dict[str, float] = {}
    cpu_seconds: dict[str, float] = {}

    @contextmanager
    def timed(part: str) -> Iterator[None]:
        started, busy = time.perf_counter(), time.process_time()
        yield
        seconds[part] = time.perf_counter() - started
        cpu_seconds[part] = time.process_time() - busy

    world = make_large_world(nodes, BLOCKS, seed)
    before = peak_bytes()
    with timed("fit"):
        links = fit_links(world, seed)
    with timed("prepare"):
        swarm = prepare_large_swarm(world.snapshot, links, WHOLE)
    requests = client_requests(world, links)
    chains_s, chains_cpu_s = [], []
    for request in requests * CHAINS_TIMED:
        started, busy = time.perf_counter(), time.process_time()
        plan_large_chain(swarm, request)
        chains_s.append(time.perf_counter() - started)
        chains_cpu_s.append(time.process_time() - busy)
    with timed("place_latency"):
        quick = plan_large_placement(swarm, requests, goal="latency")
    with timed("place_throughput"):
        wide = plan_large_placement(swarm, requests, goal="throughput")
    with timed("rebalance"):
        moves = rebalance_large(swarm, requests)
    return {
        "nodes": nodes,
        "blocks": BLOCKS,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "chain_median_s": median(chains_s),
        "chain_max_s": max(chains_s),
        "chain_median_cpu_s": median(chains_cpu_s),
        "chain_max_cpu_s": max(chains_cpu_s),
        "peak_mb": (peak_bytes() - before) / 1e6,
        "process_mb": peak_bytes() / 1e6,
        "branches": int(swarm.branch_N.max()) + 1,
        "domains": len(swarm.domains_DN),
        "latency_gap": quick.gap,
        "throughput_gap": wide.gap,
        "exposed": quick.exposed,
        "moves": len(moves.moves),
        "runs": [{"chains_s": chains_s, "chains_cpu_s": chains_cpu_s}],
    }


def random_candidates(case: Case, client: int, count: int, rng: np.random.Generator) -> Ints:
    return rng.choice(len(case.links), count, replace=False)


def nearest_candidates(case: Case, client: int, count: int, rng: np.random.Generator) -> Ints:
    return np.argsort(_entry_ms(case, client), kind="stable")[:count]


def cheapest_candidates(case: Case, client: int, count: int, rng: np.random.Generator) -> Ints:
    """Without branches: all blocks at a node's cost, and the way to it and back."""
    cost_s_N = BLOCKS * case.swarm.cost_s_N + 1e-3 * _entry_ms(case, client)
    return np.argsort(cost_s_N, kind="stable")[:count]


def cheapest_per_block(case: Case, client: int, count: int, rng: np.random.Generator) -> Ints:
    """The same cost, but as many holders of each block."""
    swarm = case.swarm
    cost_s_N = BLOCKS * swarm.cost_s_N + 1e-3 * _entry_ms(case, client)
    best_first = np.argsort(cost_s_N, kind="stable")
    holds_BN = (swarm.starts_N <= np.arange(BLOCKS)[:, None]) & (
        np.arange(BLOCKS)[:, None] < swarm.ends_N
    )
    holders_B = [best_first[holds_N[best_first]] for holds_N in holds_BN]
    chosen: set[int] = set()
    place = 0
    while len(chosen) < count:
        chosen.update(int(holders[place]) for holders in holders_B if place < len(holders))
        place += 1
    return np.array(sorted(chosen))


def _entry_ms(case: Case, client: int) -> Floats:
    return case.swarm.node_values(case.requests[client].entry_rtt_ms)


def branch_candidates(case: Case, client: int, count: int, rng: np.random.Generator) -> Ints:
    return choose_candidates(case.swarm, case.requests[client], count)


METHODS: dict[str, Callable[[Case, int, int, np.random.Generator], Ints]] = {
    "branches": branch_candidates,
    "cost per block": cheapest_per_block,
    "cost": cheapest_candidates,
    "nearest": nearest_candidates,
    "random": random_candidates,
}


def compare_chains(nodes: int, num_regions: int, options: Options) -> list[dict[str, Any]]:
    """A row per method and number of candidates: true times over those of exact chains."""
    ratios: dict[tuple[str, int], list[float]] = defaultdict(list)
    sizes: dict[tuple[str, int], list[int]] = defaultdict(list)
    exact_from, skipped = [], 0
    for number in range(options.runs):
        seed = options.seed + 1000 + number
        case = make_case(nodes, seed, num_regions=num_regions)
        rng = np.random.default_rng(seed)
        for client in range(case.world.num_clients):
            found = {}
            for method, choose in METHODS.items():
                for count in COUNTS:
                    rows = choose(case, client, count, rng)
                    rows = add_missing_holders(case.swarm, case.requests[client], rows)
                    asked = case.swarm.restrict_request(case.requests[client], rows)
                    hops = plan_chain(case.swarm.restrict(rows), asked)
                    found[method, count] = true_step_s(case, client, hops)
                    sizes[method, count].append(len(rows))
            kept = possible_nodes(case, client, min(found.values()))
            if len(kept) > MAX_EXACT_NODES:
                skipped += 1
                continue
            exact_from.append(len(kept))
            solved = solve_latency(true_problem(case.world, client, kept))
            for key, step_s in found.items():
                ratios[key].append(step_s / solved.bound_s)
    return [
        {
            "part": "chains",
            "nodes": nodes,
            "regions": num_regions,
            "method": method,
            "asked": count,
            "candidates": mean(sizes[method, count]),
            "ratio_mean": mean(of),
            "ratio_max": max(of),
            "within_2_percent": mean(ratio <= 1.02 for ratio in of),
            "clients": len(of),
            "not_computed": skipped,
            "exact_nodes_median": median(exact_from),
            "runs": [{"ratios": of}],
        }
        for (method, count), of in ratios.items()
    ]


def true_step_s(case: Case, client: int, hops: Sequence[Hop]) -> float:
    rows = np.array([case.swarm.row_of[hop.peer_id] for hop in hops])
    problem = true_problem(case.world, client, rows)
    return step_time(problem, hops_to_visits(problem, WHOLE.span, hops)).total_s


def true_problem(world: LargeWorld, client: int, rows: Ints) -> ChainProblem:
    """The chain problem of some nodes, with all their true links."""
    nodes = tuple(world.snapshot.nodes[row] for row in rows.tolist())
    snapshot = replace(world.snapshot, nodes=nodes, links=true_links(world, rows))
    return build_problem(
        snapshot, replace(WHOLE, entry_rtt_ms=world.client_rtt_ms_CN[client][rows])
    )


def true_links(world: LargeWorld, rows: Ints) -> Links:
    size = len(rows)
    rtt_ms_NN, rate_NN = np.empty((size, size)), np.empty((size, size))
    for start in range(0, size, 256):
        part = rows[start : start + 256, None]
        rtt_ms_NN[start : start + 256] = world.true_rtt_ms(part, rows[None, :])
        rate_NN[start : start + 256] = world.true_bytes_per_s(part, rows[None, :])
    nothing_NN = np.broadcast_to(0.0, rtt_ms_NN.shape)
    peers = tuple(world.snapshot.nodes[row].peer_id for row in rows.tolist())
    return Links(peers, rtt_ms_NN, rate_NN, nothing_NN, nothing_NN)


def possible_nodes(case: Case, client: int, limit_s: float) -> Ints:
    """The nodes that a chain of at most `limit_s` could visit; all its nodes are among them.

    A dynamic program over blocks, forwards and backwards. A transfer takes at least the access
    links of its sender and of the machine with the best one, and three quarters of the way between
    the regions (noise shortens it by 4 % in the standard deviation).
    """
    world, swarm = case.world, case.swarm
    unknown_N = np.full(len(swarm.links), np.nan)
    rtt_ms_N = world.client_rtt_ms_CN[client]
    entry_s_N, exit_s_N = client_seconds(WHOLE, rtt_ms_N, unknown_N, unknown_N)
    access_s_N = 5e-4 * world.access_N.rtt_ms_A
    onward_s_N = access_s_N + access_s_N.min()
    onward_s_N += WHOLE.bytes_per_token / world.access_N.up_bytes_per_s_A
    way_s_RR = 0.75 * 5e-4 * world.region_rtt_ms_RR

    def least_of_regions(seconds_N: Floats) -> Floats:
        least_s_R = np.full(len(way_s_RR), np.inf)
        np.minimum.at(least_s_R, world.region_N, seconds_N)
        return least_s_R

    blocks_B1 = np.arange(BLOCKS)[:, None]
    holds_BN: Bools = (swarm.starts_N <= blocks_B1) & (blocks_B1 < swarm.ends_N)
    busy_s_N, visit_s = swarm.busy_block_s_N, WHOLE.visit_s
    before_s_BN = np.full((BLOCKS, len(busy_s_N)), np.inf)
    done_s_N = np.full(len(busy_s_N), np.inf)
    entered_s_N = entry_s_N + visit_s
    for block in range(BLOCKS):
        if block:
            left_s_R = least_of_regions(done_s_N + onward_s_N)
            entered_s_N = (left_s_R[:, None] + way_s_RR).min(axis=0)[world.region_N] + visit_s
        before_s_N = np.where(holds_BN[block], np.minimum(done_s_N, entered_s_N), np.inf)
        before_s_BN[block] = before_s_N
        done_s_N = before_s_N + busy_s_N
    possible_N = np.zeros(len(busy_s_N), dtype=np.bool_)
    after_s_N = np.where(holds_BN[-1], exit_s_N, np.inf)
    for block in range(BLOCKS - 1, -1, -1):
        ahead_s_N = np.where(holds_BN[block], after_s_N + busy_s_N, np.inf)
        possible_N |= before_s_BN[block] + ahead_s_N <= limit_s * (1 + 1e-9)
        if block:
            ahead_s_R = (least_of_regions(ahead_s_N) + way_s_RR).min(axis=1)
            moved_s_N = onward_s_N + ahead_s_R[world.region_N] + visit_s
            after_s_N = np.minimum(ahead_s_N, moved_s_N)
    return np.flatnonzero(possible_N)


def compare_plans(nodes: int, options: Options) -> list[dict[str, Any]]:
    """Latency of placements, exact chains over true links, over that of the dense planner."""
    ratios: dict[str, list[float]] = defaultdict(list)
    seconds: dict[str, list[float]] = defaultdict(list)
    for number in range(options.runs):
        seed = options.seed + 2000 + number
        case = make_case(nodes, seed)
        everything = np.arange(nodes)
        links = true_links(case.world, everything)
        dense = replace(case.world.snapshot, links=links)
        asked = [replace(WHOLE, entry_rtt_ms=row) for row in case.world.client_rtt_ms_CN]

        def latency_s(
            spans: Any, dense: Any = dense, asked: Sequence[ChainRequest] = asked
        ) -> float:
            placed = with_spans(dense, spans)
            return mean(solve_latency(build_problem(placed, each)).cost_s for each in asked)

        began = time.perf_counter()
        plan = plan_placement(dense, asked)
        seconds["all pairs"].append(time.perf_counter() - began)
        least_s = latency_s(plan.spans)
        ratios["all pairs"].append(1.0)
        rows = choose_plan_candidates(case.swarm, case.requests)
        rng = np.random.default_rng(seed)
        chosen = {"branches": rows} | {
            method: _for_all_clients(case, METHODS[method], len(rows), rng)
            for method in ("cost per block", "cost", "nearest", "random")
        }
        for method, candidates in chosen.items():
            began = time.perf_counter()
            plan = plan_large_placement(case.swarm, case.requests, candidates=candidates)
            seconds[method].append(time.perf_counter() - began)
            ratios[method].append(latency_s(plan.spans) / least_s)
    return [
        {
            "part": "plans",
            "nodes": nodes,
            "method": method,
            "ratio_mean": mean(of),
            "ratio_max": max(of),
            "seconds_mean": mean(seconds[method]),
            "runs": [{"ratios": of}],
        }
        for method, of in ratios.items()
    ]


def _for_all_clients(
    case: Case,
    choose: Callable[[Case, int, int, np.random.Generator], Ints],
    count: int,
    rng: np.random.Generator,
) -> Ints:
    clients = range(case.world.num_clients)
    share = count // len(clients)
    return np.unique(np.concatenate([choose(case, client, share, rng) for client in clients]))


def show(rows: Sequence[dict[str, Any]]) -> None:
    print_table(
        "Swarms of many thousand nodes, 80 blocks: CPU seconds and memory",
        "nodes|fit links|prepare|chain, median|longest|median,\nclock|place,\nlatency|its clock"
        "|place,\nthroughput|rebalance|MB above\nthe start",
        [
            (
                str(row["nodes"]),
                *(f"{row['cpu_seconds'][part]:.2f}" for part in ("fit", "prepare")),
                f"{row['chain_median_cpu_s']:.4f}",
                f"{row['chain_max_cpu_s']:.4f}",
                f"{row['chain_median_s']:.4f}",
                f"{row['cpu_seconds']['place_latency']:.1f}",
                f"{row['seconds']['place_latency']:.1f}",
                f"{row['cpu_seconds']['place_throughput']:.1f}",
                f"{row['cpu_seconds']['rebalance']:.1f}",
                f"{row['peak_mb']:.0f}",
            )
            for row in rows
            if row["part"] == "time"
        ],
    )
    print_table(
        "True time of a step over that of the exact chain",
        "nodes|regions|candidates by|asked|taken|mean|greatest|within 2 %|clients",
        [
            (
                str(row["nodes"]),
                str(row["regions"]),
                row["method"],
                str(row["asked"]),
                f"{row['candidates']:.0f}",
                f"{row['ratio_mean']:.4f}",
                f"{row['ratio_max']:.3f}",
                f"{row['within_2_percent']:.0%}",
                str(row["clients"]),
            )
            for row in rows
            if row["part"] == "chains"
        ],
    )
    print_table(
        "Latency of a placement over that of the planner that sees all pairs",
        "nodes|candidates by|mean|greatest|seconds",
        [
            (
                str(row["nodes"]),
                row["method"],
                f"{row['ratio_mean']:.4f}",
                f"{row['ratio_max']:.3f}",
                f"{row['seconds_mean']:.1f}",
            )
            for row in rows
            if row["part"] == "plans"
        ],
    )


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]))))
