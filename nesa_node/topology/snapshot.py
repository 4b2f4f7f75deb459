"""Immutable snapshot of the nodes that serve one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.span import Span
from nesa_node.topology.digest import digest
from nesa_node.topology.links import Links


@dataclass(frozen=True, slots=True)
class NodeState:
    """State of one node, as announced in its last valid record.

    `prefill_tokens_per_s` and `decode_tokens_per_s` are measured through the node's whole span by
    one session; 0 means "not measured". `load` is the recent share of busy time: 0 idle, 1
    saturated, more with a queue. `max_blocks` is how many blocks fit into the node's memory, 0 if
    not announced. `reliability` is the probability, 0 to 1, that the node is available. `movable`
    nodes accept another span. `location` is latitude and longitude in degrees, if declared.
    """

    peer_id: PeerId
    span: Span
    dtype: str = "float32"
    quantization: str = "none"
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

    def node(self, peer_id: PeerId) -> NodeState | None:
        return next((node for node in self.nodes if node.peer_id == peer_id), None)

    def without(self, *peers: PeerId) -> Snapshot:
        """The snapshot without `peers`, serving or joining."""
        return replace(
            self,
            nodes=tuple(node for node in self.nodes if node.peer_id not in peers),
            joining=tuple(node for node in self.joining if node.peer_id not in peers),
        )

    def digest(self) -> str:
        """SHA-256 of the content in hexadecimal, independent of the order of nodes."""
        return digest(self)


def count_holders(nodes: Sequence[NodeState], num_blocks: int) -> tuple[int, ...]:
    """How many of `nodes` hold each of `num_blocks` blocks. Spans beyond the model are cut."""
    counts = [0] * num_blocks
    for node in nodes:
        for block in range(node.span.start, min(node.span.end, num_blocks)):
            counts[block] += 1
    return tuple(counts)


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
