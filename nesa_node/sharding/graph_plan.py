"""A plan: a network's operations in pieces, in a form that nodes and clients exchange.

It holds no code: each of them captures the network from the model's files, and compares its digest
with the plan's. A piece is to a network what a block is to a language model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from nesa_node.core.errors import ConfigError, UnsupportedFeatureError
from nesa_node.core.ids import Span
from nesa_node.sharding.operation_graph import Machine, OperationGraph
from nesa_node.sharding.slicing import slice_order

MAX_PIECES = 1024
MAX_OPERATIONS = 200_000
MAX_PLAN_BYTES = 2 << 20
REFERENCE_MACHINE = Machine(
    flop_per_s=1e11, moved_bytes_per_s=2e10, link_bytes_per_s=1.25e8, fast_memory_bytes=math.inf
)
"""A laptop without GPU, on a link of 1 Gbit/s."""

_Index = Annotated[int, Meta(ge=0, lt=MAX_OPERATIONS)]
_Side = Annotated[int, Meta(ge=1, le=1_000_000)]


_Amount = Annotated[float, Meta(ge=0, le=1e30)]


class PieceWork(msgspec.Struct, frozen=True, array_like=True):
    """What a request of the sizes that the network was captured for takes in a piece."""

    flop: _Amount
    weight_bytes: _Amount
    received_bytes: _Amount
    sent_bytes: _Amount


class GraphPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Pieces in an order in which values only go on."""

    version: Literal[1] = 1
    graph: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """`CapturedModel.digest`, in hexadecimal."""
    dtype: Literal["float32", "bfloat16", "float16"]
    batch: _Side
    tokens: _Side
    image_size: _Side | None
    """What the network was captured for (`RequestSizes`)."""
    made_with: Annotated[
        dict[Annotated[str, Meta(max_length=32)], Annotated[str, Meta(max_length=64)]],
        Meta(max_length=8),
    ]
    """Versions of the libraries that captured it."""
    pieces: Annotated[
        tuple[Annotated[tuple[_Index, ...], Meta(min_length=1)], ...],
        Meta(min_length=1, max_length=MAX_PIECES),
    ]
    """Operations of each, in the order in which they run."""
    work: Annotated[tuple[PieceWork, ...], Meta(max_length=MAX_PIECES)] = ()
    """Of each piece, to be shown: nodes and clients work it out from the graph."""

    @property
    def digest(self) -> str:
        """16 hex digits of SHA-256, that do not depend on `made_with` and `work`."""
        plain = msgspec.structs.replace(self, made_with={}, work=())
        return hashlib.sha256(encode_plan(plain)).hexdigest()[:16]

    def operations(self, span: Span) -> tuple[int, ...]:
        """All operations of a span of pieces."""
        return tuple(each for piece in self.pieces[span.start : span.end] for each in piece)


def encode_plan(plan: GraphPlan) -> bytes:
    """The plan as JSON."""
    return msgspec.json.encode(plan)


def decode_plan(content: bytes, *, where: str) -> GraphPlan:
    """Read a plan. Raises `ConfigError`."""
    if len(content) > MAX_PLAN_BYTES:
        raise ConfigError(f"{where}: {len(content)} bytes; a plan has at most {MAX_PLAN_BYTES}")
    try:
        return msgspec.json.decode(content, type=GraphPlan)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where} is no plan of pieces: {error}") from error


def check_plan(
    plan: GraphPlan, graph: OperationGraph, digest: bytes, versions: Mapping[str, str]
) -> None:
    """Raise `UnsupportedFeatureError` for a plan of another graph, or with impossible pieces.

    `versions` are those of the libraries here, for the message.
    """
    if plan.graph != digest.hex():
        different = [
            f"{name} {plan.made_with.get(name, '(unknown)')} there, {version} here"
            for name, version in versions.items()
            if plan.made_with.get(name) != version
        ]
        raise UnsupportedFeatureError(
            "the plan is of another graph than the one captured here"
            + (
                f" ({'; '.join(different)}): use the same versions"
                if different
                else ": another version of nesa-node made it, or another model"
            )
        )
    order = [operation for piece in plan.pieces for operation in piece]
    if sorted(order) != list(range(len(graph))):
        raise UnsupportedFeatureError(
            f"the plan's pieces do not have each of the graph's {len(graph)} operations once"
        )
    if any(len({graph.share_of[each] for each in piece}) > 1 for piece in plan.pieces):
        raise UnsupportedFeatureError("the plan has a piece of two networks of a pipeline")
    place = {operation: position for position, operation in enumerate(order)}
    for value in graph.values:
        made = -1 if value.producer is None else place[value.producer]
        if any(place[each] <= made for each in value.consumers):
            raise UnsupportedFeatureError("the plan's pieces use values before they are made")


@dataclass(frozen=True, slots=True)
class SpanInterface:
    """Indices of `graph.values` that a span of pieces gets and gives, ascending."""

    received: tuple[int, ...]
    sent: tuple[int, ...]


def find_interface(graph: OperationGraph, operations: Sequence[int]) -> SpanInterface:
    """What a machine with these operations needs from elsewhere, and what is needed elsewhere."""
    inside = set(operations)
    received, sent = [], []
    for index, value in enumerate(graph.values):
        used_here = any(each in inside for each in value.consumers)
        if value.producer in inside:
            if value.is_output or any(each not in inside for each in value.consumers):
                sent.append(index)
        elif used_here:
            received.append(index)
    return SpanInterface(tuple(received), tuple(sent))


def measure_work(graph: OperationGraph, operations: Sequence[int]) -> PieceWork:
    """What a request's runs of a piece of these operations take."""
    interface = find_interface(graph, operations)
    return PieceWork(
        flop=sum(graph.operations[each].flop * graph.runs[each] for each in operations),
        weight_bytes=graph.count_parameter_bytes(operations),
        received_bytes=sum(graph.request_bytes(graph.values[each]) for each in interface.received),
        sent_bytes=sum(graph.request_bytes(graph.values[each]) for each in interface.sent),
    )


def cut_evenly(graph: OperationGraph, count: int) -> tuple[tuple[int, ...], ...]:
    """`count` pieces of the graph's own order for equal machines, so that the slowest is fastest.

    None is empty, so that slow links do not keep a network whole. Raises `ConfigError` for more
    pieces than operations, and fewer than shares.
    """
    least, most = max(1, len(graph.shares)), min(len(graph), MAX_PIECES)
    if not least <= count <= most:
        what = (
            f"pipeline of {len(graph.shares)} networks"
            if graph.shares
            else f"network of {len(graph)} operations"
        )
        raise ConfigError(f"{count} pieces: a {what} has {least} to {most}")
    order, machines = graph.gather(np.arange(len(graph))), [REFERENCE_MACHINE] * count
    blocks = [list(block) for block in slice_order(graph, order, machines).blocks() if block]
    work_N = REFERENCE_MACHINE.work_s(graph)
    while len(blocks) < count:
        longest = max(
            (index for index, block in enumerate(blocks) if len(block) > 1),
            key=lambda index: work_N[blocks[index]].sum(),
        )
        block = blocks[longest]
        until = work_N[block].cumsum()
        cut = int(np.argmin(np.maximum(until[:-1], until[-1] - until[:-1]))) + 1
        blocks[longest : longest + 1] = [block[:cut], block[cut:]]
    return tuple(map(tuple, blocks))
