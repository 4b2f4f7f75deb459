"""Orchestrator of one model's swarm: holds the lease, takes snapshots, plans, publishes placements.

Any number of nodes may run one; the leaseholder publishes, the rest stand by. Nodes need not obey,
and without an orchestrator every node chooses for itself.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from nesa_node.core.decision_log import DecisionLog
from nesa_node.core.errors import NesaError, PeerUnreachableError
from nesa_node.core.ids import ModelId
from nesa_node.core.logging import get_logger
from nesa_node.server.orchestrator.history import History, decision_entry, is_same_reason
from nesa_node.server.orchestrator.learner import LEARN_INTERVAL_S, Learner
from nesa_node.server.orchestrator.planner import PlacementDecision, PlacementPlanner
from nesa_node.swarm.dht.sealing import PlacementNotice, TunedExponents
from nesa_node.swarm.notice_store import LeaseKeeper, NoticeStore
from nesa_node.topology.snapshot import Snapshot, snapshot_digest

log = get_logger(__name__)

PLACEMENT_TTL_S = 300.0
PLANNING_JITTER = (0.9, 1.1)
_PUBLISHED_FIELDS = (
    "moves",
    "gain",
    "repairs",
    "latency_before_s",
    "latency_after_s",
    "steps_per_s_before",
    "steps_per_s_after",
    "strategy",
    "schema_name",
    "trigger",
    "reason",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrchestratorIntervals:
    """Intervals of planning and learning, and the lifetime of a placement."""

    every_s: float = 30.0
    placement_ttl_s: float = PLACEMENT_TTL_S
    learn_every_s: float = LEARN_INTERVAL_S


class Orchestrator:
    """Plans with snapshots from `look`, which have links.

    `decisions` may be None: then none are logged. `clock` gives seconds since the Unix epoch.
    Without `learner` the greedy rule keeps its shipped exponents.
    """

    def __init__(
        self,
        board: NoticeStore,
        lease: LeaseKeeper,
        model_id: ModelId,
        fetch_snapshot: Callable[[], Awaitable[Snapshot]],
        planner: PlacementPlanner,
        *,
        decisions: DecisionLog | None,
        history: History | None = None,
        learner: Learner | None = None,
        intervals: OrchestratorIntervals = OrchestratorIntervals(),
        rng: random.Random,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._board = board
        self._lease = lease
        self._model_id = model_id
        self._fetch_snapshot = fetch_snapshot
        self._planner = planner
        self._decisions = decisions
        self._history = history
        self._learner = learner
        self._intervals = intervals
        self._rng = rng
        self._clock = clock
        self._last_reason = ""

    async def run(self) -> None:
        """Lead or stand by until cancelled; then release the lease."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._lease_loop())
                group.create_task(self._planning_loop())
                group.create_task(self._learning_loop())
        finally:
            await self._release_lease()

    async def step(self) -> PlacementNotice | None:
        """Take one snapshot; publish a placement if something new should move, else return None."""
        if not self._is_leader():
            await self._observe_as_standby()
            return None
        snapshot = await self._fetch_snapshot()
        decision = await asyncio.to_thread(self._planner.decide, snapshot)
        if not self._is_leader():
            # Planning for a large swarm takes seconds, in which another orchestrator may have taken
            # over.
            return None
        placement = await self._publish_if_new(decision, snapshot)
        await self._record_snapshot(snapshot, decision)
        return placement

    async def _publish_if_new(
        self, decision: PlacementDecision, snapshot: Snapshot
    ) -> PlacementNotice | None:
        known = self._board.own_notice(PlacementNotice, self._model_id)
        if not decision.moves:
            await self._record_no_moves(decision, snapshot)
            if self._should_publish_exponents(known):
                return await self._publish(decision, snapshot)
            return None
        if known is not None and known.epoch == self._lease.epoch and known.moves == decision.moves:
            return None
        return await self._publish(decision, snapshot)

    def _exponents(self) -> TunedExponents | None:
        """Exponents to publish; None for the shipped ones."""
        if self._learner is None or self._learner.tuned.version == 0:
            return None
        tuned = self._learner.tuned
        return TunedExponents(
            version=tuned.version, at=tuned.at, values=dict(tuned.values), why=tuned.why
        )

    def _should_publish_exponents(self, known: PlacementNotice | None) -> bool:
        """Whether exponents are due. They never replace a placement that still asks for moves."""
        exponents = self._exponents()
        if exponents is None or (known is not None and known.moves):
            return False
        if known is None or known.exponents != exponents:
            return True
        return known.expires_at < self._clock() + self._intervals.placement_ttl_s / 2

    async def _observe_as_standby(self) -> None:
        """Record snapshots, to be ready to take over."""
        if self._history is not None:
            await self._board.fetch(PlacementNotice, self._model_id)
            await self._record_snapshot(await self._fetch_snapshot(), None)

    async def _record_snapshot(
        self, snapshot: Snapshot, decision: PlacementDecision | None
    ) -> None:
        if self._history is None:
            return
        known = self._board.known_notices(PlacementNotice, self._model_id)
        active = max(known, key=lambda placement: placement.order, default=None)
        await asyncio.to_thread(
            self._history.record,
            snapshot,
            decision,
            active,
            leads=decision is not None,
            tuned=None if self._learner is None else self._learner.tuned,
        )

    def _is_leader(self) -> bool:
        return self._lease.is_leader

    async def _publish(self, decision: PlacementDecision, snapshot: Snapshot) -> PlacementNotice:
        placement = await self._board.publish(
            PlacementNotice,
            self._model_id,
            epoch=self._lease.epoch,
            ttl_s=self._intervals.placement_ttl_s,
            num_blocks=snapshot.num_blocks,
            based_on=await asyncio.to_thread(snapshot_digest, snapshot),
            exponents=self._exponents(),
            **{name: getattr(decision, name) for name in _PUBLISHED_FIELDS},
            parameters=dict(decision.parameters),
        )
        log.info(
            "placement_published",
            placement=placement.name,
            trigger=decision.trigger,
            moves=len(decision.moves),
            gain=round(decision.gain, 3),
            reason=decision.reason,
            planning=decision.planning,
        )
        self._last_reason = ""
        await self._log_decision(placement.name, decision, snapshot)
        return placement

    async def _record_no_moves(self, decision: PlacementDecision, snapshot: Snapshot) -> None:
        """Record that nothing moves, once per reason, and once per reason to plan or not: most
        snapshots change nothing."""
        reason = f"{decision.reason}; {decision.planning}"
        if not is_same_reason(reason, self._last_reason):
            self._last_reason = reason
            log.info("no_moves_planned", reason=decision.reason, planning=decision.planning)
            await self._log_decision(None, decision, snapshot)

    async def _log_decision(
        self, name: str | None, decision: PlacementDecision, snapshot: Snapshot
    ) -> None:
        if self._decisions is None:
            return
        decisions, epoch = self._decisions, self._lease.epoch

        def keep() -> None:
            decisions.add(decision_entry(name, decision, snapshot, epoch=epoch))

        try:
            await asyncio.to_thread(keep)
        except OSError as error:
            log.warning("decision_not_logged", reason=str(error))

    async def _lease_loop(self) -> None:
        while True:
            try:
                await self._lease.step()
            except (NesaError, OSError, ValueError) as error:
                log.warning("lease_not_renewed", reason=str(error))
            await asyncio.sleep(self._lease.terms.ttl_s / 4)

    async def _planning_loop(self) -> None:
        while True:
            await asyncio.sleep(self._intervals.every_s * self._rng.uniform(*PLANNING_JITTER))
            try:
                await self.step()
            except (NesaError, OSError, ValueError) as error:
                log.warning("placement_not_planned", reason=str(error))
            except Exception:  # a bug: the swarm continues, and so does this loop
                log.exception("placement_not_planned")

    async def _learning_loop(self) -> None:
        """Learn while leading only: it takes processor time."""
        while self._learner is not None:
            await asyncio.sleep(self._intervals.learn_every_s * self._rng.uniform(*PLANNING_JITTER))
            if not self._is_leader():
                continue
            try:
                await self._learner.learn()
            except Exception:  # a bug: the swarm continues, and so does this loop
                log.exception("study_failed")

    async def _release_lease(self) -> None:
        try:
            async with asyncio.timeout(5.0):
                await self._lease.release()
        except (TimeoutError, PeerUnreachableError) as error:
            log.debug("lease_not_released", reason=str(error))
