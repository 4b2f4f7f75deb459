"""Selection of nodes for a session, by records, reports and the session's own experience."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar, get_args

from nesa_node.client.routing.measurements import ClosableLink
from nesa_node.client.routing.planner import ChainPlan, ChainPlanner, Hops, PlanningView
from nesa_node.client.routing.request import RouteRequest
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
from nesa_node.core.settings.choices import Precision
from nesa_node.core.wait_tracking import record_failure, track_wait
from nesa_node.routing.chains import Hop
from nesa_node.swarm.dht.sealing import FailureKind
from nesa_node.swarm.node import Swarm
from nesa_node.topology.shape.failure_domains import peers_failing_with
from nesa_node.topology.snapshot import NodeState, Snapshot

log = get_logger(__name__)
_T = TypeVar("_T")

SUSPECT_EXCLUSION_S = 15.0
"""Seconds for which a failed or busy peer is used only where no other node holds its blocks."""

LEFT_NODE_EXCLUSION_S = 600.0
"""Seconds for which a session does not return to a node that it left for a faster one."""

MAX_INLINE_PLAN_NODES = 64
"""Most nodes for which planning runs on the event loop; with more it would block it too long."""

MIN_MOVE_SPEEDUP = 1.1
"""Smallest ratio of step times for which a session moves to a better chain."""

MAX_STANDBY_SLOWDOWN = 1.5
"""Largest ratio of step times for which a standby is outside its node's failure domains."""

TEMPORARY_REFUSALS = frozenset({"draining", "wrong_blocks", "unknown_shard"})
"""Refusal codes of a node that is leaving or has moved since the lookup: it may be usable later."""


