"""What a swarm cannot do is refused by name, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from nesa_node.client.model.auto import (
    AutoDistributedModelForCausalLM,
    choose_client_blocks,
    split_blocks,
)
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.errors import ConfigError, ModelNotFoundError, UnsupportedFeatureError
from nesa_node.core.settings.models import ClientConfig
from nesa_node.core.settings.sources import load_config
from tests.client.local_models import local_model, random_ids


@pytest.fixture(scope="module")
def model(tiny: Callable[[str], Path]) -> Iterator[DistributedModelForCausalLM]:
    with local_model(tiny("llama")) as model:
        yield model


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, "group beam search"),
        ({"num_beams": 2, "force_words_ids": [[5]]}, "constrained beam search"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"cache_implementation": "paged"}, "cache_implementation"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"output_hidden_states": True, "num_beams": 2}, "output_hidden_states.*beam search"),
        ({"output_hidden_states": True, "prompt_lookup_num_tokens": 2}, "output_hidden_states"),
        ({"assistant_early_exit": 2}, "assistant_early_exit"),
        ({"dola_layers": "low"}, "dola"),
        ({"past_key_values": DynamicCache()}, "past_key_values"),
        ({"custom_generate": "someone/something"}, "custom_generate"),
        ({"position_ids": torch.arange(4)[None]}, "position_ids"),
        ({"inputs_embeds": torch.zeros(1, 4, 64)}, "inputs_embeds"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_generate_refuses_by_name(
    model: DistributedModelForCausalLM, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedFeatureError, match=named):
        model.generate(random_ids(1, 4), max_new_tokens=2, **options)
    assert model._connection is None


@pytest.mark.parametrize(
    "arguments",
    [
        {"labels": torch.zeros(1, 4, dtype=torch.long)},
        {"output_attentions": True},
        {"position_ids": torch.arange(4)[None]},
        {"inputs_embeds": torch.zeros(1, 4, 64)},
        {"use_cache": True},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_forward_refuses_by_name(
    model: DistributedModelForCausalLM, arguments: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedFeatureError):
        model(random_ids(1, 4), **arguments)


def test_typos_are_caught(model: DistributedModelForCausalLM) -> None:
    with pytest.raises(TypeError, match="atention_mask"):
        model(random_ids(1, 4), atention_mask=torch.ones(1, 4))
    with pytest.raises(ValueError, match="max_new_token"):
        model.generate(random_ids(1, 4), max_new_token=3)


def test_moving_and_saving_are_refused(model: DistributedModelForCausalLM, tmp_path: Path) -> None:
    to: Any = model.to
    assert to("cpu") is model
    refusals: list[Callable[[], Any]] = [
        lambda: to(torch.float16),
        lambda: to("meta"),
        lambda: model.double(),
        lambda: model.save_pretrained(tmp_path),
        lambda: model.generate_batch([[1, 2]]),
    ]
    for refused in refusals:
        with pytest.raises(UnsupportedFeatureError):
            refused()


def test_wrong_arguments_of_from_pretrained_are_refused(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    load: Any = AutoDistributedModelForCausalLM.from_pretrained
    with pytest.raises(ConfigError, match="one of them"):
        load(tiny("llama"), dtype="float32", torch_dtype="float16")
    with pytest.raises(ConfigError, match="6 blocks"):
        load(tiny("llama"), client_blocks=(4, 3))
    with pytest.raises(ValueError, match="routing"):
        load(tiny("llama"), routing="ring")
    with pytest.raises(ModelNotFoundError):
        load(tmp_path / "nothing")
    # Before the model is looked for.
    with pytest.raises(ConfigError, match="device cuda:63"):
        load(tmp_path / "nothing", device="cuda:63")
    for address in ("foo", "127.0.0.1", "/ip4/127.0.0.1"):
        with pytest.raises(ConfigError, match=r"/p2p/<peer id>, or .* like 192\.0\.2\.7:31330"):
            load(tmp_path / "nothing", initial_peers=["127.0.0.1:31330", address])
    with pytest.raises(TypeError):
        AutoDistributedModelForCausalLM()


def test_client_blocks_are_cut_from_both_ends() -> None:
    assert [str(span) for span in split_blocks(6, (2, 1))] == ["0:2", "2:5", "5:6"]
    assert [len(span) for span in split_blocks(6, (6, 0))] == [6, 0, 0]


def test_blocks_that_are_not_private_are_the_clients() -> None:
    given = {"private": "ckks", "private_blocks": "1:4"}
    assert choose_client_blocks(load_config(ClientConfig, given, {}), 6) == (1, 2)
    assert choose_client_blocks(load_config(ClientConfig, {"client_blocks": "2,1"}, {}), 6) == (
        2,
        1,
    )
    with pytest.raises(ConfigError, match="private_blocks=1:4 of a model that has blocks 0:3"):
        choose_client_blocks(load_config(ClientConfig, given, {}), 3)
