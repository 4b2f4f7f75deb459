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
from nesa_node.server.decided import decided, same_reason
from nesa_node.server.history import History
from nesa_node.server.learner import EVERY_S, Learner
from nesa_node.server.planner import Decision, Planner
from nesa_node.swarm.lease import LeaseKeeper
from nesa_node.swarm.notice_board import NoticeBoard
from nesa_node.swarm.notices import Exponents, Placement
from nesa_node.topology.digest import digest
from nesa_node.topology.snapshot import Snapshot

log = get_logger(__name__)

PLACEMENT_TTL_S = 300.0
JITTER = (0.9, 1.1)
_PUBLISHED = (
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
class Pace:
    """Intervals of planning and learning, and the lifetime of a placement."""

    every_s: float = 30.0
    placement_ttl_s: float = PLACEMENT_TTL_S
    learn_every_s: float = EVERY_S


class Orchestrator:
    """Plans with snapshots from `look`, which have links.

    `decisions` may be None: then none are logged. `clock` gives seconds since the Unix epoch.
    Without `learner` the greedy rule keeps its shipped exponents.
    """

    def __init__(
        self,
        board: NoticeBoard,
        lease: LeaseKeeper,
        model_id: ModelId,
        look: Callable[[], Awaitable[Snapshot]],
        planner: Planner,
        *,
        decisions: DecisionLog | None,
        history: History | None = None,
        learner: Learner | None = None,
        pace: Pace = Pace(),
        rng: random.Random,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._board = board
        self._lease = lease
        self._model_id = model_id
        self._look = look
        self._planner = planner
        self._decisions = decisions
        self._history = history
        self._learner = learner
        self._pace = pace
        self._rng = rng
        self._clock = clock
        self._last_reason = ""

    async def run(self) -> None:
        """Lead or stand by until cancelled; then release the lease."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep_lease())
                group.create_task(self._keep_planning())
                group.create_task(self._keep_learning())
        finally:
            await self._leave()

    async def step(self) -> Placement | None:
        """Take one snapshot; publish a placement if something new should move, else return None."""
        if not self._leads():
            await self._stand_by()
            return None
        snapshot = await self._look()
        decision = await asyncio.to_thread(self._planner.decide, snapshot)
        if not self._leads():
            # Planning for a large swarm takes seconds, in which another orchestrator may have taken
            # over.
            return None
        placement = await self._act(decision, snapshot)
        await self._remember(snapshot, decision)
        return placement

    async def _act(self, decision: Decision, snapshot: Snapshot) -> Placement | None:
        known = self._board.own(Placement, self._model_id)
        if not decision.moves:
            await self._note_nothing(decision, snapshot)
            if self._should_tell(known):
                return await self._publish(decision, snapshot)
            return None
        if known is not None and known.epoch == self._lease.epoch and known.moves == decision.moves:
            return None
        return await self._publish(decision, snapshot)

    def _exponents(self) -> Exponents | None:
        """Exponents to publish; None for the shipped ones."""
        if self._learner is None or self._learner.tuned.version == 0:
            return None
        tuned = self._learner.tuned
        return Exponents(
            version=tuned.version, at=tuned.at, values=dict(tuned.values), why=tuned.why
        )

    def _should_tell(self, known: Placement | None) -> bool:
        """Whether exponents are due. They never replace a placement that still asks for moves."""
        exponents = self._exponents()
        if exponents is None or (known is not None and known.moves):
            return False
        if known is None or known.exponents != exponents:
            return True
        return known.expires_at < self._clock() + self._pace.placement_ttl_s / 2

    async def _stand_by(self) -> None:
        """Record snapshots, to be ready to take over."""
        if self._history is not None:
            await self._board.fetch(Placement, self._model_id)
            await self._remember(await self._look(), None)

    async def _remember(self, snapshot: Snapshot, decision: Decision | None) -> None:
        if self._history is None:
            return
        known = self._board.known(Placement, self._model_id)
        active = max(known, key=lambda placement: placement.order, default=None)
        await asyncio.to_thread(
            self._history.saw,
            snapshot,
            decision,
            active,
            leads=decision is not None,
            tuned=None if self._learner is None else self._learner.tuned,
        )

    def _leads(self) -> bool:
        return self._lease.leads

    async def _publish(self, decision: Decision, snapshot: Snapshot) -> Placement:
        placement = await self._board.publish(
            Placement,
            self._model_id,
            epoch=self._lease.epoch,
            ttl_s=self._pace.placement_ttl_s,
            num_blocks=snapshot.num_blocks,
            based_on=await asyncio.to_thread(digest, snapshot),
            exponents=self._exponents(),
            **_fields(decision),
        )
        log.info(
            "placement_published",
            placement=placement.name,
            trigger=decision.trigger,
            moves=len(decision.moves),
            gain=round(decision.gain, 3),
            reason=decision.reason,
        )
        self._last_reason = ""
        await self._keep(placement.name, decision, snapshot)
        return placement

    async def _note_nothing(self, decision: Decision, snapshot: Snapshot) -> None:
        """Record that nothing moves, once per reason: most snapshots change nothing."""
        if not same_reason(decision.reason, self._last_reason):
            self._last_reason = decision.reason
            log.info("no_moves_planned", reason=decision.reason)
            await self._keep(None, decision, snapshot)

    async def _keep(self, name: str | None, decision: Decision, snapshot: Snapshot) -> None:
        if self._decisions is None:
            return
        decisions, epoch = self._decisions, self._lease.epoch

        def keep() -> None:
            decisions.add(decided(name, decision, snapshot, epoch=epoch))

        try:
            await asyncio.to_thread(keep)
        except OSError as error:
            log.warning("decision_not_logged", reason=str(error))

    async def _keep_lease(self) -> None:
        while True:
            try:
                await self._lease.step()
            except (NesaError, OSError, ValueError) as error:
                log.warning("lease_not_renewed", reason=str(error))
            await asyncio.sleep(self._lease.terms.ttl_s / 4)

    async def _keep_planning(self) -> None:
        while True:
            await asyncio.sleep(self._pace.every_s * self._rng.uniform(*JITTER))
            try:
                await self.step()
            except (NesaError, OSError, ValueError) as error:
                log.warning("placement_not_planned", reason=str(error))
            except Exception:  # a bug: the swarm continues, and so does this loop
                log.exception("placement_not_planned")

    async def _keep_learning(self) -> None:
        """Learn while leading only: it takes processor time."""
        while self._learner is not None:
            await asyncio.sleep(self._pace.learn_every_s * self._rng.uniform(*JITTER))
            if not self._leads():
                continue
            try:
                await self._learner.learn()
            except Exception:  # a bug: the swarm continues, and so does this loop
                log.exception("study_failed")

    async def _leave(self) -> None:
        try:
            async with asyncio.timeout(5.0):
                await self._lease.leave()
        except (TimeoutError, PeerUnreachableError) as error:
            log.debug("lease_not_released", reason=str(error))


def _fields(decision: Decision) -> dict[str, object]:
    fields = {name: getattr(decision, name) for name in _PUBLISHED}
    return fields | {"parameters": dict(decision.parameters)}
