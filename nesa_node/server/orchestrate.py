"""Orchestrators and followers of placements, set up from their configuration."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Collection

from nesa_node.core.config import NodeConfig, OrchestratorConfig
from nesa_node.core.decision_log import DecisionLog
from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.logging import get_logger
from nesa_node.core.metric_names import LEADS
from nesa_node.core.metrics import Sample, Sources
from nesa_node.routing.claims import Claims
from nesa_node.routing.succession import Terms
from nesa_node.server.believed import Believed
from nesa_node.server.follow import MovesLike, follow
from nesa_node.server.history import History
from nesa_node.server.learner import Learner
from nesa_node.server.obedience import Obedience
from nesa_node.server.orchestrator import Orchestrator, Pace
from nesa_node.server.planner import Planner, Rebalancer, appraise
from nesa_node.server.snapshot_store import SnapshotStore, snapshots_path
from nesa_node.swarm.lease import LeaseKeeper, Whom
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.records import of_model
from nesa_node.topology.snapshot import Snapshot

log = get_logger(__name__)

Show = Callable[[Swarm, ModelId, History], None]

LOOK_FOR_MODEL_S = 5.0
PATIENCE_OF_LEASE = 1 / 3


async def orchestrate(
    config: OrchestratorConfig,
    swarm: Swarm,
    model_id: ModelId,
    *,
    planner: Planner | None = None,
    liars: Collection[PeerId] = (),
    show: Show | None = None,
    told: Sources | None = None,
) -> None:
    """Compete for the lease of `model_id` and plan while holding it, until cancelled.

    Leases of `liars`, which may grow, are ignored. `show` is called with the swarm, the model and
    the history; `told` collects metric sources.
    """
    own = swarm.identity.peer_id
    swarm.notices.spare(config.allow_orchestrators)
    allowed = frozenset((*config.allow_orchestrators, own) if config.allow_orchestrators else ())
    lease = LeaseKeeper(
        swarm.notices,
        own,
        model_id,
        clock=time.time,
        whom=Whom(allowed),
        liars=liars,
        terms=Terms(config.lease_ttl_s, config.lease_ttl_s * PATIENCE_OF_LEASE),
    )

    believed = Believed(swarm.directory, Claims(time.monotonic))

    async def look() -> Snapshot:
        snapshot = believed.of(await swarm.directory.fetch(model_id))
        # The links of a large swarm take a second to assemble.
        return await asyncio.to_thread(swarm.directory.with_links, snapshot)

    store = snapshots_path(config.snapshots_dir, model_id)
    decisions = DecisionLog(config.decisions_path)
    history = History(SnapshotStore(store))
    learner = Learner(
        model_id, store, goal=config.placement_goal, replicas=config.replicas, decisions=decisions
    )
    await asyncio.to_thread(history.recall)
    await asyncio.to_thread(learner.recall)
    if show is not None:
        show(swarm, model_id, history)
    orchestrator = Orchestrator(
        swarm.notices,
        lease,
        model_id,
        look,
        planner
        or Rebalancer(
            goal=config.placement_goal, replicas=config.replicas, library=learner.library
        ),
        decisions=decisions,
        history=history,
        learner=learner,
        pace=Pace(every_s=config.orchestrate_every_s, learn_every_s=config.learn_every_s),
        rng=random.Random(own),
    )
    log.info("orchestrator_ready", model=model_id)
    with (told or Sources()).adding(lambda: [Sample(LEADS, (model_id,), float(lease.leads))]):
        await orchestrator.run()


def obedience_of(config: NodeConfig, own: PeerId, *, num_blocks: int, max_blocks: int) -> Obedience:
    """A node's placement filter with its operator's settings."""
    allowed = {*config.allow_orchestrators, *((own,) if config.orchestrator else ())}
    return Obedience(
        own,
        appraise,
        num_blocks=num_blocks,
        max_blocks=max_blocks,
        allowed=frozenset(allowed),
    )


async def follow_placements(
    config: NodeConfig,
    swarm: Swarm,
    model_id: ModelId,
    obedience: Obedience,
    moves: MovesLike,
    *,
    num_blocks: int,
) -> None:
    """Request the moves that accepted placements ask of this node, until cancelled."""
    directory = swarm.directory
    swarm.notices.spare(config.allow_orchestrators)
    believed = Believed(directory, Claims(time.monotonic))

    async def look() -> Snapshot:
        snapshot = believed.of(await directory.fetch(model_id, num_blocks))
        return await asyncio.to_thread(directory.with_links, snapshot)

    await follow(
        swarm.notices,
        lambda: believed.of(directory.snapshot(model_id, num_blocks)),
        look,
        model_id,
        obedience,
        moves,
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
        found = Counter(record.model_id for record in of_model(records, wanted))
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
        await asyncio.sleep(LOOK_FOR_MODEL_S)
