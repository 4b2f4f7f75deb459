"""Models of the swarm: which are offered, under which names, and what holes do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import LlamaConfig

from nesa_node.api.models.discovery import (
    AnnouncedModel,
    locate,
    open_discovered,
    open_model_directory,
    watch_missing_blocks,
)
from nesa_node.api.models.registry import ModelRegistry, OpenModel
from nesa_node.core.errors import MissingBlocksError, ModelNotFoundError, ResourceError
from nesa_node.core.ids import ModelId, Span
from nesa_node.core.settings.models import ClientConfig, GatewayConfig
from nesa_node.engine.gguf.checkpoint import open_gguf
from nesa_node.engine.weights.checkpoint import Checkpoint, compute_model_id, open_folder
from nesa_node.engine.weights.tokenizer import load_discovered_tokenizer
from nesa_node.swarm.dht.records import NodeStatus
from nesa_node.swarm.node import open_swarm
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.web.problem import HttpProblem
from tests.api.live import live_gateway
from tests.api.scripted import MODEL_ID, ScriptedLook, ScriptedModel
from tests.cli.tiny import BLOCKS
from tests.engine.gguf_files import Kind, add_byte_tokenizer, make_random_model, write_gguf
from tests.swarms import in_process_swarm, thirds

TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def named(name: str, like: str) -> ModelId:
    """The id of a model that goes by `name` and is else the one of the id `like`."""
    return ModelId(f"{name}@{like.rpartition('@')[2]}")


def seen(name: str, folder: Path) -> AnnouncedModel:
    return AnnouncedModel(named(name, compute_model_id(open_folder(folder))), BLOCKS, ())


async def test_a_folder_of_the_cache_is_found_by_its_name(small_model: Path) -> None:
    config = ClientConfig(cache_dir=small_model.parent)
    assert await locate(config, seen("small", small_model)) == str(small_model)


async def test_a_gguf_file_of_the_cache_is_found_by_its_name(tmp_path: Path) -> None:
    config = GatewayConfig(cache_dir=tmp_path)
    path = write_gguf(
        make_random_model(LlamaConfig(**TINY)), tmp_path / "tiny-Q8_0.gguf", kind=Kind.Q8_0,
        tokenizer=add_byte_tokenizer,
    )  # fmt: skip
    model_id = compute_model_id(open_gguf(path, tmp_path / "other"))
    assert await locate(config, AnnouncedModel(model_id, 2, ())) == str(path)

    def load(checkpoint: Checkpoint) -> str:
        load_discovered_tokenizer(checkpoint.fetch_side_files())
        return checkpoint.name

    assert open_discovered(config, str(path), frozenset({model_id}), load) == "tiny-Q8_0"
    with pytest.raises(ModelNotFoundError, match="not the same"):
        open_discovered(config, str(path), frozenset({ModelId("tiny-Q8_0@0")}), load)


@pytest.mark.parametrize(
    "name", ["..", ".", "../small", "/etc", "", "a/../../b", "small/", "~", "a\nb", "x" * 300]
)
async def test_names_of_strangers_lead_nowhere(small_model: Path, name: str) -> None:
    config = ClientConfig(cache_dir=small_model.parent)
    with pytest.raises(ModelNotFoundError, match="--model"):
        await locate(config, seen(name, small_model))


async def test_a_namesake_with_other_weights_is_not_offered(small_model: Path) -> None:
    config = ClientConfig(cache_dir=small_model.parent)
    other = AnnouncedModel(ModelId("small@ffffffffffffffff"), BLOCKS, ())
    with pytest.raises(ModelNotFoundError, match="not the same"):
        await locate(config, other)


class ManyModels(ScriptedLook):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names
        self.ids: tuple[ModelId, ...] = ()
        self._asked = asyncio.Event()

    async def again(self) -> None:
        """Wait for a look, and until what it found is known."""
        for _ in range(2):
            self._asked.clear()
            await self._asked.wait()

    async def fetch_all(self) -> dict[ModelId, AnnouncedModel]:
        self._asked.set()
        ids = (*self.ids, *(ModelId(f"{name}@0") for name in self.names))
        return {key: AnnouncedModel(key, 6, self.holes) for key in ids}


async def nowhere(_one: AnnouncedModel) -> str:
    raise ModelNotFoundError("nowhere")


def opens(model: Any) -> OpenModel:
    async def open_model(_name: str, _ids: frozenset[ModelId] | None) -> Any:
        return model

    return open_model


@asynccontextmanager
async def discovering(look: ManyModels, open_model: OpenModel) -> AsyncIterator[ModelRegistry]:
    """Models that look a hundred times a second, and have done so."""

    async def find(one: AnnouncedModel) -> str:
        if one.model_name.startswith("bad"):
            await asyncio.sleep(0.01)
            raise ModelNotFoundError("nowhere")
        if one.model_name.startswith("slow"):
            await asyncio.Event().wait()
        return f"org/{one.model_name}"

    models = ModelRegistry(
        (), directory=look, open_model=open_model, locate=find, poll_interval_s=0.01
    )
    looking = asyncio.create_task(models.poll_swarm())
    await asyncio.sleep(0.05)
    yield models
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    await models.close()


async def test_models_are_opened_when_they_are_asked_for(tokenizer: Any) -> None:
    model = ScriptedModel(tokenizer)
    async with discovering(ManyModels("good", "bad"), opens(model)) as models:
        assert [card.name for card in models.entries()] == ["good"]
        assert not models.find_entry("good").is_open
        opened: Sequence[object] = await asyncio.gather(
            models.get("good"), models.get("org/good"), models.get(None)
        )
        assert all(one is model for one in opened)
        with pytest.raises(HttpProblem, match=r"`bad` is not offered .* nodes serve it: nowhere"):
            await models.get("bad")
        with pytest.raises(HttpProblem, match="`worse` does not exist"):
            await models.get("worse")
    assert model.closed


async def test_a_whole_name_goes_before_the_end_of_another(tokenizer: Any) -> None:
    look = ManyModels("evil/llama", "llama")
    async with discovering(look, opens(ScriptedModel(tokenizer))) as models:
        assert models.find_entry("llama").name == "llama"
        assert models.find_entry("evil/llama").name == "evil/llama"


class Opened:
    """Models that were opened, by name, each of its own."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.models: dict[str, ScriptedModel] = {}

    async def __call__(self, source: str, _ids: frozenset[ModelId] | None) -> Any:
        name = source.removeprefix("org/")
        model = ScriptedModel(self._tokenizer)
        model.name, model.model_id = name, ModelId(f"{name}@0")
        self.models[name] = model
        return model

    def closed(self) -> set[str]:
        return {name for name, model in self.models.items() if model.closed}


