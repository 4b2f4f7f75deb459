"""Which nodes a session may use: what records and reports say, and what it has lived through."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import get_args

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
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.notices import FailureKind
from nesa_node.topology.snapshot import NodeState, Snapshot

log = get_logger(__name__)

SUSPECT_S = 15.0
"""A peer that failed is tried again only after this, unless nobody else holds its blocks."""


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
        self._unfit: dict[PeerId, RemoteError] = {}
        self.expected_s: float | None = None
        """What a step should take by the last plan."""

    @property
    def suspected(self) -> frozenset[PeerId]:
        """Who failed, or had no room, lately."""
        now = time.monotonic()
        return frozenset(peer for peer, until in self._suspects.items() if until > now)

    def suspect(
        self, peer: PeerId, reason: str, kind: FailureKind = "lost", *, tell: bool = True
    ) -> None:
        """Remember a failure of `peer`: it is avoided for a while, in later sessions too.

        With `tell` others hear of it.
        """
        log.info("peer_failed", peer=peer, reason=reason)
        if tell:
            self._swarm.reporter.note(self._request.model_id, peer, kind)
        self._planner.avoidance.failed(peer)
        self._suspects[peer] = time.monotonic() + SUSPECT_S

    def refused(self, peer: PeerId, error: BusyError | RemoteError) -> None:
        """Remember that `peer` did not open the session."""
        if isinstance(error, RemoteError) and error.code not in PASSING:
            self._unfit[peer] = error
        else:
            # Longer than it says: others go first, and without any it is asked again anyway.
            self._suspects[peer] = time.monotonic() + SUSPECT_S

    async def plan(
        self, keep: Hops, drop: frozenset[PeerId], session: bytes = b""
    ) -> tuple[Hops, Mapping[PeerId, tuple[str, ...]]]:
        """Hops that keep `keep`; if nobody fills the gaps so, hops that keep nothing.

        And the addresses of all nodes. It is written down why `session`, if named, gets them.
        Raises `MissingBlocksError`, `ContextLengthError` and
        `RefusedError`, by the reason why nobody can fill them.
        """
        request = self._request
        snapshot = await self._swarm.directory.fetch(request.model_id, request.num_blocks)
        # Who mends a chain has no time to wait for pings.
        view = await self._planner.view(snapshot, request, may_ask=not self.suspected)
        addresses = {node.peer_id: node.addresses for node in snapshot.nodes}
        plan = self._fill(view, keep, drop)
        self.expected_s = self._planner.step_s(view, plan, plan.hops)
        if session:
            reason = "a chain to begin with" if not keep and not drop else "nodes left or failed"
            self._planner.decided(session, reason, view, plan.asked, plan.hops)
        return plan.hops, addresses

    async def to_leave(self, hops: Hops) -> frozenset[PeerId]:
        """Whom of `hops` a session should move off, since others are faster by `WORTH_MOVING`.

        After the hops were measured anew. Raises as `plan` does.
        """
        request = self._request
        snapshot = await self._swarm.directory.fetch(request.model_id, request.num_blocks)
        await self._planner.recheck(snapshot, request, hops)
        view = await self._planner.view(snapshot, request, may_ask=True)
        plan = self._fill(view, (), frozenset())
        known = {node.peer_id for node in snapshot.nodes}
        if not {hop.peer_id for hop in hops} <= known:
            return frozenset()
        now_s = self._planner.step_s(view, plan, hops)
        best_s = self._planner.step_s(view, plan, plan.hops)
        log.info("chain_reconsidered", step_ms=now_s * 1000, best_ms=best_s * 1000)
        if now_s <= WORTH_MOVING * best_s:
            return frozenset()
        return frozenset(hop.peer_id for hop in hops) - {hop.peer_id for hop in plan.hops}

    def _fill(self, view: View, keep: Hops, drop: frozenset[PeerId]) -> Plan:
        snapshot, tokens = view.snapshot, self._request.tokens
        suspects = self.suspected
        small = {n.peer_id for n in snapshot.nodes if n.total_cache_tokens < tokens}
        coarse = {n.peer_id for n in snapshot.nodes if self._is_coarse(n)}
        only = self._request.only
        others = (
            () if only is None else (n.peer_id for n in snapshot.nodes if n.peer_id not in only)
        )
        barred = frozenset(self._unfit).union(drop, small, coarse, others)
        first: MissingBlocksError | None = None
        # What a record says of free room is some seconds old: as a last resort it is not believed.
        for hops, free in ((keep, tokens), (keep, 0), ((), tokens), ((), 0)):
            for exclude in (barred | suspects, barred):
                try:
                    return self._planner.plan(
                        view, self._request, hops, exclude=exclude, min_free_tokens=free
                    )
                except MissingBlocksError as error:
                    first = first or error
        assert first is not None
        raise self._why_missing(snapshot, first)

    def _unwanted(self, snapshot: Snapshot) -> frozenset[PeerId]:
        only = self._request.only
        peers = frozenset(node.peer_id for node in snapshot.nodes)
        return frozenset() if only is None else peers - only

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
