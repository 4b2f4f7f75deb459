"""The orchestrator of a pool: builds the swarms that are asked for, of the machines on offer.

Each round reads offers, requests and records, decides what each machine should hold, and publishes
an assignment for every machine whose part changed. It keeps no state that a successor would lack:
what machines hold is in their offers, what is wanted in the requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from nesa_node.core.errors import NesaError, SwarmError
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.core.logging import get_logger
from nesa_node.core.metrics import MetricRegistry
from nesa_node.core.settings.models import OrchestratorConfig
from nesa_node.routing.placement.building import (
    BuildShortage,
    ModelShape,
    PoolMachine,
    missing_spans,
    plan_replica,
)
from nesa_node.routing.succession import LeaseTerms
from nesa_node.server.node.daemon import StoppedError, join_swarm
from nesa_node.server.node.invitation import check_ready_file, ready_file, ready_file_fields
from nesa_node.server.node.metrics import daemon_source
from nesa_node.server.node.shutdown import Shutdown, stop_signals
from nesa_node.server.orchestrator.launch import LEASE_GRACE_FRACTION, OnHistory
from nesa_node.server.pool.assignments import Assignments
from nesa_node.server.pool.demand import Demand, least_busy
from nesa_node.server.pool.machines import may_be_held, pool_machine
from nesa_node.server.pool.models import describe_model, open_pool_model
from nesa_node.server.pool.planners import PlanningTerms, SwarmPlanners
from nesa_node.server.pool.pool_round import PoolRound
from nesa_node.server.pool.speeds import MachineSpeeds
from nesa_node.swarm.dht.pool_notices import (
    MAX_LISTED_SWARMS,
    POOL,
    AssignedSpan,
    BuildRequest,
    MachineAssignment,
    Offer,
    PoolStatus,
    SwarmState,
    SwarmStatus,
    WantedSwarm,
    assignment_topic,
)
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.notice_store import LeaseEligibility, LeaseKeeper
from nesa_node.topology.snapshot import count_span_holders

log = get_logger(__name__)

ROUND_S = 4.0
STATUS_TTL_S = 60.0
ASSIGNMENT_TTL_S = 1800.0
REFUSE_AFTER_S = 10.0
"""Time for which a request waits for offers that this orchestrator has not read yet."""
DESCRIBE_RETRY_S = 60.0


@dataclass(frozen=True, slots=True)
class _Model:
    shape: ModelShape
    model_id: ModelId


async def run_pool_orchestrator(
    config: OrchestratorConfig,
    on_history: OnHistory | None = None,
    *,
    metric_sources: MetricRegistry | None = None,
) -> None:
    """Build the swarms that are asked for until SIGTERM or SIGINT.

    `on_history` is called with the history of each swarm that is planned for. Raises `SwarmError`
    and `ConfigError`.
    """
    check_ready_file(config.ready_file)
    sources = metric_sources or MetricRegistry()
    with stop_signals() as stopping, suppress(StoppedError):
        async with join_swarm(config, stopping) as swarm:
            with (
                ready_file(config.ready_file, ready_file_fields(swarm)),
                sources.registered(daemon_source(swarm, "orchestrator", sources.version)),
            ):
                work = run_builder(config, swarm, on_history, metric_sources=metric_sources)
                await Shutdown(stopping, swarm.transport).run_until_shutdown(work)


async def run_builder(
    config: OrchestratorConfig,
    swarm: Swarm,
    on_history: OnHistory | None = None,
    *,
    metric_sources: MetricRegistry | None = None,
) -> None:
    """Compete for the pool's lease and build swarms while holding it, until cancelled."""
    builder = PoolBuilder(config, swarm, on_history, metric_sources)
    try:
        await builder.run()
    finally:
        await builder.close()


