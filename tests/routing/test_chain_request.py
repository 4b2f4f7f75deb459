from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.routing.chain_request import (
    DEFAULT_BLOCK_S,
    DEFAULT_BYTES_PER_S,
    DEFAULT_RTT_MS,
    VISIT_OVERHEAD_S,
    ChainRequest,
    Visit,
    build_problem,
    step_time,
)
from nesa_node.topology.links.matrix import Links
from nesa_node.topology.simulation.world import make_world
from nesa_node.topology.snapshot import NodeState, Snapshot
from tests.routing.problems import count_calls

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def _snapshot(*nodes: NodeState, links: Links | None = None) -> Snapshot:
    return Snapshot(ModelId("m@0"), 10, nodes, 0.0, links=links)


def _links(rtt_ms: float, rate_ab: float, rate_ba: float) -> Links:
    rtt_ms_NN = np.array([[0.0, rtt_ms], [rtt_ms, 0.0]])
    rate_NN = np.array([[np.inf, rate_ab], [rate_ba, np.inf]])
    return Links((A, B), rtt_ms_NN, rate_NN, np.zeros((2, 2)), np.ones((2, 2)))


def test_seconds_of_a_chain_are_those_done_by_hand() -> None:
    a = NodeState(A, Span(0, 4), decode_tokens_per_s=25.0, load=0.5)
    b = NodeState(B, Span(2, 8), decode_tokens_per_s=50.0)
    request = ChainRequest(
        span=Span(1, 7),
        bytes_per_token=1000.0,
        entry_rtt_ms={A: 20.0, B: 40.0},
        entry_bytes_per_s=np.array([1e5, 2e5]),
        exit_bytes_per_s={A: 1e6, B: 1e6},
        penalties_s={B: 0.25},
    )
    problem = build_problem(_snapshot(a, b, links=_links(60.0, 5e5, 1e5)), request)
    assert problem.starts_N.tolist() == [0, 1]
    assert problem.ends_N.tolist() == [3, 6]
    got = step_time(problem, (Visit(0, 0, 3), Visit(1, 3, 6)))
    assert got.entry_s == pytest.approx(0.010 + 1000 / 1e5)
    assert got.compute_s == pytest.approx(3 * 0.01 * 1.5 + 3 / 300)
    assert got.visits_s == pytest.approx(2 * VISIT_OVERHEAD_S + 0.25)
    assert got.transfer_s == pytest.approx(0.030 + 1000 / 5e5)
    assert got.exit_s == pytest.approx(0.020 + 1000 / 1e6)


def test_prefill_takes_its_own_speed_and_more_bytes() -> None:
    a = NodeState(A, Span(0, 5), prefill_tokens_per_s=100.0, decode_tokens_per_s=1.0)
    request = ChainRequest(span=Span(0, 5), tokens=50, entry_bytes_per_s={A: 1e6})
    problem = build_problem(_snapshot(a), request)
    assert problem.block_s_N[0] == pytest.approx(50 / 100 / 5)
    assert problem.entry_s_N[0] == pytest.approx(DEFAULT_RTT_MS / 2000 + 50 * 16_384 / 1e6)


def test_nobody_gains_by_saying_nothing() -> None:
    fast = NodeState(A, Span(0, 5), decode_tokens_per_s=100.0)
    slow = NodeState(B, Span(0, 5), decode_tokens_per_s=10.0)
    silent = NodeState(C, Span(0, 2))
    problem = build_problem(_snapshot(fast, slow, silent), ChainRequest(span=Span(0, 5)))
    assert problem.block_s_N[2] == problem.block_s_N[1] == pytest.approx(0.02)
    alone = build_problem(_snapshot(silent), ChainRequest(span=Span(0, 5), tokens=7))
    assert alone.block_s_N[0] == pytest.approx(7 * DEFAULT_BLOCK_S)


def test_one_that_says_it_is_slow_does_not_slow_the_unmeasured() -> None:
    liar = NodeState(A, Span(0, 5), decode_tokens_per_s=1e-320)
    silent = NodeState(C, Span(0, 2))
    for count in (1, 2, 30):
        fast = [
            NodeState(PeerId(f"n{i}"), Span(0, 5), decode_tokens_per_s=100.0) for i in range(count)
        ]
        problem = build_problem(_snapshot(liar, *fast, silent), ChainRequest(span=Span(0, 5)))
        assert problem.block_s_N[0] == pytest.approx(200.0)
        assert 0.002 <= problem.block_s_N[-1] <= 0.02 + 1e-9


