"""Links from what nodes say of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nesa_node.core.ids import PeerId
from nesa_node.topology.links.matrix import (
    CONFIDENCE_HALF_LIFE_S,
    ONE_SIDED_CONFIDENCE,
    Links,
    MeasuredLink,
    assemble_links,
    peer_digest,
)

A, B, C, D = (PeerId(name) for name in "abcd")


Said = tuple[PeerId, list[tuple[PeerId, float, float, float]]]


def _node(peer: PeerId, *measured: tuple[PeerId, float, float, float]) -> Said:
    return peer, list(measured)


def _links(*nodes: Said) -> Links:
    return assemble_links(
        {
            peer: [MeasuredLink(peer_digest(other), *figures) for other, *figures in measured]
            for peer, measured in nodes
        }
    )


def test_both_ends_make_one_round_trip_and_each_direction_keeps_its_rate() -> None:
    links = _links(_node(A, (B, 38.0, 5e6, 0.0)), _node(B, (A, 40.0, math.nan, 60.0)))
    assert links.rtt_ms(A, B) == links.rtt_ms(B, A) == 38.0
    by_name = links.select((A, B))
    assert by_name.rate_bytes_per_s_NN[0, 1] == 5e6
    assert math.isnan(by_name.rate_bytes_per_s_NN[1, 0])
    assert by_name.age_s_NN[0, 1] == by_name.age_s_NN[1, 0] == 0.0
    assert by_name.confidence_NN[0, 1] == 1.0


def test_one_sided_and_old_measurements_are_believed_less() -> None:
    links = _links(_node(A, (B, 10.0, math.nan, CONFIDENCE_HALF_LIFE_S)), _node(B)).select((A, B))
    assert links.rtt_ms(B, A) == 10.0
    assert links.confidence_NN[1, 0] == pytest.approx(ONE_SIDED_CONFIDENCE / 2)


def test_unmeasured_pairs_and_peers_from_elsewhere_are_unknown() -> None:
    links = _links(_node(A, (D, 3.0, 1e6, 0.0), (A, 7.0, 1e6, 0.0)), _node(B), _node(C))
    assert math.isnan(links.rtt_ms(A, B))
    assert math.isnan(links.rtt_ms(A, D))
    assert links.rtt_ms(A, A) == 0.0
    assert links.confidence_NN.sum() == 3.0


def test_links_are_picked_by_peer_and_cannot_be_written() -> None:
    links = _links(_node(A, (B, 2.0, 1e6, 0.0)), _node(B, (C, 3.0, 1e6, 0.0)), _node(C))
    picked = links.select((C, D, B))
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