class NodeSelector:
    """Selects nodes for one session, and plans its hops."""

    def __init__(self, swarm: Swarm, request: RouteRequest, planner: ChainPlanner) -> None:
        self._swarm = swarm
        self._request = request
        self._planner = planner
        self._suspected_until: dict[PeerId, float] = {}
        self._refusals: dict[PeerId, RefusedError] = {}
        self._left_at: dict[PeerId, float] = {}
        self.joining: tuple[NodeState, ...] = ()
        """Nodes that are loading, or moving to, blocks that the last failed plan lacked."""
        self.served_models: tuple[str, ...] = ()
        """Models that the swarm serves, fetched where no node serves this one."""
        self._stale_before = -math.inf
        """Time of the last failure or refusal: older snapshots are not used."""
        self.expected_s: float | None = None
        """Step time that the last plan promises, in seconds."""

    @property
    def suspected_peers(self) -> frozenset[PeerId]:
        """Peers that failed, or had no free cache, within the last `SUSPECT_EXCLUSION_S`."""
        now = time.monotonic()
        # Copied first: the event loop may add one while a thread plans.
        return frozenset(peer for peer, until in list(self._suspected_until.items()) if until > now)

    def record_failure(
        self, peer: PeerId, reason: str, kind: FailureKind = "lost", *, report: bool = True
    ) -> None:
        """Avoid `peer`, which failed, for a while, in later sessions too; tell the swarm if
        `report`.
        """
        log.info("peer_failed", peer=peer, reason=reason)
        if report:
            record_failure(peer)
            self._swarm.failure_reporter.record_failure(self._request.model_id, peer, kind)
        self._planner.avoidance.record_failure(peer)
        self._stale_before = time.monotonic()
        self._suspected_until[peer] = self._stale_before + SUSPECT_EXCLUSION_S

    def exclude_for_a_while(self, peers: Iterable[PeerId]) -> None:
        """Avoid `peers`, which did not answer in time, in this session, without a report."""
        until = time.monotonic() + SUSPECT_EXCLUSION_S
        self._suspected_until |= {
            peer: max(until, self._suspected_until.get(peer, 0.0)) for peer in peers
        }

    def record_refusal(self, peer: PeerId, error: BusyError | RemoteError) -> None:
        """Note that `peer` refused to open the session."""
        self._stale_before = time.monotonic()
        if isinstance(error, RemoteError) and error.code not in TEMPORARY_REFUSALS:
            # A copy: the error's traceback refers to this object.
            self._refusals[peer] = RefusedError(error.code, str(error))
        else:
            # Longer than the node asks for: other nodes come first, and as a last resort it is
            # asked anyway.
            self._suspected_until[peer] = self._stale_before + SUSPECT_EXCLUSION_S
        record = self._swarm.directory.record(peer)
        if (
            isinstance(error, BusyError)
            and record is not None
            and record.free_cache_tokens >= self._request.total_tokens
            and self._planner.refusals.record_refusal(peer, record.seq)
        ):
            self._swarm.failure_reporter.record_failure(self._request.model_id, peer, "refused")

    def record_accepted(self, peer: PeerId, link: ClosableLink) -> None:
        """Note that `peer` opened the session."""
        self._planner.refusals.record_accepted(peer, link)

    async def plan_hops(
        self,
        keep: Hops,
        drop: frozenset[PeerId],
        *,
        session: bytes = b"",
        may_ping: bool = False,
        exclude_suspects: bool = False,
        standby_of: Hop | None = None,
    ) -> tuple[Hops, Mapping[PeerId, tuple[str, ...]]]:
        """Plan hops that include `keep`, or new hops if that fails; also return all nodes'
        addresses.

        `may_ping` allows pings before planning, for which a repair has no time. `exclude_suspects`
        excludes suspected peers even as a last resort. The hop in the place of `standby_of` is
        outside the failure domains of its node where one node there holds its blocks. The decision
        is recorded under `session`, if given. Raises `MissingBlocksError`, `ModelMismatchError`,
        `ContextLengthError` or `RefusedError`, by the reason why the blocks cannot be had.
        """
        while True:
            view, plan = await self._plan_once(
                keep,
                drop,
                may_ping=may_ping,
                exclude_suspects=exclude_suspects,
                standby_of=standby_of,
            )
            addresses = {node.peer_id: node.addresses for node in view.snapshot.nodes}
            if await self._are_attested([h for h in plan.hops if h not in keep], addresses):
                break
        costing = partial(self._planner.expected_step_s, view, plan.hops)
        if standby_of is None:
            self.expected_s = await _run_planning(view.snapshot, costing)
        if session:
            reason = "a chain to begin with" if not keep and not drop else "nodes left or failed"
            self._planner.record_decision(session, reason, view, plan)
        return plan.hops, addresses

    async def _plan_once(
        self,
        keep: Hops,
        drop: frozenset[PeerId],
        *,
        may_ping: bool,
        exclude_suspects: bool,
        standby_of: Hop | None,
    ) -> tuple[PlanningView, ChainPlan]:
        found = await self._plan_quickly(keep) if not may_ping and not drop else None
        if found is None:
            view = await self._fetch_view(may_ping=may_ping)
            if not keep and not drop:
                view = replace(view, prompt_tokens=self._request.prompt_tokens)
            self.served_models = ()
            if not view.snapshot.nodes:
                self.served_models = await self._planner.snapshots.check_model_copy(
                    self._request.model_id
                )
            fill = self._fill_around if exclude_suspects else self._fill_with_fallbacks
            if standby_of is not None:
                fill = partial(self._fill_standby, standby_of)
            plan = await _run_planning(view.snapshot, partial(fill, view, keep, drop))
        else:
            view, plan = found
        return view, plan

    async def _are_attested(
        self, hops: Sequence[Hop], addresses: Mapping[PeerId, tuple[str, ...]]
    ) -> bool:
        """Whether the nodes of `hops` attested their hardware, if that is required.

        Those that did not are not used in this session.
        """
        require = self._planner.require_attested
        if require is None:
            return True
        asked = (require(hop.peer_id, hop.span, addresses[hop.peer_id]) for hop in hops)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        refused = dict(zip((hop.peer_id for hop in hops), answers, strict=True))
        for peer, error in refused.items():
            if isinstance(error, RefusedError):
                # A copy: the error's traceback refers to this frame.
                self._refusals[peer] = RefusedError(error.code, str(error))
            elif error is not None:
                raise error
        return not any(refused.values())

    async def plan_replicas(
        self, hop: Hop, count: int, used: frozenset[PeerId]
    ) -> tuple[list[Hop], Mapping[PeerId, tuple[str, ...]]]:
        """Choose up to `count` further nodes for the blocks of `hop`, the best first.

        Not those of `used`, and none that failed or refused. Also return all nodes' addresses.
        """
        view = await self._fetch_view(may_ping=False)
        view = replace(view, request=replace(view.request, span=hop.span))
        snapshot = view.snapshot
        unfit = {node.peer_id for node in snapshot.nodes if not node.span.covers(hop.span)}
        exclude = self._unusable_peers(snapshot, used) | self.suspected_peers | unfit
        addresses = {node.peer_id: node.addresses for node in snapshot.nodes}
        found: list[Hop] = []
        while len(found) < count:
            planning = partial(
                self._planner.plan_chain, view, (), exclude=exclude, min_free_tokens=0
            )
            try:
                plan = await _run_planning(snapshot, planning)
            except MissingBlocksError:
                break
            replica = replace(hop, peer_id=plan.hops[0].peer_id)
            if await self._are_attested([replica], addresses):
                found.append(replica)
            exclude |= {replica.peer_id}
        return found, addresses

    async def fetch_from_one_member(self) -> Snapshot:
        return await self._planner.snapshots.fetch_from_one_member(self._request)

    async def can_fill(self, snapshot: Snapshot, keep: Hops, answered: Collection[PeerId]) -> bool:
        """Whether nodes of `answered` can complete `keep` to a chain."""
        view = await self._planner.build_view(snapshot, self._request, may_ping=False)
        usable = {hop.peer_id for hop in keep}.union(answered)
        others = frozenset(n.peer_id for n in snapshot.nodes if n.peer_id not in usable)
        planning = partial(
            self._planner.plan_chain,
            view,
            keep,
            exclude=self._unusable_peers(snapshot, others) | self.suspected_peers,
            min_free_tokens=0,
        )
        try:
            await _run_planning(snapshot, planning)
        except MissingBlocksError:
            return False
        return True

    async def _plan_quickly(self, keep: Hops) -> tuple[PlanningView, ChainPlan] | None:
        # A full fetch asks every member of the DHT that stores the records and waits seconds for
        # dead ones, which are likely the nodes to be replaced.
        snapshot = await self.fetch_from_one_member()
        view = await self._planner.build_view(snapshot, self._request, may_ping=False)
        planning = partial(self._fill_around, view, keep, frozenset())
        try:
            return view, await _run_planning(snapshot, planning)
        except MissingBlocksError:
            return None

    async def find_peers_to_leave(self, hops: Hops, step_s: float) -> frozenset[PeerId]:
        """Peers of `hops` to leave for a chain faster by `MIN_MOVE_SPEEDUP`, if there is one.

        `step_s` is the current step time. The hops are measured again first, and recently left
        nodes are not considered. Raises as `plan_hops` does.
        """
        request, planner = self._request, self._planner
        snapshot = await self._swarm.directory.fetch(request.model_id, request.num_blocks)
        await planner.remeasure_nodes(snapshot, request, hops)
        view = planner.without_own_load(await self._fetch_view(may_ping=True), hops, step_s)
        leave = await _run_planning(view.snapshot, partial(self._choose_peers_to_leave, view, hops))
        self._left_at |= dict.fromkeys(leave, time.monotonic())
        return leave

    def _choose_peers_to_leave(self, view: PlanningView, hops: Hops) -> frozenset[PeerId]:
        planner = self._planner
        now_s = planner.expected_step_s(view, hops)
        if now_s is None:
            return frozenset()
        since = time.monotonic() - LEFT_NODE_EXCLUSION_S
        left = {peer for peer, at in list(self._left_at.items()) if at > since}
        best: tuple[float, frozenset[PeerId]] = (now_s / MIN_MOVE_SPEEDUP, frozenset())
        for leave in self._leave_candidates(view, hops, left):
            kept = tuple(hop for hop in hops if hop.peer_id not in leave)
            try:
                plan = self._fill_around(view, kept, leave | left)
            except MissingBlocksError:
                continue
            found_s = planner.expected_step_s(view, plan.hops)
            if found_s is not None:
                best = min(best, (found_s, leave), key=lambda each: each[0])
        log.info("chain_reconsidered", step_ms=now_s * 1000, best_ms=best[0] * 1000)
        return best[1]

    def _leave_candidates(
        self, view: PlanningView, hops: Hops, recently_left: set[PeerId]
    ) -> tuple[frozenset[PeerId], ...]:
        """Sets of peers to try to leave: all hops outside the best chain, then each alone."""
        try:
            ideal = self._fill_around(view, (), frozenset(recently_left))
        except MissingBlocksError:
            return ()
        gone = frozenset(hop.peer_id for hop in hops) - {hop.peer_id for hop in ideal.hops}
        alone = (frozenset({peer}) for peer in sorted(gone))
        return (gone, *alone) if len(gone) > 1 else tuple(alone)

    def _fill_around(self, view: PlanningView, keep: Hops, drop: frozenset[PeerId]) -> ChainPlan:
        """Complete `keep` with unsuspected nodes with free cache. Raises `MissingBlocksError`."""
        return self._planner.plan_chain(
            view,
            keep,
            exclude=self._unusable_peers(view.snapshot, drop) | self.suspected_peers,
            min_free_tokens=self._request.total_tokens,
        )

    def _fill_standby(
        self, hop: Hop, view: PlanningView, keep: Hops, drop: frozenset[PeerId]
    ) -> ChainPlan:
        """Complete `keep` by one node that does not fail together with that of `hop`, or by any.

        By any, too, where the chain would be much slower: most often one node alone fails.
        """
        nearest = self._fill_with_fallbacks(view, keep, drop)
        together = peers_failing_with(view.snapshot, hop.peer_id)
        others = {n.peer_id for n in view.snapshot.nodes if not n.span.covers(hop.span)}
        try:
            apart = self._fill_around(view, keep, drop | together | others)
        except MissingBlocksError:
            return nearest
        nearest_s, apart_s = (
            self._planner.expected_step_s(view, plan.hops) for plan in (nearest, apart)
        )
        if nearest_s is None or apart_s is None or len(nearest.hops) > len(apart.hops):
            return apart
        return apart if apart_s <= MAX_STANDBY_SLOWDOWN * nearest_s else nearest

    async def _fetch_view(self, *, may_ping: bool) -> PlanningView:
        request, snapshots = self._request, self._planner.snapshots
        with track_wait("the DHT to list the nodes of the model", blocks=(request.span,)):
            if may_ping:
                snapshot = await snapshots.fetch(request, after=self._stale_before)
            else:
                snapshot = await self._swarm.directory.fetch(
                    request.model_id, request.num_blocks, reports=False
                )
        return await self._planner.build_view(snapshot, request, may_ping=may_ping)

    def _fill_with_fallbacks(
        self, view: PlanningView, keep: Hops, drop: frozenset[PeerId]
    ) -> ChainPlan:
        snapshot, tokens = view.snapshot, self._request.total_tokens
        suspects = self.suspected_peers
        barred = self._unusable_peers(snapshot, drop)
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
                return self._planner.plan_chain(view, hops, exclude=exclude, min_free_tokens=free)
            except MissingBlocksError as error:
                first = first or error
        assert first is not None
        self._stale_before = time.monotonic()
        self.joining = tuple(nodes_with(first.missing, snapshot.joining))
        try:
            raise self._explain_missing(snapshot, first)
        finally:
            del first  # its traceback refers to this frame

    def _unusable_peers(self, snapshot: Snapshot, drop: frozenset[PeerId]) -> frozenset[PeerId]:
        """Peers that the session cannot use under any circumstances."""
        request = self._request
        unfit = {
            node.peer_id
            for node in snapshot.nodes
            if node.total_cache_tokens < request.total_tokens
            or is_too_coarse(node, request)
            or (request.allowed_peers is not None and node.peer_id not in request.allowed_peers)
        }
        return drop.union(self._refusals, unfit, self._planner.barred)

    def _explain_missing(self, snapshot: Snapshot, error: MissingBlocksError) -> NesaError:
        request, coarsest = self._request, self._request.options.min_precision
        allowed = request.allowed_peers
        holders = [
            node
            for node in nodes_with(error.missing, snapshot.nodes)
            if allowed is None or node.peer_id in allowed
        ]
        precise = [node for node in holders if not is_too_coarse(node, request)]
        if holders and not precise:
            found = ", ".join(sorted({_describe_precision(node) for node in holders}))
            return RefusedError(
                "too_coarse",
                f"the nodes with blocks {error.missing[0][0]}:{error.missing[0][1]} hold them in "
                f"{found}, and {coarsest} was asked for at least (--min-precision)",
            )
        barred = sorted({node.peer_id for node in holders if node.peer_id in self._planner.barred})
        if holders and all(node.peer_id in barred for node in holders):
            return RefusedError(
                "barred",
                f"the nodes with blocks {error.missing[0][0]}:{error.missing[0][1]} are not used: "
                f"audits found wrong activations of {', '.join(barred)}",
            )
        refusals = [self._refusals[n.peer_id] for n in precise if n.peer_id in self._refusals]
        fitting = [n for n in precise if n.peer_id not in self._refusals]
        most_tokens = max((node.total_cache_tokens for node in fitting), default=0)
        if fitting and most_tokens < request.total_tokens:
            return ContextLengthError(
                f"a session of {request.max_tokens} tokens in {request.rows} rows was asked for; "
                f"the nodes with blocks {error.missing[0][0]}:{error.missing[0][1]} promise at "
                f"most {most_tokens // request.rows} per row"
            )
        if refusals and not fitting:
            return RefusedError(refusals[0].code, str(refusals[0]))
        return error


