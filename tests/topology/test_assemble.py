"""Links from what nodes say of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.span import Span
from nesa_node.topology.assemble import HALF_LIFE_S, ONE_SIDED, with_links
from nesa_node.topology.links import Links
from nesa_node.topology.measured import Measured, peer_digest
from nesa_node.topology.snapshot import NodeState, Snapshot

A, B, C, D = (PeerId(name) for name in "abcd")


def _node(peer: PeerId, *measured: tuple[PeerId, float, float, float]) -> NodeState:
    links = (Measured(peer_digest(other), rtt, rate, age) for other, rtt, rate, age in measured)
    return NodeState(peer, Span(0, 1), measured=tuple(links))


def _links(*nodes: NodeState) -> Links:
    links = with_links(Snapshot(ModelId("m@0"), 1, nodes[1:], 0.0, joining=nodes[:1])).links
    assert links is not None
    return links


def test_the_larger_of_both_ends_medians_is_the_round_trip() -> None:
    links = _links(_node(A, (B, 1.0, 5e6, 0.0)), _node(B, (A, 40.0, math.nan, 60.0)))
    assert links.rtt_ms(A, B) == links.rtt_ms(B, A) == 40.0
    by_name = links.of((A, B))
    assert by_name.rate_bytes_per_s_NN[0, 1] == 5e6
    assert math.isnan(by_name.rate_bytes_per_s_NN[1, 0])
    assert by_name.age_s_NN[0, 1] == by_name.age_s_NN[1, 0] == 0.0
    assert by_name.confidence_NN[0, 1] == 1.0


def test_one_sided_and_old_measurements_are_believed_less() -> None:
    links = _links(_node(A, (B, 10.0, math.nan, HALF_LIFE_S)), _node(B)).of((A, B))
    assert links.rtt_ms(B, A) == 10.0
    assert links.confidence_NN[1, 0] == pytest.approx(ONE_SIDED / 2)


def test_unmeasured_pairs_and_peers_from_elsewhere_are_unknown() -> None:
    links = _links(_node(A, (D, 3.0, 1e6, 0.0), (A, 7.0, 1e6, 0.0)), _node(B), _node(C))
    assert math.isnan(links.rtt_ms(A, B))
    assert math.isnan(links.rtt_ms(A, D))
    assert links.rtt_ms(A, A) == 0.0
    assert links.confidence_NN.sum() == 3.0


def test_links_are_picked_by_peer_and_cannot_be_written() -> None:
    links = _links(_node(A, (B, 2.0, 1e6, 0.0)), _node(B, (C, 3.0, 1e6, 0.0)), _node(C))
    picked = links.of((C, D, B))
    np.testing.assert_array_equal(
        picked.rtt_ms_NN, [[0, np.nan, 3], [np.nan, 0, np.nan], [3, np.nan, 0]]
    )
    with pytest.raises(ValueError, match="read-only"):
        links.rtt_ms_NN[0, 1] = 5.0


def test_matrices_of_another_size_are_refused() -> None:
    one = np.zeros((1, 1))
    with pytest.raises(ValueError, match="shape"):
        Links((A, B), one, one, one, one)
    two = np.zeros((2, 2))
    with pytest.raises(ValueError, match="twice"):
        Links((A, A), two, two, two, two)
