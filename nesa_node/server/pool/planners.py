"""Orchestrators of single swarms, beside the pool's: they move the nodes of what was built."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from nesa_node.core.ids import ModelId
from nesa_node.core.logging import get_logger
from nesa_node.core.metrics import MetricRegistry
from nesa_node.core.settings.choices import PlacementGoal
from nesa_node.core.settings.models import OrchestratorConfig
from nesa_node.server.node.metrics import model_source
from nesa_node.server.orchestrator.launch import OnHistory, orchestrate
from nesa_node.swarm.node import Swarm

log = get_logger(__name__)

ONLY_MODEL_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True)
class PlanningTerms:
    """What the placement of a swarm is to reach."""

    replicas: int
    goal: PlacementGoal


class SwarmPlanners:
    """One orchestrator for each built swarm; without any, for the only model that is served."""

    def __init__(
        self,
        config: OrchestratorConfig,
        swarm: Swarm,
        on_history: OnHistory | None,
        metric_sources: MetricRegistry | None,
    ) -> None:
        self._config, self._swarm, self._on_history = config, swarm, on_history
        self._metric_sources = metric_sources or MetricRegistry()
        self._running: dict[ModelId, tuple[PlanningTerms, asyncio.Task[None]]] = {}
        self._only_model: set[ModelId] = set()
        self._next_lookup = 0.0

    async def follow(self, built: Mapping[ModelId, PlanningTerms]) -> None:
        """Start and stop orchestrators so that each swarm in `built` has one with its terms."""
        own = PlanningTerms(self._config.replicas, self._config.placement_goal)
        wanted = built or dict.fromkeys(await self._find_only_model(), own)
        ended = [
            model_id
            for model_id, (terms, task) in self._running.items()
            if wanted.get(model_id) != terms or task.done()
        ]
        await self._stop(ended)
        for model_id, terms in wanted.items():
            if model_id not in self._running:
                name = f"orchestrator of {model_id}"
                task = asyncio.create_task(self._plan(model_id, terms), name=name)
                self._running[model_id] = terms, task

    async def close(self) -> None:
        await self._stop(list(self._running))

    async def _stop(self, models: list[ModelId]) -> None:
        tasks = [self._running.pop(model_id)[1] for model_id in models]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _plan(self, model_id: ModelId, terms: PlanningTerms) -> None:
        config = self._config.model_copy(
            update={"replicas": terms.replicas, "placement_goal": terms.goal}
        )
        try:
            with self._metric_sources.registered(model_source(self._swarm, model_id)):
                await orchestrate(
                    config,
                    self._swarm,
                    model_id,
                    on_history=self._on_history,
                    metric_sources=self._metric_sources,
                )
        except Exception:  # a bug: the other swarms go on, and this one is tried again
            log.exception("orchestrator_failed", model=model_id)

    async def _find_only_model(self) -> set[ModelId]:
        """The model that is served, if it is only one; looked up now and then."""
        if time.monotonic() >= self._next_lookup:
            self._next_lookup = time.monotonic() + ONLY_MODEL_INTERVAL_S
            records = await self._swarm.directory.fetch_all()
            served = {ModelId(record.model_id) for record in records}
            self._only_model = served if len(served) == 1 else set()
        return self._only_model
