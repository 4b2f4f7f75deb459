"""Weights of a span of pieces: all in memory, or what exceeds it read anew for each request.

That is the overflow of equation 9 in the Nesa paper (section 2.6). It is read while what comes
before is computed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from nesa_node.core.errors import InsufficientMemoryError
from nesa_node.core.ids import Span
from nesa_node.engine.graphs.network import Network
from nesa_node.engine.graphs.piece import GraphPiece, find_piece_interface
from nesa_node.engine.weights.skeleton import ModelTensors
from nesa_node.sharding.graph_plan import GraphPlan, SpanInterface
from nesa_node.sharding.open_sizes import Sizes
from nesa_node.sharding.operation_graph import OperationGraph

SEGMENTS_IN_MEMORY = 8
"""A segment has at most this part of the memory for weights, or one operation. Two are in memory
besides those that stay: the one that is computed and the next."""


class PieceWeights(Protocol):
    """Where a node with a span of pieces has its weights. All methods block the thread."""

    held_bytes: int
    """Most bytes of them in memory."""
    unread_bytes: int
    """Those of `held_bytes` that are not in memory yet."""

    def find_piece(self, operations: Sequence[int]) -> RunnablePiece:
        """Operations of the node's pieces as one, ready to run: all of a span, or one half of what
        `Network.split` makes of them.
        """

    def close(self) -> None: ...


class RunnablePiece(Protocol):
    """`GraphPiece`, or one that reads its weights as it runs."""

    interface: SpanInterface

    def run(self, values: Iterable[Tensor], sizes: Sizes) -> tuple[Tensor, ...]: ...


class ResidentWeights:
    """All weights in memory."""

    def __init__(
        self, network: Network, weights: Mapping[str, Tensor], device: torch.device
    ) -> None:
        """`weights` are those of the span, by name."""
        self.held_bytes = sum(tensor.nbytes for tensor in weights.values())
        self.unread_bytes = 0
        self._network = network
        self._weights = weights
        self._device = device

    def find_piece(self, operations: Sequence[int]) -> GraphPiece:
        program = self._network.build_piece(operations, self._device)
        return GraphPiece(self._network.captured, program, self._weights, self._device)

    def close(self) -> None:
        pass


class Segment:
    """Operations that follow each other within a piece, and their weights while they are here."""

    def __init__(self, network: Network, operations: Sequence[int], device: torch.device) -> None:
        self.operations = operations
        self.program = network.build_piece(operations, device)
        self.names = sorted(set(self.program.weights.values()))
        self.nbytes = network.count_weight_bytes(operations)
        self.resident: GraphPiece | None = None
        """None: its weights are read for each request."""


class StreamedWeights:
    """Segments of a span of pieces, of which the first stay in memory."""

    def __init__(
        self,
        network: Network,
        plan: GraphPlan,
        span: Span,
        device: torch.device,
        memory_bytes: int,
    ) -> None:
        """Read the weights that stay. Blocks the thread.

        Raises `InsufficientMemoryError` where two operations may need more than `memory_bytes`, and
        as `Network.load_weights` does.
        """
        self._network = network
        self._device = device
        self._tensors = ModelTensors(network.checkpoint, copy.deepcopy(network.model))
        # None has operations of two pieces or of both halves of one.
        self._segments = every = [
            Segment(network, operations, device)
            for piece in plan.pieces[span.start : span.end]
            for half in (network.split(piece) if network.states else (piece,))
            for operations in split_operations(
                network.captured.graph, half, memory_bytes // SEGMENTS_IN_MEMORY
            )
        ]
        largest = max(segment.nbytes for segment in every)
        left = memory_bytes - 2 * largest
        if left < 0:
            raise InsufficientMemoryError(
                f"--weight-memory-gib: an operation of pieces {span} has {largest >> 20} MiB of "
                f"weights, and the next one is read beside it: {2 * largest / 2**30:.2f} GiB are "
                "the least"
            )
        self.resident_bytes = 0
        for segment in every:
            if segment.nbytes <= left - self.resident_bytes:
                segment.resident = self._load(segment, self._read(segment))
                self.resident_bytes += segment.nbytes
        self.unread_bytes = 2 * largest
        self.held_bytes = self.resident_bytes + self.unread_bytes
        self._reading: tuple[Segment, Future[dict[str, Tensor]]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def find_piece(self, operations: Sequence[int]) -> StreamedPiece:
        wanted = set(operations)
        segments = [each for each in self._segments if wanted.issuperset(each.operations)]
        return StreamedPiece(self._network, segments, self)

    def take(self, segment: Segment, following: Segment) -> GraphPiece:
        """A segment with its weights; those of `following` are read from now on."""
        assert segment.resident is None
        reading = self._begin(segment)
        self._reading = None  # also where it failed: the next request reads anew
        weights = reading.result()
        self._begin(following)
        return self._load(segment, weights)

    def _load(self, segment: Segment, weights: Mapping[str, Tensor]) -> GraphPiece:
        return GraphPiece(self._network.captured, segment.program, weights, self._device)

    def _begin(self, segment: Segment) -> Future[dict[str, Tensor]]:
        if self._reading is None or self._reading[0] is not segment:
            if self._reading is not None:
                self._reading[1].exception()  # the memory is free once it is read and dropped
            self._reading = segment, self._thread.submit(self._read, segment)
        return self._reading[1]

    def _read(self, segment: Segment) -> dict[str, Tensor]:
        self._tensors.load(segment.names, dtype=None, device=self._device, task="reading weights")
        return self._tensors.take(segment.names)


class StreamedPiece:
    """Segments that run one after another, as one piece."""

    def __init__(
        self, network: Network, segments: Sequence[Segment], weights: StreamedWeights
    ) -> None:
        every = [operation for segment in segments for operation in segment.operations]
        self.interface = find_piece_interface(network.captured, every)
        self._segments = segments
        self._weights = weights
        self._streamed = [segment for segment in segments if segment.resident is None]
        self._last_use = {
            index: number
            for number, segment in enumerate(segments)
            for index in segment.program.interface.received
        } | dict.fromkeys(self.interface.sent, len(segments))

    def run(self, values: Iterable[Tensor], sizes: Sizes) -> tuple[Tensor, ...]:
        """As `GraphPiece.run`. Raises as `Network.load_weights` does, too."""
        known = dict(zip(self.interface.received, values, strict=True))
        position = 0
        for number, segment in enumerate(self._segments):
            piece = segment.resident
            if piece is None:
                position = (position + 1) % len(self._streamed)
                piece = self._weights.take(segment, self._streamed[position])
            try:
                made = piece.run([known[index] for index in piece.interface.received], sizes)
            finally:
                if segment.resident is None:
                    piece.drop_weights()
            known |= zip(piece.interface.sent, made, strict=True)
            for index in [each for each in known if self._last_use.get(each, -1) <= number]:
                del known[index]
        return tuple(known[index] for index in self.interface.sent)


def split_operations(
    graph: OperationGraph, operations: Sequence[int], max_bytes: int
) -> list[tuple[int, ...]]:
    """Runs of operations with at most `max_bytes` of weights, or one operation, in order."""
    found: list[list[int]] = []
    used: set[int] = set()
    for operation in operations:
        used |= set(graph.operations[operation].parameters)
        if not found or sum(graph.parameter_bytes[each] for each in used) > max_bytes:
            found.append([])
            used = set(graph.operations[operation].parameters)
        found[-1].append(operation)
    return [tuple(each) for each in found]
