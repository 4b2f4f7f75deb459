"""What a session over the network can do besides one `generate`.

B rows, L columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.client.model.layers import CLIENT_PEER
from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import RouteName
from tests.client.local_models import left_padded, random_ids
from tests.e2e.joining import ROUTES, both_routes, joined
from tests.engine.chained import distance
from tests.engine.tiny_models import BLOCKS, reference
from tests.same_tokens import assert_same_tokens, run_reference
from tests.swarms import in_process_swarm, thirds

Models = dict[RouteName, DistributedModelForCausalLM]
OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}


@pytest.fixture(scope="module")
def addresses(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    with in_process_swarm(folder, thirds(BLOCKS), tmp_path_factory.mktemp("swarm")) as addresses:
        yield addresses


@pytest.fixture(scope="module")
def models(folder: Path, addresses: tuple[str, ...]) -> Iterator[Models]:
    with both_routes(folder, addresses) as models:
        yield models


@pytest.fixture(params=ROUTES)
def model(models: Models, request: pytest.FixtureRequest) -> DistributedModelForCausalLM:
    return models[request.param]


def _logits(model: PreTrainedModel, ids_BL: Tensor) -> Tensor:
    forward: Any = model.__call__
    with torch.no_grad():
        logits: Tensor = forward(ids_BL).logits
    return logits


def _close(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= 1e-4 * theirs.abs().max())


def test_second_turn_prefills_only_what_is_new(
    model: DistributedModelForCausalLM, alone: PreTrainedModel
) -> None:
    with model.inference_session(max_length=128) as session:
        first = model.generate(random_ids(1, 40), session=session, **OPTIONS)
        assert session.tokens_sent == 40 + 15
        prompt = torch.cat([first, random_ids(1, 6, seed=3)], 1)
        second = model.generate(prompt, session=session, **OPTIONS)
        # The last token of the first turn was never sent.
        assert session.tokens_sent == 40 + 15 + (1 + 6) + 15
    assert_same_tokens(alone, second, prompt, **OPTIONS)


def test_an_edited_prompt_is_cut_back_to_what_both_share(
    model: DistributedModelForCausalLM, alone: PreTrainedModel
) -> None:
    prompt = random_ids(1, 40)
    edited = prompt.clone()
    edited[0, 30] = (edited[0, 30] + 1) % 320
    with model.inference_session(max_length=64) as session:
        model.generate(prompt, session=session, **OPTIONS)
        sent = session.tokens_sent
        ours = model.generate(edited, session=session, **OPTIONS)
        assert session.tokens_sent - sent == (40 - 30) + 15
    assert_same_tokens(alone, ours, edited, **OPTIONS)


def test_steps_rolled_back_and_done_again_give_the_same_logits(
    model: DistributedModelForCausalLM, alone: PreTrainedModel
) -> None:
    ids_BL = random_ids(2, 30)
    expected = _logits(alone, ids_BL)
    with model.inference_session(max_length=32, batch_size=2) as session:
        assert _close(session.step(ids_BL[:, :20]), expected[:, :20])
        once = session.step(ids_BL[:, 20:])
        for lengths in ((20, 20), (20, 0), (7, 19), (0, 0)):
            session.rollback(lengths)
            rest_BL, mask_BL = _rests(ids_BL, lengths)
            again = session.step(rest_BL, attention_mask=mask_BL)
            assert session.lengths == (30, 30)
            for row, length in enumerate(lengths):
                assert _close(again[row, : 30 - length], expected[row, length:])
        session.rollback((20, 20))
        assert torch.equal(session.step(ids_BL[:, 20:]), once)
        session.rollback((25, 25))
        other_BL = random_ids(2, 4, seed=5)
        changed = torch.cat([ids_BL[:, :25], other_BL], 1)
        assert _close(session.step(other_BL), _logits(alone, changed)[:, 25:])


def _rests(ids_BL: Tensor, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Each row's ids from its length on, padded on the right, and the mask that says so."""
    columns = ids_BL.shape[1] - min(lengths)
    rest_BL = torch.zeros(len(lengths), columns, dtype=torch.long)
    mask_BL = torch.zeros_like(rest_BL)
    for row, length in enumerate(lengths):
        rest_BL[row, : ids_BL.shape[1] - length] = ids_BL[row, length:]
        mask_BL[row, : ids_BL.shape[1] - length] = 1
    return rest_BL, mask_BL


def test_drafts_are_checked_and_rolled_back_over_the_network(
    model: DistributedModelForCausalLM, alone: PreTrainedModel
) -> None:
    ids_BL = random_ids(1, 6).repeat(1, 4)
    ours = model.generate(ids_BL, prompt_lookup_num_tokens=4, **OPTIONS)
    assert_same_tokens(alone, ours, ids_BL, **OPTIONS)


