"""Failure detection: probing of hops that owe an answer, and attribution of faults.

The rules are in `Suspicion`; `docs/decisions/019` gives the reasons.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager

from nesa_node.client.recovery.replacement_search import ReplacementSearch
from nesa_node.client.recovery.suspicion import (
    MAX_LATE_S,
    POLL_INTERVAL_S,
    PROBE_INTERVAL_S,
    HopState,
    Suspicion,
    SuspicionEvent,
)
from nesa_node.client.session.hop import HopLink
from nesa_node.core.errors import PeerUnreachableError
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.swarm.dht.notices import FailureKind
from nesa_node.swarm.p2p.tasks import TaskSet
from nesa_node.swarm.protocol.messages import Pong

log = get_logger(__name__)

_SILENT_STATES = frozenset({HopState.SUSPECTED, HopState.LOST})


class FailureDetector:
    """Failure detector of one session. `suspicions` counts suspicions by outcome."""

    def __init__(
        self, search: ReplacementSearch, suspicions: Counter[SuspicionEvent] | None = None
    ) -> None:
        self.suspicion = Suspicion(time.monotonic, suspicions)
        self._search = search

    def silent_links(self, chain: Sequence[HopLink]) -> list[HopLink]:
        """Links of `chain` with a late answer to a probe."""
        return [link for link in chain if self.suspicion.state(link) in _SILENT_STATES]

    def probe_interval_s(self, links: Sequence[HopLink]) -> float:
        """Seconds until `links` are to be checked again."""
        trusted = all(self.suspicion.state(link) is HopState.TRUSTED for link in links)
        return PROBE_INTERVAL_S if trusted else POLL_INTERVAL_S

    async def probe_links(self, links: Sequence[HopLink], chain: Sequence[HopLink]) -> bool:
        """Probe `links` of `chain`, and search for replacements of its silent hops; return whether
        those were failed.
        """
        states = [await self._probe_link(link) for link in links]
        silent = self.silent_links(chain)
        if silent:
            self.search_replacements(chain, silent)
        if HopState.LOST not in states or self._answer_pending(chain):
            return False
        for link in silent:
            silent_s = self.suspicion.silent_s(link)
            link.fail(f"{link.hop.peer_id} did not answer for {silent_s:.1f} s")
        return True

    def search_replacements(self, chain: Sequence[HopLink], *choices: Sequence[HopLink]) -> None:
        """Search for nodes that answer and could replace all links of one of `choices`."""
        gone = (frozenset(link.hop.peer_id for link in links) for links in choices)
        self._search.start(tuple(link.hop for link in chain), *gone)

    @asynccontextmanager
    async def watch_answers(
        self, chain: Sequence[HopLink], on_given_up: Callable[[], None]
    ) -> AsyncIterator[None]:
        """Fail links of `chain` that owe an answer and are silent, while the block runs.

        `on_given_up` is called after each failure of links.
        """
        tasks = TaskSet()
        tasks.start(self._probe_pending(chain, on_given_up), name="watch-answers")
        try:
            yield
        finally:
            await tasks.close()
            self._record_answers(chain)

    async def _probe_pending(
        self, chain: Sequence[HopLink], on_given_up: Callable[[], None]
    ) -> None:
        pause_s = MAX_LATE_S
        while True:
            due_at = self.suspicion.now + pause_s
            await asyncio.sleep(pause_s)
            self.suspicion.record_oversleep(self.suspicion.now - due_at)
            self._record_answers(chain)
            owing = [link for link in chain if link.owes_answer]
            if await self.probe_links(owing, [link for link in chain if not link.is_lost]):
                on_given_up()
            pause_s = self.probe_interval_s(owing)

    def _record_answers(self, chain: Sequence[HopLink]) -> None:
        self.suspicion.record_output(
            link for link in chain if not link.is_lost and not link.owes_answer
        )
        if not self.silent_links([link for link in chain if not link.is_lost]):
            self._search.stop()

    def _answer_pending(self, chain: Sequence[HopLink]) -> bool:
        """Whether another late hop may still answer: a chain with a lost hop cannot be repaired."""
        waiting = (HopState.PROBED, HopState.SUSPECTED)
        return any(
            self.suspicion.state(link) in waiting
            and self.suspicion.silent_s(link) < self.suspicion.lost_after_s
            for link in chain
        )

    async def _probe_link(self, link: HopLink) -> HopState:
        """Probe a hop, or evaluate its pending probe; return its state."""
        suspicion, heard = self.suspicion, link.received_bytes
        if suspicion.wants_probe(link):
            suspicion.record_probe(link, heard)
            await link.probe(secrets.randbits(32), suspicion.now)
        before, silent_s = suspicion.state(link), suspicion.silent_s(link)
        state = suspicion.update(
            link, heard, replaceable=self._search.has_found, probe_transit_s=link.probe_transit_s
        )
        if state is HopState.SUSPECTED and before is HopState.PROBED:
            # The session's stream may be full of replayed steps, behind which the probe waits.
            link.probe_on_new_stream()
        if state is not before and not _SILENT_STATES.isdisjoint((state, before)):
            log.info("hop_" + state.value, peer=link.hop.peer_id, silent_s=round(silent_s, 2))
        return state


class FaultAttribution:
    """Decides which hop is replaced when a step does not come back.

    The client sees only the two ends of an exchange between neighbours in a chain: either may have
    lost the step, and either may lie. The downstream hop is replaced first. If the same upstream
    hop fails with its next neighbour as well, before a step completes, it is replaced too. A
    replaced node is avoided for a while only, since it may have been the honest one.
    """

    def __init__(self) -> None:
        self.link_failures: Counter[PeerId] = Counter()
        """Failures since the last completed step, by the upstream hop."""

    def fail_link_pair(
        self,
        upstream: HopLink,
        downstream: HopLink | None,
        reason: str,
        fault: FailureKind = "lost",
    ) -> str:
        """Fail the downstream hop, or both on a repeated failure; return `what`.

        `downstream` is None after the last node: then `upstream` fails.
        """
        peer = upstream.hop.peer_id
        self.link_failures[peer] += 1
        if downstream is None or self.link_failures[peer] > 1:
            upstream.fail(f"{peer}: {reason}", fault)
        if downstream is not None:
            downstream.fail(f"{peer} did not reach {downstream.hop.peer_id}: {reason}", fault)
        return reason

    def fail_stalled_link(
        self,
        upstream: HopLink,
        downstream: HopLink,
        reason: str,
        replaceable: Collection[PeerId],
    ) -> None:
        """Fail the hop of a stalled link that the chain can do without, downstream first.

        `replaceable` contains at least one of both.
        """
        if downstream.hop.peer_id in replaceable:
            self.fail_link_pair(upstream, downstream, reason, "stalled")
        else:
            upstream.fail(reason, "stalled")

    def fail_overdue_hop(
        self, links: Sequence[HopLink], pongs: Sequence[Pong | BaseException], step: int
    ) -> str:
        """Fail the hop that holds up `step`, and return why.

        `links` are the hops that the step passes, in order, with their answers to a ping. A hop
        that did not answer its ping is lost. Otherwise the first hop that has not applied the step
        is blamed together with its predecessor (`fail_link_pair`); the last hop, if all have
        applied it.
        """
        applied: HopLink | None = None
        for link, pong in zip(links, pongs, strict=True):
            if isinstance(pong, BaseException):
                link.fail(str(pong))
                return str(pong)
            if pong.step < step:
                what = "the step never reached it"
                if applied is not None:
                    return self.fail_link_pair(applied, link, what)
                link.fail(what)
                return what
            applied = link
        what = "no output although it applied the step"
        links[-1].fail(what)
        return what


def first_busy_link(
    links: Sequence[HopLink], pongs: Sequence[Pong | BaseException]
) -> HopLink | None:
    """The first hop that reports itself busy; hops after an unreachable one do not count."""
    for link, pong in zip(links, pongs, strict=True):
        if isinstance(pong, PeerUnreachableError):
            return None
        if isinstance(pong, Pong) and pong.busy:
            return link
    return None
