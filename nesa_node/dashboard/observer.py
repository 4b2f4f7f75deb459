"""Background tasks that observe a swarm for the dashboard, as a client that serves nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from nesa_node.client.activity import Activity
from nesa_node.core.errors import NesaError
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.dashboard.board import CHARTED_MODELS, Board
from nesa_node.dashboard.feed import Feed
from nesa_node.dashboard.links import view_links
from nesa_node.dashboard.models import ModelView
from nesa_node.dashboard.shapes import Shapes
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.notices import Placement
from nesa_node.swarm.ping import ping
from nesa_node.topology.assemble import assemble_links
from nesa_node.topology.snapshot import Snapshot

log = get_logger(__name__)

LOOK_EVERY_S = 2.5
TICK_S = 0.5
QUICK_TICK_S = 0.1
"""Tick interval while a viewer watches this process's sessions, so that it sees short ones, too."""
SHAPE_EVERY_S = 30.0
FIRST_SHAPE_S = 4.0
MAX_SHAPED_NODES = 1000
PING_EVERY_S = 1.0
MOST_PINGS = 16
"""Maximum concurrent pings; the nodes of a larger swarm are pinged in turn."""
PING_TIMEOUTS_S = (1.5, 1.0)
"""Timeouts of the successive pings; a node that answers none of them is failing."""
_NODES_PER_S = 100
"""Maximum rate of fetching records, which makes polls of a large swarm rarer."""
_SHARE = 0.1
"""Maximum fraction of the time that polls, or topology updates, may take."""


class Observer:
    """Observes a swarm while `run` runs; `activity` is that of this process's sessions."""

    def __init__(
        self,
        swarm: Swarm,
        board: Board,
        feed: Feed,
        shapes: Shapes,
        *,
        activity: Activity | None = None,
        every_s: float = LOOK_EVERY_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._swarm = swarm
        self._board = board
        self._feed = feed
        self._shapes = shapes
        self._activity = activity
        self._every_s = every_s
        self._clock = clock
        self._writing = asyncio.Lock()
        """Held while the board changes in a thread: large swarms would block the event loop."""
        self._told = -1

    async def run(self) -> None:
        """Run all background tasks until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_looking(), name="dashboard-look")
            group.create_task(self._keep_ticking(), name="dashboard-tick")
            group.create_task(self._keep_shaping(), name="dashboard-shape")
            group.create_task(self._keep_pinging(), name="dashboard-ping")

    async def look(self) -> None:
        """Fetch all records once, and update nodes and links."""
        directory = self._swarm.directory
        records = [*await directory.fetch_all(), *directory.withdrawn()]
        async with self._writing:
            await asyncio.to_thread(self._board.look, records, self._clock())
        self._publish()
        for model in self._board.models[:CHARTED_MODELS]:
            async with self._writing:
                mine = self._board.records_of(model)
            view = await asyncio.to_thread(view_links, model.model_id, mine, model.num_blocks)
            async with self._writing:
                await asyncio.to_thread(self._board.measure, model.model_id, view)

    def _publish(self) -> None:
        """Wake viewers if the state has a new version."""
        version = self._board.sections.version
        if version != self._told:
            self._told = version
            self._feed.publish()

    async def _keep_looking(self) -> None:
        while True:
            began = time.monotonic()
            try:
                await self.look()
            except (NesaError, OSError) as error:
                log.warning("swarm_poll_failed", reason=str(error))
            except Exception:  # a bug, or a malicious record: the dashboard keeps running
                log.exception("swarm_poll_failed")
            took_s = time.monotonic() - began
            count = sum(model.nodes for model in self._board.models)
            await asyncio.sleep(max(self._every_s, count / _NODES_PER_S, took_s / _SHARE))

    async def _keep_ticking(self) -> None:
        while True:
            try:
                async with self._writing:
                    await asyncio.to_thread(self._board.tick, self._clock(), self._activity)
                self._publish()
            except Exception:  # as above
                log.exception("dashboard_tick_failed")
            quick = self._activity is not None and self._feed.viewers > 0
            await asyncio.sleep(QUICK_TICK_S if quick else TICK_S)

    async def _keep_pinging(self) -> None:
        """Ping nodes while a page is open: a dead node's record stays valid for up to a minute."""
        pinging: dict[PeerId, asyncio.Task[None]] = {}
        order: dict[PeerId, None] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(PING_EVERY_S)
                if not self._feed.viewers:
                    continue
                pinging = {peer: task for peer, task in pinging.items() if not task.done()}
                nodes = self._addresses()
                order = {peer: None for peer in (*order, *nodes) if peer in nodes}
                for peer in [peer for peer in order if peer not in pinging]:
                    if len(pinging) < MOST_PINGS:
                        pinging[peer] = group.create_task(self._ping(peer, nodes[peer]))
                        order[peer] = order.pop(peer)  # move to the end

    def _addresses(self) -> dict[PeerId, tuple[str, ...]]:
        directory = self._swarm.directory
        found: dict[PeerId, tuple[str, ...]] = {}
        for model in self._board.models:
            found |= directory.addresses(model.model_id, model.num_blocks)
        return found

    async def _ping(self, peer: PeerId, addresses: Sequence[str]) -> None:
        transport, answered = self._swarm.transport, False
        for timeout_s in PING_TIMEOUTS_S:
            try:
                await ping(transport, peer, addresses, timeout_s=timeout_s)
            except (NesaError, OSError):
                continue
            answered = True
            break
        async with self._writing:
            self._board.pinged(peer, answered=answered)

    async def _keep_shaping(self) -> None:
        await asyncio.sleep(FIRST_SHAPE_S)
        while True:
            began = time.monotonic()
            for model in self._board.models[:CHARTED_MODELS]:
                try:
                    await self._shape(model)
                except (NesaError, OSError) as error:
                    log.warning("topology_update_failed", model=model.model_id, reason=str(error))
                except Exception:  # as above
                    log.exception("topology_update_failed", model=model.model_id)
            took_s = time.monotonic() - began
            await asyncio.sleep(max(SHAPE_EVERY_S, took_s / _SHARE))

    async def _shape(self, model: ModelView) -> None:
        placements = await self._swarm.notices.fetch(Placement, model.model_id)
        async with self._writing:
            self._board.place(placements, self._clock())
        # Check the board's count first: a snapshot of thousands of nodes blocks the event loop.
        if not self._shapes.wants(model.model_id) or model.nodes > MAX_SHAPED_NODES:
            return
        snapshot = self._swarm.directory.snapshot(model.model_id)
        if not 0 < len(snapshot.nodes) <= MAX_SHAPED_NODES:
            return
        newest = max(placements, key=lambda placement: placement.order, default=None)
        await asyncio.to_thread(self._saw, snapshot, newest)

    def _saw(self, snapshot: Snapshot, active: Placement | None) -> None:
        measured = self._swarm.directory.measured(snapshot)
        self._shapes.saw(replace(snapshot, links=assemble_links(measured)), active)
