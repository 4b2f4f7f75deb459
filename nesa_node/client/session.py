"""A session over the swarm: steps go out, outputs come back, lost nodes are replaced on the way.

T packed tokens, D hidden.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import structlog
import torch

from nesa_node.client.blame import busy
from nesa_node.client.hop import OPEN_TIMEOUT_S, HopLink
from nesa_node.client.route import Route, RouteRequest
from nesa_node.compression import tensors
from nesa_node.core.errors import (
    BusyError,
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
from nesa_node.routing.avoidance import Avoidance
from nesa_node.routing.chains import Hop
from nesa_node.routing.repair import gaps
from nesa_node.swarm.messages import RowSlice, Step, Want
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.outbox import Kept, Outbox

log = structlog.get_logger(__name__)

MAX_ATTEMPTS = 20
"""Of one step, each through a chain that could be linked."""
REPLAY_WINDOW = 32
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_SHORTEST_OPEN_S = 1.0
_UNTIL_THERE_IS_ROOM: tuple[type[NesaError], ...] = (
    BusyError,
    MissingBlocksError,
    PeerUnreachableError,
    RemoteError,
)
_MAX_BUSY_PERIODS = 10
"""A node may be busy with a step for so many step timeouts."""


class _ChainBroken(PeerUnreachableError):
    """Some link or node failed; the session can go on once the route is rebuilt."""


class RemoteSession:
    """A `BlockSession` whose blocks run on other machines."""

    def __init__(
        self,
        swarm: Swarm,
        request: RouteRequest,
        avoidance: Avoidance,
        *,
        recovery_timeout_s: float,
        step_timeout_s: float,
        rng: random.Random,
    ) -> None:
        self.rows = request.rows
        self.max_tokens = request.max_tokens
        self.recoveries = 0
        self._request = request
        self._changed = asyncio.Event()
        self._route = Route(swarm, request, avoidance, self._changed.set)
        self._lengths = [0] * request.rows
        self._outboxes: dict[int, Outbox] = {request.span.start: Outbox()}
        self._step = 0
        self._leaver_check_at = 0.0
        self._recovery_timeout_s = recovery_timeout_s
        self._step_timeout_s = step_timeout_s
        self._rng = rng

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self._lengths)

    @property
    def hops(self) -> tuple[Hop, ...]:
        return self._route.hops

    async def open(self) -> None:
        """Reserve a session on every hop, all or none; wait while nodes are busy or missing.

        Raises at once what waiting cannot help: `RefusedError` and `ContextLengthError`.
        """
        await self._persist(_UNTIL_THERE_IS_ROOM)

    async def step(
        self, hidden_TD: torch.Tensor, rows: Sequence[RowSlice], *, want: Want = "all"
    ) -> torch.Tensor:
        """See `BlockSession.step`. Raises `MissingBlocksError` if lost blocks stay lost."""
        self._check(hidden_TD, rows)
        await self._replace_leavers()
        for _ in range(MAX_ATTEMPTS):
            try:
                output = await self._attempt(hidden_TD, tuple(rows), want)
            except PeerUnreachableError as error:
                log.info("chain_broken", reason=str(error))
                await self._recover()
                continue
            self._route.blame.step_done()
            for part in rows:
                self._lengths[part.row] += part.count
            return output.to(hidden_TD.dtype)
        raise PeerUnreachableError(
            f"a step failed {MAX_ATTEMPTS} times although the chain could be linked each time"
        )

    async def rollback(self, lengths: Sequence[int]) -> None:
        """See `BlockSession.rollback`."""
        if len(lengths) != self.rows or any(
            not 0 <= new <= old for new, old in zip(lengths, self._lengths, strict=True)
        ):
            raise ValueError(f"cannot roll back from {self._lengths} to {list(lengths)}")
        self._lengths = list(lengths)
        for outbox in self._outboxes.values():
            outbox.truncate(lengths)
        try:
            await self._route.rollback(lengths)
        except (PeerUnreachableError, RemoteError):
            await self._recover()

    async def close(self) -> None:
        await self._route.close()

    def _check(self, hidden_TD: torch.Tensor, rows: Sequence[RowSlice]) -> None:
        total = sum(part.count for part in rows)
        if hidden_TD.shape != (total, self._request.hidden_size):
            raise ValueError(f"{list(hidden_TD.shape)} are not the hidden states of {total} tokens")
        if not bool(torch.isfinite(hidden_TD).all()):
            # No node would take them, and each would be blamed for it.
            raise ProtocolError("not_finite", "the hidden states hold NaN or infinite values")
        for part in rows:
            if part.position != self._lengths[part.row]:
                raise ValueError(f"row {part.row} goes on at {self._lengths[part.row]}, not {part}")
            if part.position + part.count > self.max_tokens:
                raise CacheFullError(
                    f"row {part.row} would hold {part.position + part.count} tokens; "
                    f"the session was opened for {self.max_tokens}"
                )

    async def _attempt(
        self, hidden_TD: torch.Tensor, rows: tuple[RowSlice, ...], want: Want
    ) -> torch.Tensor:
        self._step += 1
        links = self._route.links
        sends_to = links if self._request.mode == "star" else links[:1]
        for link in sends_to:
            is_last = link is sends_to[-1]
            asked: Want = want if is_last else "all"
            meta, payload = tensors.encode(hidden_TD.to(tensors.DTYPES[self._request.dtype]))
            kept = Kept(self._step, rows, asked, meta, payload)
            self._outboxes.setdefault(link.hop.span.start, Outbox()).append(kept)
            answering = links[-1] if is_last else link
            answering.expect(self._route.epoch, kept.step)
            await self._send(link, kept)
            hidden_TD = await self._output(answering, kept)
        return hidden_TD

    async def _send(self, link: HopLink, kept: Kept) -> None:
        await link.send_step(
            Step(
                session=self._route.session,
                epoch=self._route.epoch,
                step=kept.step,
                rows=kept.rows,
                tensor=kept.meta,
                want=kept.want,
            ),
            kept.payload,
        )

    async def _output(self, link: HopLink, kept: Kept) -> torch.Tensor:
        """Wait for what `link` makes of a step. Raises `_ChainBroken` and `RemoteError`."""
        deadline = time.monotonic() + self._step_timeout_s
        patience = _MAX_BUSY_PERIODS
        while True:
            self._changed.clear()
            while link.outputs:
                output, payload = link.outputs.popleft()
                if (output.epoch, output.step) == (self._route.epoch, kept.step):
                    tokens = len(kept.rows) if kept.want == "last" else kept.meta.shape[0]
                    shape = (tokens, self._request.hidden_size)
                    got = output.tensor
                    if output.rows != kept.rows or (got.dtype, got.shape) != (
                        self._request.dtype,
                        shape,
                    ):
                        raise self._misbehaved(link, "an output of another shape")
                    try:
                        return tensors.decode(output.tensor, payload, max_bytes=len(payload))
                    except ProtocolError as error:
                        raise self._misbehaved(link, str(error)) from error
            self._check_health()
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._changed.wait()
            except TimeoutError:
                patience -= 1
                await self._probe(link, kept.step, give_up=patience <= 0)
                deadline = time.monotonic() + self._step_timeout_s

    def _misbehaved(self, link: HopLink, what: str) -> _ChainBroken:
        link.lose(what)
        return _ChainBroken(f"{link.hop.peer_id} sent {what}")

    def _check_health(self) -> None:
        links = self._route.links
        for link in links:
            if link.lost is not None:
                raise _ChainBroken(link.lost)
            if link.refusal is not None:
                # What we sent is as it should be, we made sure of that.
                refusal, link.refusal = link.refusal, None
                raise self._misbehaved(link, f"a refusal: {refusal.code}, {refusal.message}")
        for link, after in zip(links, [*links[1:], None], strict=True):
            if link.downstream_lost is not None:
                after = after if self._request.mode == "chain" else None
                what = self._route.blame.one_of_both(link, after, link.downstream_lost)
                raise _ChainBroken(what)

    async def _probe(self, awaited: HopLink, step: int, *, give_up: bool) -> None:
        """A step is overdue: return if somebody is still at it, else find out who is lost."""
        nonce = self._rng.getrandbits(32)
        links = [awaited] if self._request.mode == "star" else self._route.links
        pongs = await asyncio.gather(*(link.ping(nonce) for link in links), return_exceptions=True)
        self._check_health()
        at_it = busy(links, pongs)
        if at_it is None:
            raise _ChainBroken(self._route.blame.overdue(links, pongs, step))
        if give_up:
            raise self._misbehaved(at_it, f"nothing for {_MAX_BUSY_PERIODS} step timeouts")

    async def _replace_leavers(self) -> None:
        """Move off nodes that said they leave, if others can take over; try once a second."""
        leaving = frozenset(link.hop.peer_id for link in self._route.links if link.leaving)
        if not leaving or time.monotonic() < self._leaver_check_at:
            return
        if any(link.lost is not None for link in self._route.links):
            # A rebuild lets go of lost links even where it fails, and a step must not run over the
            # others as if nothing were missing: it is for the step to find the loss and mend it.
            return
        self._leaver_check_at = time.monotonic() + 1.0
        try:
            await self._rebuild(leaving)
            log.info("moved_off_leaving_nodes", peers=sorted(leaving))
        except MissingBlocksError as error:
            log.info("cannot_move_off_yet", reason=str(error))
        except NesaError as error:
            log.info("moving_off_failed", reason=str(error))
            await self._recover()

    async def _recover(self) -> None:
        self.recoveries += 1
        for outbox in self._outboxes.values():
            outbox.truncate(self._lengths)
        # Those who refuse, or are too small for the session, may be joined by others.
        await self._persist((*_UNTIL_THERE_IS_ROOM, ContextLengthError, RefusedError))

    async def _rebuild(
        self, drop: frozenset[PeerId] = frozenset(), *, open_timeout_s: float = OPEN_TIMEOUT_S
    ) -> None:
        """Rebuild the route and bring its fresh nodes to where the others are."""
        await self._route.rebuild(
            self._lengths,
            drop=drop,
            needs_output=self._lacks_next_outbox,
            open_timeout_s=open_timeout_s,
        )
        zeros = [0] * self.rows
        links = self._route.links
        for link in links if self._request.mode == "star" else links[:1]:
            if link not in self._route.fresh:
                continue
            replay = list(self._outboxes[link.hop.span.start].since(zeros, self._lengths))
            if self._request.mode == "star" and self._lacks_next_outbox(link.hop):
                await self._replay_for_outputs(link, replay)
            else:
                for kept in replay:
                    await self._send(link, kept)
        # Where no hop begins any more, nothing is added either: it would be taken for complete when
        # the route comes back to these spans.
        starts = {hop.span.start for hop in self.hops}
        self._outboxes = {start: kept for start, kept in self._outboxes.items() if start in starts}

    def _lacks_next_outbox(self, hop: Hop) -> bool:
        """Whether nobody has what went into the blocks after `hop`."""
        end = hop.span.end
        return end < self._request.span.end and end not in self._outboxes

    async def _replay_for_outputs(self, link: HopLink, replay: Sequence[Kept]) -> None:
        outbox = Outbox()
        # What a last hop was asked for is not enough once blocks follow it.
        whole = [replace(kept, want="all") for kept in replay]
        for start in range(0, len(whole), REPLAY_WINDOW):
            window = whole[start : start + REPLAY_WINDOW]
            for kept in window:
                link.expect(self._route.epoch, kept.step)
                await self._send(link, kept)
            for kept in window:
                meta, payload = tensors.encode(await self._output(link, kept))
                outbox.append(Kept(kept.step, kept.rows, "all", meta, payload))
        self._outboxes[link.hop.span.end] = outbox

    async def _persist(self, passing: tuple[type[NesaError], ...]) -> None:
        """Rebuild until it works, through errors that may pass, until the recovery time is over.

        The pauses between grow and are jittered. There is none where an attempt found out that yet
        another peer is gone or has no room: the next one goes elsewhere.
        """
        deadline = time.monotonic() + self._recovery_timeout_s
        pause_s = _FIRST_PAUSE_S
        while True:
            left_s = deadline - time.monotonic()
            known = self._route.suspected
            try:
                return await self._rebuild(
                    open_timeout_s=min(max(left_s, _SHORTEST_OPEN_S), OPEN_TIMEOUT_S)
                )
            except passing as error:
                last = error
            wait_s = 0.0
            if self._route.suspected <= known:
                retry_after_s = last.retry_after_s if isinstance(last, BusyError) else 0.0
                wait_s = max(retry_after_s, pause_s) * self._rng.uniform(0.5, 1.5)
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
            if time.monotonic() + wait_s > deadline:
                raise self._give_up(last) from last
            await asyncio.sleep(wait_s)

    def _give_up(self, last: Exception) -> Exception:
        waited = f"waited {self._recovery_timeout_s:g} s"
        if isinstance(last, BusyError):
            return BusyError(f"{last}; {waited}", last.retry_after_s)
        if isinstance(last, RemoteError | RefusedError):
            return last
        alive = [link.hop for link in self._route.links if link.lost is None]
        missing = [(gap.start, gap.end) for gap in gaps(self._request.span, alive)]
        if isinstance(last, MissingBlocksError):
            missing = list(last.missing)
        ranges = ", ".join(f"{start}:{end}" for start, end in missing) or str(self._request.span)
        return MissingBlocksError(
            missing,
            f"no node serves blocks {ranges} of {self._request.model_id} ({waited}); "
            f"start one with `nesa-node run`. Last problem: {last}",
        )


@asynccontextmanager
async def open_remote_session(
    swarm: Swarm,
    request: RouteRequest,
    avoidance: Avoidance,
    *,
    recovery_timeout_s: float = 30.0,
    step_timeout_s: float = 30.0,
    rng: random.Random,
) -> AsyncIterator[RemoteSession]:
    """An open session; its nodes are let go at the end."""
    session = RemoteSession(
        swarm,
        request,
        avoidance,
        recovery_timeout_s=recovery_timeout_s,
        step_timeout_s=step_timeout_s,
        rng=rng,
    )
    try:
        await session.open()
        yield session
    finally:
        await session.close()
