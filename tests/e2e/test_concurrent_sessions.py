"""Eight sessions at once give each the tokens that it gets alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.settings.choices import RouteName
from tests.client.local_models import left_padded
from tests.e2e.joining import ROUTES, both_routes
from tests.engine.tiny_models import BLOCKS, reference
from tests.same_tokens import assert_same_tokens
from tests.swarms import daemons, in_process_swarm, thirds

SESSIONS = 8
NEW_TOKENS = 24
# Of unequal lengths, so that some prefill while others decode; two are batches.
PROMPTS = [
    left_padded(lengths, seed=seed)
    for seed, lengths in enumerate([[4], [300], [17, 9], [60], [7], [450], [33, 5, 21], [130]])
]
OPTIONS: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}

Joining = tuple[Path, Sequence[str]]


@pytest.fixture(
    scope="module", params=["in one process", pytest.param("daemons", marks=pytest.mark.slow)]
)
def swarm(
    request: pytest.FixtureRequest,
    tiny: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Joining]:
    folder, files = tiny("llama"), tmp_path_factory.mktemp("swarm")
    if request.param == "daemons":
        with daemons(folder, files) as nodes:
            nodes.start_all(thirds(BLOCKS))
            yield folder, nodes.addresses
    else:
        with in_process_swarm(folder, thirds(BLOCKS), files) as addresses:
            yield folder, addresses


Models = dict[RouteName, DistributedModelForCausalLM]


@pytest.fixture(scope="module")
def clients(swarm: Joining) -> Iterator[tuple[Models, Models]]:
    """Two members of the swarm, each by both kinds of route."""
    with both_routes(*swarm) as first, both_routes(*swarm) as second:
        yield first, second


@pytest.fixture(scope="module")
def alone(swarm: Joining, clients: tuple[Models, Models]) -> list[Tensor]:
    """What each prompt's session gives while it is the only one, checked with transformers."""
    model = reference(swarm[0])
    results = []
    for ids_BL, mask_BL in PROMPTS:
        result = clients[0]["chain"].generate(ids_BL, attention_mask=mask_BL, **OPTIONS)
        assert_same_tokens(model, result, ids_BL, mask_BL, **OPTIONS)
        results.append(result)
    return results


def _generate_together(models: Sequence[DistributedModelForCausalLM]) -> list[Tensor]:
    """All prompts, each in a session and a thread of its own; all sessions are open at once."""
    everybody = Barrier(SESSIONS, timeout=30)

    def work(index: int) -> Tensor:
        ids_BL, mask_BL = PROMPTS[index]
        rows, columns = ids_BL.shape
        model = models[index % len(models)]
        with model.inference_session(columns + NEW_TOKENS, rows) as session:
            everybody.wait()
            result: Tensor = model.generate(
                ids_BL, attention_mask=mask_BL, session=session, **OPTIONS
            )
            everybody.wait()
        return result

    with ThreadPoolExecutor(SESSIONS) as threads:
        return list(threads.map(work, range(SESSIONS)))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("route", ROUTES)
def test_eight_sessions_at_once_give_the_same_tokens_as_alone(
    clients: tuple[Models, Models], alone: list[Tensor], route: RouteName, members: int
) -> None:
    together = _generate_together([models[route] for models in clients[:members]])
    for index, (ours_BL, expected_BL) in enumerate(zip(together, alone, strict=True)):
        assert torch.equal(ours_BL, expected_BL), f"session {index}"
