"""Pieces of a network in memory, and requests that are computed with them."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nesa_node.core.errors import NesaError, ProtocolError
from nesa_node.core.ids import PeerId, Span
from nesa_node.core.logging import get_logger
from nesa_node.core.lru_table import LruTable
from nesa_node.engine.graphs.network import Network
from nesa_node.engine.graphs.piece_weights import PieceWeights, RunnablePiece
from nesa_node.engine.kernels.threads import clipped_mean
from nesa_node.server.graphs.kept_sequences import KeptSequences, SequenceUse
from nesa_node.sharding.graph_plan import GraphPlan, SpanInterface
from nesa_node.sharding.open_sizes import Sizes

log = get_logger(__name__)

MAX_PROGRAMS = 32
"""Spans within the served one whose code is kept."""
MAX_KNOWN_SIZES = 256
MAX_SYMBOL_VALUE = 1 << 24
KEPT_SHARE = 2
"""Sequences have, besides, the memory that a request may take divided by this."""
MIN_TIMES = 8
MAX_TIMES = 256
"""Of requests, from which a speed is announced."""


@dataclass(frozen=True, slots=True)
class _Work:
    """What is computed for a request."""

    span: Span
    operations: tuple[int, ...]
    interface: SpanInterface
    parts: tuple[RunnablePiece, ...]
    """One after another; of a decoder the last one has all that depends on its tokens."""
    states: Mapping[int, int] = field(default_factory=dict)
    """Of `Network.states`, those that are used here."""
    fixed: frozenset[int] = frozenset()
    """The values that further tokens of a sequence need and do not change."""


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
        self._works: OrderedDict[tuple[Span, bool], _Work] = OrderedDict()
        self._peaks: LruTable[tuple[Span, Sizes], int] = LruTable(MAX_KNOWN_SIZES)
        self._sequences = KeptSequences(max_bytes // KEPT_SHARE)

    @property
    def weight_bytes(self) -> int:
        return self._weights.held_bytes

    def close(self) -> None:
        """Read no more weights. Nothing may run any more."""
        self._weights.close()

    def run(
        self,
        span: Span,
        sizes: Sizes,
        values: Mapping[int, Tensor],
        sequence: SequenceUse | None = None,
    ) -> dict[int, Tensor]:
        """Compute what `span` sends, on the CPU, of what it receives.

        Of a `sequence` the node keeps what further tokens need. Raises `ProtocolError` for pieces
        that are not here, other values than these pieces use, sequences of which nothing is kept
        (`"unknown_sequence"`), and requests that are too large or cannot be computed.
        """
        if not self.span.covers(span) or not len(span):
            raise ProtocolError("wrong_blocks", f"this node has pieces {self.span}, not {span}")
        try:
            self._check_sizes(sizes)
            position = self.network.find_position(sizes)
            work = self._find_work(span, is_step=position > 0)
            self._check_values(work, sizes, values)
            self._check_memory(work, sizes)
            states = self._find_states(work, sizes, sequence, position)
            started = time.perf_counter()
            known = {index: values[index].to(self.device) for index in work.interface.received}
            known |= states
            for part in work.parts:
                given = [known[index] for index in part.interface.received]
                known |= zip(part.interface.sent, part.run(given, sizes), strict=True)
            if sequence is not None:
                self._sequences.keep(sequence, self._find_kept(work, known))
            found = {index: known[index].cpu() for index in work.interface.sent}
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

    def forget_sequences(self, owner: PeerId) -> None:
        """Drop what is kept for a peer. It may be called from any thread."""
        self._sequences.forget(owner)

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

    def _find_work(self, span: Span, *, is_step: bool) -> _Work:
        key = span, is_step
        if key in self._works:
            self._works.move_to_end(key)
            return self._works[key]
        network, operations = self.network, self.plan.operations(span)
        if network.states:
            fixed, changing = network.split(operations)
            work = self._plan_step(span, changing) if is_step else self._plan_whole(span, fixed)
        else:
            piece = self._weights.find_piece(operations)
            work = _Work(span, operations, network.find_interface(operations), (piece,))
        self._works[key] = work
        if len(self._works) > MAX_PROGRAMS:
            self._works.popitem(last=False)
        return work

    def _plan_step(self, span: Span, changing: tuple[int, ...]) -> _Work:
        if not changing:
            raise ProtocolError("wrong_blocks", f"pieces {span} compute nothing for further tokens")
        network, piece = self.network, self._weights.find_piece(changing)
        received = piece.interface.received
        return _Work(
            span,
            changing,
            network.find_step_interface(changing),
            (piece,),
            states={index: network.states[index] for index in received if index in network.states},
            fixed=network.fixed_values.intersection(received),
        )

    def _plan_whole(self, span: Span, fixed: tuple[int, ...]) -> _Work:
        """What does not depend on tokens, and then as a step."""
        every = self.plan.operations(span)
        interface = self.network.find_interface(every)
        first = (self._weights.find_piece(fixed),) if fixed else ()
        if len(fixed) == len(every):
            return _Work(span, every, interface, first)
        step = self._find_work(span, is_step=True)
        return replace(
            step, operations=fixed + step.operations, interface=interface, parts=first + step.parts
        )

    def _find_states(
        self, work: _Work, sizes: Sizes, sequence: SequenceUse | None, position: int
    ) -> dict[int, Tensor]:
        """What the pieces use besides the values that come."""
        if not position:
            shapes = {index: self.network.find_shape(index, sizes) for index in work.states}
            return {
                index: torch.zeros(shape.shape, dtype=shape.dtype, device=self.device)
                for index, shape in shapes.items()
            }
        if not work.states and not work.fixed:
            return {}
        kept = None if sequence is None else self._sequences.find(sequence)
        if sequence is None or kept is None:
            raise ProtocolError("unknown_sequence", "nothing is kept of this sequence")
        for index in (*work.states, *work.fixed):
            shape = self.network.find_shape(index, sizes).shape
            # Looked at before anything is copied.
            if index not in kept or not _has_rows(kept[index], sequence.rows, shape):
                raise ProtocolError(
                    "unknown_sequence",
                    f"what is kept of this sequence is not of {position} tokens and {shape[0]} "
                    "rows",
                )
        found = {index: kept[index] for index in (*work.states, *work.fixed)}
        if sequence.rows:
            rows_B = torch.tensor(sequence.rows, device=self.device)
            found |= {index: found[index][rows_B] for index in work.states}
        return found

    def _find_kept(self, work: _Work, known: Mapping[int, Tensor]) -> dict[int, Tensor]:
        fixed = {index: known[index] for index in work.fixed}
        for index in fixed.keys() & set(work.interface.received):
            fixed[index] = fixed[index].clone()  # it is a view of all that came
        return fixed | {index: known[made] for index, made in work.states.items()}

    def _check_sizes(self, sizes: Sizes) -> None:
        if len(sizes) != len(self.network.captured.sizes.symbols):
            raise ProtocolError("bad_tensor", f"{len(sizes)} sizes, of another graph")
        least = (0 if index in self.network.position_sizes else 1 for index in range(len(sizes)))
        if not all(low <= size <= MAX_SYMBOL_VALUE for low, size in zip(least, sizes, strict=True)):
            raise ProtocolError(
                "bad_tensor",
                f"sizes must be 1 to {MAX_SYMBOL_VALUE}, or 0 where they count earlier tokens",
            )

    def _check_values(self, work: _Work, sizes: Sizes, values: Mapping[int, Tensor]) -> None:
        received = work.interface.received
        if set(values) != set(received):
            raise ProtocolError(
                "bad_tensor",
                f"pieces {work.span} use values {list(received)}, and {sorted(values)} came",
            )
        for index in received:
            expected, found = self.network.find_shape(index, sizes), values[index]
            if (found.dtype, tuple(found.shape)) != (expected.dtype, expected.shape):
                raise ProtocolError(
                    "bad_tensor",
                    f"value {index} is {found.dtype} {list(found.shape)}; with these sizes it is "
                    f"{expected.dtype} {list(expected.shape)}",
                )

    def _check_memory(self, work: _Work, sizes: Sizes) -> None:
        # A sequence has other sizes with each token: most are known to fit from a longer one.
        longer = tuple(
            1 << (size - 1).bit_length() if size and index in self.network.position_sizes else size
            for index, size in enumerate(sizes)
        )
        if self._count_bytes(work, longer) <= self.max_bytes:
            return
        needed = self._count_bytes(work, sizes)
        if needed > self.max_bytes:
            raise ProtocolError(
                "too_large",
                f"a request of these sizes takes {needed >> 20} MiB in pieces {work.span}; this "
                f"node gives it {self.max_bytes >> 20} MiB: send a smaller batch or image",
            )

    def _count_bytes(self, work: _Work, sizes: Sizes) -> int:
        """What a request takes while it is computed."""
        found = self._peaks.get((work.span, sizes))
        if found is None:
            network, came = self.network, work.interface.received
            lasting = {*came, *work.interface.sent, *work.fixed, *work.states}
            lasting |= set(work.states.values())
            found = network.count_peak_bytes(work.operations, sizes, lasting)
            # These are copied.
            found += sum(
                network.find_shape(index, sizes).nbytes for index in work.fixed.intersection(came)
            )
            self._peaks.put((work.span, sizes), found)
        return found


def _has_rows(kept: Tensor, rows: Sequence[int], shape: tuple[int, ...]) -> bool:
    """Whether `rows` of a tensor, or all of it without any, have this shape."""
    if tuple(kept.shape[1:]) != shape[1:]:
        return False
    if not rows:
        return len(kept) == shape[0]
    return len(rows) == shape[0] and max(rows) < len(kept)
