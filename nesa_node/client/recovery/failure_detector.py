"""Failure detection: probing of hops that owe an answer, and search for replacements meanwhile.

The rules are in `Suspicion`; `docs/decisions/019` gives the reasons. The search opens nothing: a
false alarm costs each candidate a ping. Candidates that answer are already connected when the chain
is repaired, and the rest is not tried.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager

from nesa_node.client.recovery.suspicion import (
    MAX_LATE_S,
    POLL_INTERVAL_S,
    PROBE_INTERVAL_S,
    HopState,
    Suspicion,
    SuspicionEvent,
)
from nesa_node.client.routing.node_selection import NodeSelector, nodes_with
from nesa_node.client.routing.planner import Hops
from nesa_node.client.session.hop import HopLink
from nesa_node.core.errors import PeerUnreachableError
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.swarm.dht.sealing import FailureKind
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.link_measurements import ping
from nesa_node.swarm.p2p.tasks import TaskSet
from nesa_node.swarm.protocol.messages import Pong
from nesa_node.topology.snapshot import NodeState, Snapshot

log = get_logger(__name__)

CANDIDATE_PING_TIMEOUT_S = 2.0
"""Timeout of connecting to a candidate and pinging it, in seconds."""
SEARCH_INTERVAL_S = 1.0
"""Seconds between rounds while no replacement is found."""
MAX_PINGED_CANDIDATES = 24
"""Most candidates that are pinged, the nearest first: each may cost a new connection."""


class ReplacementSearch:
    """Search for replacements of the hops that are silent now, one at a time."""

    def __init__(self, swarm: Swarm, selector: NodeSelector) -> None:
        self.replaceable: frozenset[PeerId] = frozenset()
        """Hops that nodes which have answered could replace; empty until such nodes are found."""
        self.silent_peers: frozenset[PeerId] = frozenset()
        """Silent nodes to be replaced."""
        self._swarm = swarm
        self._selector = selector
        self._choices: tuple[frozenset[PeerId], ...] = ()
        self._pinged: set[PeerId] = set()
        self._answered: set[PeerId] = set()
        self._task: asyncio.Task[None] | None = None
        self._cancelled_tasks: set[asyncio.Task[None]] = set()
        """Cancelled tasks that have not ended."""

    @property
    def has_found(self) -> bool:
        """Whether nodes that have answered could repair the chain."""
        return bool(self.replaceable)

    def start(self, hops: Hops, *choices: frozenset[PeerId]) -> None:
        """Search for nodes that could replace all hops of one of `choices`.

        A running search for the same choices continues. Several choices mean that replacing any one
        of them suffices.
        """
        if choices != self._choices:
            self._cancel_task()
            self._choices, self.silent_peers = choices, frozenset().union(*choices)
            self.replaceable = frozenset()
            self._task = asyncio.create_task(self._search(hops), name="replacement-search")

    def stop(self) -> None:
        """End the search and forget its result: no hop is silent, or the chain is repaired."""
        self._cancel_task()
        self._choices, self.silent_peers, self.replaceable = (), frozenset(), frozenset()
        self._pinged.clear()
        self._answered.clear()

    def exclude_unreachable(self) -> frozenset[PeerId]:
        """Exclude candidates that did not answer from the next plan; return them."""
        unreachable = frozenset(self._pinged - self._answered)
        self._selector.exclude_for_a_while(unreachable)
        return unreachable

    async def close(self) -> None:
        """End the search and wait for its tasks."""
        self.stop()
        await asyncio.gather(*self._cancelled_tasks, return_exceptions=True)

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._cancelled_tasks.add(self._task)
            self._task.add_done_callback(self._cancelled_tasks.discard)
            self._task = None

    async def _search(self, hops: Hops) -> None:
        try:
            while not self.has_found:
                snapshot = await self._selector.fetch_from_one_member()
                async with asyncio.TaskGroup() as asking:
                    for node in self._candidates(snapshot, hops):
                        asking.create_task(self._ping_candidate(node, snapshot, hops))
                if not self.has_found:
                    await asyncio.sleep(SEARCH_INTERVAL_S)
        except Exception:  # edge of a task: the session still repairs its chain without it
            log.exception("replacement_search_failed")

    def _candidates(self, snapshot: Snapshot, hops: Hops) -> list[NodeState]:
        """Nodes outside `hops` that hold some of the silent nodes' blocks, the nearest first."""
        rtt_ms = self._swarm.rtts.rtt_ms
        used = {hop.peer_id for hop in hops}
        lost = [(hop.span.start, hop.span.end) for hop in hops if hop.peer_id in self.silent_peers]
        holders = nodes_with(lost, [node for node in snapshot.nodes if node.peer_id not in used])
        return sorted(
            holders, key=lambda n: (math.isnan(rtt_ms(n.peer_id)), rtt_ms(n.peer_id), n.peer_id)
        )[:MAX_PINGED_CANDIDATES]

    async def _ping_candidate(self, node: NodeState, snapshot: Snapshot, hops: Hops) -> None:
        self._pinged.add(node.peer_id)
        if node.peer_id not in self._answered:
            try:
                await ping(
                    self._swarm.transport,
                    node.peer_id,
                    node.addresses,
                    timeout_s=CANDIDATE_PING_TIMEOUT_S,
                    pings=1,
                )
            except (PeerUnreachableError, OSError):
                return
            self._answered.add(node.peer_id)
        for gone in self._choices:
            kept = tuple(hop for hop in hops if hop.peer_id not in gone)
            if not self.has_found and await self._selector.can_fill(snapshot, kept, self._answered):
                self.replaceable = gone


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
