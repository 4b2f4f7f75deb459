"""Orchestrators and followers of placements, set up from their configuration."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Protocol

from nesa_node.core.decision_log import DecisionLog
from nesa_node.core.errors import ConfigError, SwarmError
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.core.logging import get_logger
from nesa_node.core.metrics import ORCHESTRATOR_LEADS, MetricRegistry, MetricSample
from nesa_node.core.settings.models import NodeConfig, OrchestratorConfig
from nesa_node.routing.reputation import SpeedClaims
from nesa_node.routing.succession import LeaseTerms
from nesa_node.server.orchestrator.history import History
from nesa_node.server.orchestrator.learner import Learner
from nesa_node.server.orchestrator.orchestrator import Orchestrator, OrchestratorIntervals
from nesa_node.server.orchestrator.placement_filter import PlacementFilter
from nesa_node.server.orchestrator.planner import PlacementPlanner, Rebalancer
from nesa_node.server.orchestrator.snapshot_store import SnapshotStore, snapshots_path
from nesa_node.server.orchestrator.swarm_score import (
    score_swarm,
)
from nesa_node.swarm.dht.records import filter_by_model
from nesa_node.swarm.dht.sealing import PlacementNotice
from nesa_node.swarm.directory import Directory
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.notice_store import LeaseEligibility, LeaseKeeper, NoticeStore
from nesa_node.topology.snapshot import Snapshot

log = get_logger(__name__)

DEFAULT_FOLLOW_INTERVAL_S = 15.0
FOLLOW_JITTER = (0.8, 1.2)


class MoveRequestLike(Protocol):
    async def wait(self) -> str: ...


class MoveLimiterLike(Protocol):
    """The part of `MoveLimiter` that is needed here."""

    def request_move(self, span: Span, reason: str) -> MoveRequestLike: ...


async def follow_placements(
    board: NoticeStore,
    cached_snapshot: Callable[[], Snapshot],
    fetch_snapshot: Callable[[], Awaitable[Snapshot]],
    model_id: ModelId,
    placement_filter: PlacementFilter,
    move_limiter: MoveLimiterLike,
    *,
    every_s: float = DEFAULT_FOLLOW_INTERVAL_S,
    rng: random.Random,
) -> None:
    """Check the placements about every `every_s` seconds, until cancelled.

    `cached_snapshot` gives the cached snapshot without network traffic, `fetch_snapshot` fetches
    one with links.
    """
    while True:
        await asyncio.sleep(every_s * rng.uniform(*FOLLOW_JITTER))
        try:
            seen = cached_snapshot()
            placement_filter.remember_snapshot(seen)
            placements = placement_filter.select_due(
                await board.fetch(PlacementNotice, model_id), seen
            )
            if not placements:
                continue
            snapshot = await fetch_snapshot()
            # Judging a large swarm's placement takes long: not on the event loop.
            found = await asyncio.to_thread(placement_filter.first_accepted, placements, snapshot)
        except (SwarmError, OSError) as error:
            log.warning("placements_not_read", reason=str(error))
            continue
        except Exception:  # a bug: one bad placement must not stop this loop
            log.exception("placements_not_read")
            continue
        if found is None:
            continue
        placement, verdict = found
        assert verdict.span is not None
        why = f"placement {placement.name}: {verdict.reason}"
        answer = await move_limiter.request_move(verdict.span, why).wait()
        log.info(
            "placement_followed",
            placement=placement.name,
            span=str(verdict.span),
            reason=verdict.reason,
            answer=answer,
        )


class ClampedSpeeds:
    """Clamps claimed speeds by the measurements that clients report.

    Neither planners nor followers compute with other nodes. `claims` remembers reports as long as
    own measurements. Not thread-safe.
    """

    def __init__(self, directory: Directory, claims: SpeedClaims) -> None:
        self._directory = directory
        self._claims = claims

    async def fetch(self, model_id: ModelId, num_blocks: int | None = None) -> Snapshot:
        """A new snapshot with links and clamped speeds."""
        snapshot = self.clamp(await self._directory.fetch(model_id, num_blocks))
        # The links of a large swarm take a second to assemble.
        return await asyncio.to_thread(self._directory.with_links, snapshot)

    def clamp(self, snapshot: Snapshot) -> Snapshot:
        """`snapshot` with clamped speeds."""
        doubts = self._directory.speed_doubts(snapshot.model_id)
        everyone = (*snapshot.nodes, *snapshot.joining)
        for node in everyone:
            self._claims.record_reports(node, doubts.get(node.peer_id, 0.0))
        nodes, joining = (
            tuple(map(self._claims.clamp, each)) for each in (snapshot.nodes, snapshot.joining)
        )
        return replace(snapshot, nodes=nodes, joining=joining)


OnHistory = Callable[[Swarm, ModelId, History], None]

FIND_MODEL_INTERVAL_S = 5.0
LEASE_GRACE_FRACTION = 1 / 3


async def orchestrate(
    config: OrchestratorConfig,
    swarm: Swarm,
    model_id: ModelId,
    *,
    planner: PlacementPlanner | None = None,
    distrusted: Collection[PeerId] = (),
    on_history: OnHistory | None = None,
    metric_sources: MetricRegistry | None = None,
) -> None:
    """Compete for the lease of `model_id` and plan while holding it, until cancelled.

    Leases of `distrusted`, which may grow, are ignored. `on_history` is called with the swarm, the
    model and the history; `metric_sources` collects metric sources.
    """
    own = swarm.identity.peer_id
    swarm.notices.pin_signers(config.allow_orchestrators)
    allowed = frozenset((*config.allow_orchestrators, own) if config.allow_orchestrators else ())
    lease = LeaseKeeper(
        swarm.notices,
        own,
        model_id,
        clock=time.time,
        eligibility=LeaseEligibility(allowed),
        distrusted=distrusted,
        terms=LeaseTerms(config.lease_ttl_s, config.lease_ttl_s * LEASE_GRACE_FRACTION),
    )
    believed = ClampedSpeeds(swarm.directory, SpeedClaims(time.monotonic))
    store = snapshots_path(config.snapshots_dir, model_id)
    decisions = DecisionLog(config.decisions_path)
    history = History(SnapshotStore(store))
    learner = Learner(
        model_id, store, goal=config.placement_goal, replicas=config.replicas, decisions=decisions
    )
    await asyncio.to_thread(history.load)
    await asyncio.to_thread(learner.load)
    if on_history is not None:
        on_history(swarm, model_id, history)
    orchestrator = Orchestrator(
        swarm.notices,
        lease,
        model_id,
        partial(believed.fetch, model_id),
        planner
        or Rebalancer(
            goal=config.placement_goal,
            replicas=config.replicas,
            library=learner.library,
            forecast=history.forecast,
        ),
        decisions=decisions,
        history=history,
        learner=learner,
        intervals=OrchestratorIntervals(
            every_s=config.orchestrate_every_s, learn_every_s=config.learn_every_s
        ),
        rng=random.Random(own),
    )
    log.info("orchestrator_ready", model=model_id)
    with (metric_sources or MetricRegistry()).registered(
        lambda: [MetricSample(ORCHESTRATOR_LEADS, (model_id,), float(lease.is_leader))]
    ):
        await orchestrator.run()


def make_placement_filter(
    config: NodeConfig, own: PeerId, *, num_blocks: int, max_blocks: int
) -> PlacementFilter:
    """A node's placement filter with its operator's settings."""
    allowed = {*config.allow_orchestrators, *((own,) if config.orchestrator else ())}
    return PlacementFilter(
        own,
        score_swarm,
        num_blocks=num_blocks,
        max_blocks=max_blocks,
        allowed=frozenset(allowed),
    )


async def run_follower(
    config: NodeConfig,
    swarm: Swarm,
    model_id: ModelId,
    placement_filter: PlacementFilter,
    move_limiter: MoveLimiterLike,
    *,
    num_blocks: int,
) -> None:
    """Request the moves that accepted placements ask of this node, until cancelled."""
    directory = swarm.directory
    swarm.notices.pin_signers(config.allow_orchestrators)
    believed = ClampedSpeeds(directory, SpeedClaims(time.monotonic))
    await follow_placements(
        swarm.notices,
        lambda: believed.clamp(directory.snapshot(model_id, num_blocks)),
        partial(believed.fetch, model_id, num_blocks),
        model_id,
        placement_filter,
        move_limiter,
        every_s=config.follow_every_s,
        rng=random.Random(swarm.identity.peer_id),
    )


async def find_model(swarm: Swarm, wanted: str | None) -> ModelId:
    """The id of the model served under that name; waits until a node serves it.

    Any node may announce another model of the same name: an exact id wins, then the one that most
    nodes serve. Raises `ConfigError` if no name is given and several models are served.
    """
    waiting = False
    while True:
        records = await swarm.directory.fetch_all()
        found = Counter(record.model_id for record in filter_by_model(records, wanted))
        if len(found) > 1 and wanted is None:
            raise ConfigError(f"several models are served: {', '.join(sorted(found))}; name one")
        if found:
            chosen = max(found, key=lambda model: (model == wanted, found[model], model))
            if len(found) > 1:
                log.warning("model_name_ambiguous", chosen=chosen, nodes=dict(found))
            return ModelId(chosen)
        if not waiting:
            waiting = True
            log.info("model_unserved", model=wanted or "any")
        await asyncio.sleep(FIND_MODEL_INTERVAL_S)
