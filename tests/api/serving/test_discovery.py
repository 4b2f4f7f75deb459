"""Models of the swarm: which are offered, under which names, and what holes do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from nesa_node.api.serving.locating import locate
from nesa_node.api.serving.looking import Seen, watch_holes
from nesa_node.api.serving.models import MAX_DISCOVERED, Models, OpenModel
from nesa_node.core.config import ClientConfig
from nesa_node.core.errors import MissingBlocksError, ModelNotFoundError
from nesa_node.core.ids import ModelId
from nesa_node.core.span import Span
from nesa_node.engine.checkpoint import open_folder
from nesa_node.engine.model_id import model_id
from nesa_node.web.problem import Problem
from tests.api.live import live_gateway
from tests.api.scripted import MODEL_ID, ScriptedLook, ScriptedModel
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
        self._asked = asyncio.Event()

    async def again(self) -> None:
        """Wait for a look, and until what it found is known."""
        for _ in range(2):
            self._asked.clear()
            await self._asked.wait()

    async def all(self) -> dict[ModelId, Seen]:
        self._asked.set()
        ids = {ModelId(f"{name}@0"): name for name in self.names}
        return {key: Seen(key, name, 6, 64, self.holes) for key, name in ids.items()}


def opens(model: Any) -> OpenModel:
    async def open_model(_name: str) -> Any:
        return model

    return open_model


@asynccontextmanager
async def discovering(look: ManyModels, open_model: OpenModel) -> AsyncIterator[Models]:
    """Models that look a hundred times a second, and have done so."""

    async def find(one: Seen) -> str:
        if one.model_name.startswith("bad"):
            await asyncio.sleep(0.01)
            raise ModelNotFoundError("nowhere")
        if one.model_name.startswith("slow"):
            await asyncio.Event().wait()
        return f"org/{one.model_name}"

    models = Models((), look=look, open_model=open_model, locate=find, look_every_s=0.01)
    looking = asyncio.create_task(models.keep_looking())
    await asyncio.sleep(0.05)
    yield models
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    await models.close()


async def test_models_are_opened_when_they_are_asked_for(tokenizer: Any) -> None:
    model = ScriptedModel(tokenizer)
    async with discovering(ManyModels("good", "bad"), opens(model)) as models:
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
    look = ManyModels("evil/llama", "llama")
    async with discovering(look, opens(ScriptedModel(tokenizer))) as models:
        assert models.card("llama").name == "llama"
        assert models.card("evil/llama").name == "evil/llama"


async def test_however_many_are_announced_few_are_offered(tokenizer: Any) -> None:
    look = ManyModels(*(f"m{number}" for number in range(99)))
    async with discovering(look, opens(ScriptedModel(tokenizer))) as models:
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


async def test_hole_that_a_node_is_joining_to_fill_is_waited_for() -> None:
    look = ScriptedLook([Span(1, 4)])
    look.joining = (Span(0, 2), Span(2, 4))
    watching = asyncio.create_task(watch_holes(look, MODEL_ID, every_s=0.01))
    await asyncio.sleep(0.1)
    assert not watching.done()
    look.joining = (Span(0, 2),)
    with pytest.raises(MissingBlocksError, match="2:4"):
        await watching


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


async def test_a_model_that_vanishes_while_it_opens_is_kept(tokenizer: Any) -> None:
    """Dropped, it would be opened once more, and nobody would close the first."""
    look, model = ManyModels("good"), ScriptedModel(tokenizer)
    opening, may_open = asyncio.Event(), asyncio.Event()

    async def open_model(_name: str) -> Any:
        opening.set()
        await may_open.wait()
        return model

    async with discovering(look, open_model) as models:
        asked = asyncio.create_task(models.get("good"))
        await opening.wait()
        look.names = ()
        await look.again()
        may_open.set()
        opened: Sequence[object] = [await asked, await models.get("good")]
        assert all(one is model for one in opened)
    assert model.closed


async def test_models_that_are_hard_to_find_hold_up_no_look(tokenizer: Any) -> None:
    look = ManyModels("good", "slow", "late")
    async with discovering(look, opens(ScriptedModel(tokenizer))) as models:
        assert [card.name for card in models.cards()] == ["good"]
        look.holes = (Span(1, 2),)
        await look.again()
        assert models.holes(models.card("good")) == (Span(1, 2),)


async def test_who_was_not_tried_goes_before_who_was_not_found(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else names that lead nowhere, tried again and again, would keep others out."""
    monkeypatch.setattr("nesa_node.api.serving.models._TRY_AGAIN_S", 0.005)
    look = ManyModels("bad-1", "bad-2", "good")
    async with discovering(look, opens(ScriptedModel(tokenizer))) as models:
        while not models.cards():
            await look.again()
        assert models.card(None).name == "good"
