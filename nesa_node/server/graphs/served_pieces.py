"""Pieces of a network in memory, and requests that are computed with them."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Mapping

import torch
from torch import Tensor

from nesa_node.core.errors import NesaError, ProtocolError
from nesa_node.core.ids import Span
from nesa_node.core.logging import get_logger
from nesa_node.core.lru_table import LruTable
from nesa_node.engine.graphs.network import Network
from nesa_node.engine.graphs.piece_weights import PieceWeights, RunnablePiece
from nesa_node.engine.kernels.threads import clipped_mean
from nesa_node.sharding.graph_plan import GraphPlan
from nesa_node.sharding.open_sizes import Sizes

log = get_logger(__name__)

MAX_PROGRAMS = 32
"""Spans within the served one whose code is kept."""
MAX_KNOWN_SIZES = 256
MAX_SYMBOL_VALUE = 1 << 24
MIN_TIMES = 8
MAX_TIMES = 256
"""Of requests, from which a speed is announced."""


class ServedPieces:
    """A span of a plan's pieces with its weights. All methods block the thread."""

    def __init__(
        self,
        network: Network,
        plan: GraphPlan,
        span: Span,
        weights: PieceWeights,
        device: torch.device,
        max_bytes: int,
    ) -> None:
        """`weights` are those of the span; no request may take more than `max_bytes`."""
        self.network = network
        self.plan = plan
        self.span = span
        self.device = device
        self.max_bytes = max_bytes
        self._weights = weights
        self._seconds: deque[float] = deque(maxlen=MAX_TIMES)
        self._pieces: OrderedDict[Span, RunnablePiece] = OrderedDict()
        self._peaks: LruTable[tuple[Span, Sizes], int] = LruTable(MAX_KNOWN_SIZES)

    @property
    def weight_bytes(self) -> int:
        return self._weights.held_bytes

    def close(self) -> None:
        """Read no more weights. Nothing may run any more."""
        self._weights.close()

    def run(self, span: Span, sizes: Sizes, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Compute what `span` sends, on the CPU, of what it receives.

        Raises `ProtocolError` for pieces that are not here, other values than these pieces use, and
        requests that are too large or cannot be computed.
        """
        if not self.span.covers(span) or not len(span):
            raise ProtocolError("wrong_blocks", f"this node has pieces {self.span}, not {span}")
        piece = self._find_piece(span)
        try:
            self._check(piece, span, sizes, values)
            started = time.perf_counter()
            given = [values[index].to(self.device) for index in piece.interface.received]
            made = piece.run(given, sizes)
            found = {
                index: tensor.cpu()
                for index, tensor in zip(piece.interface.sent, made, strict=True)
            }
            if span == self.span and sizes == self.network.example_sizes:
                self._seconds.append(time.perf_counter() - started)
            return found
        except NesaError:
            raise
        except OSError as error:
            log.warning("weights_not_read", span=str(span), reason=str(error))
            raise ProtocolError("not_computed", f"weights of pieces {span} are not read") from None
        except Exception as error:  # torch and sympy raise what they like
            log.info("request_not_computed", span=str(span), reason=str(error))
            reason = str(error).strip().partition("\n")[0][:300]
            raise ProtocolError(
                "not_computed", f"pieces {span} could not be computed: {reason}"
            ) from None

    def take_mean_s(self) -> float | None:
        """Clipped mean of what requests took since the last call; None of too few.

        Of those through the whole span, of the sizes for which the network was captured.
        """
        if len(self._seconds) < MIN_TIMES:
            return None
        times = list(self._seconds)
        self.forget_times()
        return clipped_mean(times)

    def forget_times(self) -> None:
        """Leave out what was computed so far, which no client asked for."""
        self._seconds.clear()

    def _find_piece(self, span: Span) -> RunnablePiece:
        if span in self._pieces:
            self._pieces.move_to_end(span)
            return self._pieces[span]
        piece = self._pieces[span] = self._weights.find_piece(span)
        if len(self._pieces) > MAX_PROGRAMS:
            self._pieces.popitem(last=False)
        return piece

    def _check(
        self, piece: RunnablePiece, span: Span, sizes: Sizes, values: Mapping[int, Tensor]
    ) -> None:
        if len(sizes) != len(self.network.captured.sizes.symbols):
            raise ProtocolError("bad_tensor", f"{len(sizes)} sizes, of another graph")
        if not all(0 < size <= MAX_SYMBOL_VALUE for size in sizes):
            raise ProtocolError("bad_tensor", f"sizes must be 1 to {MAX_SYMBOL_VALUE}")
        if set(values) != set(piece.interface.received):
            raise ProtocolError(
                "bad_tensor",
                f"pieces {span} use values {list(piece.interface.received)}, and "
                f"{sorted(values)} came",
            )
        for index in piece.interface.received:
            expected, found = self.network.find_shape(index, sizes), values[index]
            if (found.dtype, tuple(found.shape)) != (expected.dtype, expected.shape):
                raise ProtocolError(
                    "bad_tensor",
                    f"value {index} is {found.dtype} {list(found.shape)}; with these sizes it is "
                    f"{expected.dtype} {list(expected.shape)}",
                )
        needed = self._find_peak(span, sizes)
        if needed > self.max_bytes:
            raise ProtocolError(
                "too_large",
                f"a request of these sizes takes {needed >> 20} MiB in pieces {span}; this node "
                f"gives it {self.max_bytes >> 20} MiB: send a smaller batch or image",
            )

    def _find_peak(self, span: Span, sizes: Sizes) -> int:
        peak = self._peaks.get((span, sizes), 0)
        if not peak:
            peak = self.network.count_peak_bytes(self.plan.operations(span), sizes)
            self._peaks.put((span, sizes), max(peak, 1))
        return peak
