"""Node records: what a node announces about itself on the DHT, signed (`sealing.py`).

The signature covers the bytes as sent, so that fields added by a later minor version are preserved;
they are ignored here.

Bounded table of the node records that this node remembers.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Annotated, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    model_validator,
)

from nesa_node.core.ids import ModelId, PeerId, Span, model_name_candidates
from nesa_node.core.settings.models import MAX_RECORD_TTL_S
from nesa_node.swarm.dht.sealing import (
    RECORD_KIND,
    STRICT,
    Addresses,
    Count,
    Operator,
    Pair,
    Statement,
    StatementBounds,
    Text,
    Time,
    check_own_addresses,
    max_items,
)
from nesa_node.swarm.dht.shards import MAX_LEVEL, Shard, find_shard
from nesa_node.topology.links.matrix import MAX_PACKED_BYTES, MeasuredLink, unpack_links
from nesa_node.topology.roofline import PACKED_BYTES, unpack_roofline
from nesa_node.topology.snapshot import NodeState

MAX_RECORD_BYTES = 4096

MAX_NODES_PER_MODEL = 1024
"""Planning allocates arrays of nodes by nodes: 160 MiB, and a third of a second, for 1,024."""


Rate = Annotated[float, Field(ge=0, le=1e8)]
CodecText = Annotated[str, Field(pattern=r"^[a-z0-9:@]{1,32}$")]


def _check_packed_links(packed: bytes) -> bytes:
    unpack_links(packed)
    return packed


PackedLinks = Annotated[
    bytes, Field(max_length=MAX_PACKED_BYTES), AfterValidator(_check_packed_links)
]


def _check_packed_figures(packed: bytes) -> bytes:
    unpack_roofline(packed)
    return packed


PackedFigures = Annotated[
    bytes, Field(max_length=PACKED_BYTES), AfterValidator(_check_packed_figures)
]


class NodeStatus(BaseModel):
    """Fields of a record that the node decides; `Directory.publish` completes and signs it.

    `state` is "joining" (loads its span), "serving" (accepts sessions), "draining" (finishes its
    sessions) or "withdrawn" (has left).
    """

    model_config = STRICT

    state: Literal["joining", "serving", "draining", "withdrawn"]
    model_id: Text = Field(min_length=1, max_length=256)
    model_name: Text = Field(min_length=1, max_length=256)
    num_blocks: int = Field(ge=1, le=10_000)
    span: Pair
    dtype: str = Field(pattern=r"^[a-z0-9_]{1,24}$")
    quantization: str = Field(default="none", pattern=r"^[a-z0-9_]{1,24}$")
    cache_dtype: str = Field(default="auto", pattern=r"^[a-z0-9_]{1,24}$")
    """What the KV cache holds: "auto", values as they are computed, or "int8"."""
    protocol_version: Annotated[
        tuple[Annotated[int, Field(ge=0, le=999)], Annotated[int, Field(ge=0, le=999)]],
        max_items(2),
    ]
    prefill_tokens_per_s: Rate = 0.0
    decode_tokens_per_s: Rate = 0.0
    free_cache_tokens: Count = 0
    total_cache_tokens: Count = 0
    gpu_memory_total_bytes: Count = 0
    gpu_memory_free_bytes: Count = 0
    cpu_memory_total_bytes: Count = 0
    cpu_memory_free_bytes: Count = 0
    load: float = Field(default=0.0, ge=0, le=1000)
    uptime_s: float = Field(default=0.0, ge=0, le=1e10)
    sessions: Count = 0
    """Open sessions."""
    tokens: Count = 0
    """Tokens computed since the node started."""
    context_length: int = Field(default=0, ge=0, lt=2**40)
    public_name: Annotated[Text, Field(max_length=64)] | None = None
    codecs: Annotated[tuple[CodecText, ...], max_items(32)] = ()
    """Codecs that the node decodes beside "none"."""
    sent_bytes: Annotated[dict[CodecText, Count], max_items(16)] = Field(default_factory=dict)
    """Bytes of hidden states sent since the node started, by codec."""
    movable: bool = False
    """Whether the node may move to other blocks, by its operator's settings and its own limits."""
    next_span: Pair | None = None
    """Span that a draining node moves to."""
    measured: PackedLinks = b""
    """Round trips and rates to peers, packed (`topology/links/matrix.py`)."""
    max_blocks: int = Field(default=0, ge=0, le=10_000)
    """Blocks of the model that fit into the node's memory limit; 0 if unknown."""
    location: (
        Annotated[
            tuple[Annotated[float, Field(ge=-90, le=90)], Annotated[float, Field(ge=-180, le=180)]],
            max_items(2),
        ]
        | None
    ) = None
    """Latitude and longitude in degrees."""
    figures: PackedFigures = b""
    """What the device was measured to do with weights of this kind, and what a mean block asks of
    it, packed (`topology/roofline.py`)."""
    operator: Operator | None = None
    private_schemes: Annotated[tuple[CodecText, ...], max_items(8)] = ()
    """How the node keeps private sessions' hidden states from itself, such as "ckks"."""

    @model_validator(mode="after")
    def _check_span(self) -> Self:
        if not 0 <= self.span[0] < self.span[1] <= self.num_blocks:
            raise ValueError(f"span {self.span} is not within {self.num_blocks} blocks")
        if self.next_span and not 0 <= self.next_span[0] < self.next_span[1] <= self.num_blocks:
            raise ValueError(f"next span {self.next_span} is not within {self.num_blocks} blocks")
        return self