async def test_however_many_are_announced_few_are_open(tokenizer: Any) -> None:
    look, opened = ManyModels(*(f"m{number}" for number in range(300))), Opened(tokenizer)
    async with discovering(look, opened) as models:
        assert len(models.entries()) == 256
        for number in range(16):
            (await models.get(f"m{number}")).running = 1  # type: ignore[misc]
        with pytest.raises(ResourceError, match="--model"):
            await models.get("m16")
        assert opened.closed() == set()
        assert sum(card.is_open for card in models.entries()) == 16


async def test_the_one_used_longest_ago_makes_room_for_another(tokenizer: Any) -> None:
    look, opened = ManyModels(*(f"m{number}" for number in range(19))), Opened(tokenizer)
    async with discovering(look, opened) as models:
        for number in range(16):
            await models.get(f"m{number}")
        opened.models["m0"].running = 1
        await models.get("m1")
        first: object = await models.get("m16")
        assert first is opened.models["m16"]
        assert opened.closed() == {"m2"}
        # Still offered, and opened anew.
        assert not models.find_entry("m2").is_open
        again: object = await models.get("m2")
        assert again is opened.models["m2"]
        assert opened.closed() == {"m3"}
        assert sum(card.is_open for card in models.entries()) == 16


async def test_models_that_no_node_announces_are_closed_first(tokenizer: Any) -> None:
    """Else sixteen that came and went would close the gateway to all others for good."""
    evil = [f"evil-{number}" for number in range(15)]
    look, opened = ManyModels("old", "good", *evil), Opened(tokenizer)
    async with discovering(look, opened) as models:
        for name in ("old", *evil):
            await models.get(name)
        look.names = ("old", "good")
        await look.again()
        opened.models["evil-0"].running = 1
        await models.get("good")
        assert opened.closed() == {"evil-1"}
        await look.again()
        assert "evil-1" not in {card.name for card in models.entries()}


