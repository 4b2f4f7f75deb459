"""Pipeline of a session's steps: split into chunks, several in flight, outputs in order.

In a chain, steps enter at the first hop and their outputs leave the last. In a star each hop is a
stage of its own: while one step is at the second hop, the next is at the first.

T packed tokens, D hidden.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from nesa_node.client.recovery.failure_detector import first_busy_link
from nesa_node.client.recovery.suspicion import POLL_INTERVAL_S, StallDetector, Suspicion
from nesa_node.client.routing.request import RouteRequest
from nesa_node.client.session.base import RowSlice, Want
from nesa_node.client.session.hop import HopLink
from nesa_node.client.session.route import SessionRoute
from nesa_node.compression import tensors
from nesa_node.compression.tensors import HiddenStates
from nesa_node.core.errors import PeerUnreachableError, ProtocolError
from nesa_node.core.logging import get_logger
from nesa_node.swarm.dht.sealing import FailureKind
from nesa_node.swarm.protocol.link_encoder import check_codec_allowed, extend_via, normalize_via
from nesa_node.swarm.protocol.messages import Pong, Step
from nesa_node.swarm.protocol.replay_buffer import ReplayBuffer, SentStep, last_positions

log = get_logger(__name__)

MAX_STEPS_IN_FLIGHT = 32
"""Most steps in flight: a node stops reading at 64 of one session."""
MAX_BUSY_TIMEOUTS = 10
"""Number of step timeouts for which a node may report itself busy with a step."""
MAX_UNWATCHED_BYTES = 1 << 16
"""Larger payloads can block until the receiver reads: their sending is watched."""


class ChainBrokenError(PeerUnreachableError):
    """A link or node failed. The session can continue once its route is rebuilt."""


@dataclass(slots=True)
class PipelineStage:
    """One stage of the pipeline: entry hop, exit hop and all hops between."""

    entry: HopLink
    exit: HopLink
    links: Sequence[HopLink]
    outbox: ReplayBuffer | None = None
    """Records what is sent, for replay; None where it is recorded already."""
    outputs: ReplayBuffer | None = None
    """Records what the exit hop answers; None where it is not audited."""
    next_stage: PipelineStage | None = None
    """Receives this stage's outputs; None for the last stage."""
    in_flight: deque[SentStep] = field(default_factory=deque)
    """Steps sent and still without an output, oldest first."""
    probe_at: float = 0.0
    """When to probe the hops, by the clock of their `Suspicion`."""
    started_at: float = 0.0
    """When the oldest step in flight started: it was sent, or the output before it arrived."""
    deadline: float = 0.0
    busy_timeouts_left: int = 0

    def to_send(self, kept: SentStep) -> SentStep:
        """The step as sent to this stage: only the last stage may omit outputs of some tokens."""
        if kept.want == "all" or self.next_stage is None:
            return kept
        return replace(kept, want="all")

    def record_output(self, kept: SentStep, output_TD: torch.Tensor) -> None:
        """Record the answer to a step, if the exit hop is audited."""
        want = self.to_send(kept).want
        if self.outputs is None or want == "none":
            return
        rows = kept.rows if want == "all" else last_positions(kept.rows)
        meta, payload = tensors.encode(output_TD)
        self.outputs.append(SentStep(kept.step, rows, "all", meta, payload))

    def restart_timers(self, suspicion: Suspicion, timeout_s: float) -> None:
        """Restart the timers: an output arrived, or the first step entered."""
        self.started_at = suspicion.now
        self.probe_at = self.started_at + suspicion.late_after_s
        self.deadline = self.started_at + timeout_s
        self.busy_timeouts_left = MAX_BUSY_TIMEOUTS

    @property
    def due_at(self) -> float:
        """When to check on the steps in flight."""
        return min(self.probe_at, self.deadline)


