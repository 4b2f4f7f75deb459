"""A swarm with a key serves those who know it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.core.errors import BootstrapError
from tests.client.local_models import random_ids
from tests.e2e.joining import ROUTES, both_routes
from tests.engine.tiny_models import BLOCKS, reference
from tests.same_tokens import assert_same_tokens
from tests.swarms import in_process_swarm, thirds

KEY = "a key for the tests of a swarm"


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path]) -> Path:
    return tiny("llama")


@pytest.fixture(scope="module")
def addresses(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    files = tmp_path_factory.mktemp("swarm")
    with in_process_swarm(folder, thirds(BLOCKS), files, swarm_key=KEY) as addresses:
        yield addresses


def test_who_knows_the_key_gets_the_right_tokens(folder: Path, addresses: tuple[str, ...]) -> None:
    ids = random_ids(1, 20)
    with both_routes(folder, addresses, swarm_key=KEY) as models:
        for route in ROUTES:
            ours = models[route].generate(ids, max_new_tokens=16, do_sample=False)
            assert_same_tokens(reference(folder), ours, ids, max_new_tokens=16, do_sample=False)


@pytest.mark.parametrize("key", [None, "another key for another swarm"])
def test_who_does_not_know_the_key_is_refused(
    folder: Path, addresses: tuple[str, ...], key: str | None
) -> None:
    with (
        AutoDistributedModelForCausalLM.from_pretrained(
            folder, initial_peers=addresses, swarm_key=key, recovery_timeout_s=1
        ) as model,
        pytest.raises(BootstrapError, match="with the same --swarm-key"),
    ):
        model.generate(random_ids(1, 5), max_new_tokens=2, do_sample=False)
