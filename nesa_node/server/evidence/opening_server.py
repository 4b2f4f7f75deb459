"""A node's checks of openings that peers send it about nodes which hold its blocks, too."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, get_args

import torch

from nesa_node.compression.tensors import DTYPES
from nesa_node.core.errors import BusyError, NesaError, ProtocolError
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.core.logging import get_logger
from nesa_node.core.lru_table import LruTable
from nesa_node.core.settings.choices import QuantType
from nesa_node.engine.kernels.threads import lower_priority
from nesa_node.engine.model.recomputation import run_blocks, split_runs
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.server.session.message_loop import RefusalLog, receive_first_message
from nesa_node.server.session.peer_access import PeerAccess
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.openings import MAX_OPENING_BYTES, OpenedRow, read_opening
from nesa_node.swarm.p2p.tasks import TaskSet
from nesa_node.swarm.protocol.messages import Computation
from nesa_node.swarm.protocol.seal_messages import (
    Opening,
    OpeningOffer,
    OpeningTaken,
    OpeningWanted,
)
from nesa_node.swarm.protocol.stream import MAX_BUDGET_PEERS, Stream
from nesa_node.verification.comparison import (
    ComputationKind,
    Measure,
    find_threshold,
    is_evident,
    perturb,
)
from nesa_node.verification.schemes import DEFAULT_SCHEME

log = get_logger(__name__)

MAX_CHECKS_PER_HOUR = 4
"""For all peers together, whose identities are free. Not by accused node: a liar could have itself
accused of honest work."""
MAX_TOKEN_BLOCKS = 1 << 14
"""Tokens times blocks of one opening, each computed three times."""
RECEIVE_TIMEOUT_S = 60.0
_HOUR_S = 3600.0
_BUSY_RETRY_S = 60.0


@dataclass(frozen=True, slots=True, eq=False)
class OpenedWork:
    """What `accused` sealed, as it was opened."""

    accused: PeerId
    span: Span
    computation: Computation
    rows: list[OpenedRow]


class CheckLimits:
    """One check at a time and few an hour. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: deque[float] = deque(maxlen=MAX_CHECKS_PER_HOUR)
        self._last: LruTable[PeerId, float] = LruTable(MAX_BUDGET_PEERS)

    def admit(self, peer: PeerId) -> None:
        """Count an opening that `peer` is to send. Raises `BusyError`."""
        now = self._clock()
        is_full = len(self._began) == MAX_CHECKS_PER_HOUR and self._began[0] > now - _HOUR_S
        if is_full or self._last.get(peer, -_HOUR_S) > now - _HOUR_S:
            raise BusyError("enough openings were checked within an hour", _HOUR_S)
        self._last.put(peer, now)

    def begin(self) -> None:
        """Count a check. What was sent, but is no opening, is not checked."""
        self._began.append(self._clock())