class NodeRecord(NodeStatus, Statement):
    """A complete record with all fields bounded; one returned by `open_statement` has a valid
    signature."""

    bounds: ClassVar = StatementBounds(
        RECORD_KIND,
        MAX_RECORD_BYTES,
        MAX_RECORD_TTL_S,
        min_interval_s=-math.inf,
        max_per_key=MAX_NODES_PER_MODEL,
    )

    peer_id: str = Field(max_length=128)
    seq: int = Field(ge=0, lt=2**53)
    issued_at: Time
    expires_at: Time
    addresses: Addresses = ()
    shard_level: int = Field(default=0, ge=0, le=MAX_LEVEL)
    """Level of the shard that has the record beside the model's key (`shards.py`); 0: none has."""

    @model_validator(mode="after")
    def _check_addresses(self) -> Self:
        check_own_addresses(self.addresses, self.peer_id)
        if not 0 < self.expires_at - self.issued_at <= MAX_RECORD_TTL_S:
            raise ValueError(f"a record lives at most {MAX_RECORD_TTL_S:g} s")
        return self

    @property
    def slot(self) -> tuple[str, str]:
        """One record for each peer, whichever model it serves."""
        return "", self.peer_id

    @property
    def shard(self) -> Shard | None:
        """The only shard under which the record is valid."""
        if self.shard_level == 0:
            return None
        return find_shard(self.signer, Span(*self.span), self.num_blocks, self.shard_level)

    def node_state(self) -> NodeState:
        shared = {name: getattr(self, name) for name in _SHARED_FIELDS}
        roofline = unpack_roofline(self.figures)
        return NodeState(
            peer_id=PeerId(self.peer_id), span=Span(*self.span), roofline=roofline, **shared
        )

    def measured_links(self) -> tuple[MeasuredLink, ...]:
        return unpack_links(self.measured)


_SHARED_FIELDS = NodeState.__dataclass_fields__.keys() & NodeRecord.model_fields.keys() - {
    "peer_id",
    "span",
}


def model_key(model_id: ModelId) -> str:
    """DHT key of the records of a model's nodes: the root, where these are in shards."""
    return f"nesa/1/model/{model_id}"


def filter_by_model(records: Iterable[NodeRecord], wanted: str | None) -> Iterator[NodeRecord]:
    """Filter records by a model's name, folder or full id; all of them if `wanted` is None."""
    names = None if wanted is None else model_name_candidates(wanted)
    for record in records:
        if names is None or record.model_id in names or record.model_name in names:
            yield record


def majority_num_blocks(records: Iterable[NodeRecord]) -> int:
    """Number of blocks of a model that most of its records announce; 0 without records.

    Used when no checkpoint is open. Ties go to a number with a holder for each block, then to the
    smaller one: a false larger number leaves blocks without a holder.
    """
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for record in records:
        spans[record.num_blocks].append(record.span)

    def rank(num_blocks: int) -> tuple[int, bool, int]:
        end = 0
        for span in sorted(spans[num_blocks]):
            end = max(end, span[1]) if span[0] <= end else end
        return len(spans[num_blocks]), end == num_blocks, -num_blocks

    return max(spans, key=rank, default=0)


ALL_NODES_KEY = "nesa/1/nodes"
"""DHT key of the index of all nodes."""


MAX_NODES = 16_384
"""Nodes of all models together; models with a known number of blocks are exempt."""


class RecordTable:
    """Newest record of each peer, including expired ones until they are dropped.

    Identities are free, so a full table refuses new peers instead of evicting old ones: invented
    records never displace those of nodes that were known before. The record of `own_peer_id`, this
    node, is always accepted.
    """

    def __init__(self, own_peer_id: PeerId) -> None:
        self._own = own_peer_id
        self._records: dict[PeerId, NodeRecord] = {}
        self._num_by_model: Counter[str] = Counter()

    def __iter__(self) -> Iterator[NodeRecord]:
        return iter(self._records.values())

    def get(self, peer: PeerId) -> NodeRecord | None:
        return self._records.get(peer)

    def add(
        self, record: NodeRecord, *, is_trusted_model: bool = False, is_single_source: bool = False
    ) -> bool:
        """Remember `record` in place of its peer's older one. False if the table is full.

        A trusted model may have `MAX_NODES_PER_MODEL` nodes however full the table is. New peers
        with `is_single_source`, which only one DHT member named, may fill half of that: what a
        single member invents must leave room for what all members name.
        """
        peer = record.signer
        before = self._records.get(peer)
        if before is None or before.model_id != record.model_id:
            self.drop(peer)
            most = MAX_NODES_PER_MODEL // 2 if is_single_source else MAX_NODES_PER_MODEL
            is_full = self._num_by_model[record.model_id] >= most or (
                len(self._records) >= MAX_NODES and not is_trusted_model
            )
            if is_full and peer != self._own:
                return False
            self._num_by_model[record.model_id] += 1
        self._records[peer] = record
        return True

    def drop(self, peer: PeerId) -> None:
        record = self._records.pop(peer, None)
        if record is not None:
            self._num_by_model[record.model_id] -= 1
            if not self._num_by_model[record.model_id]:
                del self._num_by_model[record.model_id]