class StepPipeline:
    """Runs steps over a route, one set at a time. `changed` is set at each event of a link."""

    def __init__(
        self,
        route: SessionRoute,
        request: RouteRequest,
        changed: asyncio.Event,
        *,
        rng: random.Random,
    ) -> None:
        self.suspicion = route.detector.suspicion
        self._route = route
        self._request = request
        self._changed = changed
        self._step_timeout_s = request.options.step_timeout_s
        self._rng = rng
        self._stalls = StallDetector()
        self.output_codecs: tuple[str, ...] = ()
        """Codecs of the last output on its way, stream by stream; empty if uncompressed throughout.
        """
        self.num_decoding = 0
        """Most sessions that decoded at a node of the last step, this one included; 0: unknown."""

    async def send_step(self, link: HopLink, kept: SentStep) -> None:
        """Send one step. Raises `PeerUnreachableError`."""
        kept = link.wire.reencode(kept)
        link.unanswered_bytes += len(kept.payload)
        await link.send_step(
            Step(
                session=link.session,
                epoch=self._route.epoch,
                step=kept.step,
                rows=kept.rows,
                tensor=kept.meta,
                want=kept.want,
                via=extend_via(kept.via, kept.meta.codec),
            ),
            kept.payload,
        )

    async def run_steps(
        self,
        steps: Iterable[SentStep],
        stages: Sequence[PipelineStage],
        on_output: Callable[[SentStep, torch.Tensor], None],
    ) -> None:
        """Send `steps` through `stages`, with at most `MAX_STEPS_IN_FLIGHT` in flight.

        `on_output` receives each step with its output [T, D], in order, on arrival. Steps it has
        received are complete even if this raises `PeerUnreachableError` or `RemoteError`.
        """
        # Lazily: each step is compressed just before it is sent, while earlier ones are in flight.
        self.suspicion.keep_only(self._route.links)
        self.num_decoding = 0
        self._stalls.clear()
        for stage in stages:
            # Those of an attempt that failed.
            stage.in_flight.clear()
        unsent = iter(steps)
        upcoming = next(unsent, None)
        under_way = 0
        while True:
            self._changed.clear()
            under_way -= await self._forward_outputs(stages, on_output)
            if upcoming is None and not under_way:
                return
            self._raise_if_broken()
            if upcoming is not None and under_way < MAX_STEPS_IN_FLIGHT:
                await self._submit(stages[0], upcoming)
                under_way += 1
                upcoming = next(unsent, None)
            else:
                await self._wait_for_news(stages)

    async def _forward_outputs(
        self, stages: Sequence[PipelineStage], on_output: Callable[[SentStep, torch.Tensor], None]
    ) -> int:
        """Pass outputs to the next stage or to `on_output`; return the number of the latter."""
        through = 0
        for stage in reversed(stages):
            while (came := self._pop_output(stage)) is not None:
                kept, output_TD, self.output_codecs = came
                stage.record_output(kept, output_TD)
                following = stage.next_stage
                if following is None:
                    on_output(kept, output_TD)
                    through += 1
                    continue
                meta, payload = following.entry.wire.encode(HiddenStates.from_tensor(output_TD))
                await self._submit(
                    following,
                    SentStep(kept.step, kept.rows, kept.want, meta, payload, self.output_codecs),
                )
        return through

    async def _submit(self, stage: PipelineStage, kept: SentStep) -> None:
        sent = stage.to_send(kept)
        if stage.outbox is not None:
            stage.outbox.append(sent)
        shape = self._output_shape(sent)
        item_bytes = tensors.DTYPES[self._request.dtype].itemsize
        stage.exit.expect_output(self._route.epoch, sent.step, math.prod(shape) * item_bytes)
        if not stage.in_flight:
            stage.restart_timers(self.suspicion, self._step_timeout_s)
        stage.in_flight.append(kept)
        if len(sent.payload) <= MAX_UNWATCHED_BYTES:
            await self.send_step(stage.entry, sent)
        else:
            await self._send_watched(stage, sent)
            if stage.in_flight[0] is kept:
                # Hops start to compute only after the whole payload was sent.
                stage.restart_timers(self.suspicion, self._step_timeout_s)

    async def resend_step(self, link: HopLink, kept: SentStep) -> None:
        """Send a step without awaiting its output. Raises `PeerUnreachableError`."""
        stage = PipelineStage(link, link, [link])
        stage.restart_timers(self.suspicion, self._step_timeout_s)
        await self._send_watched(stage, kept)

    async def _send_watched(self, stage: PipelineStage, sent: SentStep) -> None:
        """Send a step, and probe the hops meanwhile in case the receiver does not read."""
        sending = asyncio.create_task(self.send_step(stage.entry, sent), name="send-step")
        try:
            while not sending.done():
                due_at = max(stage.probe_at, self.suspicion.now + POLL_INTERVAL_S)
                await asyncio.wait({sending}, timeout=due_at - self.suspicion.now)
                self.suspicion.record_oversleep(self.suspicion.now - due_at)
                if not sending.done():
                    await self._probe_hops(stage)
            sending.result()
        finally:
            sending.cancel()

    def _pop_output(
        self, stage: PipelineStage
    ) -> tuple[SentStep, torch.Tensor, tuple[str, ...]] | None:
        """Remove the oldest step in flight once its output is here; return both and the codecs.
        Raises `ChainBrokenError` for one out of order, or of another shape, dtype or quality.
        """
        link = stage.exit
        if not link.outputs or not stage.in_flight:
            return None
        output, payload = link.outputs.popleft()
        kept = stage.in_flight.popleft()
        shape = self._output_shape(stage.to_send(kept))
        if (output.epoch, output.step) != (self._route.epoch, kept.step):
            raise self._fail_link(link, "an output out of order")
        received = output.rows, output.tensor.dtype, output.tensor.shape
        if received != (kept.rows, self._request.dtype, shape):
            raise self._fail_link(link, "an output of another shape", "wrong")
        try:
            check_codec_allowed(self._request.options.quality, output.tensor)
            output_TD = tensors.decode(output.tensor, payload, max_bytes=output.tensor.max_nbytes)
        except ProtocolError as error:
            # Nodes refuse non-finite inputs, so this hop produced the values itself.
            raise self._fail_link(link, str(error), "wrong") from error
        link.wire.count_received(output.tensor, payload)
        self.num_decoding = max(self.num_decoding, output.decoding)
        stage.entry.unanswered_bytes = 0
        if len(kept.rows) == kept.meta.shape[0]:
            self.suspicion.record_step(self.suspicion.now - stage.started_at)
        self.suspicion.record_output(stage.links)
        self._stalls.clear()
        if self._route.search.silent_peers and not self.suspicion.suspected:
            self._route.search.stop()
        stage.restart_timers(self.suspicion, self._step_timeout_s)
        return kept, output_TD, normalize_via(self._request.options.quality, output.via)

    def _output_shape(self, sent: SentStep) -> tuple[int, int]:
        tokens = {"all": sent.meta.shape[0], "last": len(sent.rows), "none": 0}
        return tokens[sent.want], self._request.hidden_size

    async def _wait_for_news(self, stages: Sequence[PipelineStage]) -> None:
        """Wait for an event of a link, or until a stage is due, which is then checked."""
        late = min((stage for stage in stages if stage.in_flight), key=lambda stage: stage.due_at)
        due_at = late.due_at
        try:
            async with asyncio.timeout(due_at - self.suspicion.now):
                await self._changed.wait()
        except TimeoutError:
            self.suspicion.record_oversleep(self.suspicion.now - due_at)
            await self._check_stage(late)

    async def _check_stage(self, stage: PipelineStage) -> None:
        """Check an overdue stage. Raises `ChainBrokenError` if a hop is lost or holds up a step."""
        if self.suspicion.now >= stage.deadline:
            nonce = self._rng.getrandbits(32)
            asked = (link.ping(nonce) for link in stage.links)
            pongs = await asyncio.gather(*asked, return_exceptions=True)
            self._raise_if_broken()
            stage.busy_timeouts_left -= 1
            if not stage.exit.outputs:
                self._attribute_fault(stage, pongs)
            stage.deadline = self.suspicion.now + self._step_timeout_s
        await self._probe_hops(stage)

    async def _probe_hops(self, stage: PipelineStage) -> None:
        """Probe the stage's hops, search for replacements of silent ones. Raises if any is lost."""
        if stage.exit.outputs:
            # The output arrived in the meantime.
            return
        detector, links = self._route.detector, self._route.links
        if await detector.probe_links(stage.links, links):
            self._route.exclude_silent_nodes()
            self._raise_if_broken()
        if not detector.silent_links(links) and not self._has_stalled_link(stage):
            self._route.search.stop()
        stage.probe_at = self.suspicion.now + detector.probe_interval_s(stage.links)

    def _has_stalled_link(self, stage: PipelineStage) -> bool:
        """Whether a link between two nodes is suspected to be stalled. Raises if it is given up."""
        links = stage.links
        told = [(link, link.probe_report) for link in links]
        stall = self._stalls.find_stall(told, self._route.epoch, self.suspicion.now)
        if stall is None or stall[1] < self.suspicion.suspect_after_s:
            return False
        place, stalled_s = stall
        before, after = links[place - 1], links[place]
        self._route.detector.search_replacements(self._route.links, [after], [before])
        replaceable = self._route.search.replaceable
        if stalled_s >= self.suspicion.lost_after_s and replaceable:
            peers = before.hop.peer_id, after.hop.peer_id
            log.info("link_lost", peers=peers, stalled_s=round(stalled_s, 2))
            what = f"{peers[1]} received nothing from {peers[0]} for {stalled_s:.1f} s"
            self._route.fault_attribution.fail_stalled_link(before, after, what, replaceable)
            self._route.exclude_silent_nodes()
            raise ChainBrokenError(what)
        return True

    def _attribute_fault(self, stage: PipelineStage, pongs: Sequence[Pong | BaseException]) -> None:
        """Return if a hop is still busy with the overdue step, else fail a hop and raise."""
        busy = first_busy_link(stage.links, pongs)
        if busy is None:
            attribution, step = self._route.fault_attribution, stage.in_flight[0].step
            raise ChainBrokenError(attribution.fail_overdue_hop(stage.links, pongs, step))
        if stage.busy_timeouts_left <= 0:
            raise self._fail_link(busy, f"nothing for {MAX_BUSY_TIMEOUTS} step timeouts")

    def _fail_link(
        self, link: HopLink, reason: str, fault: FailureKind = "lost"
    ) -> ChainBrokenError:
        link.fail(reason, fault)
        return ChainBrokenError(f"{link.hop.peer_id} sent {reason}")

    def _raise_if_broken(self) -> None:
        links = self._route.links
        for link in links:
            if link.failure is not None:
                raise ChainBrokenError(link.failure.reason)
        for link, after in zip(links, [*links[1:], None], strict=True):
            if link.downstream_lost_reason is not None:
                after = after if self._request.is_chain else None
                what = self._route.fault_attribution.fail_link_pair(
                    link, after, link.downstream_lost_reason
                )
                raise ChainBrokenError(what)


