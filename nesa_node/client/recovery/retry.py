"""Rebuilding of a session's chain: retries with pauses and limits, and replay to new hops.

T packed tokens, D hidden.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import torch

from nesa_node.client.routing.request import RouteRequest
from nesa_node.client.routing.snapshot_cache import MAX_NAMED_MODELS
from nesa_node.client.session.hop import OPEN_TIMEOUT_S, HopLink
from nesa_node.client.session.route import SessionRoute
from nesa_node.client.session.step_pipeline import PipelineStage, StepPipeline
from nesa_node.compression.tensors import HiddenStates
from nesa_node.core.errors import (
    BusyError,
    MissingBlocksError,
    NesaError,
    PeerUnreachableError,
    RefusedError,
    RemoteError,
)
from nesa_node.core.ids import PeerId, Span
from nesa_node.core.wait_tracking import ActiveWait, track_wait
from nesa_node.routing.chains import Hop, find_gaps
from nesa_node.swarm.protocol.replay_buffer import ReplayBuffer, SentStep


class StepReplay:
    """Keeps the inputs of the first hop, in a star those of every hop, by their first block.

    Of hops that are audited it keeps the answers, too.
    """

    def __init__(self, route: SessionRoute, request: RouteRequest, pipeline: StepPipeline) -> None:
        self._route = route
        self._is_chain = request.is_chain
        self._span = request.span
        self._pipeline = pipeline
        self._outboxes: dict[int, ReplayBuffer] = {request.span.start: ReplayBuffer()}
        self._outputs: dict[HopLink, ReplayBuffer] = {}
        """Answers of audited hops."""
        self.stages: Sequence[PipelineStage] = ()
        """For steps over the last rebuilt route; each records its inputs."""

    def _new_stages(self) -> list[PipelineStage]:
        links = self._route.links
        if self._is_chain:
            exit_outputs = self.outputs_of(links[-1])
            return [PipelineStage(links[0], links[-1], links, self._outbox(links[0]), exit_outputs)]
        stages: list[PipelineStage] = []
        for link in reversed(links):
            after = stages[0] if stages else None
            outputs = self.outputs_of(link)
            stages.insert(0, PipelineStage(link, link, [link], self._outbox(link), outputs, after))
        return stages

    def record_unsent(self, kept: SentStep) -> None:
        """Record a step that the first hop need not be sent, since it reused those tokens."""
        self._outboxes[self._span.start].append(kept)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget every token at or beyond `lengths[row]`."""
        for kept in (*self._outboxes.values(), *self._outputs.values()):
            kept.truncate(lengths)

    def reorder(self, sources: Sequence[int]) -> None:
        """Let each row have what row `sources[row]` has."""
        for kept in (*self._outboxes.values(), *self._outputs.values()):
            kept.reorder(sources)

    @property
    def first_inputs(self) -> ReplayBuffer:
        """Inputs of the session's first block, also of tokens that nodes reused."""
        return self._outboxes[self._span.start]

    def inputs_of(self, link: HopLink) -> ReplayBuffer:
        """What was sent to `link`: in a chain only for the first hop."""
        return self._outbox(link)

    def outputs_of(self, link: HopLink) -> ReplayBuffer | None:
        """What `link` answered; None if it is not audited."""
        return self._outputs.setdefault(link, ReplayBuffer()) if link.is_audited else None

    async def rebuild(
        self,
        lengths: Sequence[int],
        *,
        is_opening: bool = False,
        drop: frozenset[PeerId] = frozenset(),
        open_timeout_s: float = OPEN_TIMEOUT_S,
    ) -> None:
        """Rebuild the route; afterwards every node holds `lengths[row]` tokens of each row.

        With `is_opening` the route determines the lengths itself. No inputs beyond them may be
        recorded. Raises what `SessionRoute.rebuild` and sending raise.
        """
        await self._route.rebuild(
            lengths,
            is_opening=is_opening,
            drop=drop,
            needs_output=self._lacks_inputs_after,
            on_restart=self._forget_later_hops,
            open_timeout_s=open_timeout_s,
        )
        links = self._route.links
        for link in links if not self._is_chain else links[:1]:
            if link in self._route.held_tokens:
                await self._replay_to(link, self._route.held_tokens[link], lengths)
        # Inputs at blocks where no hop starts any more would have gaps if a hop starts there again.
        starts = {hop.span.start for hop in self._route.hops}
        self._outboxes = {start: kept for start, kept in self._outboxes.items() if start in starts}
        self._outputs = {link: kept for link, kept in self._outputs.items() if link in links}
        self.stages = self._new_stages()

    async def _replay_to(self, link: HopLink, held: Sequence[int], lengths: Sequence[int]) -> None:
        steps = self._outbox(link).iter_steps(held, lengths)
        if not self._is_chain and self._lacks_inputs_after(link.hop):
            await self._replay_for_outputs(link, [await step.materialize() for step in steps])
        else:
            for step in steps:
                await self._pipeline.resend_step(link, await step.materialize())

    async def _replay_for_outputs(self, link: HopLink, steps: Sequence[SentStep]) -> None:
        outbox, links = ReplayBuffer(), self._route.links
        following = links[links.index(link) + 1]

        def keep(kept: SentStep, output_TD: torch.Tensor) -> None:
            meta, payload = following.wire.encode(HiddenStates.from_tensor(output_TD))
            outbox.append(
                SentStep(kept.step, kept.rows, "all", meta, payload, self._pipeline.output_codecs)
            )

        # As a last hop it may have been asked for less than the next hop needs.
        whole = [replace(kept, want="all") for kept in steps]
        stage = PipelineStage(link, link, [link], outputs=self.outputs_of(link))
        await self._pipeline.run_steps(whole, [stage], keep)
        self._outboxes[link.hop.span.end] = outbox

    def _forget_later_hops(self) -> None:
        """Keep only the first hop's inputs: those of later hops begin after the new start."""
        start = self._span.start
        self._outboxes = {start: self._outboxes[start]}
        self._outputs.clear()

    def _lacks_inputs_after(self, hop: Hop) -> bool:
        """Whether the inputs of the blocks after `hop` are not recorded."""
        end = hop.span.end
        return end < self._span.end and end not in self._outboxes

    def _outbox(self, link: HopLink) -> ReplayBuffer:
        return self._outboxes.setdefault(link.hop.span.start, ReplayBuffer())


