"""Pipeline of a session's steps: split into chunks, several in flight, outputs in order.

In a chain, steps enter at the first hop and their outputs leave the last. In a star each hop is a
stage of its own: while one step is at the second hop, the next is at the first.

T packed tokens, D hidden.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from nesa_node.client.blame import busy
from nesa_node.client.hop import HopLink
from nesa_node.client.request import RouteRequest
from nesa_node.client.route import Route
from nesa_node.client.stalls import Stalls
from nesa_node.client.suspicion import TICK_S, Suspicion
from nesa_node.compression import tensors
from nesa_node.compression.hidden_states import HiddenStates
from nesa_node.core.errors import PeerUnreachableError, ProtocolError
from nesa_node.core.logging import get_logger
from nesa_node.swarm.messages import Pong, Step
from nesa_node.swarm.notices import FailureKind
from nesa_node.swarm.outbox import Kept, Outbox
from nesa_node.swarm.wire import check_allowed, known, passed_on

log = get_logger(__name__)

WINDOW = 32
"""Most steps in flight: a node stops reading at 64 of one session."""
MAX_BUSY_PERIODS = 10
"""Number of step timeouts for which a node may report itself busy with a step."""
SMALL_BYTES = 1 << 16
"""Larger payloads can block until the receiver reads: their sending is watched."""


class ChainBrokenError(PeerUnreachableError):
    """A link or node failed. The session can continue once its route is rebuilt."""


@dataclass(slots=True)
class Stage:
    """One stage of the pipeline: entry hop, exit hop and all hops between."""

    enter: HopLink
    leave: HopLink
    through: Sequence[HopLink]
    outbox: Outbox | None = None
    """Records what is sent, for replay; None where it is recorded already."""
    after: Stage | None = None
    """Receives this stage's outputs; None for the last stage."""
    awaited: deque[Kept] = field(default_factory=deque)
    """Steps sent and still without an output, oldest first."""
    look_at: float = 0.0
    """When to probe the hops, by the clock of their `Suspicion`."""
    since: float = 0.0
    """When the oldest step in flight started: it was sent, or the output before it arrived."""
    deadline: float = 0.0
    patience: int = 0

    def asked(self, kept: Kept) -> Kept:
        """The step as sent to this stage: only the last stage may omit outputs of some tokens."""
        if kept.want == "all" or self.after is None:
            return kept
        return replace(kept, want="all")

    def renew(self, suspicion: Suspicion, timeout_s: float) -> None:
        """Restart the timers: an output arrived, or the first step entered."""
        self.since = suspicion.now
        self.look_at = self.since + suspicion.late_after_s
        self.deadline = self.since + timeout_s
        self.patience = MAX_BUSY_PERIODS

    @property
    def due_at(self) -> float:
        """When to check on the steps in flight."""
        return min(self.look_at, self.deadline)


