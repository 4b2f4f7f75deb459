"""Which nodes a session may use: what records and reports say, and what it has lived through."""

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
"""A peer that failed is tried again only after this, unless nobody else holds its blocks."""

RETURN_S = 600.0
"""A session does not come back so soon to whom it has moved off."""

MOST_AT_ONCE = 64
"""Among more nodes, planning takes so long that it must not stop the event loop."""

WORTH_MOVING = 1.1
"""How much slower a chain is than the best that a session moves: the third trigger for change."""

PASSING = frozenset({"draining", "wrong_blocks"})
"""Refusals of a node that leaves, or has moved since it was looked up: it may be of use later."""


class Nodes:
    """Plans the hops of one session."""

    def __init__(self, swarm: Swarm, request: RouteRequest, planner: Planner) -> None:
        self._swarm = swarm
        self._request = request
        self._planner = planner
        self._suspects: dict[PeerId, float] = {}
        self._unfit: dict[PeerId, RefusedError] = {}
        self._left_at: dict[PeerId, float] = {}
        self.joining: tuple[NodeState, ...] = ()
        """By the last plan that failed: nodes that still load, or move to, blocks it lacked."""
        self.served: tuple[str, ...] = ()
        """The models that the swarm has, where it was asked since no node has this one."""
        self._news_at = -math.inf
        """Since then it is known that what was found before is not so."""
        self.expected_s: float | None = None
        """What a step should take by the last plan."""

    @property
    def suspected(self) -> frozenset[PeerId]:
        """Who failed, or had no room, lately."""
        now = time.monotonic()
        # A list first: a thread that plans may ask while the event loop adds one.
        suspects = list(self._suspects.items())
        return frozenset(peer for peer, until in suspects if until > now)

    def suspect(
        self, peer: PeerId, reason: str, kind: FailureKind = "lost", *, tell: bool = True
    ) -> None:
        """Remember a failure of `peer`: it is avoided for a while, in later sessions too.

        With `tell` others hear of it.
        """
        log.info("peer_failed", peer=peer, reason=reason)
        if tell:
            note_failure(peer)
            self._swarm.reporter.note(self._request.model_id, peer, kind)
        self._planner.avoidance.failed(peer)
        self._news_at = time.monotonic()
        self._suspects[peer] = self._news_at + SUSPECT_S

    def avoid(self, peers: Iterable[PeerId]) -> None:
        """Plan without `peers` for a while where that can be: they did not answer in time.

        Nothing else is held against them, and other sessions are not told.
        """
        until = time.monotonic() + SUSPECT_S
        self._suspects |= {peer: max(until, self._suspects.get(peer, 0.0)) for peer in peers}

    def refused(self, peer: PeerId, error: BusyError | RemoteError) -> None:
        """Remember that `peer` did not open the session."""
        self._news_at = time.monotonic()
        if isinstance(error, RemoteError) and error.code not in PASSING:
            # Not the error itself: its traceback holds what holds this.
            self._unfit[peer] = RefusedError(error.code, str(error))
        else:
            # Longer than it says: others go first, and without any it is asked again anyway.
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
        """Remember that the node opened the session."""
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
        """Hops that keep `keep`; if nobody fills the gaps so, hops that keep nothing.

        And the addresses of all nodes. With `may_ask` others are asked first how they are: whoever
        mends a chain has no time for it. With `no_suspects` a node that failed lately, or has no
        room, is no last resort. It is written down why `session`, if named, gets its hops.
        Raises `MissingBlocksError`, `ModelMismatchError`, `ContextLengthError` and `RefusedError`,
        by the reason why nobody can fill them.
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
        """Who serves the model, as far as that can be known in a moment."""
        return await self._planner.lookup.glance(self._request)

    async def can_fill(self, snapshot: Snapshot, keep: Hops, answered: Collection[PeerId]) -> bool:
        """Whether nodes of `answered` could join the hops of `keep`."""
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
        """A plan with nodes that nothing speaks against, from a look that takes a moment.

        A whole one asks every member of the DHT that keeps the records, and waits seconds for those
        that are gone: likely the very node that is to be replaced.
        """
        snapshot = await self.glance()
        view = await self._planner.view(snapshot, self._request, may_ask=False)
        planning = partial(self._fill_around, view, keep, frozenset())
        try:
            return view, await _aside(snapshot, planning)
        except MissingBlocksError:
            return None

    async def to_leave(self, hops: Hops, step_s: float) -> frozenset[PeerId]:
        """Whom of `hops` a session should move off, since others are faster by `WORTH_MOVING`.

        Its steps take `step_s` now. The hops are measured anew first, and nobody whom it has moved
        off lately is better. Raises as `plan` does.
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
        """Who of `hops` is not in the best chain there is: all of them, and each alone."""
        try:
            ideal = self._fill_around(view, (), frozenset(left))
        except MissingBlocksError:
            return ()
        gone = frozenset(hop.peer_id for hop in hops) - {hop.peer_id for hop in ideal.hops}
        alone = (frozenset({peer}) for peer in sorted(gone))
        return (gone, *alone) if len(gone) > 1 else tuple(alone)

    def _fill_around(self, view: View, keep: Hops, drop: frozenset[PeerId]) -> Plan:
        """Hops that keep `keep` and have room now. Raises `MissingBlocksError`."""
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
        with waiting("the DHT's answer, who serves the model", blocks=(request.span,)):
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
        # What a record says of free room is some seconds old: as a last resort it is not believed.
        good = barred | suspects
        # A new chain with room comes before a node that has just failed: that may be all that could
        # join what is left, where another holder of its blocks takes part with other ones already.
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
            del first  # its traceback holds this frame

    def _unwanted(self, snapshot: Snapshot) -> frozenset[PeerId]:
        only = self._request.only
        peers = frozenset(node.peer_id for node in snapshot.nodes)
        return frozenset() if only is None else peers - only

    def _barred(self, snapshot: Snapshot, drop: frozenset[PeerId]) -> frozenset[PeerId]:
        """Whom the session may not use whatever there is else."""
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
        """Whether a node computes with weights coarser than asked for, or unheard of."""
        order = get_args(Precision)
        precision = "full" if node.quantization == "none" else node.quantization
        return precision not in order[order.index(self._request.min_precision) :]

    def _why_missing(self, snapshot: Snapshot, error: MissingBlocksError) -> NesaError:
        """Nobody holds the blocks, or those who do have no room, or refused us."""
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
    """`planning` over the nodes of `snapshot`, in a thread where they are many."""
    if len(snapshot.nodes) > MOST_AT_ONCE:
        return await asyncio.to_thread(planning)
    return planning()
