"""Parts of a model that several nodes hold, against a search over all cuts."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import combinations, pairwise

import pytest

from nesa_node.client.verification.replica_selection import choose_chains, choose_replicas
from nesa_node.core.errors import MissingBlocksError
from nesa_node.core.ids import PeerId, Span
from nesa_node.topology.snapshot import NodeState

WHOLE = Span(0, 6)


def node(
    name: str, start: int, end: int, dtype: str = "float32", cache_dtype: str = "auto"
) -> NodeState:
    return NodeState(PeerId(name), Span(start, end), dtype, cache_dtype=cache_dtype)


def most_of_a_kind(nodes: list[NodeState], part: Span) -> int:
    kinds = [(each.dtype, each.cache_dtype) for each in nodes if each.span.covers(part)]
    return max((kinds.count(kind) for kind in kinds), default=0)


@pytest.mark.parametrize("seed", range(60))
def test_parts_are_as_few_as_possible(seed: int) -> None:
    rng = random.Random(seed)
    nodes = []
    for number in range(rng.randint(3, 14)):
        start = rng.randint(0, 5)
        kind = rng.choice([("float32", "auto"), ("float32", "int8"), ("bfloat16", "auto")])
        nodes.append(node(f"node-{number}", start, rng.randint(start + 1, 6), *kind))
    fewest = None
    for size in range(6):
        for cuts in combinations(range(1, 6), size):
            parts = [Span(*ends) for ends in pairwise((0, *cuts, 6))]
            if all(most_of_a_kind(nodes, part) >= 3 for part in parts) and fewest is None:
                fewest = len(parts)
    if fewest is None:
        with pytest.raises(MissingBlocksError, match="start more nodes"):
            choose_replicas(nodes, WHOLE, 3)
        return
    chosen = choose_replicas(nodes, WHOLE, 3)
    assert len(chosen) == fewest
    assert [part.span.start for part in chosen] == [0, *(part.span.end for part in chosen[:-1])]
    assert chosen[-1].span.end == 6
    by_peer = {each.peer_id: each for each in nodes}
    for part in chosen:
        peers = [peer for [peer] in part.replicas]
        assert len(set(peers)) == len(peers) >= 3
        assert all(by_peer[peer].span.covers(part.span) for peer in peers)
        assert len({by_peer[peer].dtype for peer in peers}) == 1


def test_nodes_that_boast_are_not_preferred() -> None:
    nodes = [node(f"node-{number}", 0, 6) for number in range(9)]
    first = {choose_replicas(nodes, WHOLE, 3)[0].replicas[0] for _ in range(200)}
    assert len(first) == 9


def test_avoided_nodes_are_not_chosen() -> None:
    nodes = [node(f"node-{number}", 0, 6) for number in range(4)]
    [part] = choose_replicas(nodes, WHOLE, 3, avoided=[PeerId("node-0")])
    assert frozenset({"node-0"}) not in part.replicas
    with pytest.raises(MissingBlocksError, match=r"2 can be used for 0:6"):
        choose_replicas(nodes, WHOLE, 3, avoided=[PeerId("node-0"), PeerId("node-1")])


def test_the_blocks_that_too_few_hold_are_named() -> None:
    nodes = [node(f"node-{number}", 0, 4) for number in range(3)] + [node("last", 2, 6)]
    with pytest.raises(MissingBlocksError) as caught:
        choose_replicas(nodes, WHOLE, 3)
    assert caught.value.missing == ((4, 6),)


def most_chains(nodes: list[NodeState]) -> int:
    """Most disjoint covers of `WHOLE`, by trying all ways to take one."""
    best = 0
    for size in range(1, len(nodes) + 1):
        for chosen in combinations(nodes, size):
            if covers(chosen):
                rest = [each for each in nodes if each not in chosen]
                best = max(best, 1 + most_chains(rest))
        if best:
            # A smaller cover leaves more nodes to the rest.
            break
    return best


def covers(nodes: Iterable[NodeState]) -> bool:
    return all(
        any(each.span.start <= block < each.span.end for each in nodes)
        for block in range(WHOLE.start, WHOLE.end)
    )


@pytest.mark.parametrize("seed", range(60))
def test_chains_are_as_many_as_possible(seed: int) -> None:
    rng = random.Random(seed)
    nodes = []
    for number in range(rng.randint(2, 7)):
        start = rng.choice([0, 0, 0, 1, 2, 3, 4, 5])
        nodes.append(node(f"node-{number}", start, rng.randint(start + 1, 6)))
    others = [node(f"other-{number}", 0, 6, dtype="bfloat16") for number in range(seed % 2)]
    most = max(most_chains(nodes), len(others))
    if most < 1:
        with pytest.raises(MissingBlocksError, match="start more nodes"):
            choose_chains([*nodes, *others], WHOLE, 1)
        return
    part = choose_chains([*nodes, *others], WHOLE, 1)
    assert len(part.replicas) == most
    by_peer = {each.peer_id: each for each in (*nodes, *others)}
    peers = [peer for replica in part.replicas for peer in replica]
    assert len(set(peers)) == len(peers)
    assert len({by_peer[peer].dtype for peer in peers}) == 1
    assert all(covers([by_peer[peer] for peer in replica]) for replica in part.replicas)


def test_each_node_may_be_in_each_chain() -> None:
    nodes = [node(f"{place}-{number}", *place) for place in ((0, 3), (3, 6)) for number in range(3)]
    found = {choose_chains(nodes, WHOLE, 3).replicas[0] for _ in range(400)}
    assert len(found) == 9


def test_nodes_outside_the_span_are_in_no_chain() -> None:
    nodes = [node("a", 0, 4), node("b", 2, 6), node("c", 0, 2), node("d", 1, 6)]
    part = choose_chains(nodes, Span(2, 6), 1)
    assert {peer for replica in part.replicas for peer in replica} == {"a", "b", "d"}


def test_blocks_without_enough_chains_are_named() -> None:
    nodes = [node("a", 0, 6), node("b", 0, 3), node("c", 0, 6, dtype="bfloat16")]
    with pytest.raises(MissingBlocksError, match="1 nodes can be used for block 3") as caught:
        choose_chains(nodes, WHOLE, 2)
    assert caught.value.missing == ((3, 4), (4, 5), (5, 6))
    with pytest.raises(MissingBlocksError, match="0 nodes can be used for block 0"):
        choose_chains(nodes, WHOLE, 1, avoided=[each.peer_id for each in nodes])
    with pytest.raises(MissingBlocksError, match="0 nodes"):
        choose_chains([], WHOLE, 2)
