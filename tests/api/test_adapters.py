"""`base:adapter` as the model of a request, over three nodes, through OpenAI's client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from nesa_node import publish_adapter
from nesa_node.api.models.registry import split_adapter
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.swarm.adapter_catalog import PublishedAdapter, find_published, name_published
from nesa_node.swarm.dht.adapter_notices import ListedAdapter
from tests.api.live import live_gateway
from tests.cli.tiny import BLOCKS
from tests.engine.training.test_adapted_blocks import PEFT_WARNINGS
from tests.swarms import in_process_swarm, thirds

pytestmark = [*PEFT_WARNINGS, pytest.mark.timeout(120)]
PROMPT = [5, 6, 7, 8]
NEW_TOKENS = 12


def load(folder: Path) -> Any:
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32).eval()


def generate_alone(model: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    found = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
    )
    return [int(token) for token in found[0, len(PROMPT) :]]


@pytest.fixture(scope="module")
def adapter(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(1)
    config: Any = peft.LoraConfig(
        r=4, lora_alpha=64, target_modules="all-linear", init_lora_weights=False
    )
    made: Any = peft.get_peft_model(load(small_model), config)
    made.save_pretrained(target)
    return target


@pytest.fixture(scope="module")
def client(
    small_model: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("live")
    with (
        in_process_swarm(
            small_model, thirds(BLOCKS), folder, cache_dir=folder / "cache"
        ) as addresses,
        live_gateway(addresses, folder, small_model) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as found,
    ):
        publish_adapter(
            str(small_model),
            adapter,
            name="tuned",
            initial_peers=addresses,
            identity_path=folder / "author",
        )
        yield found


def complete(client: openai.OpenAI, model: str) -> str:
    answer = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=NEW_TOKENS, temperature=0
    )
    assert answer.model == model
    return answer.choices[0].text


def test_a_request_gets_the_text_of_its_adapter(
    client: openai.OpenAI, small_model: Path, adapter: Path, tokenizer: Any
) -> None:
    base = load(small_model)
    expected = tokenizer.decode(generate_alone(base), skip_special_tokens=True)
    tuned: Any = peft.PeftModel.from_pretrained(base, adapter)
    changed = tokenizer.decode(generate_alone(tuned.eval()), skip_special_tokens=True)
    assert changed != expected
    assert complete(client, "small:tuned").strip() == changed.strip()
    assert complete(client, "small").strip() == expected.strip()


def test_published_adapters_are_listed(client: openai.OpenAI) -> None:
    """With the next look at the swarm."""
    deadline = time.monotonic() + 20
    while len(models := client.models.list().data) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert [model.id for model in models] == ["small", "small:tuned"]
    listed = client.models.retrieve("small:tuned")
    assert listed == models[1]
    assert listed.owned_by.startswith("12D3Koo")
    assert listed.model_extra is not None
    assert listed.model_extra["parent"] == "small"
    assert client.models.retrieve(f"small:{listed.owned_by}/tuned").owned_by == listed.owned_by
    with pytest.raises(openai.NotFoundError, match="no adapter 'other' is published"):
        client.models.retrieve("small:other")


@pytest.mark.parametrize("authors", [1, 2])
def test_an_adapter_is_named_with_its_author_where_two_use_the_name(authors: int) -> None:
    listed = ListedAdapter(
        name="tuned", digest="0" * 64, nbytes=1, rank=1, target_modules=("q_proj",), created_at=1
    )
    published = [
        PublishedAdapter(ModelId("small@00"), PeerId(f"{at}" * 52), listed, 0.0)
        for at in range(authors)
    ]
    names = name_published(published)
    assert list(names) == (["tuned"] if authors == 1 else [each.name for each in published])
    assert all(find_published([each], name) == each for name, each in names.items())


def test_what_is_not_published_is_no_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no adapter 'other' is published"):
        complete(client, "small:other")
    with pytest.raises(openai.NotFoundError, match="`none:tuned` does not exist here"):
        complete(client, "none:tuned")
    with pytest.raises(openai.BadRequestError, match="leave the adapter away"):
        client.embeddings.create(model="small:tuned", input="hello")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a/b:c", ("a/b", "c")),
        ("a:b:author/c", ("a:b", "author/c")),
        ("a", ("a", None)),
        (":a", (":a", None)),
        ("a:", ("a:", None)),
    ],
)
def test_the_last_colon_separates_the_adapter(name: str, parts: tuple[str, str | None]) -> None:
    assert split_adapter(name) == parts
