"""What one session looks up serves those that open at the same time, and nobody later."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from nesa_node.client.routing import snapshot_cache as lookup_module
from nesa_node.client.routing.snapshot_cache import SNAPSHOT_FRESH_S, SnapshotCache
from nesa_node.core.errors import ModelMismatchError, PeerUnreachableError
from nesa_node.core.ids import ModelId

MODEL = ModelId("tiny@0")
REQUEST: Any = SimpleNamespace(model_id=MODEL, num_blocks=4)


class Directory:
    def __init__(self) -> None:
        self.fetched = 0
        self.takes_s = 0.0
        self.waits_s = 0.01
        self.holes: tuple[int, ...] = ()
        self.glances = 0
        self.now = 100.0
        self.error: Exception | None = None

    async def fetch(self, _: ModelId) -> None:
        self.fetched += 1
        await asyncio.sleep(self.waits_s)
        self.now += self.takes_s
        if self.error is not None:
            raise self.error
        self.glances = 0

    async def try_fetch_one(self, _: ModelId) -> bool:
        self.glances += 1
        return True

    def snapshot(self, model_id: ModelId, num_blocks: int) -> Any:
        if self.glances:
            return SimpleNamespace(nodes=("known",), holes=lambda: self.holes)
        return f"{model_id} {num_blocks}"


def made() -> tuple[SnapshotCache, Directory]:
    directory = Directory()
    given: Any = directory
    return SnapshotCache(given, lambda: directory.now), directory


def running() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_name() == "shared-call"]


@pytest.mark.parametrize("takes_s", [0.0, 30.0])
async def test_sessions_that_open_together_share_one_lookup(takes_s: float) -> None:
    lookup, directory = made()
    directory.takes_s = takes_s
    found: list[Any] = await asyncio.gather(*(lookup.fetch(REQUEST) for _ in range(20)))
    assert found == ["tiny@0 4"] * 20
    assert directory.fetched == 1


async def test_later_ones_look_again() -> None:
    lookup, directory = made()
    await lookup.fetch(REQUEST)
    directory.now += 0.9 * SNAPSHOT_FRESH_S
    await lookup.fetch(REQUEST)
    assert directory.fetched == 1
    directory.now += 0.2 * SNAPSHOT_FRESH_S
    await lookup.fetch(REQUEST)
    assert directory.fetched == 2


async def test_a_session_that_knows_better_looks_again_once() -> None:
    lookup, directory = made()
    await lookup.fetch(REQUEST)
    directory.now += 0.1
    news_at = directory.now
    directory.now += 0.1
    await asyncio.gather(*(lookup.fetch(REQUEST, after=news_at) for _ in range(5)))
    assert directory.fetched == 2


async def test_of_a_lookup_that_is_cancelled_or_fails_nobody_is_told() -> None:
    lookup, directory = made()
    first, second = (asyncio.create_task(lookup.fetch(REQUEST)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == "tiny@0 4"  # type: ignore[comparison-overlap]
    assert directory.fetched == 1
    directory.now += 2 * SNAPSHOT_FRESH_S
    directory.error = PeerUnreachableError("p2pd is gone")
    for _ in range(2):
        with pytest.raises(PeerUnreachableError):
            await lookup.fetch(REQUEST)
    assert directory.fetched == 3


async def test_members_that_do_not_answer_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookup_module, "FETCH_WAIT_S", 0.05)
    lookup, directory = made()
    directory.waits_s = 0.3
    found: Any = await lookup.fetch(REQUEST)
    assert found.nodes == ("known",)
    directory.now += 2 * SNAPSHOT_FRESH_S
    began = time.monotonic()
    await lookup.fetch(REQUEST)
    assert time.monotonic() - began < 0.05, "the look that goes on is not waited for again"
    await asyncio.sleep(0.4)
    assert not running()
    assert directory.fetched == 1


async def test_members_are_waited_for_where_blocks_are_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookup_module, "FETCH_WAIT_S", 0.05)
    lookup, directory = made()
    directory.waits_s, directory.holes = 0.2, (1,)
    assert await lookup.fetch(REQUEST) == "tiny@0 4"  # type: ignore[comparison-overlap]
    assert not running()


async def test_looks_that_go_on_end_with_their_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_module, "FETCH_WAIT_S", 0.05)
    lookup, directory = made()
    directory.waits_s = 60.0
    await lookup.fetch(REQUEST)
    assert running()
    await lookup.close()
    assert not running()


def serving(*models: str) -> SnapshotCache:
    async def fetch_all() -> list[Any]:
        return [SimpleNamespace(model_id=model) for model in models]

    directory: Any = SimpleNamespace(fetch_all=fetch_all)
    return SnapshotCache(directory)


async def test_the_same_weights_under_another_name_are_told() -> None:
    lookup = serving("SmolLM@9ce3", "other@1")
    with pytest.raises(ModelMismatchError, match=r"weights as SmolLM@9ce3, .*folder 'SmolLM'"):
        await lookup.check_model_copy(ModelId("copy@9ce3"))


async def test_other_weights_of_the_same_name_are_told() -> None:
    with pytest.raises(ModelMismatchError, match=r"serves tiny@1, and the copy here differs"):
        await serving("tiny@1", "other@2").check_model_copy(ModelId("tiny@0"))


async def test_of_a_swarm_without_the_model_it_is_known_what_it_serves() -> None:
    assert await serving("b@2", "a@1", "b@2").check_model_copy(ModelId("tiny@0")) == ("a@1", "b@2")
    assert await serving().check_model_copy(ModelId("tiny@0")) == ()
    # Perhaps by nodes that load or leave: that the swarm serves it would be no help.
    assert await serving("tiny@0", "tiny@1").check_model_copy(ModelId("tiny@0")) == ()
