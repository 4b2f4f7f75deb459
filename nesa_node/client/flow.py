"""Steps on their way through a session's hops: several at once, in order, each answered in time.

In a chain steps go in at the first hop and their outputs come out of the last. In a star every hop
is a stage of its own: while a step is at the second, the next one is at the first.
T packed tokens, D hidden.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from nesa_node.client.blame import busy
from nesa_node.client.hop import HopLink
from nesa_node.client.request import RouteRequest
from nesa_node.client.route import Route
from nesa_node.compression import tensors
from nesa_node.compression.hidden_states import HiddenStates
from nesa_node.core.errors import PeerUnreachableError, ProtocolError
from nesa_node.swarm.messages import Pong, Step
from nesa_node.swarm.notices import FailureKind
from nesa_node.swarm.outbox import Kept, Outbox
from nesa_node.swarm.wire import check_allowed, passed_on

WINDOW = 32
"""Steps under way at once: a node reads no more while it has 64 of a session."""
MAX_BUSY_PERIODS = 10
"""A node may be busy with a step for so many step timeouts."""
SILENCE_S = 6.0
"""After that the hops that small steps pass are asked whether they are there: a link that is cut
says nothing, and long before a step is overdue its hops can be known to be lost."""
SMALL_BYTES = 1 << 16
"""Behind more than that a question may have to wait: it is not asked before a step is overdue."""


class ChainBrokenError(PeerUnreachableError):
    """Some link or node failed; the session can go on once the route is rebuilt."""


@dataclass(slots=True)
class Stage:
    """Where steps go in, where their outputs come out, and whom they pass in between."""

    enter: HopLink
    leave: HopLink
    through: Sequence[HopLink]
    outbox: Outbox | None = None
    """Keeps what is sent; None where it is kept already."""
    after: Stage | None = None
    """Where the outputs go in; None after the last stage."""
    awaited: deque[Kept] = field(default_factory=deque)
    """Sent, their outputs have not come."""
    ask_at: float = 0.0
    deadline: float = 0.0
    patience: int = 0

    def asked(self, kept: Kept) -> Kept:
        """What is sent here of a step: only the last stage may leave out tokens of its output."""
        if kept.want == "all" or self.after is None:
            return kept
        return replace(kept, want="all")

    def renew(self, timeout_s: float) -> None:
        """Something came, or the first step went in."""
        now = time.monotonic()
        self.ask_at, self.deadline = now + SILENCE_S, now + timeout_s
        self.patience = MAX_BUSY_PERIODS

    def look_at(self) -> float:
        """When to look what became of the awaited steps."""
        under_way = sum(len(kept.payload) for kept in self.awaited)
        # What a fresh node was sent again is awaited by nobody.
        small = max(under_way, self.enter.unanswered_bytes) <= SMALL_BYTES
        return min(self.ask_at, self.deadline) if small else self.deadline


class Flow:
    """Runs one set of steps at a time over a route; `changed` is set whenever a link has news."""

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
        self.via: tuple[str, ...] = ()
        """How the hidden states of the last output travelled; empty: as they are all the way."""

    async def send(self, link: HopLink, kept: Kept) -> None:
        """Raises `PeerUnreachableError`."""
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
        """Send `steps` through `stages`, at most `WINDOW` under way.

        `take` gets each with its output [T, D], in order, as soon as it comes: those have been done
        even if this raises `PeerUnreachableError` or `RemoteError`.
        """
        # One by one: each is compressed as late as it can be, while others are under way.
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
        """Pass outputs to the next stage, those of the last to `take`: returns how many."""
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
        await self.send(stage.enter, sent)
        if not stage.awaited:
            stage.renew(self._step_timeout_s)
        stage.awaited.append(kept)

    def _output(self, stage: Stage) -> tuple[Kept, torch.Tensor, tuple[str, ...]] | None:
        """The oldest awaited step of a stage, its output and how that travelled, if it has come.

        Raises `ChainBrokenError` for an output that is not what was asked for.
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
            # Nodes refuse inputs that are not finite: it is this one's own.
            raise self._misbehaved(link, str(error), "wrong") from error
        link.wire.came(output.tensor, payload)
        stage.enter.unanswered_bytes = 0
        stage.renew(self._step_timeout_s)
        return kept, output_TD, output.via

    def _output_shape(self, sent: Kept) -> tuple[int, int]:
        tokens = {"all": sent.meta.shape[0], "last": len(sent.rows), "none": 0}
        return tokens[sent.want], self._request.hidden_size

    async def _wait(self, stages: Sequence[Stage]) -> None:
        """Until a link has news; a stage where nothing came for too long is looked into."""
        late = min((stage for stage in stages if stage.awaited), key=Stage.look_at)
        try:
            async with asyncio.timeout(late.look_at() - time.monotonic()):
                await self._changed.wait()
        except TimeoutError:
            overdue = time.monotonic() >= late.deadline
            pongs = await self._ask(late)
            now = time.monotonic()
            late.ask_at = now + SILENCE_S
            if overdue:
                late.patience -= 1
                self._blame(late, pongs)
                late.deadline = now + self._step_timeout_s

    async def _ask(self, stage: Stage) -> Sequence[Pong | BaseException]:
        """What the hops of a stage say they are at. Raises if one of them is lost."""
        nonce = self._rng.getrandbits(32)
        asked = (link.ping(nonce) for link in stage.through)
        pongs = await asyncio.gather(*asked, return_exceptions=True)
        self._check_health()
        return pongs

    def _blame(self, stage: Stage, pongs: Sequence[Pong | BaseException]) -> None:
        """A step is overdue: return if somebody is still at it, else say who is lost."""
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
                # What we sent is as it should be, we made sure of that.
                refusal, link.refusal = link.refusal, None
                raise self._misbehaved(link, f"a refusal: {refusal.code}, {refusal.message}")
        for link, after in zip(links, [*links[1:], None], strict=True):
            if link.downstream_lost is not None:
                after = after if self._request.mode == "chain" else None
                what = self._route.blame.one_of_both(link, after, link.downstream_lost)
                raise ChainBrokenError(what)
