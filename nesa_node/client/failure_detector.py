"""Failure detection: probing of hops that owe an answer, and attribution of faults.

The rules are in `Suspicion`; `docs/decisions/019` gives the reasons.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from nesa_node.client.hop import HopLink
from nesa_node.client.replacements import ReplacementSearch
from nesa_node.client.suspicion import (
    MAX_LATE_S,
    PROBE_EVERY_S,
    TICK_S,
    HopState,
    Suspicion,
    SuspicionEvent,
)
from nesa_node.core.logging import get_logger
from nesa_node.swarm.tasks import TaskSet

log = get_logger(__name__)

_SILENT = frozenset({HopState.SUSPECTED, HopState.LOST})


class FailureDetector:
    """Failure detector of one session. `search` looks for replacements of silent hops."""

    def __init__(
        self, search: ReplacementSearch, suspicions: Counter[SuspicionEvent] | None = None
    ) -> None:
        """`suspicions` counts suspicions by outcome."""
        self.suspicion = Suspicion(time.monotonic, suspicions)
        self._search = search

    def silent(self, chain: Sequence[HopLink]) -> list[HopLink]:
        """Links of `chain` with a late answer to a probe."""
        return [link for link in chain if self.suspicion.state(link) in _SILENT]

    def probe_every_s(self, links: Sequence[HopLink]) -> float:
        """Seconds until `links` are to be checked again."""
        trusted = all(self.suspicion.state(link) is HopState.TRUSTED for link in links)
        return PROBE_EVERY_S if trusted else TICK_S

    async def look(self, links: Sequence[HopLink], chain: Sequence[HopLink]) -> bool:
        """Probe `links` of `chain`, and search for replacements of its silent hops.

        Returns whether the silent hops were failed.
        """
        states = [await self._examine(link) for link in links]
        silent = self.silent(chain)
        if silent:
            self.look_for_replacements(chain, silent)
        if HopState.LOST not in states or self._may_answer(chain):
            return False
        for link in silent:
            silent_s = self.suspicion.silent_s(link)
            link.lose(f"{link.hop.peer_id} did not answer for {silent_s:.1f} s")
        return True

    def look_for_replacements(self, chain: Sequence[HopLink], *choices: Sequence[HopLink]) -> None:
        """Search for nodes that answer and could replace all links of one of `choices`."""
        gone = (frozenset(link.hop.peer_id for link in links) for links in choices)
        self._search.begin(tuple(link.hop for link in chain), *gone)

    @asynccontextmanager
    async def watching(
        self, chain: Sequence[HopLink], on_given_up: Callable[[], None]
    ) -> AsyncIterator[None]:
        """Fail links of `chain` that owe an answer and are silent, while the block runs.

        `on_given_up` is called after each failure of links.
        """
        tasks = TaskSet()
        tasks.start(self._watch(chain, on_given_up), name="watch-answers")
        try:
            yield
        finally:
            await tasks.close()
            self._note_answers(chain)

    async def _watch(self, chain: Sequence[HopLink], on_given_up: Callable[[], None]) -> None:
        pause_s = MAX_LATE_S
        while True:
            due_at = self.suspicion.now + pause_s
            await asyncio.sleep(pause_s)
            self.suspicion.overslept(self.suspicion.now - due_at)
            self._note_answers(chain)
            owing = [link for link in chain if link.owes_answer]
            if await self.look(owing, [link for link in chain if link.lost is None]):
                on_given_up()
            pause_s = self.probe_every_s(owing)

    def _note_answers(self, chain: Sequence[HopLink]) -> None:
        self.suspicion.progress(
            link for link in chain if link.lost is None and not link.owes_answer
        )
        if not self.silent([link for link in chain if link.lost is None]):
            self._search.end()

    def _may_answer(self, chain: Sequence[HopLink]) -> bool:
        """Whether another late hop may still answer: a chain that includes a lost hop cannot be
        repaired.
        """
        waiting = (HopState.PROBED, HopState.SUSPECTED)
        return any(
            self.suspicion.state(link) in waiting
            and self.suspicion.silent_s(link) < self.suspicion.lost_after_s
            for link in chain
        )

    async def _examine(self, link: HopLink) -> HopState:
        """Probe a hop, or evaluate its pending probe; return its state."""
        suspicion, heard = self.suspicion, link.heard_bytes
        if suspicion.wants_probe(link):
            suspicion.probed(link, heard)
            await link.probe(secrets.randbits(32), suspicion.now)
        before, silent_s = suspicion.state(link), suspicion.silent_s(link)
        state = suspicion.look(
            link, heard, replaceable=self._search.found, behind_s=link.probe_way_s
        )
        if state is HopState.SUSPECTED and before is HopState.PROBED:
            # The session's stream may be full of replayed steps, behind which the probe waits.
            link.probe_beside()
        if state is not before and not _SILENT.isdisjoint((state, before)):
            log.info("hop_" + state.value, peer=link.hop.peer_id, silent_s=round(silent_s, 2))
        return state