@pytest.mark.parametrize("client_blocks", [(0, 0), (1, 1)])
def test_beam_search_equals_that_of_transformers(
    folder: Path,
    addresses: tuple[str, ...],
    alone: PreTrainedModel,
    model: DistributedModelForCausalLM,
    client_blocks: tuple[int, int],
) -> None:
    """Every step the rows go on as copies of others, on the nodes and with the client."""
    ids_BL, mask_BL = left_padded([30, 41])
    options: dict[str, Any] = {
        "num_beams": 4,
        "num_return_sequences": 2,
        "max_new_tokens": 24,
        "pad_token_id": 0,
    }
    expected_BL: Any = alone.generate(ids_BL, attention_mask=mask_BL, do_sample=False, **options)  # type: ignore[operator]
    with joined(folder, addresses, "chain", client_blocks=client_blocks) as kept:
        for each in (kept, model):
            ours_BL = each.generate(ids_BL, attention_mask=mask_BL, **options)
            assert torch.equal(ours_BL, expected_BL)


def test_rows_go_on_as_copies_of_others(model: DistributedModelForCausalLM) -> None:
    ids_BL = random_ids(3, 50)
    more_BL = random_ids(3, 5, seed=9)
    sources = [2, 2, 0]
    with model.inference_session(80, 3) as session:
        session.step(ids_BL)
        session.reorder(sources)
        assert session.token_ids == tuple(tuple(ids_BL[row].tolist()) for row in sources)
        logits_BLV = session.step(more_BL)
        session.rollback([45, 50, 20])
        again_BLV = session.step(more_BL)
    with model.inference_session(80, 3) as session:
        session.step(ids_BL[sources])
        expected_BLV = session.step(more_BL)
        assert distance(logits_BLV, expected_BLV) <= 1e-5
        session.rollback([45, 50, 20])
        assert distance(again_BLV, session.step(more_BL)) <= 1e-5
    with model.inference_session(80, 2) as session, pytest.raises(ValueError, match="2 rows"):
        session.reorder([0, 2])


@pytest.mark.parametrize("route", ROUTES)
def test_blocks_that_stay_with_the_client_change_no_token(
    folder: Path, addresses: tuple[str, ...], alone: PreTrainedModel, route: RouteName
) -> None:
    ids_BL, mask_BL = left_padded([5, 19])
    options = OPTIONS | {"pad_token_id": 0}
    with joined(folder, addresses, route, client_blocks=(1, 1)) as model:
        ours = model.generate(ids_BL, attention_mask=mask_BL, **options)
        with model.inference_session(max_length=8) as session:
            hops = session.hops
    assert_same_tokens(alone, ours, ids_BL, mask_BL, **options)
    assert [hop.span for hop in hops] == [
        Span(0, 1),
        Span(1, 2),
        Span(2, 4),
        Span(4, 5),
        Span(5, 6),
    ]
    assert [hop.peer_id == CLIENT_PEER for hop in hops] == [True, False, False, False, True]


@pytest.fixture(scope="module")
def overlapping(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, ...]]:
    """Three nodes that are all needed, of which no chain can use every block."""
    spans = [Span(0, 2), Span(1, 5), Span(4, BLOCKS)]
    with in_process_swarm(folder, spans, tmp_path_factory.mktemp("swarm")) as addresses:
        yield addresses


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("client_blocks", [(0, 0), (2, 2)])
def test_a_part_of_a_nodes_span_serves_between_others(
    folder: Path,
    overlapping: tuple[str, ...],
    alone: PreTrainedModel,
    route: RouteName,
    client_blocks: tuple[int, int],
) -> None:
    ids_BL = random_ids(1, 30)
    with (
        joined(folder, overlapping, route, client_blocks=client_blocks) as model,
        model.inference_session(max_length=64) as session,
    ):
        ours = model.generate(ids_BL, session=session, **OPTIONS)
        session.rollback([10])
        again = model.generate(ids_BL, session=session, **OPTIONS)
        spans = [hop.span for hop in session.hops]
    assert_same_tokens(alone, ours, ids_BL, **OPTIONS)
    assert torch.equal(ours, again)
    assert len(spans) == 3
    assert (spans[0].start, spans[-1].end) == (0, BLOCKS)
    assert all(before.end == after.start for before, after in itertools.pairwise(spans))
    assert spans[1] in [Span(a, b) for a in (1, 2) for b in (4, 5)]


def test_bfloat16_is_served_and_its_agreement_reported(folder: Path, tmp_path: Path) -> None:
    """transformers disagrees with itself there, so that only gross mistakes are asserted."""
    whole = reference(folder, torch.bfloat16)
    ids_BL = random_ids(1, 200)
    theirs = _logits(whole, ids_BL)
    expected_BL = run_reference(whole, ids_BL, **OPTIONS).sequences_BL
    with (
        in_process_swarm(folder, thirds(BLOCKS), tmp_path, torch_dtype="bfloat16") as addresses,
        both_routes(folder, addresses, dtype=torch.bfloat16) as models,
    ):
        for route, model in models.items():
            ours, new_BL = model(ids_BL).logits, model.generate(ids_BL, **OPTIONS)
            agreement = float((ours.argmax(-1) == theirs.argmax(-1)).float().mean())
            same = float((new_BL == expected_BL)[:, 200:].float().mean())
            error = float((ours - theirs).abs().max() / theirs.abs().max())
            print(f"{route}: of one forward's tokens {agreement:.1%} agree, of decoded {same:.1%}")
            assert ours.dtype == torch.bfloat16
            assert agreement > 0.9
            assert error < 0.1
