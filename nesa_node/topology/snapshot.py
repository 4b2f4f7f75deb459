"""Immutable snapshot of the nodes that serve one model; its digest, and comparison of two."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import msgspec
import numpy as np

from nesa_node.core.arrays import Floats
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.topology.links.matrix import Links
from nesa_node.topology.roofline import Roofline

_DOMAIN = b"nesa-node snapshot 1\n"
_LATER_FIELDS = frozenset(
    (
        *("gpu_memory_total_bytes", "gpu_memory_free_bytes"),
        *("cpu_memory_total_bytes", "cpu_memory_free_bytes"),
        *("roofline", "operator", "private_schemes", "cache_dtype"),
    )
)
LINK_ARRAYS = ("rtt_ms_NN", "rate_bytes_per_s_NN", "age_s_NN", "confidence_NN")
"""Array fields of `Links`, in the order in which they are hashed and stored."""


def snapshot_digest(snapshot: Snapshot) -> str:
    """SHA-256 of a snapshot, 64 hexadecimal digits; independent of the order of its nodes."""
    hasher = hashlib.sha256(_DOMAIN)
    head = (snapshot.model_id, snapshot.num_blocks, snapshot.taken_at + 0.0)
    hasher.update(
        _canonical_json((head, _sorted_nodes(snapshot.nodes), _sorted_nodes(snapshot.joining)))
    )
    if snapshot.links is not None:
        links = _sorted_links(snapshot.links)
        hasher.update(_canonical_json(links.peers))
        for name in LINK_ARRAYS:
            hasher.update(canonical_bytes(getattr(links, name)))
    return hasher.hexdigest()


def canonical_bytes(array: Floats) -> bytes:
    """Bytes of an array: little-endian float64, one NaN pattern, no negative zero."""
    plain = np.array(array, dtype="<f8")
    plain += 0.0
    plain[np.isnan(plain)] = np.nan
    return plain.tobytes()


def _sorted_nodes(nodes: tuple[NodeState, ...]) -> list[dict[str, object]]:
    return [_node_fields(node) for node in sorted(nodes, key=lambda node: node.peer_id)]


def _node_fields(node: NodeState) -> dict[str, object]:
    """Fields of a node, numbers as floats, so that 0, 0.0 and -0.0 hash alike.

    Later fields with their default are left out, so that older snapshots keep their digest.
    """
    values = {
        field.name: getattr(node, field.name)
        for field in fields(node)
        if field.name not in _LATER_FIELDS or getattr(node, field.name) != field.default
    }
    values["location"] = node.location and tuple(value + 0.0 for value in node.location)
    return {
        name: value + 0.0 if isinstance(value, int | float) else value
        for name, value in values.items()
    }


def _sorted_links(links: Links) -> Links:
    peers = tuple(sorted(links.peers))
    return links if peers == links.peers else links.select(peers)


def _canonical_json(value: object) -> bytes:
    return msgspec.json.encode(value, order="sorted") + b"\n"


@dataclass(frozen=True, slots=True)
class NodeState:
    """State of one node, as announced in its last valid record.

    `prefill_tokens_per_s` and `decode_tokens_per_s` are measured through the node's whole span by
    one session; 0 means "not measured". `load` is the recent share of busy time: 0 idle, 1
    saturated, more with a queue. `max_blocks` is how many blocks fit into the node's memory, 0 if
    not announced. `reliability` is the probability, 0 to 1, that the node is available. `movable`
    nodes accept another span. `location` is latitude and longitude in degrees, if declared.
    `gpu_memory_*` and `cpu_memory_*` are of the whole device, GPU 0 without one; `roofline` is what
    the device was measured to do, None if it was not. `operator` is the name of the node's
    operator, if declared. `private_schemes` are those of private sessions that it serves.
    `cache_dtype` is "int8" if the node holds keys and values in 8 bits.
    """

    peer_id: PeerId
    span: Span
    dtype: str = "float32"
    quantization: str = "none"
    cache_dtype: str = "auto"
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    free_cache_tokens: int = 0
    total_cache_tokens: int = 0
    load: float = 0.0
    uptime_s: float = 0.0
    addresses: tuple[str, ...] = ()
    public_name: str | None = None
    context_length: int = 0
    protocol_version: tuple[int, int] = (1, 0)
    seq: int = 0
    max_blocks: int = 0
    reliability: float = 1.0
    movable: bool = False
    location: tuple[float, float] | None = None
    gpu_memory_total_bytes: int = 0
    gpu_memory_free_bytes: int = 0
    cpu_memory_total_bytes: int = 0
    cpu_memory_free_bytes: int = 0
    roofline: Roofline | None = None
    operator: str | None = None
    private_schemes: tuple[str, ...] = ()

    @property
    def kind(self) -> tuple[str, str, str]:
        """What it computes with: outputs of nodes of one kind differ by rounding alone."""
        return self.dtype, self.quantization, self.cache_dtype

    @property
    def free_memory_share(self) -> float | None:
        """Free share of the memory that holds weights: the GPU's, without one the machine's."""
        free, total = self.gpu_memory_free_bytes, self.gpu_memory_total_bytes
        if total <= 0:
            free, total = self.cpu_memory_free_bytes, self.cpu_memory_total_bytes
        return min(max(free / total, 0.0), 1.0) if total > 0 else None

    def with_span(self, span: Span) -> NodeState:
        """The node with another span, at the same speed per block."""
        if span == self.span:
            return self
        share = max(len(self.span), 1) / max(len(span), 1)
        return replace(
            self,
            span=span,
            prefill_tokens_per_s=self.prefill_tokens_per_s * share,
            decode_tokens_per_s=self.decode_tokens_per_s * share,
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The nodes of one model at `taken_at` (seconds since the epoch).

    `nodes` serve and can be routed through. `joining` nodes have announced a span that they are
    loading, or will load once the sessions of their previous span have ended: no chain uses them,
    but they count as holders when a node chooses its span. `links` has its own order of peers; None
    without measurements.
    """

    model_id: ModelId
    num_blocks: int
    nodes: tuple[NodeState, ...]
    taken_at: float
    joining: tuple[NodeState, ...] = ()
    links: Links | None = None

    def coverage(self) -> tuple[int, ...]:
        """Number of serving nodes that hold each block."""
        return count_holders(self.nodes, self.num_blocks)

    def holes(self) -> tuple[Span, ...]:
        """The maximal spans that no serving node holds, in order."""
        return zero_runs(self.coverage())

    def find_node(self, peer_id: PeerId) -> NodeState | None:
        return next((node for node in self.nodes if node.peer_id == peer_id), None)

    def without_peers(self, *peers: PeerId) -> Snapshot:
        """The snapshot without `peers`, serving or joining."""
        return replace(
            self,
            nodes=tuple(node for node in self.nodes if node.peer_id not in peers),
            joining=tuple(node for node in self.joining if node.peer_id not in peers),
        )

    def digest(self) -> str:
        """SHA-256 of the content in hexadecimal, independent of the order of nodes."""
        return snapshot_digest(self)


