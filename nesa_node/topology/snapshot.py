"""An immutable picture of the nodes that serve one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.span import Span
from nesa_node.topology.digest import digest
from nesa_node.topology.links import Links


@dataclass(frozen=True, slots=True)
class NodeState:
    """What one node promised in its last valid record.

    `prefill_tokens_per_s` and `decode_tokens_per_s` are measured through the node's whole span by
    one session; `load` is the share of its time that it was busy lately (0 idle, 1 saturated, more
    when it queues). Zero speeds mean "not measured". `max_blocks` of this model fit into the memory
    that the node gives, 0 if it has not said so. `reliability` is the chance, 0 to 1, that it is
    there when it is needed. `movable`: it would hold other blocks if that served the swarm.
    `location` is latitude and longitude in degrees, if the operator says
    where.
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

    `nodes` serve and can be routed through. `joining` have announced a span that they still load,
    or will load once their sessions have left the one before: no chain goes through them, yet a
    newcomer counts them as holders when it chooses its own.
    `links` are those among any of them, in an order of its own; None if nobody has measured.
    """

    model_id: ModelId
    num_blocks: int
    nodes: tuple[NodeState, ...]
    taken_at: float
    joining: tuple[NodeState, ...] = ()
    links: Links | None = None

    def coverage(self) -> tuple[int, ...]:
        """How many serving nodes hold each block; one number per block."""
        return count_holders(self.nodes, self.num_blocks)

    def holes(self) -> tuple[Span, ...]:
        """The maximal spans that no serving node holds, in order."""
        return zero_runs(self.coverage())

    def node(self, peer_id: PeerId) -> NodeState | None:
        return next((node for node in self.nodes if node.peer_id == peer_id), None)

    def without(self, *peers: PeerId) -> Snapshot:
        """The same picture with `peers` taken out of both lists."""
        return replace(
            self,
            nodes=tuple(node for node in self.nodes if node.peer_id not in peers),
            joining=tuple(node for node in self.joining if node.peer_id not in peers),
        )

    def digest(self) -> str:
        """SHA-256 of its content in hexadecimal; the same in whatever order nodes are listed."""
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
