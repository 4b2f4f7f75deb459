"""Nodes that stand ready to go on where one of a chain's nodes leaves or dies.

A successor has the session open; the node it succeeds hands it the cache and the kept outputs,
first in bulk while the session goes on, then what came since. Only in a chain: nodes of a star must
not learn of each other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from nesa_node.client.hop import HopLink
from nesa_node.core.errors import NesaError
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.swarm.messages import Downstream
from nesa_node.swarm.stream import silence_is_loss

log = get_logger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 80.0
"""Between looks for a successor where none was found, each twice as long as the one before: one
look asks members of the DHT."""

LAST_HAND_OVER_S = 3.0
"""Of what came since the one before, while a step waits: what is missing is sent again instead."""

OpenSuccessor = Callable[[HopLink], Awaitable[HopLink | None]]
"""Open the session with somebody who holds the node's blocks; None if nobody else does."""


class _Successor:
    """The link of one, and how far its cache reaches for certain."""

    def __init__(self, link: HopLink, rows: int) -> None:
        self.link = link
        self.lengths = [0] * rows
        self._cuts = 0
        self._is_anew = False
        """The last hand-over failed: the next one begins by emptying the successor."""

    def truncate(self, lengths: Sequence[int]) -> None:
        self._cuts += 1
        self.lengths = [min(pair) for pair in zip(self.lengths, lengths, strict=True)]

    async def sync(self, leaver: HopLink) -> None:
        """Raises `NesaError`."""
        span, cuts = self.link.hop.span, self._cuts
        if self._is_anew:
            self.lengths = [0] * len(self.lengths)
        try:
            held = await leaver.hand_over(
                Downstream(peer=self.link.hop.peer_id, blocks=(span.start, span.end))
            )
        except NesaError:
            self._is_anew = True
            raise
        self._is_anew = False
        if self._cuts == cuts:
            self.lengths = list(held)
        else:
            # It may hold tokens that were rolled back meanwhile.
            self.lengths = [min(pair) for pair in zip(self.lengths, held, strict=True)]


class Successors:
    """By the link that each succeeds. The tasks that prepare them end with `close`."""

    def __init__(self, rows: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rows = rows
        self._clock = clock
        self._pauses: dict[HopLink, tuple[float, float]] = {}
        """Of links without a successor: when to look again, and how long that pause is."""
        self._ready: dict[HopLink, _Successor] = {}
        self._preparing: dict[HopLink, asyncio.Task[None]] = {}
        self._opening = asyncio.Lock()

    @property
    def peers(self) -> frozenset[PeerId]:
        """Who takes part as somebody's successor, which nobody can do twice."""
        return frozenset(successor.link.hop.peer_id for successor in self._ready.values())

    def prepare(self, link: HopLink, open_successor: OpenSuccessor) -> bool:
        """Bring a successor of `link` to where it is; whether that is under way.

        False once an attempt has ended, whether there is a successor now or not.
        """
        task = self._preparing.get(link)
        if task is not None and task.done():
            del self._preparing[link]
            return False
        self._start(link, open_successor)
        return True

    def refresh(self, links: Sequence[HopLink], open_successor: OpenSuccessor) -> None:
        """Bring the successors of `links` to where those are, as soon as that can be.

        A link without one is left alone for a while after each attempt.
        """
        for link in links:
            if link not in self._pauses or self._pauses[link][0] <= self._clock():
                self._start(link, open_successor)

    def link_of(self, link: HopLink) -> HopLink | None:
        """Who can take the place of `link`."""
        successor = self._ready.get(link)
        return successor.link if successor is not None and successor.link.lost is None else None

    async def take(self, link: HopLink) -> tuple[HopLink, tuple[int, ...]]:
        """The successor of `link`, which is the caller's from now on, and what it holds.

        If `link` lives it is asked for what came since. Cancelled, it stays here.
        """
        await self._stop(link)
        successor = self._ready[link]
        if link.lost is None:
            try:
                async with silence_is_loss(link.hop.peer_id, LAST_HAND_OVER_S, "handing over"):
                    await successor.sync(link)
            except NesaError as error:
                log.info("hand_over_incomplete", peer=link.hop.peer_id, reason=str(error))
        del self._ready[link]
        return successor.link, tuple(successor.lengths)

    def truncate(self, lengths: Sequence[int]) -> None:
        """The session forgets tokens from `lengths` on."""
        for successor in self._ready.values():
            successor.truncate(lengths)

    async def keep_only(self, links: Sequence[HopLink]) -> None:
        """Let go of the successors of all others."""
        for link in {*self._preparing, *self._ready, *self._pauses} - set(links):
            await self._stop(link)
            self._pauses.pop(link, None)
            successor = self._ready.pop(link, None)
            if successor is not None:
                await successor.link.close()

    async def close(self) -> None:
        await self.keep_only(())

    def _start(self, link: HopLink, open_successor: OpenSuccessor) -> None:
        task = self._preparing.get(link)
        if task is None or task.done():
            self._preparing[link] = asyncio.create_task(self._prepare(link, open_successor))

    async def _prepare(self, link: HopLink, open_successor: OpenSuccessor) -> None:
        try:
            if self.link_of(link) is None:
                await self._replace(link, open_successor)
            if link in self._ready:
                self._pauses.pop(link, None)
                await self._ready[link].sync(link)
                return
        except NesaError as error:
            log.info("no_hand_over", peer=link.hop.peer_id, reason=str(error))
        if self.link_of(link) is None:
            _, before_s = self._pauses.get(link, (0.0, FIRST_PAUSE_S / 2))
            pause_s = min(2 * before_s, LONGEST_PAUSE_S)
            self._pauses[link] = self._clock() + pause_s, pause_s

    async def _replace(self, link: HopLink, open_successor: OpenSuccessor) -> None:
        async with self._opening:
            lost = self._ready.pop(link, None)
            if lost is not None:
                await lost.link.close()
            opened = await open_successor(link)
            if opened is not None:
                self._ready[link] = _Successor(opened, self._rows)

    async def _stop(self, link: HopLink) -> None:
        task = self._preparing.pop(link, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
