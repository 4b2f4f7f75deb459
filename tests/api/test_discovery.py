"""Models of the swarm: which are offered, under which names, and what holes do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from nesa_node.api.locating import locate
from nesa_node.api.looking import Seen, watch_holes
from nesa_node.api.models import MAX_DISCOVERED, Models
from nesa_node.core.config import ClientConfig
from nesa_node.core.errors import MissingBlocksError, ModelNotFoundError
from nesa_node.core.ids import ModelId
from nesa_node.core.span import Span
from nesa_node.engine.checkpoint import open_folder
from nesa_node.engine.model_id import model_id
from nesa_node.web.problem import Problem
from tests.api.live import live_gateway
from tests.api.scripted import ScriptedLook, ScriptedModel
from tests.cli.tiny import BLOCKS
from tests.swarms import in_process_swarm, thirds


def seen(name: str, folder: Path) -> Seen:
    return Seen(model_id(open_folder(folder)), name, BLOCKS, 512, ())


async def test_a_folder_of_the_cache_is_found_by_its_name(small_model: Path) -> None:
    config = ClientConfig(cache_dir=small_model.parent)
    assert await locate(config, seen("small", small_model)) == str(small_model)


@pytest.mark.parametrize(
    "name", ["..", ".", "../small", "/etc", "", "a/../../b", "small/", "~", "a\nb", "x" * 300]
)
async def test_names_of_strangers_lead_nowhere(small_model: Path, name: str) -> None:
    config = ClientConfig(cache_dir=small_model.parent)
    with pytest.raises(ModelNotFoundError, match="--model"):
        await locate(config, seen(name, small_model))


async def test_a_namesake_with_other_weights_is_not_offered(small_model: Path) -> None:
    config = ClientConfig(cache_dir=small_model.parent)
    other = Seen(ModelId("small@ffffffffffffffff"), "small", BLOCKS, 512, ())
    with pytest.raises(ModelNotFoundError, match="not the same"):
        await locate(config, other)


class ManyModels(ScriptedLook):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    async def all(self) -> dict[ModelId, Seen]:
        ids = {ModelId(f"{name}@0"): name for name in self.names}
        return {key: Seen(key, name, 6, 64, ()) for key, name in ids.items()}


@asynccontextmanager
async def discovering(look: ManyModels, model: Any) -> AsyncIterator[Models]:
    async def open_model(_name: str) -> Any:
        return model

    async def find(one: Seen) -> str:
        if one.model_name.startswith("bad"):
            raise ModelNotFoundError("nowhere")
        return f"org/{one.model_name}"

    models = Models((), look=look, open_model=open_model, locate=find)
    looking = asyncio.create_task(models.keep_looking())
    await asyncio.sleep(0.05)
    yield models
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    await models.close()


async def test_models_are_opened_when_they_are_asked_for(tokenizer: Any) -> None:
    model = ScriptedModel(tokenizer)
    async with discovering(ManyModels("good", "bad"), model) as models:
        assert [card.name for card in models.cards()] == ["good"]
        assert not models.card("good").opened
        opened: Sequence[object] = await asyncio.gather(
            models.get("good"), models.get("org/good"), models.get(None)
        )
        assert all(one is model for one in opened)
        with pytest.raises(Problem, match="does not exist"):
            await models.get("bad")
    assert model.closed


async def test_a_whole_name_goes_before_the_end_of_another(tokenizer: Any) -> None:
    async with discovering(ManyModels("evil/llama", "llama"), ScriptedModel(tokenizer)) as models:
        assert models.card("llama").name == "llama"
        assert models.card("evil/llama").name == "evil/llama"


async def test_however_many_are_announced_few_are_offered(tokenizer: Any) -> None:
    look = ManyModels(*(f"m{number}" for number in range(99)))
    async with discovering(look, ScriptedModel(tokenizer)) as models:
        assert len(models.cards()) == MAX_DISCOVERED


async def test_a_hole_seen_once_is_not_believed() -> None:
    look = ScriptedLook([Span(1, 2)])
    watching = asyncio.create_task(watch_holes(look, ModelId("scripted@0123456789abcdef")))
    await asyncio.sleep(0.05)
    look.holes = (Span(4, 5),)
    await asyncio.sleep(0)
    assert not watching.done()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    with pytest.raises(MissingBlocksError, match="4:5") as raised:
        await watch_holes(look, ModelId("scripted@0123456789abcdef"), every_s=0.01)
    assert raised.value.missing == ((4, 5),)
    with pytest.raises(MissingBlocksError, match="no node serves"):
        await watch_holes(look, ModelId("other@0"), every_s=0.01)


@pytest.mark.slow
def test_a_swarm_with_a_hole_is_told_soon(small_model: Path, tmp_path: Path) -> None:
    """The model is found by what the nodes announce."""
    with (
        in_process_swarm(small_model, thirds(BLOCKS)[:2], tmp_path) as addresses,
        live_gateway(addresses, tmp_path, cache_dir=small_model.parent) as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        for _ in range(100):
            if names := [model["id"] for model in client.get("/v1/models").json()["data"]]:
                break
        assert names == ["small"]
        body = {"model": "small", "messages": [{"role": "user", "content": "hello"}]}
        # Opening the model is not what is to be quick.
        assert client.post("/tokenize", json={"prompt": "hello"}).status_code == 200
        for stream in (False, True):
            answer = client.post("/v1/chat/completions", json=body | {"stream": stream})
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "missing_blocks"
            assert "2:4" in answer.json()["error"]["message"]
            assert int(answer.headers["retry-after"]) > 0
            assert answer.elapsed.total_seconds() < 10
        health = client.get("/health").json()
        assert health["status"] == "degraded"
        assert health["models"][0]["missing_blocks"] == [[2, 4]]