_PRECISIONS: Mapping[str, Precision] = {"none": "full", "llm_int8": "int8"}
"""Precision of weights by a record's quantization, where it has another name."""


def nodes_with(blocks: Iterable[tuple[int, int]], nodes: Iterable[NodeState]) -> list[NodeState]:
    """Nodes that hold some of `blocks`, given as pairs of start and end."""
    ranges = list(blocks)
    return [
        node
        for node in nodes
        if any(node.span.start < end and start < node.span.end for start, end in ranges)
    ]


async def _run_planning(snapshot: Snapshot, planning: Callable[[], _T]) -> _T:
    """Run `planning`, in a thread if `snapshot` has more than `MAX_INLINE_PLAN_NODES` nodes."""
    if len(snapshot.nodes) > MAX_INLINE_PLAN_NODES:
        return await asyncio.to_thread(planning)
    return planning()


def is_too_coarse(node: NodeState, request: RouteRequest) -> bool:
    """Whether the node's weights or KV cache are coarser than requested, or of an unknown kind."""
    order = get_args(Precision)
    allowed = order[order.index(request.options.min_precision) :]
    weights = _PRECISIONS.get(node.quantization, node.quantization)
    cache = "full" if node.cache_dtype == "auto" else node.cache_dtype
    return weights not in allowed or cache not in allowed


def _describe_precision(node: NodeState) -> str:
    cache = "" if node.cache_dtype == "auto" else f" with a cache in {node.cache_dtype}"
    return node.quantization + cache
