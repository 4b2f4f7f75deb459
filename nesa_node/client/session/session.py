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

from nesa_node.client.recovery.retry import (
    RETRYABLE_ERRORS,
    ChainRebuilder,
    OpenLimiter,
    StepReplay,
)
from nesa_node.client.recovery.suspicion import SlowdownDetector
from nesa_node.client.routing.planner import ChainPlanner
from nesa_node.client.routing.request import RouteRequest
from nesa_node.client.session.base import (
    MAX_SESSION_FAILOVERS,
    DrawnAudits,
    Failover,
    SessionPrefix,
)
from nesa_node.client.session.hop import HopLink, LinkState
from nesa_node.client.session.route import SessionRoute
from nesa_node.client.session.step_pipeline import StepChunk, StepPipeline, split_step
from nesa_node.client.session.telemetry import FailoverReason, SessionMetrics, SessionTrace
from nesa_node.client.verification.session_audit import (
    SessionAudit,
    SessionAuditor,
    codec_family,
    read_buffer,
)
from nesa_node.compression import tensors
from nesa_node.compression.tensors import HiddenStates
from nesa_node.core.errors import (
    CacheFullError,
    ContextLengthError,
    MissingBlocksError,
    NesaError,
    PeerUnreachableError,
    ProtocolError,
    RefusedError,
    RemoteError,
    WrongActivationsError,
)
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import bind_session, get_logger, session_name
from nesa_node.core.wait_tracking import ActiveWait, track_wait, untracked
from nesa_node.routing.chains import Hop
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.tasks import TaskSet
from nesa_node.swarm.protocol.messages import Computation, RowSlice, Want
from nesa_node.swarm.protocol.replay_buffer import SentStep

log = get_logger(__name__)

MAX_FRUITLESS_ATTEMPTS = 20
"""Most attempts at a step that makes no progress, each over a newly linked chain."""
AUDIT_WAIT_S = 10.0
"""Most time that the end of a session waits for its audits. Later ones only bar nodes."""
REPLICATION_INTERVAL_S = 0.25
"""Seconds between updates of successors: newer tokens are computed again after a failover."""


