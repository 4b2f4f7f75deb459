"""Failure domains against known regions, and branches against scipy's single linkage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.cluster.hierarchy import linkage, to_tree
from scipy.spatial.distance import squareform

from nesa_node.core.arrays import Floats
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.topology.links.matrix import Links
from nesa_node.topology.shape.failure_domains import (
    FailureDomain,
    access_delays_ms,
    failure_domains,
    members_DN,
    peers_failing_with,
    persistent_branches,
)
from nesa_node.topology.shape.merge_tree import make_filtration, merge_tree
from nesa_node.topology.simulation.world import make_world
from nesa_node.topology.snapshot import NodeState, Snapshot


def _snapshot(rtt_ms_NN: Floats | None = None, *, addresses: Sequence[tuple[str, ...]]) -> Snapshot:
    nodes = tuple(
        NodeState(PeerId(f"n{i}"), Span(0, 1), addresses=each) for i, each in enumerate(addresses)
    )
    peers = tuple(node.peer_id for node in nodes)
    links = None
    if rtt_ms_NN is not None:
        plain_NN = np.zeros_like(rtt_ms_NN)
        links = Links(peers, rtt_ms_NN, plain_NN, plain_NN, plain_NN)
    return Snapshot(ModelId("m"), 1, nodes, 0.0, links=links)


def _domains(snapshot: Snapshot) -> dict[str, set[frozenset[str]]]:
    found: dict[str, set[frozenset[str]]] = {}
    for domain in failure_domains(snapshot):
        found.setdefault(domain.kind, set()).add(frozenset(domain.peers))
    return found


def _two_cities(apart_ms: float, access_ms: list[float]) -> Floats:
    """Even nodes in one city, odd ones in another."""
    access_N = np.array(access_ms)
    place_N = np.arange(len(access_ms)) % 2
    rtt_ms_NN: Floats = access_N[:, None] + access_N + 0.5
    rtt_ms_NN += apart_ms * (place_N[:, None] != place_N)
    np.fill_diagonal(rtt_ms_NN, 0.0)
    return rtt_ms_NN


def test_cities_are_told_apart_though_homes_are_further_from_their_exchange() -> None:
    snapshot = _snapshot(_two_cities(12.0, [1, 30, 25, 2, 14, 9, 40, 5]), addresses=[()] * 8)
    even, odd = (frozenset(f"n{i}" for i in range(at, 8, 2)) for at in (0, 1))
    assert _domains(snapshot) == {"branch": {even, odd}}


def test_one_city_has_no_branches() -> None:
    snapshot = _snapshot(_two_cities(1.0, [1, 30, 25, 2, 14, 9, 40, 5]), addresses=[()] * 8)
    assert failure_domains(snapshot) == ()


def test_branches_are_the_regions_of_made_up_swarms() -> None:
    """Every region with two nodes or more is a branch, but for some beside a near one."""
    found, regions, wrong = 0, 0, 0
    for seed in range(20):
        world = make_world(40, 80, np.random.default_rng(seed), num_regions=6)
        branches = _domains(world.snapshot)["branch"]
        for region in set(world.region_N.tolist()):
            rows = np.flatnonzero(world.region_N == region).tolist()
            members = frozenset(world.snapshot.nodes[row].peer_id for row in rows)
            if len(members) > 1:
                regions += 1
                found += members in branches
        of = {node.peer_id: world.region_N[i] for i, node in enumerate(world.snapshot.nodes)}
        for branch in branches:
            # A branch is one region, a part of one, or whole regions together.
            inside = {of[PeerId(peer)] for peer in branch}
            whole = {PeerId(peer) for peer in of if of[peer] in inside}
            wrong += len(inside) > 1 and whole != branch
    assert found / regions > 0.8
    assert wrong / regions < 0.05


def test_access_delays_are_those_of_the_world() -> None:
    for seed in range(5):
        world = make_world(40, 80, np.random.default_rng(seed), num_regions=6)
        error_N = access_delays_ms(world.links.rtt_ms_NN) - world.access_N.rtt_ms_A
        assert np.median(np.abs(error_N)) < 1.5


def test_unknown_round_trips_join_nothing() -> None:
    rtt_ms_NN = _two_cities(50.0, [1.0] * 8)
    apart = np.arange(8) % 2
    rtt_ms_NN[apart[:, None] != apart] = np.nan
    even, odd = (frozenset(f"n{i}" for i in range(at, 8, 2)) for at in (0, 1))
    assert _domains(_snapshot(rtt_ms_NN, addresses=[()] * 8)) == {"branch": {even, odd}}
    nothing_NN = np.where(np.eye(8, dtype=bool), 0.0, np.nan)
    assert failure_domains(_snapshot(nothing_NN, addresses=[()] * 8)) == ()


LEAST_HEIGHT, LEAST_PERSISTENCE = 5.0, 1.5


def _expected_branches(cluster: Any, until: float) -> Iterator[frozenset[int]]:
    """Of scipy's tree, which joins its parent at `until`."""
    if cluster.is_leaf():
        return
    since = max(cluster.dist, LEAST_HEIGHT / 2)
    if until >= max(LEAST_HEIGHT, LEAST_PERSISTENCE * since):
        yield frozenset(cluster.pre_order())
    yield from _expected_branches(cluster.left, cluster.dist)
    yield from _expected_branches(cluster.right, cluster.dist)


