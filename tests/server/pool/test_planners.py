"""Which swarms have an orchestrator, and with which terms."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from nesa_node.core.ids import ModelId
from nesa_node.core.settings.models import OrchestratorConfig
from nesa_node.server.pool import planners as pool_planners
from nesa_node.server.pool.planners import PlanningTerms, SwarmPlanners

ONE, TWO = ModelId("org/one@00"), ModelId("org/two@00")


class Orchestrators:
    """Those that run, as model, replicas and goal; those of `failing` models end at once."""

    def __init__(self) -> None:
        self.running: list[tuple[ModelId, int, str]] = []
        self.started = 0
        self.failing: set[ModelId] = set()
        self.served: list[ModelId] = []

    async def run(
        self, config: OrchestratorConfig, _: object, model_id: ModelId, **__: object
    ) -> None:
        self.started += 1
        if model_id in self.failing:
            raise RuntimeError("a bug")
        entry = model_id, config.replicas, config.placement_goal
        self.running.append(entry)
        try:
            await asyncio.Event().wait()
        finally:
            self.running.remove(entry)

    async def fetch_all(self) -> list[Any]:
        return [SimpleNamespace(model_id=each) for each in self.served]


@pytest.fixture
def orchestrators(monkeypatch: pytest.MonkeyPatch) -> Orchestrators:
    found = Orchestrators()
    monkeypatch.setattr(pool_planners, "orchestrate", found.run)
    monkeypatch.setattr(pool_planners, "ONLY_MODEL_INTERVAL_S", 0.0)
    return found


@pytest.fixture
def planners(orchestrators: Orchestrators) -> SwarmPlanners:
    swarm: Any = SimpleNamespace(directory=SimpleNamespace(fetch_all=orchestrators.fetch_all))
    return SwarmPlanners(OrchestratorConfig(replicas=3), swarm, None, None)


async def test_each_swarm_is_planned_with_its_own_terms(
    planners: SwarmPlanners, orchestrators: Orchestrators
) -> None:
    one, two = PlanningTerms(1, "latency"), PlanningTerms(2, "throughput")
    for built in ({ONE: one}, {ONE: one, TWO: two}, {ONE: two, TWO: two}, {TWO: two}):
        await planners.follow(built)
        await asyncio.sleep(0)
        expected = [(model, each.replicas, each.goal) for model, each in built.items()]
        assert sorted(orchestrators.running) == sorted(expected)
    assert orchestrators.started == 3, "one starts again only with other terms"
    await planners.close()
    assert orchestrators.running == []


async def test_without_a_built_swarm_the_only_model_is_planned(
    planners: SwarmPlanners, orchestrators: Orchestrators
) -> None:
    for served, expected in (([ONE], [(ONE, 3, "latency")]), ([ONE, TWO], []), ([], [])):
        orchestrators.served = served
        await planners.follow({})
        await asyncio.sleep(0)
        assert orchestrators.running == expected
    await planners.close()


async def test_an_orchestrator_that_fails_is_started_again_and_stops_no_other(
    planners: SwarmPlanners, orchestrators: Orchestrators
) -> None:
    orchestrators.failing = {ONE}
    built = dict.fromkeys((ONE, TWO), PlanningTerms(1, "latency"))
    for _ in range(3):
        await planners.follow(built)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert orchestrators.started == 4
    assert [model for model, *_ in orchestrators.running] == [TWO]
    await planners.close()
