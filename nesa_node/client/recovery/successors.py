"""Successors: nodes that take over when a node of a chain leaves or dies.

A successor has the session open. The node it succeeds hands over its cache and kept outputs, first
in bulk while the session runs, later the difference. Only in a chain: nodes of a star must not
learn of each other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from nesa_node.client.session.hop import HopLink
from nesa_node.core.errors import NesaError
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.swarm.protocol.stream import peer_timeout

log = get_logger(__name__)

FIRST_SEARCH_PAUSE_S, MAX_SEARCH_PAUSE_S = 5.0, 80.0
"""Pauses between searches after none was found, doubling each time: one search asks members of the
DHT."""

FINAL_HAND_OVER_TIMEOUT_S = 3.0
"""Timeout of the last hand-over, for which a step waits; missing tokens are replayed instead."""

OpenSuccessor = Callable[[HopLink], Awaitable[HopLink | None]]
"""Opens the session at another node with the same blocks; None if there is none."""


class _SuccessorState:
    """Link of a successor, and the tokens per row that it holds for certain."""

    def __init__(self, link: HopLink, rows: int) -> None:
        self.link = link
        self.lengths = [0] * rows
        self._truncations = 0
        self._must_restart = False
        """Whether the last hand-over failed: the next one first empties the successor."""

    def truncate(self, lengths: Sequence[int]) -> None:
        self._truncations += 1
        self.lengths = [min(pair) for pair in zip(self.lengths, lengths, strict=True)]

    async def sync(self, leaver: HopLink) -> None:
        """Let `leaver` hand over what the successor lacks. Raises `NesaError`."""
        cuts = self._truncations
        if self._must_restart:
            self.lengths = [0] * len(self.lengths)
        try:
            held = await leaver.hand_over(self.link)
        except NesaError:
            self._must_restart = True
            raise
        self._must_restart = False
        if self._truncations == cuts:
            self.lengths = list(held)
        else:
            # The successor may hold tokens that were rolled back meanwhile.
            self.lengths = [min(pair) for pair in zip(self.lengths, held, strict=True)]


class SuccessorPool:
    """Successors by the link that each succeeds. `close` ends the tasks that prepare them."""

    def __init__(self, rows: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rows = rows
        self._clock = clock
        self._pauses: dict[HopLink, tuple[float, float]] = {}
        """For links without a successor: time of the next search, and the length of that pause."""
        self._ready: dict[HopLink, _SuccessorState] = {}
        self._preparing: dict[HopLink, asyncio.Task[None]] = {}
        self._opening = asyncio.Lock()

    @property
    def peers(self) -> frozenset[PeerId]:
        """Peers of all successors; a peer can be that of one link only."""
        return frozenset(successor.link.hop.peer_id for successor in self._ready.values())

    def prepare(self, link: HopLink, open_successor: OpenSuccessor) -> bool:
        """Prepare a successor of `link` in the background; return whether that is in progress.

        False once an attempt has ended, successful or not.
        """
        task = self._preparing.get(link)
        if task is not None and task.done():
            del self._preparing[link]
            return False
        self._start(link, open_successor)
        return True

    def refresh(self, links: Sequence[HopLink], open_successor: OpenSuccessor) -> None:
        """Update the successors of `links` in the background.

        A link without a successor is skipped for a pause after each attempt.
        """
        for link in links:
            if link not in self._pauses or self._pauses[link][0] <= self._clock():
                self._start(link, open_successor)

    def link_of(self, link: HopLink) -> HopLink | None:
        """Link of the successor of `link`, None if there is none that lives."""
        successor = self._ready.get(link)
        return None if successor is None or successor.link.is_lost else successor.link

    async def take_over(self, link: HopLink) -> tuple[HopLink, tuple[int, ...]]:
        """Give the successor of `link` to the caller, with the tokens per row that it holds.

        If `link` lives, it hands over the difference first. If cancelled, the successor stays here.
        """
        await self._stop(link)
        successor = self._ready[link]
        if not link.is_lost:
            try:
                async with peer_timeout(
                    link.hop.peer_id, FINAL_HAND_OVER_TIMEOUT_S, "handing over"
                ):
                    await successor.sync(link)
            except NesaError as error:
                log.info("final_hand_over_failed", peer=link.hop.peer_id, reason=str(error))
        del self._ready[link]
        return successor.link, tuple(successor.lengths)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget tokens from `lengths` on, as the session does."""
        for successor in self._ready.values():
            successor.truncate(lengths)

    async def keep_only(self, links: Sequence[HopLink]) -> None:
        """Close the successors of all links outside `links`."""
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
                await self._open_successor(link, open_successor)
            if link in self._ready:
                self._pauses.pop(link, None)
                await self._ready[link].sync(link)
                return
        except NesaError as error:
            log.info("hand_over_failed", peer=link.hop.peer_id, reason=str(error))
        if self.link_of(link) is None:
            _, before_s = self._pauses.get(link, (0.0, FIRST_SEARCH_PAUSE_S / 2))
            pause_s = min(2 * before_s, MAX_SEARCH_PAUSE_S)
            self._pauses[link] = self._clock() + pause_s, pause_s

    async def _open_successor(self, link: HopLink, open_successor: OpenSuccessor) -> None:
        async with self._opening:
            lost = self._ready.pop(link, None)
            if lost is not None:
                await lost.link.close()
            opened = await open_successor(link)
            if opened is not None:
                self._ready[link] = _SuccessorState(opened, self._rows)

    async def _stop(self, link: HopLink) -> None:
        task = self._preparing.pop(link, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