@pytest.mark.parametrize("count", [2, 3, 7, 25])
def test_branches_are_those_of_single_linkage(count: int) -> None:
    rng = np.random.default_rng(count)
    for _ in range(10):
        upper_NN = np.triu(rng.lognormal(2.0, 1.5, (count, count)), 1)
        weight_NN = upper_NN + upper_NN.T
        root = to_tree(linkage(squareform(weight_NN), "single"))
        found = [
            frozenset(branch.tolist())
            for branch in persistent_branches(
                merge_tree(make_filtration(weight_NN)),
                min_height=LEAST_HEIGHT,
                min_persistence=LEAST_PERSISTENCE,
            )
        ]
        expected = list(_expected_branches(root, np.inf))
        assert sorted(map(sorted, found)) == sorted(map(sorted, expected))


def test_nodes_of_one_machine_and_of_one_subnet_are_domains() -> None:
    addresses = [
        ("/ip4/8.8.8.8/tcp/1/p2p/n0", "/ip4/192.168.1.5/tcp/1/p2p/n0"),
        ("/ip4/8.8.8.8/tcp/2/p2p/n1",),
        ("/ip4/8.8.8.9/tcp/1/p2p/n2",),
        ("/ip4/9.9.9.9/tcp/1/p2p/n3", "/ip4/192.168.1.5/tcp/1/p2p/n3"),
        ("/ip6/2a00:1450:1::1/tcp/1/p2p/n4",),
        ("/ip6/2a00:1450:1:2::2/tcp/1/p2p/n5",),
        (),
    ]
    assert _domains(_snapshot(addresses=addresses)) == {
        "machine": {frozenset({"n0", "n1"})},
        "subnet": {frozenset({"n0", "n1", "n2"}), frozenset({"n4", "n5"})},
    }


def test_private_addresses_count_where_there_are_no_public_ones() -> None:
    addresses = [(f"/ip4/10.0.{net}.1/tcp/{port}",) for net in (0, 1) for port in (1, 2)]
    assert _domains(_snapshot(addresses=addresses)) == {
        "machine": {frozenset({"n0", "n1"}), frozenset({"n2", "n3"})}
    }


def test_nodes_of_one_operator_are_a_domain() -> None:
    nodes = tuple(
        NodeState(PeerId(f"n{index}"), Span(0, 1), operator=operator)
        for index, operator in enumerate(("one", "two", "one", None, None, "three"))
    )
    snapshot = Snapshot(ModelId("m"), 1, nodes, 0.0)
    assert _domains(snapshot) == {"operator": {frozenset({"n0", "n2"})}}
    assert peers_failing_with(snapshot, PeerId("n2")) == {"n0"}
    assert peers_failing_with(snapshot, PeerId("n3")) == frozenset()


def test_a_domain_of_all_nodes_is_none() -> None:
    assert failure_domains(_snapshot(addresses=[("/ip4/8.8.8.8/tcp/1",)] * 3)) == ()


def test_addresses_of_relays_and_of_this_machine_say_nothing() -> None:
    relayed = "/ip4/9.9.9.9/tcp/1/p2p/relay/p2p-circuit/p2p/"
    homes = [
        (f"{relayed}n{i}", "/ip4/127.0.0.1/tcp/1", "/ip4/169.254.1.1/tcp/1", "/ip6/::1/tcp/1")
        for i in range(2)
    ]
    public = [("/ip4/9.9.9.9/tcp/1",), ("/ip4/8.8.8.8/tcp/1",)]
    assert failure_domains(_snapshot(addresses=[*homes, *public])) == ()


def test_addresses_make_a_bounded_number_of_domains() -> None:
    """Each of many pairs of nodes claims addresses of its own."""
    pairs = [
        tuple(f"/ip4/{pair // 250 + 11}.{pair % 250}.{i}.1/tcp/1" for i in range(4))
        for pair in range(300)
        for _ in range(2)
    ]
    everyone = [("/ip4/8.8.8.8/tcp/1", *addresses) for addresses in pairs[:-1]] + [()]
    domains = failure_domains(_snapshot(addresses=everyone))
    assert len(domains) <= 256
    assert max(len(domain.peers) for domain in domains) == 599


def test_addresses_that_a_stranger_makes_up_are_ignored() -> None:
    odd = ("/ip4/999.1.1.1/tcp/1", "/ip4//tcp", "/ip6/zz/tcp/1", "/dns4/example.org/tcp/1", "/")
    assert failure_domains(_snapshot(addresses=[odd, odd, ()])) == ()


def test_members_are_rows_of_the_peers_asked_for() -> None:
    domain = FailureDomain("branch", frozenset({PeerId("a"), PeerId("c"), PeerId("gone")}))
    peers = [PeerId(name) for name in "abc"]
    assert members_DN([domain], peers).tolist() == [[True, False, True]]
    assert members_DN([domain], [PeerId("a"), PeerId("c")]).shape == (0, 2)
    assert members_DN([domain], [PeerId("b")]).shape == (0, 1)
    assert members_DN([], peers).shape == (0, 3)


def test_joining_nodes_belong_to_domains() -> None:
    snapshot = _snapshot(_two_cities(50.0, [1.0] * 6), addresses=[()] * 6)
    moved = replace(snapshot, nodes=snapshot.nodes[:4], joining=snapshot.nodes[4:])
    assert failure_domains(moved) == failure_domains(snapshot)