FIRST_RETRY_PAUSE_S, MAX_RETRY_PAUSE_S = 0.1, 2.0
MAX_HOPELESS_ATTEMPTS = 3
"""Attempts in a row with missing blocks before giving up: a member of the DHT that did not answer
may explain one."""
PARTIAL_CHAIN_HOLD_S = 5.0
"""Seconds for which a session keeps the rest of its nodes while replacements are busy."""


class RetryPolicy:
    """Retry policy with backoff. Pure: decides after each failed attempt.

    Busy nodes answer, so waiting for them is limited by `queue_timeout_s` from the start; other
    failures by `recovery_timeout_s` since the last `BusyError`. Pauses grow exponentially with
    jitter, which separates clients that started together.
    """

    def __init__(
        self,
        *,
        queue_timeout_s: float,
        recovery_timeout_s: float,
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        now = clock()
        self._queue_until = now + queue_timeout_s
        self._recovery_until = now + recovery_timeout_s
        self._recovery_timeout_s = recovery_timeout_s
        self._pause_s = FIRST_RETRY_PAUSE_S
        self._busy_since: float | None = None
        self._hopeless_attempts = 0
        self._hold_s = PARTIAL_CHAIN_HOLD_S * rng.uniform(0.5, 1.5)
        self._rng = rng
        self._clock = clock

    @property
    def queue_left_s(self) -> float:
        return max(self._queue_until - self._clock(), 0.0)

    @property
    def recovery_left_s(self) -> float:
        return max(self._recovery_until - self._clock(), 0.0)

    @property
    def must_release_nodes(self) -> bool:
        """Whether to release the remaining nodes, which another waiting session may need."""
        since = self._busy_since
        return since is not None and self._clock() - since >= self._hold_s

    def next_pause_s(
        self, error: Exception, *, has_alternatives: bool, hopeless: bool = False
    ) -> float | None:
        """Seconds until the next attempt; None: give up.

        With `has_alternatives` the next attempt uses different nodes and follows at once.
        `hopeless` marks failures that waiting does not resolve by the current snapshot.
        """
        self._hopeless_attempts = self._hopeless_attempts + 1 if hopeless else 0
        if self._hopeless_attempts >= MAX_HOPELESS_ATTEMPTS:
            return None
        now = self._clock()
        until = self._recovery_until
        pause_s = 0.0 if has_alternatives else self._pause_s
        if isinstance(error, BusyError):
            self._busy_since = now if self._busy_since is None else self._busy_since
            self._recovery_until = now + self._recovery_timeout_s
            until = self._queue_until
            pause_s = pause_s and max(error.retry_after_s, pause_s)
        else:
            self._busy_since = None
        if pause_s:
            pause_s *= self._rng.uniform(0.5, 1.5)
            self._pause_s = min(self._pause_s * 2, MAX_RETRY_PAUSE_S)
        # The last pause ends at the deadline, so that one more attempt is made.
        return min(pause_s, until - now) if now < until else None


MAX_CONCURRENT_OPENS = 8
"""Most sessions that open, or retry busy nodes, at the same time."""


class OpenLimiter:
    """Fair semaphore of one event loop: not all opening sessions ask busy nodes at once."""

    def __init__(self, max_concurrent: int = MAX_CONCURRENT_OPENS) -> None:
        self._slots = asyncio.Semaphore(max_concurrent)
        self._released = asyncio.Event()

    @asynccontextmanager
    async def slot(self, timeout_s: float) -> AsyncIterator[None]:
        """Acquire a slot for the block. Raises `BusyError` after `timeout_s`."""
        try:
            with track_wait("other sessions of this process to open first", limit_s=timeout_s):
                async with asyncio.timeout(timeout_s):
                    await self._slots.acquire()
        except TimeoutError:
            raise BusyError(
                f"other sessions of this process still open after {timeout_s:g} s", 1.0
            ) from None
        try:
            yield
        finally:
            self._slots.release()

    def notify_released(self) -> None:
        """Wake sessions in `wait_for_release`: a session of this process released its cache."""
        self._released.set()

    async def wait_for_release(self, seconds: float) -> None:
        """Wait `seconds`, or until a session of this process releases its cache."""
        try:
            async with asyncio.timeout(seconds):
                await self._released.wait()
        except TimeoutError:
            pass
        self._released.clear()


FIRST_REPLACEMENT_TIMEOUT_S = 3.0
"""First timeout of dialling and of opening a replacement, which may be unreachable without an
error."""
RETRYABLE_ERRORS: tuple[type[NesaError], ...] = (
    BusyError,
    MissingBlocksError,
    PeerUnreachableError,
    RemoteError,
)
_MIN_OPEN_TIMEOUT_S = 1.0


class ChainRebuilder:
    """Rebuilds the route of one session."""

    def __init__(
        self,
        route: SessionRoute,
        request: RouteRequest,
        replay: StepReplay,
        open_limiter: OpenLimiter,
        *,
        rng: random.Random,
    ) -> None:
        self._route = route
        self._request = request
        self._replay = replay
        self._open_limiter = open_limiter
        self._rng = rng

    def new_retry_policy(self) -> RetryPolicy:
        """New policy with time limits that start now."""
        return RetryPolicy(
            queue_timeout_s=self._request.options.queue_timeout_s,
            recovery_timeout_s=self._request.options.recovery_timeout_s,
            rng=self._rng,
        )

    async def rebuild_with_retries(
        self,
        policy: RetryPolicy,
        retryable: tuple[type[NesaError], ...],
        lengths: Sequence[int],
        *,
        is_opening: bool = False,
    ) -> None:
        """Rebuild, again after errors of the types `retryable`, as long as `policy` allows.

        With `is_opening`, missing blocks are waited for only where a node is joining with them.
        Raises the last error, as `MissingBlocksError` or `BusyError` with the time waited.
        """
        what = "a chain of nodes" if is_opening else "a chain of nodes without those that failed"
        limit_s = policy.recovery_left_s
        with track_wait(what, blocks=(self._request.span,), limit_s=limit_s) as wait:
            attempts = 0
            while True:
                known = self._route.selector.suspected_peers
                longest_s = (
                    OPEN_TIMEOUT_S if is_opening or attempts else FIRST_REPLACEMENT_TIMEOUT_S
                )
                timeout_s = min(max(policy.recovery_left_s, _MIN_OPEN_TIMEOUT_S), longest_s)
                attempts += 1
                try:
                    return await self._replay.rebuild(
                        lengths, is_opening=is_opening, open_timeout_s=timeout_s
                    )
                except retryable as error:
                    # Another peer has failed or is busy: the next attempt uses different nodes.
                    others_left = not self._route.selector.suspected_peers <= known
                    hopeless = is_opening and self._is_hopeless(error)
                    pause_s = policy.next_pause_s(
                        error, has_alternatives=others_left, hopeless=hopeless
                    )
                    if pause_s is None:
                        if isinstance(error, RemoteError | RefusedError):
                            raise
                        raise self._final_error(error, hopeless=hopeless) from error
                    self._update_wait(wait, error, policy)
                if policy.must_release_nodes:
                    await self._route.leave_all_nodes()
                if pause_s:
                    await self._open_limiter.wait_for_release(pause_s)

    def _is_hopeless(self, error: Exception) -> bool:
        """Whether blocks are missing that no joining node is going to serve."""
        if not isinstance(error, MissingBlocksError):
            return False
        joining = [Hop(node.peer_id, node.span) for node in self._route.selector.joining]
        return any(find_gaps(Span(start, end), joining) for start, end in error.missing)

    def _update_wait(self, wait: ActiveWait, error: Exception, policy: RetryPolicy) -> None:
        selector, busy = self._route.selector, self._route.opener.last_refusing_hop
        left_s = policy.recovery_left_s
        if isinstance(error, BusyError) and busy is not None:
            wait.update(
                "room", blocks=(busy.span,), peers=(busy.peer_id,), remaining_s=policy.queue_left_s
            )
        elif isinstance(error, MissingBlocksError):
            blocks = [Span(start, end) for start, end in error.missing]
            joining = [node.peer_id for node in selector.joining]
            what = "a node that is joining" if joining else "a node that serves what is missing"
            wait.update(what, blocks=blocks, peers=joining, remaining_s=left_s)
        else:
            what, failed = "a node in place of one that failed", sorted(selector.suspected_peers)
            spans = self._missing_spans()
            wait.update(what, blocks=spans, peers=failed, remaining_s=left_s)

    def _missing_spans(self) -> Sequence[Span]:
        """Blocks without a node; for a chain that never stood, those of the nodes not reached."""
        alive = [link.hop for link in self._route.links if not link.is_lost]
        return (not alive and self._route.opener.unreached_spans) or find_gaps(
            self._request.span, alive
        )

    def _final_error(self, last: Exception, *, hopeless: bool) -> Exception:
        if isinstance(last, BusyError):
            waited = f"waited {self._request.options.queue_timeout_s:g} s for room"
            return BusyError(f"{last}; {waited}", last.retry_after_s)
        if isinstance(last, MissingBlocksError):
            missing = list(last.missing)
        else:
            missing = [(span.start, span.end) for span in self._missing_spans()]
        ranges = ", ".join(f"{start}:{end}" for start, end in missing) or str(self._request.span)
        waited = f"waited {self._request.options.recovery_timeout_s:g} s"
        if hopeless:
            waited = "and none is joining with them"
        blocks = f"blocks {ranges} of {self._request.model_id}"
        if not isinstance(last, MissingBlocksError):
            return MissingBlocksError(
                missing, f"no node with {blocks} could be reached ({waited}): {last}"
            )
        text = f"no node serves {blocks} ({waited}): start one with `nesa-node run`"
        if served := self._route.selector.served_models:
            text += f"; the swarm serves {', '.join(served[:MAX_NAMED_MODELS])}"
            if len(served) > MAX_NAMED_MODELS:
                text += f" and {len(served) - MAX_NAMED_MODELS} more"
        return MissingBlocksError(missing, text)
