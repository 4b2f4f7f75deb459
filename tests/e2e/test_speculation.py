"""Steps of several drafted tokens through nodes: the text of single tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.client.session.hop import HopLink
from nesa_node.core.decision_log import DecisionLog
from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import RouteName
from nesa_node.core.settings.declaration import default_decisions_path
from nesa_node.swarm.protocol.messages import Rollback
from tests.client.local_models import left_padded, random_ids
from tests.client.speculation.scripted_drafter import accepted_and_drafted, scripted_drafting
from tests.e2e.joining import ROUTES, both_routes, joined
from tests.engine.tiny_models import BLOCKS, reference
from tests.same_tokens import assert_same_tokens
from tests.swarms import in_process_swarm, thirds

Models = dict[RouteName, DistributedModelForCausalLM]
OPTIONS: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
PADDED: dict[str, Any] = {**OPTIONS, "pad_token_id": 0}


@pytest.fixture(scope="module")
def addresses(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    with in_process_swarm(folder, thirds(BLOCKS), tmp_path_factory.mktemp("swarm")) as addresses:
        yield addresses


@pytest.fixture(scope="module")
def models(folder: Path, addresses: tuple[str, ...]) -> Iterator[Models]:
    with both_routes(folder, addresses) as models:
        yield models


@pytest.fixture(params=ROUTES)
def model(models: Models, request: pytest.FixtureRequest) -> Iterator[DistributedModelForCausalLM]:
    yield models[request.param]
    models[request.param].drafting = None


@pytest.fixture
def rollbacks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How rollbacks were sent: "early" without waiting for the answer, else "awaited"."""
    told: list[str] = []
    send, start = HopLink.send_rollback, HopLink.start_epoch

    async def note_send(self: HopLink, message: Rollback) -> None:
        told.append("early")
        await send(self, message)

    async def note_start(self: HopLink, message: Any) -> None:
        if isinstance(message, Rollback):
            told.append("awaited")
        await start(self, message)

    monkeypatch.setattr(HopLink, "send_rollback", note_send)
    monkeypatch.setattr(HopLink, "start_epoch", note_start)
    return told


def test_drafts_half_of_which_are_wrong_change_no_token(
    model: DistributedModelForCausalLM, alone: PreTrainedModel, rollbacks: list[str]
) -> None:
    ids = random_ids(1, 20)
    expected = alone.generate(ids, **OPTIONS)  # type: ignore[operator]
    drafting = model.drafting = scripted_drafting(expected.tolist(), 4)
    with model.inference_session(20 + 40) as session:
        found = model.generate(ids, session=session, **OPTIONS)
        assert session.token_ids[0] == tuple(found[0, :-1].tolist())
        assert session.num_decoding == 1
    assert_same_tokens(alone, found, ids, **OPTIONS)
    right, drafted = accepted_and_drafted(drafting)
    assert 0 < right < drafted
    assert set(rollbacks) == {"early"}


def test_rows_of_a_batch_advance_at_their_own_pace(
    model: DistributedModelForCausalLM, alone: PreTrainedModel
) -> None:
    ids, mask = left_padded([5, 17, 11])
    expected = alone.generate(ids, attention_mask=mask, **PADDED)  # type: ignore[operator]
    texts = [row[17 - length :].tolist() for row, length in zip(expected, (5, 17, 11), strict=True)]
    drafting = model.drafting = scripted_drafting(texts[:2], 5)
    found = model.generate(ids, attention_mask=mask, **PADDED)
    assert_same_tokens(alone, found, ids, mask, **PADDED)
    assert accepted_and_drafted(drafting)[0] > 0


def test_seeded_samples_are_those_of_transformers(
    model: DistributedModelForCausalLM, alone: PreTrainedModel
) -> None:
    ids, options = random_ids(1, 20), {**OPTIONS, "do_sample": True, "temperature": 0.8}
    torch.manual_seed(3)
    expected = alone.generate(ids, **options)  # type: ignore[operator]
    drafting = model.drafting = scripted_drafting(expected.tolist(), 5)
    torch.manual_seed(3)
    assert torch.equal(model.generate(ids, **options), expected)
    assert accepted_and_drafted(drafting)[0] > 0


def test_towards_older_nodes_of_a_chain_a_rollback_is_awaited(
    models: Models,
    alone: PreTrainedModel,
    rollbacks: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HopLink, "takes_early_steps", False)
    for route, how in (("chain", "awaited"), ("star", "early")):
        ids = random_ids(1, 20, seed=2)
        rollbacks.clear()
        with models[route].inference_session(64) as session:  # type: ignore[index]
            session.step(torch.cat([ids, random_ids(1, 5)], 1))
            session.rollback([20])
            assert rollbacks == [how] * 3
            logits = session.step(random_ids(1, 1, seed=4))
        whole = torch.cat([ids, random_ids(1, 1, seed=4)], 1)
        assert torch.allclose(logits[0, -1], alone(whole).logits[0, -1], atol=1e-4)


def test_a_draft_model_by_its_folder_and_what_explain_says_of_it(
    folder: Path, addresses: tuple[str, ...], alone: PreTrainedModel, tmp_path: Path
) -> None:
    """The model drafts for itself: all that it drafts is right."""
    ids = random_ids(1, 20)
    with joined(folder, addresses, "chain", draft=folder) as model:
        found = model.generate(ids, **OPTIONS)
        drafting = model.drafting
        assert drafting is not None
        right, drafted = accepted_and_drafted(drafting)
    assert_same_tokens(alone, found, ids, **OPTIONS)
    assert right == drafted > 0
    log = DecisionLog(default_decisions_path()).recent(10)
    (told,) = (decision for decision in log if decision.kind == "speculation")
    (opened,) = {decision.name for decision in log if decision.kind == "session"} & {told.name}
    assert told.name == opened
    assert told.body["tokens"] == 39
    assert told.body["accepted"] == told.body["drafted"]


def test_replicas_that_check_each_other_roll_back_alike(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    llama, ids = tiny("llama"), random_ids(1, 20)
    alone = reference(llama)
    expected = alone.generate(ids, **OPTIONS)
    with (
        in_process_swarm(llama, [Span(0, BLOCKS)] * 3, tmp_path) as addresses,
        joined(llama, addresses, "star", verify="2of3") as model,
    ):
        drafting = model.drafting = scripted_drafting(expected.tolist(), 4)
        found = model.generate(ids, **OPTIONS)
    assert_same_tokens(alone, found, ids, **OPTIONS)
    right, drafted = accepted_and_drafted(drafting)
    assert 0 < right < drafted