class PoolBuilder:
    """Decides which machine of the pool holds what."""

    def __init__(
        self,
        config: OrchestratorConfig,
        swarm: Swarm,
        on_history: OnHistory | None = None,
        metric_sources: MetricRegistry | None = None,
    ) -> None:
        own = swarm.identity.peer_id
        self._config, self._swarm = config, swarm
        allowed = (*config.allow_orchestrators, own) if config.allow_orchestrators else ()
        self._lease = LeaseKeeper(
            swarm.notices,
            own,
            POOL,
            clock=time.time,
            eligibility=LeaseEligibility(frozenset(allowed)),
            terms=LeaseTerms(config.lease_ttl_s, config.lease_ttl_s * LEASE_GRACE_FRACTION),
        )
        self._creators = frozenset((own, *config.allow_creators))
        swarm.notices.pin_signers(self._creators)
        self._models: dict[str, _Model] = {}
        self._model_errors: dict[str, tuple[str, float]] = {}
        self._assignments = Assignments()
        self._demand: dict[str, Demand] = {}
        self._speeds = MachineSpeeds(swarm)
        self._wanted_since: dict[str, float] = {}
        self._planners = SwarmPlanners(config, swarm, on_history, metric_sources)

    async def run(self) -> None:
        """Run rounds until cancelled; errors are logged."""
        log.info("pool_orchestrator_ready", creators=sorted(self._creators))
        next_lease = 0.0
        while True:
            try:
                if time.monotonic() >= next_lease:
                    await self._lease.step()
                    next_lease = time.monotonic() + self._lease.terms.ttl_s / 4
                round_ = await self._run_round() if self._lease.is_leader else None
                await self._plan_placements(round_)
            except (SwarmError, OSError) as error:
                log.warning("pool_not_planned", reason=str(error))
            except Exception:  # a bug: one bad notice must not stop this loop
                log.exception("pool_not_planned")
            await asyncio.sleep(ROUND_S)

    async def close(self) -> None:
        """Stop planning, and release the lease."""
        await self._planners.close()
        try:
            async with asyncio.timeout(5.0):
                await self._lease.release()
        except (TimeoutError, SwarmError, OSError) as error:
            log.warning("lease_not_released", reason=str(error) or "no DHT member answered")

    async def _run_round(self) -> PoolRound:
        round_ = await self._read()
        await self._speeds.measure_round_trips(round_.offers)
        await self._describe_models(round_)
        await self._look_at_swarms(round_)
        shapes = self._shapes()
        for peer in round_.offers:
            round_.assigned[peer] = self._assignments.present(round_, peer, shapes)
        self._release_unwanted(round_)
        self._fill(round_)
        await self._publish_assignments(round_)
        await self._publish_status(round_)
        return round_

    async def _read(self) -> PoolRound:
        notices = self._swarm.notices
        offered = await notices.fetch(Offer, POOL)
        offers = {each.signer: self._plausible(each) for each in offered if self._may_use(each)}
        requests = [
            each
            for each in await notices.fetch(BuildRequest, POOL)
            if each.signer in self._creators
        ]
        now = time.time()
        wanted: dict[str, WantedSwarm] = {}
        for request in sorted(requests, key=lambda each: (each.issued_at, each.peer_id)):
            for swarm in request.swarms:
                if swarm.until > now:
                    wanted[swarm.model] = swarm
        self._assignments.keep(offers)
        since = self._wanted_since
        self._wanted_since = {name: since.get(name, time.monotonic()) for name in wanted}
        return PoolRound(offers, len(offered) - len(offers), wanted)

    def _may_use(self, offer: Offer) -> bool:
        return not offer.obeys or self._swarm.identity.peer_id in offer.obeys

    def _plausible(self, offer: Offer) -> Offer:
        """The offer without spans that its model cannot have: offers are untrusted."""
        held = tuple(
            each
            for each in offer.held
            if each.model not in self._models or may_be_held(each, self._models[each.model].shape)
        )
        return offer if len(held) == len(offer.held) else offer.model_copy(update={"held": held})

    def _shapes(self) -> dict[str, ModelShape]:
        return {name: model.shape for name, model in self._models.items()}

    async def _describe_models(self, round_: PoolRound) -> None:
        """Open the wanted models' configs and headers, once each."""
        for name in round_.wanted:
            error = self._model_errors.get(name)
            if error is not None and time.monotonic() < error[1]:
                round_.refused.add(name)
                round_.reasons[name] = error[0]
            elif name not in self._models:
                try:
                    self._models[name] = await asyncio.to_thread(self._describe, name)
                    self._model_errors.pop(name, None)
                except (NesaError, OSError) as problem:
                    reason = str(problem)
                    self._model_errors[name] = reason, time.monotonic() + DESCRIBE_RETRY_S
                    round_.refused.add(name)
                    round_.reasons[name] = reason
                    log.warning("model_not_described", model=name, reason=reason)

    def _describe(self, name: str) -> _Model:
        return _Model(*describe_model(open_pool_model(name, self._config)))

    async def _look_at_swarms(self, round_: PoolRound) -> None:
        """Read the nodes of each swarm: their speeds, and what their load asks for."""
        now = time.monotonic()
        for name, wanted in round_.wanted.items():
            model = self._models.get(name)
            if model is not None:
                round_.snapshots[name] = await self._swarm.directory.fetch(
                    model.model_id, model.shape.num_blocks, reports=False
                )
                for peer, (held, node) in round_.serving_nodes(name).items():
                    offer = round_.offers[peer]
                    self._speeds.observe(peer, offer, model.shape, held.quant_type, node, now)
            demand = self._demand.setdefault(name, Demand(wanted, wanted.replicas))
            demand.update(wanted, round_.snapshots.get(name), now)
        self._demand = {name: each for name, each in self._demand.items() if name in round_.wanted}

    def _release_unwanted(self, round_: PoolRound) -> None:
        """Release machines of removed swarms, and of those that have more replicas than wanted."""
        for spans in round_.assigned.values():
            for name in [name for name in spans if name not in round_.wanted]:
                del spans[name]
        for name in round_.wanted:
            model = self._models.get(name)
            if model is not None:
                while (peer := self._superfluous(round_, name, model)) is not None:
                    del round_.assigned[peer][name]
                    log.info("machine_released", model=name, machine=peer)

    def _superfluous(self, round_: PoolRound, name: str, model: _Model) -> PeerId | None:
        """A machine without which each block still has the wanted replicas: the smallest such."""
        holders = {peer: each.blocks for peer, each in round_.holders(name).items()}
        counts = _count_holders(holders.values(), model)
        replicas = self._demand[name].replicas
        spare = [
            (len(span), peer)
            for peer, span in holders.items()
            if min(counts[span.start : span.end], default=0) > replicas
        ]
        return min(spare)[1] if spare else None

    def _fill(self, round_: PoolRound) -> None:
        """Give spans that lack holders to machines with room: holes, then further replicas."""
        for replica in range(1, 1 + max((d.replicas for d in self._demand.values()), default=0)):
            for name, wanted in round_.wanted.items():
                if name in self._models and replica <= self._demand[name].replicas:
                    self._fill_replica(round_, wanted, replica)

    def _fill_replica(self, round_: PoolRound, wanted: WantedSwarm, replica: int) -> None:
        name, model = wanted.model, self._models[wanted.model]
        counts = _count_holders((each.blocks for each in round_.holders(name).values()), model)
        for span in missing_spans(counts, replica):
            machines = self._machines_for(round_, name)
            plan = plan_replica(
                model.shape,
                span,
                machines,
                round_.holder_domains(name, span),
                quality=wanted.quality,
                goal=wanted.goal,
            )
            if isinstance(plan, BuildShortage):
                self._explain_shortage(round_, wanted, replica, plan, machines)
                idle = least_busy(self._demand)
                if replica > wanted.replicas and not round_.is_releasing() and idle is not None:
                    idle.give_back(time.monotonic())
                return
            for each in plan.spans:
                round_.assigned[each.peer][name] = AssignedSpan(
                    model=name,
                    span=(each.span.start, each.span.end),
                    quant_type=each.quant_type,
                    dtype=model.shape.dtype,
                    cache_tokens=model.shape.cache_tokens,
                )
                self._assignments.record_assigned(each.peer, name)
            log.info(
                "span_assigned",
                model=name,
                span=str(span),
                machines=[f"{each.peer[-8:]} {each.span} {each.quant_type}" for each in plan.spans],
                step_s=round(plan.step_s, 4),
            )

    def _machines_for(self, round_: PoolRound, name: str) -> list[PoolMachine]:
        """Machines that may hold the model and do not yet, with their free memory."""
        shapes, machines = self._shapes(), []
        for peer, offer in round_.offers.items():
            if self._assignments.is_avoided(peer, name):
                continue
            machine = pool_machine(
                offer,
                name,
                shapes[name],
                round_.assigned[peer],
                shapes,
                hop_s=self._speeds.hop_s(peer),
                slowdown=partial(self._speeds.slowdown, peer),
            )
            if machine is not None:
                machines.append(machine)
        return machines

    def _explain_shortage(
        self,
        round_: PoolRound,
        wanted: WantedSwarm,
        replica: int,
        shortage: BuildShortage,
        machines: Sequence[PoolMachine],
    ) -> None:
        name = wanted.model
        refusals = self._assignments.refusals(name, round_.offers)
        if not round_.offers:
            reason = "no machine is on offer yet"
            if round_.disobedient:
                reason = (
                    f"none of {round_.disobedient} machines on offer obeys this orchestrator "
                    "(--allow-orchestrators)"
                )
                self._refuse_in_time(round_, name)
            round_.reasons.setdefault(name, reason)
            return
        if not machines and refusals:
            reason = f"all machines refuse: {'; '.join(refusals)}"
        elif not machines and not round_.holders(name):
            reason = f"none of {len(round_.offers)} machines on offer may hold {name}"
        else:
            reason = f"it does not fit: {shortage.advice}"
        if replica > 1:
            reason = f"replica {replica}: {reason}"
        else:
            self._refuse_in_time(round_, name)
        round_.reasons.setdefault(name, reason[:240])

    def _refuse_in_time(self, round_: PoolRound, name: str) -> None:
        if time.monotonic() - self._wanted_since[name] >= REFUSE_AFTER_S:
            round_.refused.add(name)

    async def _publish_assignments(self, round_: PoolRound) -> None:
        for peer, spans in round_.assigned.items():
            wanted = tuple(sorted(spans.values(), key=lambda each: each.model))
            if not self._assignments.is_due(peer, wanted):
                continue
            await self._swarm.notices.publish(
                MachineAssignment,
                assignment_topic(peer),
                epoch=self._lease.epoch,
                ttl_s=ASSIGNMENT_TTL_S,
                spans=wanted,
            )
            self._assignments.record_published(peer, wanted)

    async def _publish_status(self, round_: PoolRound) -> None:
        swarms = [self._describe_swarm(round_, each) for each in round_.wanted.values()]
        swarms += [
            SwarmStatus(model=name, state="removing", replicas=0, wanted=0, machines=0)
            for name in round_.leaving()
        ]
        await self._swarm.notices.publish(
            PoolStatus,
            POOL,
            ttl_s=STATUS_TTL_S,
            creators=tuple(sorted(self._creators))[:16],
            machines=len(round_.offers),
            free_machines=sum(not spans for spans in round_.assigned.values()),
            swarms=tuple(swarms[:MAX_LISTED_SWARMS]),
        )

    def _describe_swarm(self, round_: PoolRound, wanted: WantedSwarm) -> SwarmStatus:
        name, model = wanted.model, self._models.get(wanted.model)
        holders = round_.holders(name)
        serving = [node.span for _, node in round_.serving_nodes(name).values()]
        replicas, predicted = 0, 0.0
        if model is not None:
            replicas = min(_count_holders(serving, model))
            predicted = self._speeds.predict_tokens_per_s(model.shape, holders, round_.offers)
        state: SwarmState = "building"
        reason = round_.reasons.get(name, "")
        if replicas:
            state = "serving"
        elif name in round_.refused:
            state = "refused"
        elif not reason:
            reason = f"{len(serving)} of {len(holders)} machines serve"
        return SwarmStatus(
            model=name,
            state=state,
            replicas=replicas,
            wanted=self._demand[name].replicas,
            machines=len(holders),
            model_id="" if model is None else model.model_id,
            predicted_tokens_per_s=predicted,
            reason="".join(char for char in reason if char.isprintable())[:240],
        )

    async def _plan_placements(self, round_: PoolRound | None) -> None:
        """Have the placement of each built swarm planned, with its replicas and goal."""
        built = {}
        for name, wanted in ({} if round_ is None else round_.wanted).items():
            if name in self._models:
                terms = PlanningTerms(self._demand[name].replicas, wanted.goal)
                built[self._models[name].model_id] = terms
        await self._planners.follow(built)


def _count_holders(held: Iterable[Span], model: _Model) -> tuple[int, ...]:
    """Number of holders of each block; a span that goes beyond the model is cut."""
    spans = ((span.start, span.end) for span in held)
    return count_span_holders(spans, model.shape.num_blocks)