def count_holders(nodes: Sequence[NodeState], num_blocks: int) -> tuple[int, ...]:
    """How many of `nodes` hold each of `num_blocks` blocks. Spans beyond the model are cut."""
    return count_span_holders(((node.span.start, node.span.end) for node in nodes), num_blocks)


def count_span_holders(spans: Iterable[tuple[int, int]], num_blocks: int) -> tuple[int, ...]:
    """How many of `spans` (start, end) hold each block, by differences; spans are cut as above."""
    steps = [0] * (num_blocks + 1)
    for start, end in spans:
        steps[min(start, num_blocks)] += 1
        steps[min(end, num_blocks)] -= 1
    return tuple(accumulate(steps[:-1]))


def zero_runs(counts: Sequence[float]) -> tuple[Span, ...]:
    """The maximal runs of zeros as spans: `(0, 0, 1, 0)` gives `0:2` and `3:4`."""
    runs: list[Span] = []
    start: int | None = None
    for block, count in enumerate((*counts, 1)):
        if count == 0 and start is None:
            start = block
        elif count != 0 and start is not None:
            runs.append(Span(start, block))
            start = None
    return tuple(runs)


SPEED_CHANGE_FRACTION = 0.2
"""Relative change of a node's tokens/s that counts as a difference."""
RTT_CHANGE_FRACTION = 0.05
"""Mean change of round trips, relative to their median, that counts as a difference. Pings alone
vary by about 2 %."""
_MAX_COMPARED_NODES = 500


def snapshots_differ(first: Snapshot, second: Snapshot) -> bool:
    """Whether nodes, spans, speeds or round trips differ.

    Loads, ages and free memory differ between any two snapshots and do not count.
    """
    return (
        first.num_blocks != second.num_blocks
        or _spans_by_peer(first.nodes) != _spans_by_peer(second.nodes)
        or _spans_by_peer(first.joining) != _spans_by_peer(second.joining)
        or _speeds_differ(first, second)
        or _rtts_differ(first, second)
    )


def _spans_by_peer(nodes: Sequence[NodeState]) -> dict[PeerId, tuple[int, int, str]]:
    return {node.peer_id: (node.span.start, node.span.end, node.quantization) for node in nodes}


def _speeds_differ(one: Snapshot, other: Snapshot) -> bool:
    speed = {node.peer_id: node.decode_tokens_per_s for node in one.nodes}
    return any(
        abs(node.decode_tokens_per_s - speed[node.peer_id])
        > SPEED_CHANGE_FRACTION * speed[node.peer_id]
        for node in other.nodes
    )


def _rtts_differ(one: Snapshot, other: Snapshot) -> bool:
    """Whether round trips differ, among at most 500 nodes; each change is capped at the median."""
    if one.links is None or other.links is None:
        return (one.links is None) != (other.links is None)
    peers = [node.peer_id for node in one.nodes][:: -(-len(one.nodes) // _MAX_COMPARED_NODES) or 1]
    before_NN, _ = one.links.select_arrays(peers)
    after_NN, _ = other.links.select_arrays(peers)
    known_NN = np.isfinite(before_NN) & np.isfinite(after_NN)
    if not np.array_equal(np.isfinite(before_NN), np.isfinite(after_NN)):
        return True
    np.fill_diagonal(known_NN, False)
    if not known_NN.any():
        return False
    unit = float(np.median(before_NN[known_NN]))
    away = np.minimum(np.abs(after_NN[known_NN] - before_NN[known_NN]), unit)
    return float(away.mean()) > RTT_CHANGE_FRACTION * unit
