"""Background tasks that observe a swarm for the dashboard, as a client that serves nothing."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from nesa_node.client.model.activity import Activity
from nesa_node.client.verification.audit_history import AuditHistory
from nesa_node.core.errors import NesaError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.logging import get_logger
from nesa_node.dashboard.feed import StateFeed
from nesa_node.dashboard.state import MAX_CHARTED_MODELS, DashboardState, summarize_links
from nesa_node.dashboard.training_curves import TrainingCurves
from nesa_node.dashboard.views import ModelSummary
from nesa_node.server.orchestrator.history import History
from nesa_node.server.orchestrator.planner import ChangeMonitor
from nesa_node.swarm.dht.pool_notices import POOL, Offer, PoolStatus
from nesa_node.swarm.dht.sealing import PlacementNotice
from nesa_node.swarm.graph_plans import fetch_plan, is_planned, summarize_plan
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.link_measurements import ping
from nesa_node.topology.changes.triggers import Sensitivity
from nesa_node.topology.links.matrix import assemble_links
from nesa_node.topology.snapshot import Snapshot

log = get_logger(__name__)

STARTING_JSON = msgspec.json.encode(
    {"format": "nesa-node topology", "version": 1, "starting": True}
)
"""Topology document of a model that has none yet."""


class DocumentSource(Protocol):
    """Source of a document. `version` changes with it; `document` is slow: call it in a thread."""

    @property
    def version(self) -> int: ...

    def document(self) -> dict[str, Any] | None:
        """The document; None while there is none."""


class TopologyDocument:
    """A source's document as JSON, encoded on demand and once for all requests."""

    def __init__(self, source: DocumentSource) -> None:
        self._source = source
        self._encode_lock = asyncio.Lock()
        self._encoded_version: int | None = None
        self._json = STARTING_JSON

    async def encode_json(self) -> bytes:
        async with self._encode_lock:
            version = self._source.version
            if self._encoded_version != version:
                self._json = await asyncio.to_thread(self._encode)
                self._encoded_version = version
            return self._json

    def _encode(self) -> bytes:
        document = self._source.document()
        return STARTING_JSON if document is None else msgspec.json.encode(document)


MAX_WATCHED_MODELS = 4


class ModelTopologies:
    """A document per model, from an orchestrator in this process or from own observations."""

    def __init__(self) -> None:
        self._documents: dict[ModelId, TopologyDocument] = {}
        self._watched: dict[ModelId, tuple[History, ChangeMonitor]] = {}
        """Models with own observations, the least recently observed first."""

    def set_source(self, model: ModelId, source: DocumentSource) -> None:
        """Use `source` for the document of `model`, instead of own observations."""
        self._watched.pop(model, None)
        self._documents[model] = TopologyDocument(source)

    def observes(self, model: ModelId) -> bool:
        """Whether `observe_snapshot` should be called for this model."""
        return model in self._watched or model not in self._documents

    def observe_snapshot(self, snapshot: Snapshot, active: PlacementNotice | None) -> None:
        """Add a snapshot, and the newest placement, to the model's history.

        Slow: call it in a thread. The least recently observed models beyond `MAX_WATCHED_MODELS`
        are dropped, so that models which come and go do not displace those that stay.
        """
        if not snapshot.nodes:
            return
        model = snapshot.model_id
        if model not in self._watched:
            history = History()
            self._documents[model] = TopologyDocument(history)
            self._watched[model] = history, ChangeMonitor(Sensitivity())
        history, watch = self._watched[model] = self._watched.pop(model)
        while len(self._watched) > MAX_WATCHED_MODELS:
            oldest = next(iter(self._watched))
            del self._watched[oldest]
            self._documents.pop(oldest, None)
        triggers = watch.observe(snapshot, None).triggers
        history.record(snapshot, None, active, leads=False, triggers=triggers)

    async def encode_json(self, model: str | None) -> bytes | None:
        """JSON of a model's document, of the first model's if None; None if it is not observed."""
        if model is None:
            first = next(iter(self._documents.values()), None)
            return STARTING_JSON if first is None else await first.encode_json()
        found = self._documents.get(ModelId(model))
        return None if found is None else await found.encode_json()


POLL_INTERVAL_S = 2.5
POOL_INTERVAL_S = 5.0
PLAN_INTERVAL_S = 5.0
PLAN_RETRY_S = 60.0
TICK_INTERVAL_S = 0.5
VIEWED_TICK_INTERVAL_S = 0.1
"""Tick interval while a viewer watches this process's sessions, so that it sees short ones, too."""
TOPOLOGY_INTERVAL_S = 30.0
FIRST_TOPOLOGY_DELAY_S = 4.0
MAX_TOPOLOGY_NODES = 1000
PING_INTERVAL_S = 1.0
MAX_CONCURRENT_PINGS = 16
"""Maximum concurrent pings; the nodes of a larger swarm are pinged in turn."""
PING_TIMEOUTS_S = (1.5, 1.0)
"""Timeouts of the successive pings; a node that answers none of them is failing."""
_MAX_RECORDS_PER_S = 100
"""Maximum rate of fetching records, which makes polls of a large swarm rarer."""
_MAX_BUSY_FRACTION = 0.1
"""Maximum fraction of the time that polls, or topology updates, may take."""