async def test_a_model_that_came_back_and_was_closed_for_room_is_opened_again(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nesa_node.api.models.registry.MAX_OPEN", 2)
    look, opened, ids_of = ManyModels("a", "b", "c"), Opened(tokenizer), dict[str, Any]()

    async def open_model(source: str, ids: frozenset[ModelId] | None) -> Any:
        ids_of[source] = ids
        model = await opened(source, ids)
        model.model_id = next(iter(ids or ()))
        return model

    async with discovering(look, open_model) as models:
        await models.get("a")
        for names in (("b", "c"), ("a", "b", "c")):
            look.names = names
            await look.again()
        # So that no look comes between what follows.
        models._poll_interval_s = 600.0
        await asyncio.sleep(0.2)
        for name in ("b", "c", "a"):
            await models.get(name)
        assert opened.closed() == {"b"}
        assert len(look.known) == 2, "the records of one that was closed have no room of their own"
        assert ids_of["org/a"]


async def test_a_name_that_two_models_end_in_is_neither_s(tokenizer: Any) -> None:
    """However many nodes say so: identities are free."""
    look = ManyModels("AAA/llama", "meta/llama", "meta/other")
    async with discovering(look, opens(ScriptedModel(tokenizer))) as models:
        with pytest.raises(HttpProblem, match="AAA/llama, org/meta/llama"):
            models.find_entry("llama")
        assert models.find_entry("meta/llama").name == "meta/llama"
        assert models.find_entry("other").name == "meta/other"
        with pytest.raises(HttpProblem, match="whole name"):
            models.find_entry(None)


async def test_beside_a_named_model_none_is_discovered(tokenizer: Any) -> None:
    located: list[AnnouncedModel] = []

    async def find(one: AnnouncedModel) -> str:
        located.append(one)
        return one.model_name

    look = ManyModels("AAA/scripted", "scripted")
    models = ModelRegistry(
        ("/models/scripted",),
        directory=look,
        open_model=opens(ScriptedModel(tokenizer)),
        locate=find,
        poll_interval_s=0.01,
    )
    await models.open_given()
    looking = asyncio.create_task(models.poll_swarm())
    await look.again()
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    assert [card.source for card in models.entries()] == ["/models/scripted"]
    assert models.find_entry("scripted").source == "/models/scripted"
    assert models.find_entry(None).source == "/models/scripted"
    assert located == []
    with pytest.raises(HttpProblem, match="does not exist"):
        models.find_entry("AAA/scripted")
    await models.close()


async def test_two_given_folders_of_one_name_are_told_apart_by_their_paths(tokenizer: Any) -> None:
    model = ScriptedModel(tokenizer)
    given = ("/a/scripted", "/b/scripted", "/a/scripted")
    models = ModelRegistry(given, directory=ScriptedLook(), open_model=opens(model), locate=nowhere)
    await models.open_given()
    assert [card.source for card in models.entries()] == ["/a/scripted", "/b/scripted"]
    assert models.find_entry("/b/scripted").source == "/b/scripted"
    with pytest.raises(HttpProblem, match="/a/scripted, /b/scripted"):
        models.find_entry("scripted")
    await models.close()


async def test_false_ids_of_a_name_do_not_hide_the_true_one(tokenizer: Any) -> None:
    """Which of them is right shows when the checkpoint is opened."""
    look, model = ManyModels(), ScriptedModel(tokenizer)
    true, false = ModelId("llama@1"), ModelId("llama@0")
    look.ids = (false, true)
    look.holes = (Span(1, 2),)
    model.model_id = true
    asked: list[frozenset[ModelId] | None] = []

    async def open_model(_name: str, ids: frozenset[ModelId] | None) -> Any:
        asked.append(ids)
        return model

    async with discovering(look, open_model) as models:
        assert [card.name for card in models.entries()] == ["llama"]
        opened: object = await models.get("llama")
        assert opened is model
        assert asked == [frozenset({true, false})]
        assert models.find_entry(true).is_open
        with pytest.raises(HttpProblem, match="does not exist"):
            models.find_entry(false)
        look.ids = (false,)
        await look.again()
        assert models.holes(models.find_entry("llama")) is None


async def test_a_model_that_cannot_be_fetched_is_not_offered_for_a_while(tokenizer: Any) -> None:
    async def open_model(_name: str, _ids: frozenset[ModelId] | None) -> Any:
        raise ModelNotFoundError("the hub has no such model")

    look = ManyModels("good")
    async with discovering(look, open_model) as models:
        with pytest.raises(ModelNotFoundError):
            await models.get("good")
        await look.again()
        assert models.entries() == ()


async def test_the_number_of_blocks_is_the_opened_checkpoint_s(tokenizer: Any) -> None:
    look, model = ManyModels("good"), ScriptedModel(tokenizer)
    model.num_blocks = 30
    async with discovering(look, opens(model)) as models:
        await models.get("good")
        assert look.known == {model.model_id: 30}


async def test_a_hole_seen_once_is_not_believed() -> None:
    look = ScriptedLook([Span(1, 2)])
    watching = asyncio.create_task(watch_missing_blocks(look, ModelId("scripted@0123456789abcdef")))
    await asyncio.sleep(0.05)
    look.holes = (Span(4, 5),)
    await asyncio.sleep(0)
    assert not watching.done()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    with pytest.raises(MissingBlocksError, match="4:5") as raised:
        await watch_missing_blocks(look, ModelId("scripted@0123456789abcdef"), interval_s=0.01)
    assert raised.value.missing == ((4, 5),)
    with pytest.raises(MissingBlocksError, match="no node serves"):
        await watch_missing_blocks(look, ModelId("other@0"), interval_s=0.01)


async def test_hole_that_a_node_is_joining_to_fill_is_waited_for() -> None:
    look = ScriptedLook([Span(1, 4)])
    look.joining = (Span(0, 2), Span(2, 4))
    watching = asyncio.create_task(watch_missing_blocks(look, MODEL_ID, interval_s=0.01))
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

    async def open_model(_name: str, _ids: frozenset[ModelId] | None) -> Any:
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
        assert [card.name for card in models.entries()] == ["good"]
        look.holes = (Span(1, 2),)
        await look.again()
        assert models.holes(models.find_entry("good")) == (Span(1, 2),)


async def test_who_was_not_tried_goes_before_who_was_not_found(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else names that lead nowhere, tried again and again, would keep others out."""
    monkeypatch.setattr("nesa_node.api.models.registry._LOCATE_RETRY_S", 0.005)
    look = ManyModels("bad-1", "bad-2", "good")
    async with discovering(look, opens(ScriptedModel(tokenizer))) as models:
        while not models.entries():
            await look.again()
        assert models.find_entry(None).name == "good"


async def publish_false_sizes(addresses: Sequence[str], folder: Path, count: int) -> AsyncExitStack:
    """Strangers' records, each a copy of an honest one but for a block more."""
    async with AsyncExitStack() as stack:
        for number in range(count):
            stranger = await stack.enter_async_context(
                open_swarm(
                    Identity.load_or_create(folder / f"stranger-{number}.key"),
                    initial_peers=addresses,
                    listen=False,
                )
            )
            honest = next(
                record
                for record in await stranger.directory.fetch_all()
                if record.state == "serving" and record.num_blocks == BLOCKS
            )
            fields = honest.model_dump(include=set(NodeStatus.model_fields))
            fields |= {"num_blocks": BLOCKS + 1, "span": (0, 1)}
            await stranger.directory.publish(NodeStatus.model_validate(fields))
        return stack.pop_all()
    raise AssertionError


@pytest.mark.slow
async def test_strangers_who_say_that_there_are_more_blocks_stop_no_request(
    small_model: Path, tmp_path: Path
) -> None:
    """Nor hide them: the look that ends a request with 503 sees what the checkpoint has."""
    with in_process_swarm(small_model, thirds(BLOCKS), tmp_path) as addresses:
        config = ClientConfig(initial_peers=tuple(addresses), log_level="warning")
        async with (
            await publish_false_sizes(addresses, tmp_path, 4),
            open_model_directory(config) as (look, _),
        ):
            model = compute_model_id(open_folder(small_model))
            seen = await look.fetch(model)
            assert seen is not None
            assert seen.num_blocks == BLOCKS + 1, "the attack itself does not work"
            look.set_num_blocks(model, BLOCKS)
            seen = await look.fetch(model)
            assert seen is not None
            assert (seen.num_blocks, seen.holes) == (BLOCKS, ())
            assert (await look.fetch_all())[model].holes == ()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(3):
                    await watch_missing_blocks(look, model, interval_s=0.5)
