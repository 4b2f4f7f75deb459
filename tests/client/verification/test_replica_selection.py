"""Parts of a model that several nodes hold, against a search over all cuts."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from nesa_node.client.verification.replica_selection import choose_replicas
from nesa_node.core.errors import MissingBlocksError
from nesa_node.core.ids import PeerId, Span
from nesa_node.topology.snapshot import NodeState

WHOLE = Span(0, 6)


def node(name: str, start: int, end: int, dtype: str = "float32") -> NodeState:
    return NodeState(PeerId(name), Span(start, end), dtype)


def most_of_a_kind(nodes: list[NodeState], part: Span) -> int:
    kinds = [(each.dtype, each.quantization) for each in nodes if each.span.covers(part)]
    return max((kinds.count(kind) for kind in kinds), default=0)


@pytest.mark.parametrize("seed", range(60))
def test_parts_are_as_few_as_possible(seed: int) -> None:
    rng = random.Random(seed)
    nodes = []
    for number in range(rng.randint(3, 14)):
        start = rng.randint(0, 5)
        kind = rng.choice(["float32", "bfloat16"])
        nodes.append(node(f"node-{number}", start, rng.randint(start + 1, 6), dtype=kind))
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