class SwarmObserver:
    """Observes a swarm while `run` runs; `activity` is that of this process's sessions.

    `audits_path` is the file in which this user's clients keep what audits said (`AuditHistory`).
    """

    def __init__(
        self,
        swarm: Swarm,
        state: DashboardState,
        feed: StateFeed,
        shapes: ModelTopologies,
        *,
        activity: Activity | None = None,
        curves: TrainingCurves | None = None,
        audits_path: Path | None = None,
        poll_interval_s: float = POLL_INTERVAL_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._swarm = swarm
        self._state = state
        self._feed = feed
        self._topologies = shapes
        self._activity = activity
        self._curves = curves
        self._audits_path = audits_path
        self._audits_changed_at: float | None = None
        self._poll_interval_s = poll_interval_s
        self._clock = clock
        self._state_lock = asyncio.Lock()
        """Held while the state changes in a thread: large swarms would block the event loop."""
        self._plans_due: dict[ModelId, float] = {}
        """When each model's plan is to be fetched; once it is here, never."""
        self._published_version = -1

    async def run(self) -> None:
        """Run all background tasks until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._run_polls(), name="dashboard-look")
            group.create_task(self._run_pool_polls(), name="dashboard-pool")
            group.create_task(self._run_plan_polls(), name="dashboard-plans")
            group.create_task(self._run_ticks(), name="dashboard-tick")
            if self._curves is not None:
                curves = self._run_training_polls(self._curves)
                group.create_task(curves, name="dashboard-training")
            group.create_task(self._run_topology_updates(), name="dashboard-shape")
            group.create_task(self._run_pings(), name="dashboard-ping")

    async def poll_records(self) -> None:
        """Fetch all records once, and update nodes and links."""
        directory = self._swarm.directory
        records = [*await directory.fetch_all(), *directory.withdrawn_records()]
        async with self._state_lock:
            await asyncio.to_thread(self._read_audits)
            await asyncio.to_thread(self._state.update_records, records, self._clock())
        self._publish()
        for model in self._state.models[:MAX_CHARTED_MODELS]:
            async with self._state_lock:
                mine = self._state.records_of(model)
            view = await asyncio.to_thread(summarize_links, model.model_id, mine, model.num_blocks)
            async with self._state_lock:
                await asyncio.to_thread(self._state.update_links, model.model_id, view)

    def _read_audits(self) -> None:
        """Read what clients of this user wrote of nodes since the last time."""
        try:
            changed_at = None if self._audits_path is None else self._audits_path.stat().st_mtime
        except OSError:  # no audit was made
            return
        if changed_at != self._audits_changed_at:
            self._audits_changed_at = changed_at
            self._state.update_audits(AuditHistory(self._audits_path))

    def _publish(self) -> None:
        """Wake viewers if the state has a new version."""
        version = self._state.sections.version
        if version != self._published_version:
            self._published_version = version
            self._feed.publish()

    async def _run_polls(self) -> None:
        while True:
            began = time.monotonic()
            try:
                await self.poll_records()
            except (NesaError, OSError) as error:
                log.warning("swarm_poll_failed", reason=str(error))
            except Exception:  # a bug, or a malicious record: the dashboard keeps running
                log.exception("swarm_poll_failed")
            took_s = time.monotonic() - began
            count = sum(model.nodes for model in self._state.models)
            await asyncio.sleep(
                max(self._poll_interval_s, count / _MAX_RECORDS_PER_S, took_s / _MAX_BUSY_FRACTION)
            )

    async def poll_pool(self) -> None:
        """Fetch offers and statuses of the pool once."""
        notices = self._swarm.notices
        offers = await notices.fetch(Offer, POOL)
        statuses = await notices.fetch(PoolStatus, POOL)
        async with self._state_lock:
            self._state.update_pool(offers, statuses)
        self._publish()

    async def _run_pool_polls(self) -> None:
        while True:
            try:
                await self.poll_pool()
            except (NesaError, OSError) as error:
                log.warning("pool_poll_failed", reason=str(error))
            except Exception:  # a bug: the page keeps what it knows of the pool
                log.exception("pool_poll_failed")
            await asyncio.sleep(POOL_INTERVAL_S)

    async def poll_plans(self) -> None:
        """Fetch the plans of networks in pieces that are new; one that fails is tried again."""
        shown = {model.model_id for model in self._state.models}
        self._plans_due = {each: due for each, due in self._plans_due.items() if each in shown}
        for model in self._state.models[:MAX_CHARTED_MODELS]:
            model_id, now = model.model_id, time.monotonic()
            if not is_planned(model_id) or now < self._plans_due.get(model_id, 0.0):
                continue
            self._plans_due[model_id] = now + PLAN_RETRY_S
            async with self._state_lock:
                records = self._state.records_of(model)
            serving = [record for record in records if record.state == "serving"]
            found = summarize_plan(model_id, model.num_blocks, serving)
            try:
                plan = await fetch_plan(self._swarm, found, random.Random())
            except (NesaError, OSError) as error:
                log.info("plan_not_fetched", model=model_id, reason=str(error))
                continue
            self._plans_due[model_id] = math.inf
            async with self._state_lock:
                self._state.update_plan(model_id, plan)
            self._publish()

    async def _run_plan_polls(self) -> None:
        while True:
            try:
                await self.poll_plans()
            except Exception:  # a bug, or a malicious record: the dashboard keeps running
                log.exception("plan_poll_failed")
            await asyncio.sleep(PLAN_INTERVAL_S)

    async def _run_training_polls(self, curves: TrainingCurves) -> None:
        while True:
            try:
                found = await asyncio.to_thread(curves.read)
                async with self._state_lock:
                    self._state.update_trainings(found)
                self._publish()
            except Exception:  # a bug: the page keeps what it knows
                log.exception("training_poll_failed")
            await asyncio.sleep(self._poll_interval_s)

    async def _run_ticks(self) -> None:
        while True:
            try:
                async with self._state_lock:
                    await asyncio.to_thread(self._state.advance_time, self._clock(), self._activity)
                self._publish()
            except Exception:  # as above
                log.exception("dashboard_tick_failed")
            quick = self._activity is not None and self._feed.num_viewers > 0
            await asyncio.sleep(VIEWED_TICK_INTERVAL_S if quick else TICK_INTERVAL_S)

    async def _run_pings(self) -> None:
        """Ping nodes while a page is open: a dead node's record stays valid for up to a minute."""
        pinging: dict[PeerId, asyncio.Task[None]] = {}
        order: dict[PeerId, None] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(PING_INTERVAL_S)
                if not self._feed.num_viewers:
                    continue
                pinging = {peer: task for peer, task in pinging.items() if not task.done()}
                nodes: dict[PeerId, tuple[str, ...]] = {}
                for model in self._state.models:
                    nodes |= self._swarm.directory.addresses(model.model_id, model.num_blocks)
                order = {peer: None for peer in (*order, *nodes) if peer in nodes}
                for peer in [peer for peer in order if peer not in pinging]:
                    if len(pinging) < MAX_CONCURRENT_PINGS:
                        pinging[peer] = group.create_task(self._ping(peer, nodes[peer]))
                        order[peer] = order.pop(peer)  # move to the end

    async def _ping(self, peer: PeerId, addresses: Sequence[str]) -> None:
        answered = False
        for timeout_s in PING_TIMEOUTS_S:
            with suppress(NesaError, OSError):
                await ping(self._swarm.transport, peer, addresses, timeout_s=timeout_s)
                answered = True
                break
        async with self._state_lock:
            self._state.record_ping(peer, answered=answered)

    async def _run_topology_updates(self) -> None:
        await asyncio.sleep(FIRST_TOPOLOGY_DELAY_S)
        while True:
            began = time.monotonic()
            for model in self._state.models[:MAX_CHARTED_MODELS]:
                try:
                    await self._update_topology(model)
                except (NesaError, OSError) as error:
                    log.warning("topology_update_failed", model=model.model_id, reason=str(error))
                except Exception:  # as above
                    log.exception("topology_update_failed", model=model.model_id)
            took_s = time.monotonic() - began
            await asyncio.sleep(max(TOPOLOGY_INTERVAL_S, took_s / _MAX_BUSY_FRACTION))

    async def _update_topology(self, model: ModelSummary) -> None:
        placements = await self._swarm.notices.fetch(PlacementNotice, model.model_id)
        async with self._state_lock:
            self._state.report_placements(placements, self._clock())
        # Check the state's count first: a snapshot of thousands of nodes blocks the event loop.
        if not self._topologies.observes(model.model_id) or model.nodes > MAX_TOPOLOGY_NODES:
            return
        snapshot = self._swarm.directory.snapshot(model.model_id)
        if not 0 < len(snapshot.nodes) <= MAX_TOPOLOGY_NODES:
            return
        newest = max(placements, key=lambda placement: placement.order, default=None)
        await asyncio.to_thread(self._observe_snapshot, snapshot, newest)

    def _observe_snapshot(self, snapshot: Snapshot, active: PlacementNotice | None) -> None:
        measured = self._swarm.directory.measured_links(snapshot)
        self._topologies.observe_snapshot(replace(snapshot, links=assemble_links(measured)), active)