class RemoteSession:
    """A `BlockSession` with its blocks on other machines."""

    noisy_vectors = None

    def __init__(
        self,
        swarm: Swarm,
        request: RouteRequest,
        planner: ChainPlanner,
        open_limiter: OpenLimiter,
        *,
        rng: random.Random,
        prefix: SessionPrefix | None = None,
        metrics: SessionMetrics | None = None,
        auditor: SessionAuditor | None = None,
    ) -> None:
        self.rows = request.rows
        self.max_tokens = request.max_tokens
        self.recoveries = 0
        self._failovers: deque[Failover] = deque(maxlen=MAX_SESSION_FAILOVERS)
        self._drawn_audits = DrawnAudits()
        self._request = request
        self._prefix = prefix
        self._changed = asyncio.Event()
        self.metrics = metrics or SessionMetrics()
        self._route = SessionRoute(
            swarm, request, planner, self._changed.set, self.metrics.suspicions
        )
        self._trace = SessionTrace(request, session_name(self._route.session))
        self._route.opener.trace = self._trace.context
        self._lengths = [0] * request.rows
        self._pipeline = StepPipeline(self._route, request, self._changed, rng=rng)
        self._replay = StepReplay(self._route, request, self._pipeline)
        self._auditor = auditor
        self._audit = SessionAudit(self._route, request, self._replay)
        self._is_closed = False
        self._audits: list[asyncio.Task[WrongActivationsError | None]] = []
        if auditor is not None:
            self._route.opener.draws = auditor.draws
        self._rebuilder = ChainRebuilder(self._route, request, self._replay, open_limiter, rng=rng)
        self._step_number = 0
        self._next_leaver_check_at = 0.0
        self._next_replication_at = 0.0
        self._open_limiter = open_limiter
        self._slowdown = SlowdownDetector(time.monotonic)
        self._watched_hops: tuple[Hop, ...] = ()
        self._reconsidering = TaskSet()

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self._lengths)

    @property
    def hops(self) -> tuple[Hop, ...]:
        return self._route.hops

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def session_id(self) -> bytes:
        """The session's id at the client."""
        return self._route.session

    @property
    def declared_computations(self) -> tuple[Computation | None, ...]:
        """What each hop declares to compute with; None from older nodes."""
        return tuple(
            None if link.opened is None else link.opened.computation for link in self._route.links
        )

    @property
    def codecs(self) -> tuple[str, ...]:
        """Codec of the last step's hidden states on each stream, from the client and back to it."""
        streams = len(self.hops) + 1 if self._request.is_chain else 2 * len(self.hops)
        via = self._pipeline.output_codecs
        return ("none",) * (streams - len(via)) + via

    @property
    def codec(self) -> str:
        """Family of the codecs by which nodes encode their outputs; a level where links choose."""
        return codec_family(self._request.options.quality)

    @property
    def failovers(self) -> tuple[Failover, ...]:
        return tuple(self._failovers)

    @property
    def num_decoding(self) -> int:
        """See `BlockSession.num_decoding`."""
        return self._pipeline.num_decoding

    @property
    def drawn_audits(self) -> DrawnAudits:
        return self._drawn_audits

    async def open(self) -> None:
        """Reserve cache on every hop, all or none; wait while nodes are busy or missing.

        Raises `RefusedError` and `ContextLengthError` at once, since waiting does not resolve them.
        """
        policy = self._rebuilder.new_retry_policy()
        with self._log_context(), self._trace.phase("open"):
            async with self._open_limiter.slot(policy.queue_left_s):
                await self._rebuilder.rebuild_with_retries(
                    policy, RETRYABLE_ERRORS, self._lengths, is_opening=True
                )
            self._log_chain("chain_opened")
        self._lengths = list(self._route.prefix_start.start_lengths)
        await self._record_reused_prefix()

    async def step(
        self,
        hidden_TD: torch.Tensor,
        rows: Sequence[RowSlice],
        *,
        want: Want = "all",
        chunk_tokens: int | None = None,
    ) -> torch.Tensor:
        """See `BlockSession.step`. Raises `MissingBlocksError` if lost blocks are not replaced in
        time, and `WrongActivationsError` once another session has found a node of this one wrong.
        With `chunk_tokens` the step is sent in chunks of that many tokens.
        """
        self._check_step(hidden_TD, rows)
        self._check_barred()
        await self._replace_leavers()
        began = time.perf_counter()
        chunks = deque(split_step(rows, want, len(self.hops), chunk_tokens))
        wire_TD = hidden_TD.to(tensors.DTYPES[self._request.dtype])
        outputs: list[torch.Tensor] = []

        def take(_: SentStep, output_TD: torch.Tensor) -> None:
            chunk = chunks.popleft()
            for part in chunk.rows:
                self._lengths[part.row] += part.count
            outputs.append(chunk.select_output(output_TD))
            wait.restart()

        fruitless = 0
        while chunks:
            left = len(chunks)
            try:
                # Encoded lazily: `take` removes chunks from the deque meanwhile.
                steps = self._encode_chunks(tuple(chunks), wire_TD)
                with self._waiting_for_output() as wait:
                    await self._pipeline.run_steps(steps, self._replay.stages, take)
            except PeerUnreachableError as error:
                with self._log_context():
                    log.info("chain_broken", reason=str(error))
                fruitless = 0 if len(chunks) < left else fruitless + 1
                if fruitless == MAX_FRUITLESS_ATTEMPTS:
                    raise PeerUnreachableError(
                        f"a step failed {fruitless} times although the chain could be linked each "
                        "time"
                    ) from error
                await self._recover()
        is_decode = len(hidden_TD) == len(rows)
        self._finish_step(len(hidden_TD), time.perf_counter() - began, is_decode)
        output_TD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output_TD.to(hidden_TD.dtype)

    def _finish_step(self, tokens: int, step_s: float, is_decode: bool) -> None:
        """Record a completed step, and start what it makes due in the background."""
        self._route.fault_attribution.link_failures.clear()
        self._route.prefix_start.is_behind = False
        now = time.monotonic()
        if self._request.options.replicate_cache and now >= self._next_replication_at:
            self._next_replication_at = now + REPLICATION_INTERVAL_S
            self._route.refresh_successors()
        if is_decode:
            self.metrics.step_s.observe(step_s)
            self._check_step_time(step_s)
        if self._trace.is_enabled:
            self._trace.record_step("decode" if is_decode else "prefill", tokens, step_s)

    async def read_inputs(self) -> list[tuple[RowSlice, torch.Tensor]]:
        """What the first block was given: consecutive positions of rows, their values [L, D]."""
        return await read_buffer(self._replay.first_inputs, self._lengths)

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
            await self._recover(reopen=True)

    async def finish(self) -> None:
        """See `BlockSession.finish`."""
        await self.close()
        if not self._audits:
            return
        done, waiting = await asyncio.wait(self._audits, timeout=AUDIT_WAIT_S)
        if waiting:
            with self._log_context():
                log.warning("audits_continue", audits=len(waiting), waited_s=AUDIT_WAIT_S)
        for audit in done:
            if (wrong := audit.result()) is not None:
                raise wrong

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        await self._reconsidering.close()
        request, prefix, hops = self._request, self._prefix, len(self.hops)
        with self._log_context():
            try:
                if self._auditor is not None:
                    drawn = sum(link.is_audited for link in self._route.links)
                    self._drawn_audits = DrawnAudits(hops, drawn)
                    self._audits += await self._auditor.audit(self._audit, self._lengths)
            finally:
                await self._route.close(
                    prefix.final_digests(request.model_id, request.numerics_label) if prefix else ()
                )
            log.info("session_closed", lengths=self.lengths)
        self._trace.end(hops)
        self._open_limiter.notify_released()

    def _log_context(self) -> AbstractContextManager[None]:
        return bind_session(self._route.session)

    def _log_chain(self, event: str) -> None:
        hops = [f"{hop.peer_id} {hop.span}" for hop in self.hops]
        log.info(event, mode=self._request.options.routing, hops=hops)

    async def _record_reused_prefix(self) -> None:
        """Record reused tokens for replay, since nodes that join later may lack them."""
        rows = [RowSlice(row, 0, length) for row, length in enumerate(self._lengths) if length]
        if self._prefix is None or not rows:
            return
        hidden_TD = await self._prefix.compute_inputs(rows)
        wire_TD = hidden_TD.to(tensors.DTYPES[self._request.dtype])
        for chunk in split_step(rows, "none", len(self.hops)):
            # Uncompressed: these are rarely sent.
            self._step_number += 1
            meta, payload = tensors.encode(wire_TD[chunk.start : chunk.end])
            self._replay.record_unsent(
                SentStep(self._step_number, chunk.rows, chunk.want, meta, payload)
            )

    def _check_step(self, hidden_TD: torch.Tensor, rows: Sequence[RowSlice]) -> None:
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

    def _check_barred(self) -> None:
        """Raise `WrongActivationsError` where an audit of another session barred a node of this."""
        if self._auditor is None:
            return
        for hop in self.hops:
            if (reason := self._auditor.barred.get(hop.peer_id)) is not None:
                blocks = hop.span.start, hop.span.end
                raise WrongActivationsError(
                    hop.peer_id, blocks, None, f"{hop.peer_id} is not used any more: {reason}"
                )

    def _encode_chunks(
        self, chunks: Iterable[StepChunk], wire_TD: torch.Tensor
    ) -> Iterator[SentStep]:
        for chunk in chunks:
            self._step_number += 1
            meta, payload = self._route.links[0].wire.encode(
                HiddenStates.from_tensor(wire_TD[chunk.start : chunk.end])
            )
            yield SentStep(self._step_number, chunk.rows, chunk.want, meta, payload)

    def _check_step_time(self, step_s: float) -> None:
        """Start a search for better nodes if steps are slower than expected."""
        if self._watched_hops != self.hops:
            self._watched_hops = self.hops
            self._slowdown.start_chain(self._route.selector.expected_s)
        self._slowdown.record_step(step_s)
        if self._slowdown.should_reconsider() and not self._reconsidering:
            self._reconsidering.start(
                self._reconsider(self.hops, self._slowdown.step_s), name="reconsider-chain"
            )

    async def _reconsider(self, hops: tuple[Hop, ...], step_s: float) -> None:
        with self._log_context(), untracked():
            try:
                leave = await self._route.selector.find_peers_to_leave(hops, step_s)
            except NesaError as error:
                log.info("chain_check_failed", reason=str(error))
                return
        for link in self._route.links:
            if link.hop.peer_id in leave:
                link.change_state(LinkState.TOO_SLOW)

    async def _replace_leavers(self) -> None:
        """Replace nodes that leave or are too slow, if possible; tried at most once a second."""
        links = self._route.links
        leavers = [link for link in links if link.state is LinkState.LEAVING]
        reason: FailoverReason = "left" if leavers else "slow"
        leavers = leavers or [link for link in links if link.state is LinkState.TOO_SLOW]
        if not leavers or time.monotonic() < self._next_leaver_check_at:
            return
        if any(link.is_lost for link in links):
            # A rebuild drops lost links even if it fails, and a step must not run over the
            # remaining ones: the step finds the loss and repairs it.
            return
        if self._request.is_chain:
            under_way = [link for link in leavers if self._route.prepare_successor(link)]
            if under_way:
                # They serve until successors hold their cache.
                return
        self._next_leaver_check_at = time.monotonic() + 1.0
        with self._log_context(), self._trace.phase("move off"):
            await self._move_off(leavers, reason)

    async def _move_off(self, leavers: Sequence[HopLink], reason: FailoverReason) -> None:
        began = time.monotonic()
        leaving = frozenset(link.hop.peer_id for link in leavers)
        try:
            await self._replay.rebuild(self._lengths, drop=leaving)
            self._record_failover(leaving, began)
            log.info("nodes_replaced", peers=sorted(leaving))
            self.metrics.failovers[reason] += 1
        except NesaError as error:
            # Otherwise a working session would retry this again and again.
            for link in leavers:
                link.change_state(LinkState.SERVING)
            if isinstance(error, MissingBlocksError):
                log.info("node_replacement_postponed", reason=str(error))
            else:
                log.info("node_replacement_failed", reason=str(error))
                await self._recover()

    async def _recover(self, *, reopen: bool = False) -> None:
        """Repair the chain; `reopen` opens the session again at every node."""
        self.recoveries += 1
        began, before = time.monotonic(), self.hops
        failed = {link.hop.peer_id for link in self._route.links if link.is_lost}
        self._replay.truncate(self._lengths)
        # Nodes that refuse, or are too small, may be joined by suitable ones.
        passing = (*RETRYABLE_ERRORS, ContextLengthError, RefusedError)
        with self._log_context(), self._trace.phase("recover"):
            if reopen:
                await self._route.leave_all_nodes()
            await self._rebuilder.rebuild_with_retries(
                self._rebuilder.new_retry_policy(), passing, self._lengths
            )
            self._log_chain("chain_repaired")
        gone = {hop.peer_id for hop in before} - {hop.peer_id for hop in self.hops}
        self._record_failover(failed | gone, began)
        self.metrics.recovery_s.observe(time.monotonic() - began)
        self.metrics.failovers["failed"] += 1

    def _record_failover(self, peers: Iterable[PeerId], began: float) -> None:
        took_ms = (time.monotonic() - began) * 1000
        self._failovers.append(Failover(time.time(), tuple(sorted(peers)), took_ms))

    def _waiting_for_output(self) -> AbstractContextManager[ActiveWait]:
        return track_wait(
            "the answer to a step",
            blocks=(self._request.span,),
            peers=[link.hop.peer_id for link in self._route.links],
            limit_s=self._request.options.step_timeout_s,
        )
