from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import networkx as nx
import numpy as np
import pytest

from nesa_node.core.errors import MissingBlocksError
from nesa_node.routing.chain_request import Chain, ChainProblem, Visit, step_time
from nesa_node.routing.search.exact import exact_latency, merge_revisits, solve_latency
from tests.routing.problems import (
    count_calls,
    covered_problem,
    least_by_trying_everything,
    random_problem,
    small_problem,
)


def _cost(problem: ChainProblem, **options: bool) -> float:
    return _total_s(problem, exact_latency(problem, **options))


def _total_s(problem: ChainProblem, chain: Chain) -> float:
    return step_time(problem, chain).total_s


def test_both_forms_are_as_cheap_as_exhaustive_search_finds() -> None:
    """500 swarms of up to 6 nodes and 6 blocks; in some of them returning pays."""
    returned = 0
    for seed in range(500):
        problem = small_problem(seed)
        for may_return in (False, True):
            cost = partial(_total_s, problem)
            best = least_by_trying_everything(problem, cost, may_return=may_return)
            if best == math.inf:
                with pytest.raises(MissingBlocksError):
                    exact_latency(problem, allow_revisits=may_return)
                continue
            chain = exact_latency(problem, allow_revisits=may_return)
            assert step_time(problem, chain).total_s == pytest.approx(best, rel=1e-9)
            nodes = [visit.node for visit in chain]
            assert may_return or len(set(nodes)) == len(nodes)
            returned += len(set(nodes)) < len(nodes)
    assert returned >= 10


def _networkx_cost(problem: ChainProblem) -> float:
    """The shortest path from "client" to "done" over vertices (blocks done, node)."""
    graph = nx.DiGraph()
    blocks = problem.num_blocks
    for node in range(problem.num_nodes):
        block_s = float(problem.busy_block_s_N[node])
        for block in range(problem.starts_N[node], problem.ends_N[node]):
            graph.add_edge(("on", block, node), ("done", block + 1, node), weight=block_s)
            graph.add_edge(("done", block, node), ("on", block, node), weight=0.0)
            for sender in set(range(problem.num_nodes)) - {node}:
                enter_s = float(problem.transfer_s_NN[sender, node] + problem.visit_s_N[node])
                graph.add_edge(("done", block, sender), ("on", block, node), weight=enter_s)
        enter_s = float(problem.entry_s_N[node] + problem.visit_s_N[node])
        graph.add_edge("client", ("on", 0, node), weight=enter_s)
        graph.add_edge(("done", blocks, node), "done", weight=float(problem.exit_s_N[node]))
    # Nobody is on a block that it does not hold.
    graph.remove_nodes_from(
        [
            vertex
            for vertex in graph
            if vertex[0] == "on"
            and not problem.starts_N[vertex[2]] <= vertex[1] < problem.ends_N[vertex[2]]
        ]
    )
    return float(nx.dijkstra_path_length(graph, "client", "done"))


def test_plain_program_equals_the_shortest_path_that_networkx_finds() -> None:
    for seed in range(50):
        rng = np.random.default_rng(seed)
        nodes, blocks = int(rng.integers(15, 35)), int(rng.integers(10, 25))
        problem = random_problem(rng, nodes, blocks)
        problem = replace(problem, ends_N=np.where(np.arange(nodes) == 0, blocks, problem.ends_N))
        problem = replace(problem, starts_N=np.where(np.arange(nodes) == 0, 0, problem.starts_N))
        assert _cost(problem, allow_revisits=True) == pytest.approx(
            _networkx_cost(problem), rel=1e-12
        )


def test_watching_nodes_proves_a_chain_optimal() -> None:
    """Many nodes with cheap blocks amid slow ones: the relaxed optimum returns again and again."""
    rng = np.random.default_rng(3)
    problem = random_problem(rng, 40, 30)
    problem = replace(problem, visit_s_N=np.zeros(40), transfer_s_NN=np.zeros((40, 40)))
    relaxed = solve_latency(problem, allow_revisits=True)
    assert merge_revisits(relaxed.chain) != relaxed.chain
    solved = solve_latency(problem)
    assert solved.gap == 0.0
    assert solved.cost_s > relaxed.cost_s
    cut_short = solve_latency(problem, max_states=1)
    assert cut_short.bound_s == relaxed.cost_s
    assert cut_short.cost_s >= solved.cost_s
    assert step_time(problem, cut_short.chain).total_s == cut_short.cost_s
    assert cut_short.gap > 0.0


