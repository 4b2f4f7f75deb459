"""Messages of streams on which nodes run pieces of networks (`docs/protocol.md`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from nesa_node.core.errors import ProtocolError
from nesa_node.swarm.protocol.messages import (
    BlockRange,
    Downstream,
    Message,
    PeerName,
    Seconds,
    Version,
)

GRAPH_PROTOCOL = "/nesa/graph/1"
CHAIN_VERSION = (1, 8)
"""Since this version nodes send values of a request to each other."""
MAX_RUNNING = 16
"""Requests of one stream that may wait at once; more are not read yet."""
MAX_NODES = 64
"""With which a node exchanges values of one request."""
MAX_VALUES = 512
"""Of one message."""
MAX_VALUE_DIMS = 8
MAX_SYMBOLS = 64
MAX_PLAN_PART_BYTES = 32 * 1024
ALIGNMENT = 16
"""Each value of a payload begins at a multiple of so many bytes."""

ValueDtype = Literal[
    "float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"
]
ITEM_BYTES: Mapping[str, int] = dict(
    zip(get_args(ValueDtype), (4, 2, 2, 8, 8, 4, 2, 1, 1, 1), strict=True)
)

Index = Annotated[int, Meta(ge=0, lt=1 << 24)]
Size = Annotated[int, Meta(ge=0, lt=1 << 31)]
RequestNumber = Annotated[int, Meta(ge=0, lt=1 << 62)]
RequestKey = Annotated[bytes, Meta(min_length=16, max_length=16)]
Indices = Annotated[tuple[Index, ...], Meta(max_length=MAX_VALUES)]


class ValueMeta(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a payload."""

    value: Index
    """Its index among the values of the graph."""
    dtype: ValueDtype
    shape: Annotated[tuple[Size, ...], Meta(max_length=MAX_VALUE_DIMS)]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


Values = Annotated[tuple[ValueMeta, ...], Meta(max_length=MAX_VALUES)]


class GraphOpen(Message, frozen=True, kw_only=True, tag="graph_open"):
    """Client to node: begin a stream of requests."""

    version: Version
    model: Annotated[str, Meta(max_length=256)]
    membership: Annotated[bytes, Meta(max_length=64)] = b""
    """In a private swarm the proof that the sender knows its key (`adapter_proof`)."""


class GraphOpened(Message, frozen=True, kw_only=True, tag="graph_opened"):
    """Node to client: requests are served."""

    version: Version
    blocks: BlockRange
    """The pieces that the node holds."""
    max_bytes: Size
    """Of all values of a request together."""


class PlanRequest(Message, frozen=True, kw_only=True, tag="plan_request"):
    """Any peer to node, instead of `graph_open`: send the plan that you serve."""

    model: Annotated[str, Meta(max_length=256)]
    membership: Annotated[bytes, Meta(max_length=64)] = b""


class PlanPart(Message, frozen=True, kw_only=True, tag="plan_part"):
    """Node to peer: a part of its plan's JSON, in order."""

    total_bytes: Size
    data: Annotated[bytes, Meta(min_length=1, max_length=MAX_PLAN_PART_BYTES)]


class SourceNode(msgspec.Struct, frozen=True, array_like=True):
    """A node that sends values of a request to the one that is asked."""

    peer: PeerName
    key: RequestKey
    """Secret name of what these two nodes exchange."""
    values: Indices


class TargetNode(msgspec.Struct, frozen=True, array_like=True):
    """A node to which the one that is asked sends values of a request."""

    node: Downstream
    key: RequestKey
    values: Indices


class Exchange(msgspec.Struct, frozen=True):
    """Which values of a request nodes send to each other, and which one node to the client."""

    sources: Annotated[tuple[SourceNode, ...], Meta(max_length=MAX_NODES)]
    targets: Annotated[tuple[TargetNode, ...], Meta(max_length=MAX_NODES)]
    returned: Indices


class GraphSequence(msgspec.Struct, frozen=True):
    """The sequence of tokens that a request of a decoder belongs to.

    Its first request begins at position 0. Those after it begin where the last one ended, by their
    sizes, and have the values that differ from token to token alone.
    """

    key: RequestKey
    """Chosen by the client, for which alone a node keeps the sequence."""
    rows: Annotated[tuple[Index, ...], Meta(max_length=MAX_VALUES)] = ()
    """For each row the row of the last request that it goes on from; empty: its own."""


class GraphRun(Message, frozen=True, kw_only=True, tag="graph_run"):
    """Client to node: compute pieces of these values, which are the payload."""

    request: RequestNumber
    blocks: BlockRange
    sizes: Annotated[tuple[Size, ...], Meta(max_length=MAX_SYMBOLS)]
    """The graph's open sizes, in the order of their names."""
    values: Values
    exchange: Exchange | None = None
    """None: the client gives all values that the pieces need, and gets all that they give."""
    sequence: GraphSequence | None = None
    """None: nothing is kept of the request."""


class GraphCancel(Message, frozen=True, kw_only=True, tag="graph_cancel"):
    """Client to node: a request needs no answer any more."""

    request: RequestNumber


class GraphValues(Message, frozen=True, kw_only=True, tag="graph_values"):
    """Node to node: values for a request of a client of both, which are the payload."""

    key: RequestKey
    values: Values


class GraphOutput(Message, frozen=True, kw_only=True, tag="graph_output"):
    """Node to client: the values that are needed elsewhere, which are the payload."""

    request: RequestNumber
    values: Values


class GraphFailed(Message, frozen=True, kw_only=True, tag="graph_failed"):
    """Node to client: a request was not computed. The stream goes on."""

    request: RequestNumber
    code: Annotated[str, Meta(min_length=1, max_length=64)]
    message: Annotated[str, Meta(max_length=1024)]
    retry_after_s: Seconds = 0.0


def payload_bytes(values: tuple[ValueMeta, ...], *, max_bytes: int) -> int:
    """Bytes of a payload. Raises `ProtocolError("bad_tensor")` for more than `max_bytes`."""
    total = 0
    for each in values:
        total += -total % ALIGNMENT + each.nbytes
    if total > max_bytes:
        raise ProtocolError("bad_tensor", f"values of {total} bytes; at most {max_bytes} fit")
    return total
