"""Packed link measurements of one node, 12 bytes each, as its DHT record carries them.

A round trip is a float16 in ms (exact to 0.05 %, up to 65 s), a rate a float16 in MB/s, an age a
float16 in minutes. A peer is the first 6 bytes of the SHA-256 of its id. An attacker that grinds an
id which collides with a given one inherits that node's measurements, until a node pings both and
reports neither. Two colliding ids of its own are found after about 2^24 tries.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from nesa_node.core.ids import PeerId

MAX_LINKS_PER_RECORD = 16
"""Maximum number of links in one record."""
DIGEST_BYTES = 6
_LINK_FORMAT = struct.Struct(f"<{DIGEST_BYTES}seee")
MAX_PACKED_BYTES = MAX_LINKS_PER_RECORD * _LINK_FORMAT.size
_MAX_PACKED_VALUE = 60_000.0


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """Measured link to the peer with this id digest; `rate_bytes_per_s` is NaN if unknown."""

    digest: bytes
    rtt_ms: float
    rate_bytes_per_s: float
    age_s: float


def peer_digest(peer: PeerId) -> bytes:
    return hashlib.sha256(peer.encode()).digest()[:DIGEST_BYTES]


def pack_links(links: Sequence[MeasuredLink]) -> bytes:
    """Encode links for a record. Raises `ValueError` for more than `MAX_LINKS_PER_RECORD`."""
    if len(links) > MAX_LINKS_PER_RECORD:
        raise ValueError(f"{len(links)} links do not fit a record, {MAX_LINKS_PER_RECORD} do")
    return b"".join(
        _LINK_FORMAT.pack(
            link.digest,
            min(link.rtt_ms, _MAX_PACKED_VALUE),
            min(link.rate_bytes_per_s / 1e6, _MAX_PACKED_VALUE),
            min(link.age_s / 60, _MAX_PACKED_VALUE),
        )
        for link in links
    )


def unpack_links(packed: bytes) -> tuple[MeasuredLink, ...]:
    """Decode links of a record. Raises `ValueError` for bytes that `pack_links` cannot make."""
    if len(packed) > MAX_PACKED_BYTES or len(packed) % _LINK_FORMAT.size:
        raise ValueError(f"{len(packed)} bytes are no list of measured links")
    links = []
    for digest, rtt_ms, rate_mb_per_s, age_min in _LINK_FORMAT.iter_unpack(packed):
        link = MeasuredLink(digest, rtt_ms, rate_mb_per_s * 1e6, age_min * 60)
        rate_is_fine = math.isnan(rate_mb_per_s) or 0 <= rate_mb_per_s < math.inf
        if not (0 <= rtt_ms < math.inf and rate_is_fine and 0 <= age_min < math.inf):
            raise ValueError(f"not a measured link: {link}")
        links.append(link)
    if len({link.digest for link in links}) < len(links):
        raise ValueError("a peer occurs twice among measured links")
    return tuple(links)
