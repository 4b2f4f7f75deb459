"""Adapters of a swarm: trained, published, and served beside the base model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from nesa_node import list_adapters, publish_adapter
from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.errors import AdapterError, RefusedError
from tests.engine.tiny_models import BLOCKS, reference
from tests.engine.training.test_adapted_blocks import PEFT_WARNINGS, remove_dropout
from tests.swarms import in_process_swarm, thirds

pytestmark = [*PEFT_WARNINGS, pytest.mark.timeout(180)]
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return remove_dropout(tiny("llama"), tmp_path_factory.mktemp("model"))


def make_adapter(folder: Path, target: Path, seed: int) -> Path:
    """A folder of PEFT with values that change tokens."""
    torch.manual_seed(seed)
    config: Any = peft.LoraConfig(
        r=4, lora_alpha=32, target_modules="all-linear", init_lora_weights=False
    )
    model: Any = peft.get_peft_model(reference(folder).float(), config)
    model.save_pretrained(target)
    return target


def generate_alone(folder: Path, adapter: Path | None, ids_1L: torch.Tensor) -> list[int]:
    model: Any = reference(folder).float()
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    model.eval()
    found = model.generate(input_ids=ids_1L, max_new_tokens=NEW_TOKENS, do_sample=False)
    return [int(token) for token in found[0, ids_1L.shape[1] :]]


def generate(model: DistributedModelForCausalLM, ids_1L: torch.Tensor, adapter: str) -> list[int]:
    length = ids_1L.shape[1] + NEW_TOKENS
    with model.inference_session(length, prompt=ids_1L, adapter=adapter) as session:
        found: Any = model.generate(
            ids_1L, max_new_tokens=NEW_TOKENS, do_sample=False, session=session
        )
    return [int(token) for token in found[0, ids_1L.shape[1] :]]


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    # Two pages: a prefix of one adapter that another one reused would show.
    return torch.randint(3, 300, (1, 70), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def swarm(folder: Path, tmp_path: Path) -> Iterator[tuple[str, ...]]:
    with in_process_swarm(
        folder, thirds(BLOCKS), tmp_path, cache_dir=tmp_path / "cache"
    ) as addresses:
        yield addresses


def test_sessions_with_several_adapters_and_none_get_the_tokens_of_peft(
    folder: Path, swarm: tuple[str, ...], prompt: torch.Tensor, tmp_path: Path
) -> None:
    names = ["one", "two", "three"]
    folders = {
        name: make_adapter(folder, tmp_path / name, number) for number, name in enumerate(names)
    }
    expected = {name: generate_alone(folder, path, prompt) for name, path in folders.items()}
    expected[""] = generate_alone(folder, None, prompt)
    assert len({tuple(tokens) for tokens in expected.values()}) == 4
    for name, path in folders.items():
        publish_adapter(
            str(folder), path, name=name, initial_peers=swarm, identity_path=tmp_path / "author"
        )
    assert [each.listed.name for each in list_adapters(str(folder), initial_peers=swarm)] == sorted(
        names
    )
    with (
        AutoDistributedModelForCausalLM.from_pretrained(
            folder, initial_peers=swarm, dtype=torch.float32, adapter="one"
        ) as model,
        ThreadPoolExecutor(8) as threads,
    ):
        asked = ["one", "", "two", "three"] * 2
        found = list(threads.map(lambda name: generate(model, prompt, name), asked))
        for name, tokens in zip(asked, found, strict=True):
            assert tokens == expected[name], name
        by_default: Any = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
        assert by_default[0, prompt.shape[1] :].tolist() == expected["one"]
        with pytest.raises(AdapterError, match="no adapter 'four'"):
            model.inference_session(80, adapter="four")


def test_a_trained_adapter_is_published_and_served(
    folder: Path, swarm: tuple[str, ...], prompt: torch.Tensor, tmp_path: Path
) -> None:
    config: Any = peft.LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"])
    with AutoDistributedModelForCausalLM.from_pretrained(
        folder, initial_peers=swarm, dtype=torch.float32
    ) as model:
        with model.finetuning_session(config) as training:
            for _ in range(10):
                training.step({"input_ids": prompt, "labels": prompt}, learning_rate=1e-2)
            training.save_pretrained(tmp_path / "trained")
        publish_adapter(
            str(folder),
            tmp_path / "trained",
            name="trained",
            initial_peers=swarm,
            identity_path=tmp_path / "author",
        )
        started = time.monotonic()
        tokens = generate(model, prompt, "trained")
        assert time.monotonic() - started < 30
    assert tokens == generate_alone(folder, tmp_path / "trained", prompt)
    assert tokens != generate_alone(folder, None, prompt)


def test_a_node_without_memory_for_adapters_refuses_by_name(
    folder: Path, prompt: torch.Tensor, tmp_path: Path
) -> None:
    adapter = make_adapter(folder, tmp_path / "one", 1)
    with (
        in_process_swarm(
            folder,
            thirds(BLOCKS),
            tmp_path,
            cache_dir=tmp_path / "cache",
            adapter_memory_gib=0,
        ) as addresses,
        AutoDistributedModelForCausalLM.from_pretrained(
            folder, initial_peers=addresses, dtype=torch.float32, recovery_timeout_s=3
        ) as model,
    ):
        publish_adapter(
            str(folder), adapter, initial_peers=addresses, identity_path=tmp_path / "author"
        )
        with pytest.raises(RefusedError, match="KiB for adapters"):
            generate(model, prompt, "one")
        assert generate(model, prompt, "") == generate_alone(folder, None, prompt)