MIN_CHUNK_TOKENS = 128
"""Smallest chunk, in tokens: smaller ones lower a machine's throughput."""
MAX_CHUNK_TOKENS = 512
_CHUNKS_PER_HOP = 12
"""Chunks per hop after the first. While chunks fill and drain the pipeline, each hop idles for as
many chunks as there are further hops: with 12 times as many chunks, for under 1/12 of the time."""


@dataclass(frozen=True, slots=True)
class StepChunk:
    """Tokens `start` to `end` of a step, and which of their outputs are requested."""

    rows: tuple[RowSlice, ...]
    start: int
    end: int
    want: Want
    ends_within_row: bool
    """Whether the last slice continues in the next chunk: its last token here is not an output of
    the step."""

    def select_output(self, output_TD: torch.Tensor) -> torch.Tensor:
        """Rows of this chunk's output that belong to the step's output."""
        return output_TD[:-1] if self.ends_within_row and self.want == "last" else output_TD


def split_step(
    rows: Sequence[RowSlice], want: Want, hops: int, chunk_tokens: int | None = None
) -> list[StepChunk]:
    """Split `rows` into consecutive chunks of nearly equal size, which may end within a row.

    Chunks have at most `chunk_tokens` tokens. If that is None, steps of up to `MIN_CHUNK_TOKENS`
    tokens and decode steps (one token per row) stay whole.
    """
    total = sum(part.count for part in rows)
    if chunk_tokens is None and (total <= MIN_CHUNK_TOKENS or total == len(rows)):
        return [StepChunk(tuple(rows), 0, total, want, False)]
    count = math.ceil(total / (chunk_tokens or _choose_chunk_tokens(total, hops)))
    left = deque(rows)
    ends = [total * number // count for number in range(count + 1)]
    return [_take_chunk(left, start, end, want) for start, end in itertools.pairwise(ends)]


def _choose_chunk_tokens(total: int, hops: int) -> int:
    enough = _CHUNKS_PER_HOP * (hops - 1)
    largest = MAX_CHUNK_TOKENS if enough == 0 else math.ceil(total / enough)
    return min(max(largest, MIN_CHUNK_TOKENS), MAX_CHUNK_TOKENS)


def _take_chunk(remaining: deque[RowSlice], start: int, end: int, want: Want) -> StepChunk:
    taken: list[RowSlice] = []
    room = end - start
    goes_on = False
    while room:
        part = remaining.popleft()
        count = min(part.count, room)
        goes_on = count < part.count
        taken.append(RowSlice(part.row, part.position, count))
        if goes_on:
            remaining.appendleft(RowSlice(part.row, part.position + count, part.count - count))
        room -= count
    if want == "last" and goes_on and len(taken) == 1:
        want = "none"
    return StepChunk(tuple(taken), start, end, want, goes_on)
