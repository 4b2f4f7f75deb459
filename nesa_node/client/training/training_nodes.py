"""The nodes of a session that trains: chosen, opened, left when they fail, and replaced."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from nesa_node.client.routing.node_selection import NodeSelector
from nesa_node.client.routing.planner import ChainPlanner
from nesa_node.client.routing.request import RouteRequest
from nesa_node.client.training.announced_plan import AnnouncedPlan
from nesa_node.client.training.replica_group import ReplicaGroup, ReplicaOptions
from nesa_node.client.training.training_link import (
    CLOSE_TIMEOUT_S,
    TrainingLimits,
    TrainingLink,
    dial_training,
)
from nesa_node.core.errors import (
    BusyError,
    PeerUnreachableError,
    ProtocolError,
    RemoteError,
    StreamClosedError,
    SwarmError,
)
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.engine.training.training_spec import TrainingSpec
from nesa_node.engine.training.training_state import Partition, StateShapes, select_blocks
from nesa_node.routing.chains import Hop
from nesa_node.swarm.node import Swarm

log = get_logger(__name__)
V = TypeVar("V")

MAX_LOSSES = 3
LOSSES_WITHIN_S = 600.0
"""A node that was lost `MAX_LOSSES` times in this time is left out."""
TEMPORARY_CODES = frozenset(
    {"draining", "idle_timeout", "not_computed", "stale_step", "wrong_blocks", "closed"}
)
"""Codes after which a node may be used again later. A node with another one is left out."""


class TrainingNodes:
    """One node for each span of a chain, or several where replicas are wanted."""

    def __init__(
        self,
        swarm: Swarm,
        request: RouteRequest,
        planner: ChainPlanner,
        spec: TrainingSpec,
        shapes: Mapping[str, tuple[int, ...]],
        limits: TrainingLimits,
        options: ReplicaOptions,
        plan: AnnouncedPlan,
    ) -> None:
        """`request.span` are the blocks in the swarm; `shapes` those of their parameters."""
        self.groups: list[ReplicaGroup] = []
        """In the order of their spans."""
        self.seconds_by_peer: dict[PeerId, float] = {}
        """Time between messages to a node and its answers, in sum."""
        self.num_lost = 0
        self._swarm = swarm
        self._request = request
        self._spec = spec
        self._shapes = dict(shapes)
        self._limits = limits
        self._options = options
        self._plan = plan
        self._selector = NodeSelector(swarm, request, planner)
        self._runs: dict[TrainingLink, asyncio.Task[None]] = {}
        self._losses: dict[PeerId, list[float]] = {}
        """When each node was lost, for the last times."""
        self._is_complete = False

    @property
    def hops(self) -> tuple[Hop, ...]:
        return tuple(link.hop for group in self.groups for link in group.links)

    @property
    def lanes(self) -> int:
        """Ways through all spans that have no node in common."""
        return min((len(group.links) for group in self.groups), default=1)

    @property
    def lacks_replicas(self) -> bool:
        return self.lanes < self._options.replicas

    async def complete(self, *, grow: bool = False) -> bool:
        """Leave failed nodes and open new ones; return whether there was anything to do.

        With `grow`, also look for replicas that are lacking. Raises an error of `RETRYABLE`, after
        which another call goes on, and what `plan_hops` raises.
        """
        lost = [link for group in self.groups for link in group.links if link.failure is not None]
        for link in lost:
            self.num_lost += 1
            self._record_failure(link)
            await self._leave(link)
        if self._is_complete and not lost and not grow:
            return False
        self._is_complete = False
        has_opened = await self._open_missing(frozenset(link.peer for link in lost))
        self._is_complete = True
        return bool(lost) or has_opened

    async def close(self) -> None:
        """Leave all nodes, and withdraw the plan."""
        links = [link for group in self.groups for link in group.links]
        await asyncio.gather(*(self._close_link(link) for link in links))
        self.groups.clear()
        with suppress(SwarmError, TimeoutError):  # it expires
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._plan.withdraw()

    async def _leave(self, link: TrainingLink) -> None:
        """Leave a node; where replicas divide the optimizer state, all of its group."""
        for group in [group for group in self.groups if link in group.links]:
            if group.is_partitioned:
                await self._leave_group(group)
            else:
                await self._close_link(link)
                group.links.remove(link)
                if not group.links:
                    self.groups.remove(group)

    async def _leave_group(self, group: ReplicaGroup) -> None:
        await asyncio.gather(*(self._close_link(link) for link in group.links))
        self.groups.remove(group)

    def _record_failure(self, link: TrainingLink) -> None:
        error, now = link.failure, time.monotonic()
        losses = [at for at in self._losses.get(link.peer, []) if now - at < LOSSES_WITHIN_S]
        if not link.is_leaving:
            self._losses[link.peer] = losses = [*losses, now]
        if len(losses) >= MAX_LOSSES:
            code = error.code if isinstance(error, ProtocolError) else "lost"
            error = RemoteError(code, f"lost {len(losses)} times: {error}")
            self._selector.record_refusal(link.peer, error)
        elif isinstance(error, RemoteError) and error.code not in TEMPORARY_CODES:
            self._selector.record_refusal(link.peer, error)
        else:
            is_lost = isinstance(error, PeerUnreachableError | StreamClosedError)
            self._selector.record_failure(
                link.peer, str(error), report=is_lost and not link.is_leaving
            )

    async def _open_missing(self, drop: frozenset[PeerId]) -> bool:
        if not len(self._request.span):
            return False
        keep = tuple(group.hop for group in self.groups)
        hops, addresses = await self._selector.plan_hops(keep, drop, may_ping=not keep)
        for group in [group for group in self.groups if group.hop not in hops]:
            await self._leave_group(group)
        addresses = dict(addresses)
        wanted: list[list[Hop]] = []
        for hop in hops:
            used = drop.union(each.peer_id for part in (hops, self.hops, *wanted) for each in part)
            members, more = await self._plan_group(hop, used)
            wanted.append(members)
            addresses |= more
        known = {link.hop for group in self.groups for link in group.links}
        wanted = [members for members in wanted if not known.issuperset(members)]
        for members in filter(self._is_partitioned, wanted):
            for group in [group for group in self.groups if group.span == members[0].span]:
                await self._leave_group(group)
        links = {link.hop: link for group in self.groups for link in group.links}
        opened = await asyncio.gather(
            *(
                self._open(hop, addresses[hop.peer_id], self._part(rank, members))
                for members in wanted
                for rank, hop in enumerate(members)
                if hop not in links
            ),
            return_exceptions=True,
        )
        links |= {each.hop: each for each in opened if isinstance(each, TrainingLink)}
        for members in wanted:
            await self._add_links([links[hop] for hop in members if hop in links], members)
        for group in self.groups:
            # A multiple: what nodes keep at once is bounded for each of the chain's lanes.
            group.lanes = len(group.links) // self.lanes * self.lanes
        for each in opened:
            if isinstance(each, BaseException):
                raise each
        return bool(opened)

    async def _plan_group(
        self, hop: Hop, used: frozenset[PeerId]
    ) -> tuple[list[Hop], Mapping[PeerId, tuple[str, ...]]]:
        """The nodes of one span: those that it has, and more where replicas are lacking.

        Also return addresses.
        """
        members = [
            link.hop for group in self.groups if group.hop == hop for link in group.links
        ] or [hop]
        lacking = self._options.replicas - len(members)
        if lacking <= 0:
            return members, {}
        found, addresses = await self._selector.plan_replicas(hop, lacking, used)
        return members + found, addresses

    def _is_partitioned(self, members: Sequence[Hop]) -> bool:
        return self._options.zero_stage > 0 and len(members) > 1

    async def _add_links(self, links: list[TrainingLink], members: Sequence[Hop]) -> None:
        """Make a group of opened links, in place of the one that some of them had."""
        for link in links:
            if link not in self._runs:
                self._runs[link] = asyncio.create_task(link.run())
        self.groups = [group for group in self.groups if group.span != members[0].span]
        if self._is_partitioned(members) and len(links) < len(members):
            # They divide the state among more nodes than there are.
            await asyncio.gather(*(self._close_link(link) for link in links))
        elif links:
            shapes = select_blocks(self._shapes, members[0].span)
            group = ReplicaGroup(
                links,
                shapes,
                self.seconds_by_peer,
                zero_stage=self._options.zero_stage,
                average_every=self._options.average_every,
            )
            self.groups.append(group)
            self.groups.sort(key=lambda group: group.span.start)

    def _part(self, rank: int, members: Sequence[Hop]) -> Partition:
        stage = self._options.zero_stage
        return Partition(stage, rank, len(members)) if stage else Partition()

    async def _open(
        self, hop: Hop, addresses: tuple[str, ...], partition: Partition
    ) -> TrainingLink:
        try:
            parameters = select_blocks(self._shapes, hop.span)
            shapes = held = StateShapes(parameters, self._spec.optimizer)
            if partition.divides_parameters:
                owned = {name: parameters[name] for name in partition.select(parameters)}
                held = StateShapes(owned, self._spec.optimizer)
            dialing = dial_training(
                self._swarm, hop, addresses, self._request, shapes, held, self._limits
            )
            async with dialing as link:
                await link.open(
                    self._swarm,
                    self._request,
                    self._spec.encode(),
                    self._plan,
                    partition,
                )
        except PeerUnreachableError as error:
            self._selector.record_failure(hop.peer_id, str(error))
            raise
        except (BusyError, RemoteError) as error:
            self._selector.record_refusal(hop.peer_id, error)
            raise
        log.info("training_hop_opened", peer=hop.peer_id, blocks=str(hop.span))
        return link

    async def _close_link(self, link: TrainingLink) -> None:
        task = self._runs.pop(link, None)
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await link.close()