class Flow:
    """Runs steps over a route, one set at a time. `changed` is set at each event of a link."""

    def __init__(
        self,
        route: Route,
        request: RouteRequest,
        changed: asyncio.Event,
        *,
        step_timeout_s: float,
        rng: random.Random,
    ) -> None:
        self._route = route
        self._request = request
        self._changed = changed
        self._step_timeout_s = step_timeout_s
        self._rng = rng
        self._stalls = Stalls()
        self.via: tuple[str, ...] = ()
        """Codecs of the last output on its way, stream by stream; empty if uncompressed throughout.
        """

    @property
    def suspicion(self) -> Suspicion:
        return self._route.detector.suspicion

    async def send(self, link: HopLink, kept: Kept) -> None:
        """Send one step. Raises `PeerUnreachableError`."""
        kept = link.wire.readable(kept)
        link.unanswered_bytes += len(kept.payload)
        await link.send_step(
            Step(
                session=link.session,
                epoch=self._route.epoch,
                step=kept.step,
                rows=kept.rows,
                tensor=kept.meta,
                want=kept.want,
                via=passed_on(kept.via, kept.meta.codec),
            ),
            kept.payload,
        )

    async def run(
        self,
        steps: Iterable[Kept],
        stages: Sequence[Stage],
        take: Callable[[Kept, torch.Tensor], None],
    ) -> None:
        """Send `steps` through `stages`, with at most `WINDOW` in flight.

        `take` receives each step with its output [T, D], in order, on arrival. Steps it has
        received are complete even if this raises `PeerUnreachableError` or `RemoteError`.
        """
        # Lazily: each step is compressed just before it is sent, while earlier ones are in flight.
        self.suspicion.keep_only(self._route.links)
        self._stalls.clear()
        unsent = iter(steps)
        upcoming = next(unsent, None)
        under_way = 0
        while True:
            self._changed.clear()
            under_way -= await self._hand_on(stages, take)
            if upcoming is None and not under_way:
                return
            self._check_health()
            if upcoming is not None and under_way < WINDOW:
                await self._enter(stages[0], upcoming)
                under_way += 1
                upcoming = next(unsent, None)
            else:
                await self._wait(stages)

    async def _hand_on(
        self, stages: Sequence[Stage], take: Callable[[Kept, torch.Tensor], None]
    ) -> int:
        """Pass outputs to the next stage, or of the last stage to `take`; return the number of the
        latter.
        """
        through = 0
        for stage in reversed(stages):
            while (came := self._output(stage)) is not None:
                kept, output_TD, self.via = came
                if stage.after is None:
                    take(kept, output_TD)
                    through += 1
                else:
                    meta, payload = stage.after.enter.wire.encode(HiddenStates.of(output_TD))
                    step = Kept(kept.step, kept.rows, kept.want, meta, payload, self.via)
                    await self._enter(stage.after, step)
        return through

    async def _enter(self, stage: Stage, kept: Kept) -> None:
        sent = stage.asked(kept)
        if stage.outbox is not None:
            stage.outbox.append(sent)
        shape = self._output_shape(sent)
        item_bytes = tensors.DTYPES[self._request.dtype].itemsize
        stage.leave.expect(self._route.epoch, sent.step, math.prod(shape) * item_bytes)
        if not stage.awaited:
            stage.renew(self.suspicion, self._step_timeout_s)
        stage.awaited.append(kept)
        if len(sent.payload) <= SMALL_BYTES:
            await self.send(stage.enter, sent)
        else:
            await self._send_watched(stage, sent)
            if stage.awaited[0] is kept:
                # Hops start to compute only after the whole payload was sent.
                stage.renew(self.suspicion, self._step_timeout_s)

    async def send_again(self, link: HopLink, kept: Kept) -> None:
        """Send a step without awaiting its output. Raises `PeerUnreachableError`."""
        stage = Stage(link, link, [link])
        stage.renew(self.suspicion, self._step_timeout_s)
        await self._send_watched(stage, kept)

    async def _send_watched(self, stage: Stage, sent: Kept) -> None:
        """Send a step, and probe the hops meanwhile in case the receiver does not read."""
        sending = asyncio.create_task(self.send(stage.enter, sent), name="send-step")
        try:
            while not sending.done():
                due_at = max(stage.look_at, self.suspicion.now + TICK_S)
                await asyncio.wait({sending}, timeout=due_at - self.suspicion.now)
                self.suspicion.overslept(self.suspicion.now - due_at)
                if not sending.done():
                    await self._look_at_hops(stage)
            sending.result()
        finally:
            sending.cancel()

    def _output(self, stage: Stage) -> tuple[Kept, torch.Tensor, tuple[str, ...]] | None:
        """Remove the oldest step in flight once its output is here; return both and the codecs.

        None if it has not arrived. Raises `ChainBrokenError` for an output that differs from the
        request in order, shape, dtype or quality.
        """
        link = stage.leave
        if not link.outputs or not stage.awaited:
            return None
        output, payload = link.outputs.popleft()
        kept = stage.awaited.popleft()
        shape = self._output_shape(stage.asked(kept))
        if (output.epoch, output.step) != (self._route.epoch, kept.step):
            raise self._misbehaved(link, "an output out of order")
        if output.rows != kept.rows or (output.tensor.dtype, output.tensor.shape) != (
            self._request.dtype,
            shape,
        ):
            raise self._misbehaved(link, "an output of another shape", "wrong")
        try:
            check_allowed(self._request.quality, output.tensor)
            output_TD = tensors.decode(output.tensor, payload, max_bytes=output.tensor.most_nbytes)
        except ProtocolError as error:
            # Nodes refuse non-finite inputs, so this hop produced the values itself.
            raise self._misbehaved(link, str(error), "wrong") from error
        link.wire.came(output.tensor, payload)
        stage.enter.unanswered_bytes = 0
        if len(kept.rows) == kept.meta.shape[0]:
            self.suspicion.stepped(self.suspicion.now - stage.since)
        self.suspicion.progress(stage.through)
        self._stalls.clear()
        if self._route.search.silent and not self.suspicion.suspected:
            self._route.search.end()
        stage.renew(self.suspicion, self._step_timeout_s)
        return kept, output_TD, known(self._request.quality, output.via)

    def _output_shape(self, sent: Kept) -> tuple[int, int]:
        tokens = {"all": sent.meta.shape[0], "last": len(sent.rows), "none": 0}
        return tokens[sent.want], self._request.hidden_size

    async def _wait(self, stages: Sequence[Stage]) -> None:
        """Wait for an event of a link, or until a stage is due, which is then checked."""
        late = min((stage for stage in stages if stage.awaited), key=lambda stage: stage.due_at)
        due_at = late.due_at
        try:
            async with asyncio.timeout(due_at - self.suspicion.now):
                await self._changed.wait()
        except TimeoutError:
            self.suspicion.overslept(self.suspicion.now - due_at)
            await self._look(late)

    async def _look(self, stage: Stage) -> None:
        """Check an overdue stage. Raises `ChainBrokenError` if a hop is lost or holds up a step."""
        if self.suspicion.now >= stage.deadline:
            pongs = await self._ask(stage)
            stage.patience -= 1
            self._blame(stage, pongs)
            stage.deadline = self.suspicion.now + self._step_timeout_s
        await self._look_at_hops(stage)

    async def _look_at_hops(self, stage: Stage) -> None:
        """Probe the stage's hops, search for replacements of silent ones. Raises if any is lost."""
        if stage.leave.outputs:
            # The output arrived in the meantime.
            return
        detector, links = self._route.detector, self._route.links
        if await detector.look(stage.through, links):
            self._route.give_up_silent()
            self._check_health()
        if not detector.silent(links) and not self._look_at_links(stage):
            self._route.search.end()
        stage.look_at = self.suspicion.now + detector.probe_every_s(stage.through)

    def _look_at_links(self, stage: Stage) -> bool:
        """Whether a link between two nodes is suspected to be stalled. Raises if it is given up."""
        links = stage.through
        told = [(link, link.report) for link in links]
        stall = self._stalls.look(told, self._route.epoch, self.suspicion.now)
        if stall is None or stall[1] < self.suspicion.suspect_after_s:
            return False
        place, stalled_s = stall
        before, after = links[place - 1], links[place]
        self._route.detector.look_for_replacements(self._route.links, [after], [before])
        replaceable = self._route.search.replaceable
        if stalled_s >= self.suspicion.lost_after_s and replaceable:
            peers = before.hop.peer_id, after.hop.peer_id
            log.info("link_lost", peers=peers, stalled_s=round(stalled_s, 2))
            what = f"{peers[1]} received nothing from {peers[0]} for {stalled_s:.1f} s"
            self._route.blame.cut_off(before, after, what, replaceable)
            self._route.give_up_silent()
            raise ChainBrokenError(what)
        return True

    async def _ask(self, stage: Stage) -> Sequence[Pong | BaseException]:
        """Pings of the stage's hops, in order. Raises if one of the links is lost."""
        nonce = self._rng.getrandbits(32)
        asked = (link.ping(nonce) for link in stage.through)
        pongs = await asyncio.gather(*asked, return_exceptions=True)
        self._check_health()
        return pongs

    def _blame(self, stage: Stage, pongs: Sequence[Pong | BaseException]) -> None:
        """Return if a hop is still busy with the overdue step, else fail a hop and raise."""
        if stage.leave.outputs:
            return
        links = stage.through
        at_it = busy(links, pongs)
        if at_it is None:
            raise ChainBrokenError(self._route.blame.overdue(links, pongs, stage.awaited[0].step))
        if stage.patience <= 0:
            raise self._misbehaved(at_it, f"nothing for {MAX_BUSY_PERIODS} step timeouts")

    def _misbehaved(
        self, link: HopLink, what: str, fault: FailureKind = "lost"
    ) -> ChainBrokenError:
        link.lose(what, fault)
        return ChainBrokenError(f"{link.hop.peer_id} sent {what}")

    def _check_health(self) -> None:
        links = self._route.links
        for link in links:
            if link.lost is not None:
                raise ChainBrokenError(link.lost)
            if link.refusal is not None:
                # The step was valid when it was sent: the refusal is the node's fault.
                refusal, link.refusal = link.refusal, None
                raise self._misbehaved(link, f"a refusal: {refusal.code}, {refusal.message}")
        for link, after in zip(links, [*links[1:], None], strict=True):
            if link.downstream_lost is not None:
                after = after if self._request.mode == "chain" else None
                what = self._route.blame.one_of_both(link, after, link.downstream_lost)
                raise ChainBrokenError(what)
