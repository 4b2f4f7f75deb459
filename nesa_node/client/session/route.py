"""Route of a session: its links, and their repair after failures."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial

from nesa_node.client.recovery.failure_detector import (
    FailureDetector,
    FaultAttribution,
    ReplacementSearch,
)
from nesa_node.client.recovery.successors import SuccessorPool
from nesa_node.client.recovery.suspicion import SuspicionEvent
from nesa_node.client.routing.node_selection import NodeSelector
from nesa_node.client.routing.planner import ChainPlanner
from nesa_node.client.routing.request import RouteRequest
from nesa_node.client.session.base import PrefixStart
from nesa_node.client.session.hop import LINK_TIMEOUT_S, OPEN_TIMEOUT_S, HopLink, LinkState
from nesa_node.client.session.hop_opening import HopOpener, close_links
from nesa_node.core.errors import PeerUnreachableError, RemoteError
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger, session_name
from nesa_node.core.wait_tracking import track_wait, untracked
from nesa_node.routing.chains import Hop, find_gaps
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.protocol.messages import Link, Prefix, Reorder, Rollback

log = get_logger(__name__)


class SessionRoute:
    """Links in the order of their blocks. `epoch` increases with every change of them. One call at
    a time.
    """

    def __init__(
        self,
        swarm: Swarm,
        request: RouteRequest,
        planner: ChainPlanner,
        on_change: Callable[[], None],
        suspicions: Counter[SuspicionEvent] | None = None,
    ) -> None:
        self.links: list[HopLink] = []
        self.hops: tuple[Hop, ...] = ()
        self.epoch = 0
        self.num_builds = 0
        """How many times the route was built."""
        self.lost_audits: list[HopLink] = []
        """Links whose work was to be audited, and that failed before."""
        self.held_tokens: dict[HopLink, tuple[int, ...]] = {}
        """Tokens of each row that nodes hold which the last rebuild added or sent back; they need
        the rest."""
        self.prefix_start = PrefixStart(request.rows, request.prefix)
        self.successors = SuccessorPool(request.rows)
        self._swarm = swarm
        self._request = request
        self._on_change = on_change
        self.selector = NodeSelector(swarm, request, planner)
        self.opener = HopOpener(swarm, request, self.selector, self.prefix_start, on_change)
        self.search = ReplacementSearch(swarm, self.selector)
        self.detector = FailureDetector(self.search, suspicions)
        self.fault_attribution = FaultAttribution()

    @property
    def session(self) -> bytes:
        return self.opener.session

    async def rebuild(
        self,
        lengths: Sequence[int],
        *,
        is_opening: bool = False,
        drop: frozenset[PeerId] = frozenset(),
        needs_output: Callable[[Hop], bool] = lambda _: False,
        on_restart: Callable[[], None] = lambda: None,
        open_timeout_s: float = OPEN_TIMEOUT_S,
    ) -> None:
        """Keep live links outside `drop`, open missing hops, and link all of them.

        Afterwards kept nodes hold `lengths[row]` tokens, and those in `held_tokens` the tokens
        given there. With `is_opening` nothing was sent yet, and all nodes hold
        `prefix_start.start_lengths`. If all have to go back to an earlier start, `on_restart` is
        called first.

        A node that has a successor is replaced by it. In a star, a new hop repeats its outputs only
        where `needs_output(hop)`. Suspected nodes are a last resort, and excluded if all links in
        `drop` could stay. On failure everything opened here is closed; old links stay, but not
        linked to each other. Raises `MissingBlocksError`, `BusyError`, `ContextLengthError`,
        `RefusedError`, `PeerUnreachableError` and `RemoteError`; `SwarmError` once libp2p's daemon
        has ended.
        """
        with self._swarm.transport.check_alive_during():
            gone = [link for link in self.links if link.is_lost or link.hop.peer_id in drop]
            self._record_failures(gone)
            held = await self._take_successors(gone, lengths)
            fresh = list(held)
            try:
                await self._close_links([link for link in gone if link.is_lost])
                kept = [*(link for link in self.links if link not in gone), *held]
                # Live links that do not leave are better than suspected nodes.
                optional = bool(gone) and all(
                    link.state not in (LinkState.LOST, LinkState.LEAVING) for link in gone
                )
                hops, addresses = await self._plan_hops(
                    kept, drop, may_ping=is_opening, exclude_suspects=optional
                )
                if not {link.hop for link in kept} <= set(hops):
                    # No plan includes the kept links: start over with other nodes or other spans.
                    await close_links(fresh)
                    await self.leave_all_nodes()
                    kept, held, fresh = [], {}, []
                self.epoch += 1
                known = {link.hop: link for link in kept}
                opened = await self.opener.open_hops(
                    hops, known, addresses, self.epoch, open_timeout_s, self.search
                )
                fresh += opened.values()
                links = [known.get(hop) or opened[hop] for hop in hops]
                reused = [self.prefix_start.held_tokens(link.opened) for link in opened.values()]
                reached = [*held.values(), *reused]
                sent = None if is_opening else lengths
                if self.prefix_start.agree_on_start(reached, sent, all_new=not kept):
                    opened = known | opened
                    on_restart()
                held |= dict.fromkeys(opened.values(), tuple(self.prefix_start.start_lengths))
                for link, start_lengths in held.items():
                    link.start_lengths = start_lengths
                self.num_builds += 1
                await self._link_hops(
                    links,
                    held,
                    self.prefix_start.start_lengths if is_opening else lengths,
                    needs_output,
                )
            except BaseException:
                await close_links(fresh)
                raise
            dropped = [link for link in self.links if link not in links]
            self._set_links(links)
            self.held_tokens = held
            await close_links(dropped)
            await self.successors.keep_only(links)

    def exclude_silent_nodes(self) -> None:
        """Keep nodes and successors that did not answer the search out of the repaired chain."""
        unreachable = self.search.exclude_unreachable()
        for link in self.links:
            successor = self.successors.link_of(link)
            if successor is not None and successor.hop.peer_id in unreachable:
                successor.fail(f"{successor.hop.peer_id} did not answer a ping")
        self.search.stop()

    async def rollback(self, lengths: Sequence[int]) -> None:
        """Truncate every node's cache. Steps may follow at once: no answer is waited for.

        Nodes of protocol 1.9 or older are waited for in a chain, where a step could reach one of
        them before its rollback does. Raises `PeerUnreachableError` or `RemoteError`.
        """
        self.epoch += 1
        self.prefix_start.truncate(lengths)
        self.successors.truncate(lengths)
        for link in self.links:
            link.start_lengths = [
                min(each) for each in zip(link.start_lengths, lengths, strict=True)
            ]
        message = Rollback(epoch=self.epoch, lengths=tuple(lengths))
        if self._request.is_chain and not all(link.takes_early_steps for link in self.links[1:]):
            return await self._start_epoch(message, "the nodes to roll back")
        sent = [link.send_rollback(message) for link in self.links]
        for result in await asyncio.gather(*sent, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def reorder(self, sources: Sequence[int]) -> None:
        """Let each row continue as a copy of row `sources[row]` at every node.

        Raises `PeerUnreachableError` or `RemoteError`: then some nodes may have done so already.
        """
        self.epoch += 1
        self.prefix_start.reorder(sources)
        self.successors.truncate([0] * self._request.rows)
        for link in self.links:
            link.start_lengths = [link.start_lengths[source] for source in sources]
        message = Reorder(epoch=self.epoch, sources=tuple(sources))
        await self._start_epoch(message, "the nodes to reorder rows")

    def prepare_successor(self, link: HopLink) -> bool:
        """See `SuccessorPool.prepare`."""
        return self.successors.prepare(link, self._open_successor)

    def refresh_successors(self) -> None:
        """Update the standbys of all links in the background."""
        self.successors.refresh(self.links, partial(self._open_successor, is_standby=True))

    async def leave_all_nodes(self) -> None:
        """Close all links and take a new session id; lost nodes are avoided in the next rebuild."""
        self._record_failures(self.links)
        await self.close()
        before = session_name(self.session)
        self.opener.renew_session_id()
        log.info("session_renamed", before=before, now=session_name(self.session))

    async def close(self, prefix: Prefix = ()) -> None:
        """Close all links. `prefix` has digests of the rows' tokens, for nodes' prefix caches."""
        self.search.stop()
        await self.successors.close()
        await self._close_links(self.links, prefix)
        await self.search.close()

    def _set_links(self, links: list[HopLink]) -> None:
        self.links = links
        self.hops = tuple(link.hop for link in links)

    def _record_failures(self, links: Sequence[HopLink]) -> None:
        for link in links:
            if (failure := link.failure) is not None:
                is_lost = link.is_audited and not failure.had_announced
                if is_lost and link not in self.lost_audits:
                    self.lost_audits.append(link)
                self.selector.record_failure(
                    link.hop.peer_id,
                    failure.reason,
                    failure.kind,
                    report=not failure.had_announced,
                )

    async def _plan_hops(
        self,
        kept: Sequence[HopLink],
        drop: frozenset[PeerId],
        *,
        may_ping: bool,
        exclude_suspects: bool,
    ) -> tuple[tuple[Hop, ...], Mapping[PeerId, tuple[str, ...]]]:
        """Hops that include those of `kept` if possible, and the addresses of new nodes."""
        hops = tuple(sorted((link.hop for link in kept), key=lambda hop: hop.span.start))
        if hops and not find_gaps(self._request.span, hops):
            return hops, {}
        return await self.selector.plan_hops(
            hops, drop, session=self.session, may_ping=may_ping, exclude_suspects=exclude_suspects
        )

    async def _take_successors(
        self, gone: Sequence[HopLink], lengths: Sequence[int]
    ) -> dict[HopLink, tuple[int, ...]]:
        """Take the successors of the links `gone`; return the tokens per row that each holds."""
        held: dict[HopLink, tuple[int, ...]] = {}
        try:
            for link in gone:
                if self.successors.link_of(link) is not None:
                    successor, reached = await self.successors.take_over(link)
                    held[successor] = tuple(map(min, reached, lengths))
            if len(held) < len(gone):
                # A successor takes part only once, but may be needed here as a regular hop.
                await self.successors.close()
        except BaseException:
            await close_links(list(held))
            raise
        return held

    async def _open_successor(self, link: HopLink, *, is_standby: bool = False) -> HopLink | None:
        """See `OpenSuccessor`. A standby does not fail together with its node, where it can be.

        Raises as `rebuild` does.
        """
        with untracked():
            at = self.links.index(link)
            others = tuple(other.hop for other in self.links if other is not link)
            hops, addresses = await self.selector.plan_hops(
                others,
                frozenset({link.hop.peer_id, *self.successors.peers}),
                standby_of=link.hop if is_standby else None,
            )
            if len(hops) != len(self.links) or hops[at].span != link.hop.span:
                return None
            hop, before = hops[at], hops[at - 1] if at else None
            return await self.opener.open_hop(
                hop,
                before,
                addresses[hop.peer_id],
                self.epoch,
                OPEN_TIMEOUT_S,
                donor=link.hop.peer_id,
            )

    async def _link_hops(
        self,
        links: Sequence[HopLink],
        held: dict[HopLink, tuple[int, ...]],
        lengths: Sequence[int],
        needs_output: Callable[[Hop], bool],
    ) -> None:
        everything = tuple(lengths)
        chained = self._request.is_chain
        requests = []
        for i, link in enumerate(links):
            after = links[i + 1] if chained and i + 1 < len(links) else None
            if after is not None:
                lacks = held.get(after, everything)
            else:
                again = not chained and link in held and needs_output(link.hop)
                lacks = held[link] if again else everything
            message = Link(
                epoch=self.epoch,
                upstream=links[i - 1].hop.peer_id if chained and i else None,
                downstream=None if after is None else after.as_downstream(),
                lengths=held.get(link, everything),
                emit_from=lacks,
            )
            requests.append(self._link_hop(link, message, after))
        await self._run_requests(links, requests)

    async def _link_hop(self, link: HopLink, message: Link, after: HopLink | None) -> None:
        try:
            with track_wait(
                "the node to link with its neighbours",
                blocks=(link.hop.span,),
                peers=(link.hop.peer_id,),
                limit_s=LINK_TIMEOUT_S,
            ):
                await link.link(message)
        except PeerUnreachableError as error:
            self.selector.record_failure(link.hop.peer_id, str(error))
            raise
        except RemoteError as error:
            if error.code == "downstream_lost" and after is not None:
                self.fault_attribution.fail_link_pair(link, after, str(error))
                for either in (link, after):
                    if either.failure is not None:
                        self.selector.record_failure(
                            either.hop.peer_id, either.failure.reason, "stalled"
                        )
            else:
                # It cannot be brought to the same state as the rest.
                link.fail(str(error))
                self.selector.record_failure(link.hop.peer_id, str(error))
            raise

    async def _run_requests(
        self, links: Sequence[HopLink], requests: Sequence[Coroutine[object, object, None]]
    ) -> None:
        """Wait for all `requests` to `links`, which fail if silent; raise the first failure."""
        async with self.detector.watch_answers(links, self.exclude_silent_nodes):
            results = await asyncio.gather(*requests, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            del results  # it refers to the raised error, and its traceback to this frame
            raise failures.pop(0)

    async def _start_epoch(self, message: Rollback | Reorder, what: str) -> None:
        peers = [link.hop.peer_id for link in self.links]
        with track_wait(what, blocks=(self._request.span,), peers=peers, limit_s=LINK_TIMEOUT_S):
            requests = [link.start_epoch(message) for link in self.links]
            await self._run_requests(self.links, requests)

    async def _close_links(self, links: Sequence[HopLink], prefix: Prefix = ()) -> None:
        gone = list(links)
        self._set_links([link for link in self.links if link not in gone])
        await close_links(gone, prefix)
