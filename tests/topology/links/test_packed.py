"""The packed form of links in records."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nesa_node.core.ids import PeerId
from nesa_node.topology.links.matrix import (
    MAX_LINKS_PER_RECORD,
    MeasuredLink,
    pack_links,
    peer_digest,
    unpack_links,
)

LINKS = st.lists(
    st.builds(
        MeasuredLink,
        digest=st.binary(min_size=6, max_size=6),
        rtt_ms=st.floats(0, 1e9),
        rate_bytes_per_s=st.floats(0, math.inf) | st.just(math.nan),
        age_s=st.floats(0, 1e9),
    ),
    max_size=MAX_LINKS_PER_RECORD,
    unique_by=lambda link: link.digest,
)


@given(LINKS)
def test_what_is_packed_comes_back_to_half_a_permille(links: list[MeasuredLink]) -> None:
    packed = pack_links(links)
    assert len(packed) == 12 * len(links)
    for link, back in zip(links, unpack_links(packed), strict=True):
        assert back.digest == link.digest
        assert back.rtt_ms == pytest.approx(min(link.rtt_ms, 60_000), rel=6e-4, abs=1e-4)
        assert back.age_s == pytest.approx(min(link.age_s, 3.6e6), rel=6e-4, abs=1e-4)
        if math.isnan(link.rate_bytes_per_s):
            assert math.isnan(back.rate_bytes_per_s)
        else:
            expected = min(link.rate_bytes_per_s, 6e10)
            assert back.rate_bytes_per_s == pytest.approx(expected, rel=6e-4, abs=1)


@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(packed: bytes) -> None:
    try:
        links = unpack_links(packed)
    except ValueError:
        return
    assert len(links) <= MAX_LINKS_PER_RECORD
    assert all(0 <= link.rtt_ms < math.inf and 0 <= link.age_s < math.inf for link in links)


@pytest.mark.parametrize(
    "values", [(math.nan, 1, 1), (math.inf, 1, 1), (-1, 1, 1), (1, -1, 1), (1, 1, math.nan)]
)
def test_impossible_values_are_refused(values: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="not a measured link"):
        unpack_links(struct.pack("<6seee", b"abcdef", *values))


def test_a_peer_is_listed_once_and_lists_are_bounded() -> None:
    link = MeasuredLink(peer_digest(PeerId("a")), 1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="twice"):
        unpack_links(pack_links([link, link]))
    with pytest.raises(ValueError, match="16 do"):
        pack_links([link] * 17)
    with pytest.raises(ValueError, match="no list"):
        unpack_links(bytes(13))
