"""Session over the swarm: sends steps, receives outputs, replaces lost nodes.

T packed tokens, D hidden.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from nesa_node.client.chunks import Chunk, cut
from nesa_node.client.flow import Flow
from nesa_node.client.hop import HopLink
from nesa_node.client.line import Line
from nesa_node.client.losses import MOST_KEPT, Loss
from nesa_node.client.planner import Planner
from nesa_node.client.prefix import SessionPrefix
from nesa_node.client.rebuilding import UNTIL_THERE_IS_ROOM, Rebuilding
from nesa_node.client.replay import Replay
from nesa_node.client.request import RouteRequest
from nesa_node.client.route import Route
from nesa_node.client.session_trace import SessionTrace
from nesa_node.client.tallies import SessionTallies
from nesa_node.client.watch import Watch
from nesa_node.compression import tensors
from nesa_node.compression.hidden_states import HiddenStates
from nesa_node.core.errors import (
    CacheFullError,
    ContextLengthError,
    MissingBlocksError,
    NesaError,
    PeerUnreachableError,
    ProtocolError,
    RefusedError,
    RemoteError,
)
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger, logging_of, session_name
from nesa_node.core.waiting import Waiting, unheard, waiting
from nesa_node.routing.chains import Hop
from nesa_node.swarm.messages import RowSlice, Want
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.outbox import Kept
from nesa_node.swarm.tasks import TaskSet

log = get_logger(__name__)

MAX_ATTEMPTS = 20
"""Most attempts at a step that makes no progress, each over a newly linked chain."""
REPLICATE_EVERY_S = 0.25
"""Seconds between updates of successors: newer tokens are computed again after a failover."""
_FRUITLESS = f"a step failed {MAX_ATTEMPTS} times although the chain could be linked each time"


class RemoteSession:
    """A `BlockSession` with its blocks on other machines."""

    def __init__(
        self,
        swarm: Swarm,
        request: RouteRequest,
        planner: Planner,
        line: Line,
        *,
        recovery_timeout_s: float,
        queue_timeout_s: float,
        step_timeout_s: float,
        rng: random.Random,
        prefix: SessionPrefix | None = None,
        tallies: SessionTallies | None = None,
    ) -> None:
        self.rows = request.rows
        self.max_tokens = request.max_tokens
        self.recoveries = 0
        self._losses: deque[Loss] = deque(maxlen=MOST_KEPT)
        self._request = request
        self._prefix = prefix
        self._changed = asyncio.Event()
        self.tallies = tallies or SessionTallies()
        self._route = Route(swarm, request, planner, self._changed.set, self.tallies.suspicions)
        self._trace = SessionTrace(request, session_name(self._route.session))
        self._route.opener.trace = self._trace.told
        self._lengths = [0] * request.rows
        self._flow = Flow(
            self._route,
            request,
            self._changed,
            step_timeout_s=step_timeout_s,
            rng=rng,
        )
        self._replay = Replay(self._route, request, self._flow)
        self._rebuilding = Rebuilding(
            self._route,
            request,
            self._replay,
            line,
            recovery_timeout_s=recovery_timeout_s,
            queue_timeout_s=queue_timeout_s,
            rng=rng,
        )
        self._step = 0
        self._leaver_check_at = 0.0
        self._replicate_at = 0.0
        self._line = line
        self._step_timeout_s = step_timeout_s
        self._watch = Watch(time.monotonic)
        self._watched: tuple[Hop, ...] = ()
        self._looking = TaskSet()

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self._lengths)

    @property
    def hops(self) -> tuple[Hop, ...]:
        return self._route.hops

    @property
    def codecs(self) -> tuple[str, ...]:
        """Codec of the last step's hidden states on each stream, from the client and back to it."""
        streams = len(self.hops) + 1 if self._request.mode == "chain" else 2 * len(self.hops)
        via = self._flow.via
        return ("none",) * (streams - len(via)) + via

    @property
    def suspected(self) -> frozenset[PeerId]:
        """Nodes that have been silent for longer than usual."""
        return self._route.search.silent

    @property
    def losses(self) -> tuple[Loss, ...]:
        return tuple(self._losses)

    async def open(self) -> None:
        """Reserve cache on every hop, all or none; wait while nodes are busy or missing.

        Raises `RefusedError` and `ContextLengthError` at once, since waiting does not resolve them.
        """
        patience = self._rebuilding.patience()
        with self._named(), self._trace.part("open"):
            async with self._line.turn(patience.queue_left_s):
                await self._rebuilding.persist(
                    patience, UNTIL_THERE_IS_ROOM, self._lengths, begins=True
                )
            self._tell("chain_opened")
        self._lengths = list(self._route.beginning.start)
        await self._note_what_is_held()

    async def step(
        self,
        hidden_TD: torch.Tensor,
        rows: Sequence[RowSlice],
        *,
        want: Want = "all",
        chunk_tokens: int | None = None,
    ) -> torch.Tensor:
        """See `BlockSession.step`. Raises `MissingBlocksError` if lost blocks are not replaced in
        time.

        With `chunk_tokens` the step is sent in chunks of that many tokens.
        """
        self._check(hidden_TD, rows)
        await self._replace_leavers()
        began = time.perf_counter()
        chunks = deque(cut(rows, want, len(self.hops), chunk_tokens))
        wire_TD = hidden_TD.to(tensors.DTYPES[self._request.dtype])
        outputs: list[torch.Tensor] = []

        def take(_: Kept, output_TD: torch.Tensor) -> None:
            chunk = chunks.popleft()
            for part in chunk.rows:
                self._lengths[part.row] += part.count
            outputs.append(chunk.wanted(output_TD))
            wait.renew()

        fruitless = 0
        while chunks:
            left = len(chunks)
            try:
                # Encoded lazily: `take` removes chunks from the deque meanwhile.
                steps = self._encode(tuple(chunks), wire_TD)
                with self._waiting_for_output() as wait:
                    await self._flow.run(steps, self._replay.stages(), take)
            except PeerUnreachableError as error:
                with self._named():
                    log.info("chain_broken", reason=str(error))
                fruitless = 0 if len(chunks) < left else fruitless + 1
                if fruitless == MAX_ATTEMPTS:
                    raise PeerUnreachableError(_FRUITLESS) from error
                await self._recover()
        self._route.blame.step_done()
        self._route.beginning.caught_up()
        self._replicate()
        if len(hidden_TD) == len(rows):
            step_s = time.perf_counter() - began
            self.tallies.step_s.add(step_s)
            self._look_out(step_s)
        if self._trace.on:
            phase = "decode" if len(hidden_TD) == len(rows) else "prefill"
            self._trace.stepped(phase, len(hidden_TD), time.perf_counter() - began)
        output_TD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output_TD.to(hidden_TD.dtype)

    async def rollback(self, lengths: Sequence[int]) -> None:
        """See `BlockSession.rollback`."""
        if len(lengths) != self.rows or any(
            not 0 <= new <= old for new, old in zip(lengths, self._lengths, strict=True)
        ):
            raise ValueError(f"cannot roll back from {self._lengths} to {list(lengths)}")
        self._lengths = list(lengths)
        self._replay.truncate(lengths)
        try:
            await self._route.rollback(lengths)
        except (PeerUnreachableError, RemoteError):
            await self._recover()

    async def reorder(self, sources: Sequence[int]) -> None:
        """See `BlockSession.reorder`."""
        self._lengths = [self._lengths[source] for source in sources]
        self._replay.reorder(sources)
        try:
            await self._route.reorder(sources)
        except (PeerUnreachableError, RemoteError):
            # Which rows each node holds is unknown.
            await self._recover(anew=True)

    async def close(self) -> None:
        await self._looking.close()
        request, prefix, hops = self._request, self._prefix, len(self.hops)
        with self._named():
            await self._route.close(
                prefix.leaves(request.model_id, request.precision) if prefix else ()
            )
            log.info("session_closed", lengths=self.lengths)
        self._trace.end(hops)
        self._line.left()

    def _named(self) -> AbstractContextManager[None]:
        """Log context with this session's name."""
        return logging_of(self._route.session)

    def _tell(self, event: str) -> None:
        hops = [f"{hop.peer_id} {hop.span}" for hop in self.hops]
        log.info(event, mode=self._request.mode, hops=hops)

    async def _note_what_is_held(self) -> None:
        """Record reused tokens for replay, since nodes that join later may lack them."""
        rows = [RowSlice(row, 0, length) for row, length in enumerate(self._lengths) if length]
        if self._prefix is None or not rows:
            return
        hidden_TD = await self._prefix.inputs(rows)
        wire_TD = hidden_TD.to(tensors.DTYPES[self._request.dtype])
        for chunk in cut(rows, "none", len(self.hops)):
            # Uncompressed: these are rarely sent.
            self._step += 1
            meta, payload = tensors.encode(wire_TD[chunk.start : chunk.end])
            self._replay.note(Kept(self._step, chunk.rows, chunk.want, meta, payload))

    def _check(self, hidden_TD: torch.Tensor, rows: Sequence[RowSlice]) -> None:
        total = sum(part.count for part in rows)
        if hidden_TD.shape != (total, self._request.hidden_size):
            raise ValueError(f"{list(hidden_TD.shape)} are not the hidden states of {total} tokens")
        if not tensors.is_finite(hidden_TD):
            # Every node would refuse them, and be blamed for it.
            raise ProtocolError("not_finite", "the hidden states hold NaN or infinite values")
        for part in rows:
            if part.position != self._lengths[part.row]:
                raise ValueError(f"row {part.row} has {self._lengths[part.row]} tokens, not {part}")
            if part.position + part.count > self.max_tokens:
                raise CacheFullError(
                    f"row {part.row} would hold {part.position + part.count} tokens; "
                    f"the session was opened for {self.max_tokens}"
                )

    def _encode(self, chunks: Iterable[Chunk], wire_TD: torch.Tensor) -> Iterator[Kept]:
        for chunk in chunks:
            self._step += 1
            meta, payload = self._route.links[0].wire.encode(
                HiddenStates.of(wire_TD[chunk.start : chunk.end])
            )
            yield Kept(self._step, chunk.rows, chunk.want, meta, payload)

    def _look_out(self, step_s: float) -> None:
        """Start a search for better nodes if steps are slower than expected."""
        if self._watched != self.hops:
            self._watched = self.hops
            self._watch.begin(self._route.nodes.expected_s)
        self._watch.note(step_s)
        if not self._looking and self._watch.complains():
            self._looking.start(
                self._reconsider(self.hops, self._watch.step_s), name="reconsider-chain"
            )

    async def _reconsider(self, hops: tuple[Hop, ...], step_s: float) -> None:
        with self._named(), unheard():
            try:
                leave = await self._route.nodes.to_leave(hops, step_s)
            except NesaError as error:
                log.info("chain_check_failed", reason=str(error))
                return
        for link in self._route.links:
            if link.hop.peer_id in leave:
                link.is_unwanted = True

    def _replicate(self) -> None:
        """Update successors, if the session has them."""
        now = time.monotonic()
        if self._request.replicates and now >= self._replicate_at:
            self._replicate_at = now + REPLICATE_EVERY_S
            self._route.refresh_successors()

    async def _replace_leavers(self) -> None:
        """Replace nodes that leave or are too slow, if possible; tried at most once a second."""
        links = self._route.links
        leavers = [link for link in links if link.leaving]
        leavers = leavers or [link for link in links if link.is_unwanted]
        leaving = frozenset(link.hop.peer_id for link in leavers)
        if not leaving or time.monotonic() < self._leaver_check_at:
            return
        if any(link.lost is not None for link in links):
            # A rebuild drops lost links even if it fails, and a step must not run over the
            # remaining ones: the step finds the loss and repairs it.
            return
        if self._request.mode == "chain":
            under_way = [link for link in leavers if self._route.prepare_successor(link)]
            if under_way:
                # They serve until successors hold their cache.
                return
        began = time.monotonic()
        self._leaver_check_at = began + 1.0
        with self._named(), self._trace.part("move off"):
            await self._move_off(leavers, leaving, began)

    async def _move_off(
        self, leavers: Sequence[HopLink], leaving: frozenset[PeerId], began: float
    ) -> None:
        try:
            await self._replay.rebuild(self._lengths, drop=leaving)
            self._note_loss(leaving, began)
            log.info("nodes_replaced", peers=sorted(leaving))
            self.tallies.failovers["left" if any(x.leaving for x in leavers) else "slow"] += 1
        except NesaError as error:
            # Otherwise a working session would retry this again and again.
            for link in leavers:
                link.is_unwanted = False
            if isinstance(error, MissingBlocksError):
                log.info("node_replacement_postponed", reason=str(error))
            else:
                log.info("node_replacement_failed", reason=str(error))
                await self._recover()

    async def _recover(self, *, anew: bool = False) -> None:
        """Repair the chain; `anew` opens the session again at every node."""
        self.recoveries += 1
        began, before = time.monotonic(), self.hops
        failed = {link.hop.peer_id for link in self._route.links if link.lost is not None}
        self._replay.truncate(self._lengths)
        # Nodes that refuse, or are too small, may be joined by suitable ones.
        passing = (*UNTIL_THERE_IS_ROOM, ContextLengthError, RefusedError)
        with self._named(), self._trace.part("recover"):
            if anew:
                await self._route.let_go()
            await self._rebuilding.persist(self._rebuilding.patience(), passing, self._lengths)
            self._tell("chain_repaired")
        gone = {hop.peer_id for hop in before} - {hop.peer_id for hop in self.hops}
        self._note_loss(failed | gone, began)
        self.tallies.recovery_s.add(time.monotonic() - began)
        self.tallies.failovers["failed"] += 1

    def _note_loss(self, peers: Iterable[PeerId], began: float) -> None:
        took_ms = (time.monotonic() - began) * 1000
        self._losses.append(Loss(time.time(), tuple(sorted(peers)), took_ms))

    def _waiting_for_output(self) -> AbstractContextManager[Waiting]:
        return waiting(
            "the answer to a step",
            blocks=(self._request.span,),
            peers=[link.hop.peer_id for link in self._route.links],
            limit_s=self._step_timeout_s,
        )