def test_unknown_links_take_the_defaults() -> None:
    nodes = [NodeState(peer, Span(0, 5)) for peer in (A, B, C)]
    one_token_s = DEFAULT_RTT_MS / 2000 + 16_384 / DEFAULT_BYTES_PER_S
    for links in (None, _links(np.nan, np.nan, 0.0)):
        problem = build_problem(_snapshot(*nodes, links=links), ChainRequest(span=Span(0, 5)))
        assert problem.entry_s_N == pytest.approx(np.full(3, one_token_s))
        assert problem.transfer_s_NN == pytest.approx(
            np.full((3, 3), one_token_s) * (1 - np.eye(3))
        )


def test_only_nodes_that_may_and_can_help_are_in_it() -> None:
    outside = NodeState(A, Span(0, 3), free_cache_tokens=99)
    full = NodeState(B, Span(0, 9), free_cache_tokens=5)
    avoided = NodeState(C, Span(0, 9), free_cache_tokens=99)
    good = NodeState(PeerId("d"), Span(5, 6), free_cache_tokens=99)
    request = ChainRequest(span=Span(3, 9), exclude=frozenset({C}), min_free_tokens=10)
    problem = build_problem(_snapshot(outside, full, avoided, good), request)
    assert problem.peers == ("d",)
    nobody = build_problem(_snapshot(outside), request)
    assert nobody.num_nodes == 0
    assert nobody.transfer_s_NN.shape == (0, 0)


def test_spare_is_the_free_share_of_caches_where_memory_is_unknown() -> None:
    a = NodeState(A, Span(0, 1), free_cache_tokens=25, total_cache_tokens=100)
    b = NodeState(B, Span(0, 1), load=0.25)
    problem = build_problem(_snapshot(a, b), ChainRequest(span=Span(0, 1), stability={B: 0.5}))
    assert problem.spare_N.tolist() == problem.cache_N.tolist() == [0.25, 0.75]
    assert problem.pressure_N.tolist() == [0.0, 0.0]
    assert problem.stability_N.tolist() == [1.0, 0.5]


def test_spare_is_the_free_share_of_the_memory_with_the_weights() -> None:
    """That of the GPU, without one of the machine, whose used share is its pressure."""
    of_machine: dict[str, Any] = {"cpu_memory_total_bytes": 1000, "cpu_memory_free_bytes": 900}
    of_gpu: dict[str, Any] = {"gpu_memory_total_bytes": 80, "gpu_memory_free_bytes": 20}
    cache: dict[str, Any] = {"free_cache_tokens": 1, "total_cache_tokens": 2}
    a = NodeState(A, Span(0, 1), **of_machine, **of_gpu, **cache)
    b = NodeState(B, Span(0, 1), **of_machine, **cache)
    c = NodeState(C, Span(0, 1), **of_gpu, load=0.5)
    problem = build_problem(_snapshot(a, b, c), ChainRequest(span=Span(0, 1)))
    assert problem.spare_N.tolist() == [0.25, 0.9, 0.25]
    assert problem.cache_N.tolist() == [0.5, 0.5, 0.5]
    assert problem.pressure_N == pytest.approx([0.1, 0.1, 0.0])


def test_links_in_another_order_give_the_same_problem() -> None:
    world = make_world(30, 20, np.random.default_rng(0))
    request = ChainRequest(span=Span(3, 15), entry_rtt_ms=world.client_rtt_ms_CN[0])
    backwards = tuple(node.peer_id for node in reversed(world.snapshot.nodes))
    shuffled = replace(world.snapshot, links=world.links.select(backwards))
    one, other = build_problem(world.snapshot, request), build_problem(shuffled, request)
    assert one.peers == other.peers
    assert np.array_equal(one.transfer_s_NN, other.transfer_s_NN)
    assert np.array_equal(one.entry_s_N, other.entry_s_N)


def test_values_in_the_wrong_number_are_refused() -> None:
    request = ChainRequest(span=Span(0, 1), entry_rtt_ms=np.zeros(3))
    with pytest.raises(ValueError, match=r"\(3,\) values for 1 nodes"):
        build_problem(_snapshot(NodeState(A, Span(0, 1))), request)
    with pytest.raises(ValueError, match="nothing to run"):
        ChainRequest(span=Span(1, 1))


def test_work_grows_no_faster_than_the_nodes() -> None:
    calls = []
    for nodes in (100, 1000):
        world = make_world(nodes, 80, np.random.default_rng(0))
        request = ChainRequest(span=Span(0, 80), entry_rtt_ms=world.client_rtt_ms_CN[0])
        build_problem(world.snapshot, request)
        calls.append(count_calls(partial(build_problem, world.snapshot, request)))
    assert calls[1] < 11 * calls[0]