class OpeningServer:
    """Takes openings, checks them one at a time, and calls `report_wrong` with nodes that lied.

    `find_span` gives the blocks that are served now, whose weights are here; `find_addresses` the
    model's known nodes, about which alone openings are taken.
    """

    def __init__(
        self,
        swarm: Swarm,
        model_id: ModelId,
        checkpoint: Checkpoint,
        *,
        find_span: Callable[[], Span | None],
        find_addresses: Callable[[], Mapping[PeerId, object]],
        report_wrong: Callable[[PeerId, str], None],
        allow: frozenset[PeerId] = frozenset(),
        deny: frozenset[PeerId] = frozenset(),
        refusals: RefusalLog | None = None,
    ) -> None:
        """The caller closes it."""
        self._swarm = swarm
        self._checkpoint = checkpoint
        self._find_span = find_span
        self._find_addresses = find_addresses
        self._report_wrong = report_wrong
        self._access = PeerAccess(swarm, model_id, allow, deny)
        self._refusals = refusals or RefusalLog()
        self._limits = CheckLimits()
        self._is_busy = False
        self._tasks = TaskSet()
        self._stopping = threading.Event()
        self._thread = ThreadPoolExecutor(1, "evidence", initializer=partial(lower_priority, 19))

    async def close(self) -> None:
        """Let go of checks; one that runs ends after its block."""
        self._stopping.set()
        await self._tasks.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def handle(self, peer: PeerId, reader: Any, writer: Any) -> None:
        """Serve one stream, which has one opening; the caller closes it.

        A peer's mistake is answered, never raised.
        """
        stream = Stream(peer, reader, writer)
        async with self._refusals.answering(stream):
            # Read before it is refused: see `SessionServer.handle`.
            offer = await receive_first_message(stream)
            if not isinstance(offer, OpeningOffer):
                raise ProtocolError("unexpected", "a stream of evidence begins with opening_offer")
            self._check_offer(peer, offer)
            await self._receive(stream, offer)

    def _check_offer(self, peer: PeerId, offer: OpeningOffer) -> None:
        self._access.require(peer, offer.membership, offer.model)
        own, accused = self._swarm.identity.peer_id, PeerId(offer.accused)
        span = self._find_span()
        if span is None or not span.covers(Span(*offer.blocks)):
            raise ProtocolError("wrong_blocks", f"this node serves blocks {span}")
        if accused in (peer, own) or accused not in self._find_addresses():
            raise ProtocolError("not_checkable", f"{accused} is no other node of the model")

    async def _receive(self, stream: Stream, offer: OpeningOffer) -> None:
        if self._is_busy:
            raise BusyError("another opening is being checked", _BUSY_RETRY_S)
        self._limits.admit(stream.peer)
        self._is_busy = True
        check = None
        try:
            async with asyncio.timeout(RECEIVE_TIMEOUT_S):
                await stream.send(OpeningWanted())
                opening, payload = await stream.receive(max_tensor_bytes=MAX_OPENING_BYTES)
            if not isinstance(opening, Opening):
                raise ProtocolError("unexpected", "after opening_wanted comes opening")
            work = await asyncio.to_thread(self._read, opening, payload, offer)
            self._limits.begin()
            check = self._tasks.start(self._check(work), name="opening")
        except TimeoutError:
            raise ProtocolError("transfer_timeout", f"{stream.peer} sends too slowly") from None
        finally:
            self._is_busy = check is not None
        await stream.send(OpeningTaken())

    def _read(self, opening: Opening, payload: bytearray, offer: OpeningOffer) -> OpenedWork:
        accused, hidden_size = PeerId(offer.accused), int(self._checkpoint.config.hidden_size)
        stated, rows = read_opening(opening, payload, accused, hidden_size)
        if stated.blocks != offer.blocks:
            raise ProtocolError("bad_opening", f"the seal is of blocks {Span(*stated.blocks)}")
        if self._checkpoint.family.router is not None:
            raise ProtocolError("not_checkable", "honest routers of a mixture may disagree")
        if stated.computation.weights not in get_args(QuantType):
            raise ProtocolError("not_checkable", "a quantization that is unknown here")
        work = OpenedWork(accused, Span(*stated.blocks), stated.computation, rows)
        if sum(len(row.inputs_LD) for row in rows) * len(work.span) > MAX_TOKEN_BLOCKS:
            raise ProtocolError("too_large", f"more than {MAX_TOKEN_BLOCKS:,} tokens x blocks")
        return work

    async def _check(self, work: OpenedWork) -> None:
        loop = asyncio.get_running_loop()
        try:
            judging = partial(is_wrong_work, self._checkpoint, work, self._stopping)
            is_wrong = await loop.run_in_executor(self._thread, judging)
        except (NesaError, OSError) as error:
            log.info("opening_not_checked", peer=work.accused, reason=str(error))
        else:
            log.info("opening_checked", peer=work.accused, is_wrong=is_wrong)
            if is_wrong:
                reason = f"it sealed wrong activations of blocks {work.span}"
                self._report_wrong(work.accused, reason)
        finally:
            self._is_busy = False


def is_wrong_work(checkpoint: Checkpoint, work: OpenedWork, stopping: threading.Event) -> bool:
    """Whether a node sealed what its blocks do not compute (`is_evident`).

    By the weights of `checkpoint`, in the kind of computation that the seal declares: in one
    prefill, token by token, and of inputs that are changed by their rounding. Blocks the thread,
    once `stopping` is set for one more block, and then tells nothing. Raises what `load_blocks`
    raises.
    """
    declared = work.computation
    kind = ComputationKind(
        checkpoint.config.model_type, declared.dtype, declared.quantization, declared.backend
    )
    allowed = find_threshold(kind, len(work.span))
    if allowed is None:
        return False
    computing = partial(_compute, checkpoint, work, stopping)
    expected, *further = computing(), computing(by_token=True), computing(is_perturbed=True)
    if stopping.is_set():
        return False
    given = [row.outputs_PD for row in work.rows]
    return is_evident(given, expected, further, allowed, Measure(DEFAULT_SCHEME, b""))


def _compute(
    checkpoint: Checkpoint,
    work: OpenedWork,
    stopping: threading.Event,
    *,
    by_token: bool = False,
    is_perturbed: bool = False,
) -> list[torch.Tensor]:
    """Outputs [P, D] of each row."""
    declared = work.computation
    hidden = [perturb(row.inputs_LD) if is_perturbed else row.inputs_LD for row in work.rows]
    dtype = DTYPES[declared.dtype]
    for span in split_runs(checkpoint, work.span, dtype):
        if stopping.is_set():
            break
        ran = run_blocks(
            checkpoint,
            span,
            hidden,
            dtype=dtype,
            quant_type=cast(QuantType, declared.weights),
            cache_dtype=declared.cache_dtype,
            by_token=by_token,
        )
        hidden = [output_LD for output_LD, _ in ran]
    return [
        output_LD[list(row.positions)] for row, output_LD in zip(work.rows, hidden, strict=True)
    ]