def test_missing_blocks_are_named() -> None:
    problem = random_problem(np.random.default_rng(0), 2, 8)
    problem = replace(problem, starts_N=np.array([0, 4]), ends_N=np.array([2, 6]))
    with pytest.raises(MissingBlocksError, match=r"2:4, 6:8") as caught:
        exact_latency(problem)
    assert caught.value.missing == ((2, 4), (6, 8))


def test_blocks_that_no_link_leads_to_are_missing() -> None:
    problem = random_problem(np.random.default_rng(0), 2, 8)
    problem = replace(
        problem,
        starts_N=np.array([0, 4]),
        ends_N=np.array([5, 8]),
        transfer_s_NN=np.full((2, 2), np.inf),
    )
    with pytest.raises(MissingBlocksError, match="links") as caught:
        exact_latency(problem)
    assert caught.value.missing == ((5, 8),)


def test_last_block_is_missing_where_nobody_can_answer() -> None:
    problem = random_problem(np.random.default_rng(0), 1, 8)
    problem.starts_N[:], problem.ends_N[:], problem.exit_s_N[:] = 0, 8, np.inf
    with pytest.raises(MissingBlocksError) as caught:
        exact_latency(problem)
    assert caught.value.missing == ((7, 8),)


@pytest.mark.parametrize("nodes", [5, 20, 1000])
def test_nodes_without_distance_are_no_harder(nodes: int) -> None:
    """Where moving costs nothing the relaxed optimum returns all the time."""
    problem = covered_problem(np.random.default_rng(nodes), nodes, 80)
    problem.visit_s_N[:], problem.transfer_s_NN[:] = 0.0, 0.0
    assert solve_latency(problem).gap == 0.0
    assert count_calls(partial(solve_latency, problem)) < 1000 * problem.num_blocks


def test_no_nodes_miss_everything_and_no_blocks_need_nobody() -> None:
    nobody = random_problem(np.random.default_rng(0), 0, 4)
    with pytest.raises(MissingBlocksError) as caught:
        exact_latency(nobody)
    assert caught.value.missing == ((0, 4),)
    nodes = random_problem(np.random.default_rng(0), 3, 4)
    empty = replace(nodes, num_blocks=0, starts_N=nodes.starts_N * 0, ends_N=nodes.ends_N * 0)
    assert exact_latency(empty) == ()


def test_equal_nodes_are_chosen_in_their_order() -> None:
    problem = random_problem(np.random.default_rng(0), 3, 4)
    problem = replace(
        problem,
        starts_N=np.zeros(3, int),
        ends_N=np.full(3, 4),
        block_s_N=np.full(3, 0.01),
        visit_s_N=np.zeros(3),
        load_N=np.zeros(3),
        entry_s_N=np.full(3, 0.01),
        exit_s_N=np.full(3, 0.01),
        transfer_s_NN=np.zeros((3, 3)),
    )
    assert exact_latency(problem) == (Visit(0, 0, 4),)


def test_overloaded_nodes_are_used_where_nobody_else_is() -> None:
    problem = random_problem(np.random.default_rng(0), 1, 4)
    problem = replace(problem, starts_N=np.array([0]), ends_N=np.array([4]), load_N=np.array([1e9]))
    assert exact_latency(problem) == (Visit(0, 0, 4),)


@pytest.mark.parametrize("name", ["block_s_N", "transfer_s_NN", "load_N", "reliability_N"])
@pytest.mark.parametrize("value", [float("nan"), -1.0])
def test_numbers_that_mean_nothing_are_refused(name: str, value: float) -> None:
    problem = random_problem(np.random.default_rng(0), 3, 4)
    array = getattr(problem, name).copy()
    array.flat[1] = value
    with pytest.raises(ValueError, match=name):
        replace(problem, **{name: array})


def test_work_grows_with_blocks_not_with_nodes() -> None:
    """Array operations over all nodes; `benchmarks routing` has the times."""
    for nodes in (300, 1000):
        problem = random_problem(np.random.default_rng(1), nodes, 80, longest=40)
        problem.starts_N[0] = 0
        assert count_calls(partial(exact_latency, problem)) < 1000 * problem.num_blocks
