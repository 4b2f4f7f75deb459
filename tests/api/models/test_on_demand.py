"""Models that no node serves, built by the pool because a request names them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from nesa_node.api.models import registry as registry_module
from nesa_node.api.models.building import MAX_CONCURRENT_BUILDS, DemandBuilder
from nesa_node.api.models.discovery import AnnouncedModel
from nesa_node.api.models.registry import ModelRegistry
from nesa_node.core.errors import SwarmError
from nesa_node.core.ids import ModelId
from nesa_node.web.problem import HttpProblem


class Pool:
    """An orchestrator's answers, and a swarm that announces what was built."""

    def __init__(self, refusal: str = "", seconds: float = 0.0) -> None:
        self.asked: list[str] = []
        self.announced: dict[ModelId, AnnouncedModel] = {}
        self._refusal = refusal
        self._seconds = seconds

    async def request(self, model: str, *, until: float) -> None:
        self.asked.append(model)

    async def wait_until_serving(self, model: str, wait_s: float) -> None:
        await asyncio.sleep(min(self._seconds, wait_s))
        if self._refusal:
            raise SwarmError(self._refusal)
        if self._seconds <= wait_s:
            model_id = ModelId(f"{model}@00")
            self.announced[model_id] = AnnouncedModel(model_id, 4, ())

    async def fetch_all(self) -> dict[ModelId, AnnouncedModel]:
        return dict(self.announced)

    async def fetch_adapters(self, model_id: ModelId) -> tuple[()]:
        return ()

    def set_num_blocks(self, model_id: ModelId, num_blocks: int) -> None:
        pass


@asynccontextmanager
async def open_registry(pool: Pool, *patterns: str) -> AsyncIterator[ModelRegistry]:
    async def open_model(name: str, ids: Any) -> Any:
        async def nothing() -> None:
            pass

        return SimpleNamespace(
            model_id=ModelId(f"{name}@00"),
            num_blocks=4,
            context_length=64,
            defaults={},
            running=0,
            join=nothing,
            close=nothing,
        )

    async def locate(announced: AnnouncedModel) -> str:
        return announced.model_name

    anything: Any = pool
    builder = DemandBuilder(anything, patterns)
    models = ModelRegistry(
        (),
        directory=anything,
        open_model=open_model,
        locate=locate,
        build=builder,
        poll_interval_s=0.02,
    )
    polling = asyncio.create_task(models.poll_swarm())
    try:
        yield models
    finally:
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
        await builder.close()
        await models.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "describe_sampling", lambda _: {})


async def test_requests_for_one_model_wait_for_one_build() -> None:
    pool = Pool(seconds=0.1)
    async with open_registry(pool, "org/*") as models:
        found = await asyncio.gather(*(models.get("org/one") for _ in range(5)))
    assert pool.asked == ["org/one"]
    assert {each.model_id for each in found} == {"org/one@00"}


@pytest.mark.parametrize("name", ["other/one", "org/../../etc", "/etc/passwd", None])
async def test_nothing_else_is_asked_for(name: str | None) -> None:
    pool = Pool()
    async with open_registry(pool, "org/*") as models:
        with pytest.raises(HttpProblem) as refused:
            await models.get(name)
    assert refused.value.status == 404
    assert pool.asked == []


async def test_a_refusal_is_passed_on() -> None:
    async with open_registry(Pool("it does not fit: one more machine"), "*") as models:
        with pytest.raises(HttpProblem, match="one more machine") as refused:
            await models.get("org/one")
    assert (refused.value.status, refused.value.code) == (503, "model_not_built")


async def test_a_long_build_ends_in_a_time_to_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_BUILD_WAIT_S", 0.05)
    async with open_registry(Pool(seconds=9), "*") as models:
        with pytest.raises(HttpProblem, match="being built") as refused:
            await models.get("org/one")
    assert refused.value.status == 503
    assert int(refused.value.headers["retry-after"]) > 0


async def test_builds_at_once_are_limited() -> None:
    pool = Pool(seconds=0.2)
    async with open_registry(pool, "*") as models:
        asked = [models.get(f"org/{number}") for number in range(MAX_CONCURRENT_BUILDS + 2)]
        found = await asyncio.gather(*asked, return_exceptions=True)
    assert len(pool.asked) == MAX_CONCURRENT_BUILDS
    assert sum(isinstance(each, HttpProblem) for each in found) == 2
