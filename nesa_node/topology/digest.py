"""Content digest of a snapshot: SHA-256 in a canonical order."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from nesa_node.topology.links import Links
    from nesa_node.topology.snapshot import NodeState, Snapshot

Floats = NDArray[np.float64]

_DOMAIN = b"nesa-node snapshot 1\n"
ARRAYS = ("rtt_ms_NN", "rate_bytes_per_s_NN", "age_s_NN", "confidence_NN")
"""Array fields of `Links`, in the order in which they are hashed and stored."""


def digest(snapshot: Snapshot) -> str:
    """SHA-256 of a snapshot, 64 hexadecimal digits; independent of the order of its nodes."""
    hasher = hashlib.sha256(_DOMAIN)
    head = (snapshot.model_id, snapshot.num_blocks, snapshot.taken_at + 0.0)
    hasher.update(_canonical((head, _sorted(snapshot.nodes), _sorted(snapshot.joining))))
    if snapshot.links is not None:
        links = _in_order(snapshot.links)
        hasher.update(_canonical(links.peers))
        for name in ARRAYS:
            hasher.update(canonical_bytes(getattr(links, name)))
    return hasher.hexdigest()


def canonical_bytes(array: Floats) -> bytes:
    """Bytes of an array: little-endian float64, one NaN pattern, no negative zero."""
    plain = np.array(array, dtype="<f8")
    plain += 0.0
    plain[np.isnan(plain)] = np.nan
    return plain.tobytes()


def _sorted(nodes: tuple[NodeState, ...]) -> list[dict[str, object]]:
    return [_plain(node) for node in sorted(nodes, key=lambda node: node.peer_id)]


def _plain(node: NodeState) -> dict[str, object]:
    """Fields of a node, numbers as floats, so that 0, 0.0 and -0.0 hash alike."""
    values = {field.name: getattr(node, field.name) for field in fields(node)}
    values["location"] = node.location and tuple(value + 0.0 for value in node.location)
    return {
        name: value + 0.0 if isinstance(value, int | float) else value
        for name, value in values.items()
    }


def _in_order(links: Links) -> Links:
    peers = tuple(sorted(links.peers))
    return links if peers == links.peers else links.of(peers)


def _canonical(value: object) -> bytes:
    return msgspec.json.encode(value, order="sorted") + b"\n"
