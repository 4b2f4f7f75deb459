"""Candidates of large swarms, in worlds that are small enough to search all nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nesa_node.core.errors import MissingBlocksError
from nesa_node.core.ids import Span
from nesa_node.routing.chain_request import ChainRequest
from nesa_node.routing.chains import chain_cost_s, plan_chain
from nesa_node.routing.large_swarm import (
    LargeSwarm,
    choose_candidates,
    plan_large_chain,
    prepare_large_swarm,
)
from nesa_node.topology.geography import locations_array
from nesa_node.topology.links.sparse import estimate_sparse_links
from nesa_node.topology.simulation.world import LargeWorld, make_large_world

BLOCKS = 40
WHOLE = ChainRequest(span=Span(0, BLOCKS))


def _prepared(nodes: int, seed: int, **world: Any) -> tuple[LargeWorld, LargeSwarm]:
    made = make_large_world(nodes, BLOCKS, seed, **world)
    states = made.snapshot.nodes
    links = estimate_sparse_links(
        [node.peer_id for node in states],
        locations_array([node.location for node in states]),
        made.measured,
        np.random.default_rng(0),
    )
    return made, prepare_large_swarm(made.snapshot, links, WHOLE)


WORLD, SWARM = _prepared(700, seed=3)
EVERYTHING = np.arange(len(SWARM.links))


def _request(client: int) -> ChainRequest:
    pinged = WORLD.client_pings_CA[client]
    rtt_ms_N = WORLD.client_rtt_ms_CN[client]
    return replace(WHOLE, entry_rtt_ms=SWARM.links.expect_from(pinged, rtt_ms_N[pinged]))


def test_branches_are_the_regions_that_are_far_apart() -> None:
    apart = {
        frozenset((one, other))
        for one in range(len(WORLD.regions))
        for other in range(one)
        if WORLD.region_rtt_ms_RR[one, other] > 15
    }
    for branch in range(int(SWARM.branch_N.max()) + 1):
        inside = set(WORLD.region_N[SWARM.branch_N == branch].tolist())
        assert not any(pair <= inside for pair in apart)
    assert int(SWARM.branch_N.max()) + 1 >= 5


@pytest.mark.parametrize("client", range(4))
def test_chain_of_candidates_is_nearly_that_of_all_nodes(client: int) -> None:
    """By the same estimated links, so that only the choice of candidates can cost."""
    request = _request(client)
    everyone = SWARM.restrict(EVERYTHING)
    asked = SWARM.restrict_request(request, EVERYTHING)
    exact_s = chain_cost_s(everyone, asked, plan_chain(everyone, asked))
    rows = choose_candidates(SWARM, request, 96)
    assert len(rows) < 200
    hops = plan_large_chain(SWARM, request, most=96)
    assert chain_cost_s(everyone, asked, hops) <= exact_s * 1.005


def test_excluded_and_full_nodes_are_no_candidates() -> None:
    request = _request(0)
    used = {hop.peer_id for hop in plan_large_chain(SWARM, request)}
    without = replace(request, exclude=frozenset(used))
    again = plan_large_chain(SWARM, without)
    assert used.isdisjoint(hop.peer_id for hop in again)
    full = replace(request, min_free_tokens=int(np.median(SWARM.free_tokens_N)))
    assert (SWARM.free_tokens_N[choose_candidates(SWARM, full)] >= full.min_free_tokens).all()


def test_a_block_of_one_far_holder_is_found() -> None:
    """The only holder of the last block is in no near branch; without it there is no chain."""
    rare = int(np.argmax(SWARM.node_values(_request(0).entry_rtt_ms)))
    nodes = tuple(
        replace(node, span=Span(BLOCKS - 1, BLOCKS))
        if row == rare
        else replace(node, span=Span(node.span.start, min(node.span.end, BLOCKS - 1)))
        for row, node in enumerate(WORLD.snapshot.nodes)
    )
    swarm = prepare_large_swarm(replace(WORLD.snapshot, nodes=nodes), SWARM.links, WHOLE)
    hops = plan_large_chain(swarm, _request(0), most=32)
    assert hops[-1].peer_id == nodes[rare].peer_id
    lost = replace(_request(0), exclude=frozenset({nodes[rare].peer_id}))
    with pytest.raises(MissingBlocksError):
        plan_large_chain(swarm, lost, most=32)


def test_links_of_other_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="in their order"):
        prepare_large_swarm(WORLD.snapshot, SWARM.links.restrict(EVERYTHING[::-1]), WHOLE)
