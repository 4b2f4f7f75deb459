"""Selection of nodes for a session, by records, reports and the session's own experience."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import TypeVar, get_args

from nesa_node.client.hop import HopLink
from nesa_node.client.planner import Hops, Plan, Planner, View
from nesa_node.client.request import RouteRequest
from nesa_node.core.choices import Precision
from nesa_node.core.errors import (
    BusyError,
    ContextLengthError,
    MissingBlocksError,
    NesaError,
    RefusedError,
    RemoteError,
)
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.core.waiting import note_failure, waiting
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.notices import FailureKind
from nesa_node.topology.snapshot import NodeState, Snapshot

log = get_logger(__name__)
_T = TypeVar("_T")

SUSPECT_S = 15.0
"""Seconds for which a failed or busy peer is used only where no other node holds its blocks."""

RETURN_S = 600.0
"""Seconds for which a session does not return to a node that it left for a faster one."""

MOST_AT_ONCE = 64
"""Most nodes for which planning runs on the event loop; with more it would block it too long."""

WORTH_MOVING = 1.1
"""Smallest ratio of step times for which a session moves to a better chain."""

PASSING = frozenset({"draining", "wrong_blocks"})
"""Refusal codes of a node that is leaving or has moved since the lookup: it may be usable later."""


class Nodes:
    """Selects nodes for one session, and plans its hops."""

    def __init__(self, swarm: Swarm, request: RouteRequest, planner: Planner) -> None:
        self._swarm = swarm
        self._request = request
        self._planner = planner
        self._suspects: dict[PeerId, float] = {}
        self._unfit: dict[PeerId, RefusedError] = {}
        self._left_at: dict[PeerId, float] = {}
        self.joining: tuple[NodeState, ...] = ()
        """Nodes that are loading, or moving to, blocks that the last failed plan lacked."""
        self.served: tuple[str, ...] = ()
        """Models that the swarm serves, fetched where no node serves this one."""
        self._news_at = -math.inf
        """Time of the last failure or refusal: older snapshots are not used."""
        self.expected_s: float | None = None
        """Step time that the last plan promises, in seconds."""

    @property
    def suspected(self) -> frozenset[PeerId]:
        """Peers that failed, or had no free cache, within the last `SUSPECT_S`."""
        now = time.monotonic()
        # Copied first: the event loop may add one while a thread plans.
        suspects = list(self._suspects.items())
        return frozenset(peer for peer, until in suspects if until > now)

    def suspect(
        self, peer: PeerId, reason: str, kind: FailureKind = "lost", *, tell: bool = True
    ) -> None:
        """Note a failure of `peer`, which is avoided for a while, by later sessions too.

        With `tell` the failure is reported to the swarm.
        """
        log.info("peer_failed", peer=peer, reason=reason)
        if tell:
            note_failure(peer)
            self._swarm.reporter.note(self._request.model_id, peer, kind)
        self._planner.avoidance.failed(peer)
        self._news_at = time.monotonic()
        self._suspects[peer] = self._news_at + SUSPECT_S

    def avoid(self, peers: Iterable[PeerId]) -> None:
        """Plan without `peers` for a while where possible, since they did not answer in time.

        For this session only, without a penalty or a report.
        """
        until = time.monotonic() + SUSPECT_S
        self._suspects |= {peer: max(until, self._suspects.get(peer, 0.0)) for peer in peers}

    def refused(self, peer: PeerId, error: BusyError | RemoteError) -> None:
        """Note that `peer` refused to open the session."""
        self._news_at = time.monotonic()
        if isinstance(error, RemoteError) and error.code not in PASSING:
            # A copy: the error's traceback refers to this object.
            self._unfit[peer] = RefusedError(error.code, str(error))
        else:
            # Longer than the node asks for: other nodes come first, and as a last resort it is
            # asked anyway.
            self._suspects[peer] = self._news_at + SUSPECT_S
        record = self._swarm.directory.record(peer)
        if (
            isinstance(error, BusyError)
            and record is not None
            and record.free_cache_tokens >= self._request.tokens
            and self._planner.closed_doors.refused(peer, record.seq)
        ):
            self._swarm.reporter.note(self._request.model_id, peer, "refused")

    def accepted(self, link: HopLink) -> None:
        """Note that the node opened the session."""
        self._planner.closed_doors.accepted(link.hop.peer_id, link)

    async def plan(
        self,
        keep: Hops,
        drop: frozenset[PeerId],
        *,
        session: bytes = b"",
        may_ask: bool = False,
        no_suspects: bool = False,
    ) -> tuple[Hops, Mapping[PeerId, tuple[str, ...]]]:
        """Plan hops that include `keep`, or new hops if that fails; also return all nodes'
        addresses.

        `may_ask` allows pings before planning, for which a repair has no time. `no_suspects`
        excludes suspected peers even as a last resort. The decision is recorded under `session`, if
        given. Raises `MissingBlocksError`, `ModelMismatchError`, `ContextLengthError` or
        `RefusedError`, by the reason why the blocks cannot be had.
        """
        found = await self._mend_quickly(keep) if not may_ask and not drop else None
        if found is None:
            view = await self._view(may_ask=may_ask)
            self.served = ()
            if not view.snapshot.nodes:
                self.served = await self._planner.lookup.check_copy(self._request.model_id)
            fill = self._fill_around if no_suspects else self._fill
            plan = await _aside(view.snapshot, partial(fill, view, keep, drop))
        else:
            view, plan = found
        addresses = {node.peer_id: node.addresses for node in view.snapshot.nodes}
        costing = partial(self._planner.step_s, view, self._request, plan.hops)
        self.expected_s = await _aside(view.snapshot, costing)
        if session:
            reason = "a chain to begin with" if not keep and not drop else "nodes left or failed"
            self._planner.decided(session, reason, view, plan.asked, plan.hops)
        return plan.hops, addresses

    async def glance(self) -> Snapshot:
        """Snapshot by the first member of the DHT to answer."""
        return await self._planner.lookup.glance(self._request)

    async def can_fill(self, snapshot: Snapshot, keep: Hops, answered: Collection[PeerId]) -> bool:
        """Whether nodes of `answered` can complete `keep` to a chain."""
        view = await self._planner.view(snapshot, self._request, may_ask=False)
        usable = {hop.peer_id for hop in keep}.union(answered)
        others = frozenset(n.peer_id for n in snapshot.nodes if n.peer_id not in usable)
        planning = partial(
            self._planner.plan,
            view,
            self._request,
            keep,
            exclude=self._barred(snapshot, others) | self.suspected,
            min_free_tokens=0,
        )
        try:
            await _aside(snapshot, planning)
        except MissingBlocksError:
            return False
        return True

    async def _mend_quickly(self, keep: Hops) -> tuple[View, Plan] | None:
        """Plan with unsuspected nodes of a quick snapshot; None if they do not suffice.

        A full fetch asks every member of the DHT that stores the records and waits seconds for dead
        ones, which are likely the nodes to be replaced.
        """
        snapshot = await self.glance()
        view = await self._planner.view(snapshot, self._request, may_ask=False)
        planning = partial(self._fill_around, view, keep, frozenset())
        try:
            return view, await _aside(snapshot, planning)
        except MissingBlocksError:
            return None

    async def to_leave(self, hops: Hops, step_s: float) -> frozenset[PeerId]:
        """Peers of `hops` to leave for a chain faster by `WORTH_MOVING`; empty if there is none.

        `step_s` is the current step time. The hops are measured again first, and recently left
        nodes are not considered. Raises as `plan` does.
        """
        request, planner = self._request, self._planner
        snapshot = await planner.lookup.fetch_now(request)
        await planner.recheck(snapshot, request, hops)
        view = planner.without_own_load(await self._view(may_ask=True), hops, request, step_s)
        leave = await _aside(view.snapshot, partial(self._best_to_leave, view, hops))
        self._left_at |= dict.fromkeys(leave, time.monotonic())
        return leave

    def _best_to_leave(self, view: View, hops: Hops) -> frozenset[PeerId]:
        request, planner = self._request, self._planner
        now_s = planner.step_s(view, request, hops)
        if now_s is None:
            return frozenset()
        since = time.monotonic() - RETURN_S
        left = {peer for peer, at in list(self._left_at.items()) if at > since}
        best: tuple[float, frozenset[PeerId]] = (now_s / WORTH_MOVING, frozenset())
        for leave in self._worth_leaving(view, hops, left):
            kept = tuple(hop for hop in hops if hop.peer_id not in leave)
            try:
                plan = self._fill_around(view, kept, leave | left)
            except MissingBlocksError:
                continue
            found_s = planner.step_s(view, request, plan.hops)
            if found_s is not None:
                best = min(best, (found_s, leave), key=lambda each: each[0])
        log.info("chain_reconsidered", step_ms=now_s * 1000, best_ms=best[0] * 1000)
        return best[1]

    def _worth_leaving(
        self, view: View, hops: Hops, left: set[PeerId]
    ) -> tuple[frozenset[PeerId], ...]:
        """Sets of peers to try to leave: all hops outside the best chain, then each alone."""
        try:
            ideal = self._fill_around(view, (), frozenset(left))
        except MissingBlocksError:
            return ()
        gone = frozenset(hop.peer_id for hop in hops) - {hop.peer_id for hop in ideal.hops}
        alone = (frozenset({peer}) for peer in sorted(gone))
        return (gone, *alone) if len(gone) > 1 else tuple(alone)

    def _fill_around(self, view: View, keep: Hops, drop: frozenset[PeerId]) -> Plan:
        """Complete `keep` with unsuspected nodes with free cache. Raises `MissingBlocksError`."""
        return self._planner.plan(
            view,
            self._request,
            keep,
            exclude=self._barred(view.snapshot, drop) | self.suspected,
            min_free_tokens=self._request.tokens,
        )

    async def _view(self, *, may_ask: bool) -> View:
        request = self._request
        lookup = self._planner.lookup
        with waiting("the DHT to list the nodes of the model", blocks=(request.span,)):
            if may_ask:
                snapshot = await lookup.fetch(request, after=self._news_at)
            else:
                snapshot = await lookup.fetch_now(request, reports=False)
        return await self._planner.view(snapshot, request, may_ask=may_ask)

    def _fill(self, view: View, keep: Hops, drop: frozenset[PeerId]) -> Plan:
        snapshot, tokens = view.snapshot, self._request.tokens
        suspects = self.suspected
        barred = self._barred(snapshot, drop)
        first: MissingBlocksError | None = None
        # Records lag by some seconds: as a last resort their free cache is ignored.
        good = barred | suspects
        # A new chain with free cache precedes a repair with a suspected node: that node may be the
        # only one that fits the kept hops, while other holders of its blocks fit a new chain.
        for hops, free, exclude in (
            *((keep, tokens, good), (keep, 0, good), ((), tokens, good)),
            *((keep, tokens, barred), (keep, 0, barred)),
            *(((), 0, good), ((), tokens, barred), ((), 0, barred)),
        ):
            try:
                return self._planner.plan(
                    view, self._request, hops, exclude=exclude, min_free_tokens=free
                )
            except MissingBlocksError as error:
                first = first or error
        assert first is not None
        self._news_at = time.monotonic()
        self.joining = tuple(
            node
            for node in snapshot.joining
            if any(node.span.start < end and start < node.span.end for start, end in first.missing)
        )
        try:
            raise self._why_missing(snapshot, first)
        finally:
            del first  # its traceback refers to this frame

    def _unwanted(self, snapshot: Snapshot) -> frozenset[PeerId]:
        only = self._request.only
        peers = frozenset(node.peer_id for node in snapshot.nodes)
        return frozenset() if only is None else peers - only

    def _barred(self, snapshot: Snapshot, drop: frozenset[PeerId]) -> frozenset[PeerId]:
        """Peers that the session cannot use under any circumstances."""
        request = self._request
        unfit = {
            node.peer_id
            for node in snapshot.nodes
            if node.total_cache_tokens < request.tokens
            or self._is_coarse(node)
            or (request.only is not None and node.peer_id not in request.only)
        }
        return drop.union(self._unfit, unfit)

    def _is_coarse(self, node: NodeState) -> bool:
        """Whether the node's weights are coarser than requested, or of an unknown quantization."""
        order = get_args(Precision)
        precision = "full" if node.quantization == "none" else node.quantization
        return precision not in order[order.index(self._request.min_precision) :]

    def _why_missing(self, snapshot: Snapshot, error: MissingBlocksError) -> NesaError:
        """The error to raise: no holder of the blocks, none precise enough, none large enough, or
        refusals.
        """
        request = self._request
        holders = [
            node
            for node in snapshot.nodes
            if any(node.span.start < end and start < node.span.end for start, end in error.missing)
        ]
        precise = [node for node in holders if not self._is_coarse(node)]
        if holders and not precise:
            found = ", ".join(sorted({node.quantization for node in holders}))
            return RefusedError(
                "too_coarse",
                f"the nodes with blocks {error.missing[0][0]}:{error.missing[0][1]} hold them in "
                f"{found}, and {request.min_precision} was asked for at least (--min-precision)",
            )
        holders = precise
        refusals = [self._unfit[n.peer_id] for n in holders if n.peer_id in self._unfit]
        fitting = [n for n in holders if n.peer_id not in self._unfit]
        if fitting and max(node.total_cache_tokens for node in fitting) < request.tokens:
            most = max(node.total_cache_tokens for node in fitting) // request.rows
            return ContextLengthError(
                f"a session of {request.max_tokens} tokens in {request.rows} rows was asked for; "
                f"the nodes with blocks {error.missing[0][0]}:{error.missing[0][1]} promise at "
                f"most {most} per row"
            )
        if refusals and not fitting:
            return RefusedError(refusals[0].code, str(refusals[0]))
        return error


async def _aside(snapshot: Snapshot, planning: Callable[[], _T]) -> _T:
    """Run `planning`, in a thread if `snapshot` has more than `MOST_AT_ONCE` nodes."""
    if len(snapshot.nodes) > MOST_AT_ONCE:
        return await asyncio.to_thread(planning)
    return planning()
