"""Text that is generated with drafts is the text without them, greedy and sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.client.speculation.drafting import Drafting
from nesa_node.core.ids import ModelId
from tests.client.local_models import left_padded, local_model, random_ids
from tests.client.model.test_greedy import Collect
from tests.client.speculation.scripted_drafter import accepted_and_drafted, scripted_drafting
from tests.engine.tiny_models import reference
from tests.same_tokens import assert_same_tokens

Pair = tuple[DistributedModelForCausalLM, PreTrainedModel]
NEW = 40


@pytest.fixture(scope="module")
def pair(tiny: Callable[[str], Path]) -> Iterator[Pair]:
    with local_model(tiny("llama")) as model:
        yield model, reference(tiny("llama"))


@contextmanager
def drafted_by(model: DistributedModelForCausalLM, drafting: Drafting) -> Iterator[Drafting]:
    model.drafting = drafting
    try:
        yield drafting
    finally:
        model.drafting = None


def texts_of(ids_BL: torch.Tensor, mask_BL: torch.Tensor | None = None) -> list[list[int]]:
    """Rows without their padding."""
    if mask_BL is None:
        return [row.tolist() for row in ids_BL]
    more = ids_BL.shape[1] - mask_BL.shape[1]
    whole_BL = torch.nn.functional.pad(mask_BL, (0, more), value=1)
    return [row[seen != 0].tolist() for row, seen in zip(ids_BL, whole_BL, strict=True)]


@pytest.mark.parametrize("wrong_every", [0, 2, 3, 7])
def test_greedy_text_is_that_of_transformers_however_many_drafts_are_wrong(
    pair: Pair, wrong_every: int
) -> None:
    model, alone = pair
    ids = random_ids(1, 9)
    expected = alone.generate(ids, max_new_tokens=NEW, do_sample=False)  # type: ignore[operator]
    with drafted_by(model, scripted_drafting(expected.tolist(), wrong_every)) as drafting:
        found = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(found, expected)
    right, drafted = accepted_and_drafted(drafting)
    assert drafted > NEW // 4
    assert (right == drafted) == (wrong_every == 0)


def test_a_batch_of_padded_rows_is_that_of_transformers(pair: Pair) -> None:
    model, alone = pair
    ids, mask = left_padded([9, 4, 13], pad=2)
    options: Any = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 2}
    expected = alone.generate(ids, attention_mask=mask, **options)  # type: ignore[operator]
    stop = int(expected[1, -5])
    stops: list[dict[str, Any]] = [{}, {"eos_token_id": stop}]
    for more in stops:
        expected = alone.generate(  # type: ignore[operator]
            ids, attention_mask=mask, **options, **more
        )
        with drafted_by(model, scripted_drafting(texts_of(expected, mask), 5)) as drafting:
            found = model.generate(ids, attention_mask=mask, **options, **more)
        assert_same_tokens(alone, found, ids, mask, **options, **more)
        right, drafted = accepted_and_drafted(drafting)
        assert 0 < right < drafted


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8, "temperature": 1.3},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        {"min_new_tokens": 20, "eos_token_id": [3, 4, 5]},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_seeded_samples_are_those_of_transformers(pair: Pair, options: dict[str, Any]) -> None:
    """Each token takes the same random number: drafts change none."""
    model, alone = pair
    ids = random_ids(1, 9)
    torch.manual_seed(5)
    expected = alone.generate(  # type: ignore[operator]
        ids, max_new_tokens=NEW, do_sample=True, **options
    )
    with drafted_by(model, scripted_drafting(expected.tolist(), 6)) as drafting:
        torch.manual_seed(5)
        found = model.generate(ids, max_new_tokens=NEW, do_sample=True, **options)
    assert torch.equal(found, expected)
    assert accepted_and_drafted(drafting)[0] > 0


class CountCalls(LogitsProcessor):
    """Bans the token that follows the last one, and counts."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.lengths.append(input_ids.shape[1])
        scores[0, (int(input_ids[0, -1]) + 1) % scores.shape[1]] = -torch.inf
        return scores


class EndAt(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        return torch.tensor([input_ids.shape[1] >= self._length])


def test_processors_and_criteria_of_the_caller_see_each_token_once(pair: Pair) -> None:
    model, alone = pair
    ids = random_ids(1, 9)

    def options() -> dict[str, Any]:
        return {
            "max_new_tokens": NEW,
            "do_sample": False,
            "logits_processor": LogitsProcessorList([counted]),
            "stopping_criteria": StoppingCriteriaList([EndAt(30)]),
        }

    counted = CountCalls()
    expected = alone.generate(ids, **options())  # type: ignore[operator]
    with drafted_by(model, scripted_drafting(expected.tolist(), 4)):
        counted = CountCalls()
        found = model.generate(ids, **options())
    assert torch.equal(found, expected)
    assert counted.lengths == list(range(9, 30))


def test_a_session_goes_on_after_drafts_and_a_streamer_gets_each_token(pair: Pair) -> None:
    model, alone = pair
    ids = random_ids(1, 9)
    whole = alone.generate(ids, max_new_tokens=2 * NEW, do_sample=False)  # type: ignore[operator]
    with (
        drafted_by(model, scripted_drafting(whole.tolist(), 3)) as drafting,
        model.inference_session(9 + 2 * NEW) as session,
    ):
        streamer = Collect()
        first = model.generate(
            ids, max_new_tokens=NEW, do_sample=False, session=session, streamer=streamer
        )
        assert streamer.tokens == whole[0, 9 : 9 + NEW].tolist()
        assert session.token_ids[0] == tuple(whole[0, : 9 + NEW - 1].tolist())
        sent = session.tokens_sent
        second = model.generate(first, max_new_tokens=NEW, do_sample=False, session=session)
        assert torch.equal(second, whole)
        drafted = accepted_and_drafted(drafting)[1]
        assert session.tokens_sent - sent <= NEW + drafted


def test_lookup_repeats_what_the_text_has_said(pair: Pair) -> None:
    """A model that goes round in a loop is followed without a draft model."""
    model, alone = pair
    ids = torch.tensor([[5, 6, 7, 8] * 6])
    expected = alone.generate(ids, max_new_tokens=96, do_sample=False)  # type: ignore[operator]
    with drafted_by(model, Drafting(ModelId("tiny"))) as drafting:
        found = model.generate(ids, max_new_tokens=96, do_sample=False)
    assert torch.equal(found, expected)
    assert accepted_and_drafted(drafting)[1] > 0


def test_beams_and_scores_are_computed_without_drafts(pair: Pair) -> None:
    model, alone = pair
    ids = random_ids(1, 9)
    for options in (
        {"num_beams": 3, "do_sample": False},
        {"return_dict_in_generate": True, "output_scores": True, "do_sample": False},
    ):
        expected: Any = alone.generate(  # type: ignore[operator]
            ids, max_new_tokens=12, **options
        )
        with drafted_by(model, scripted_drafting([])) as drafting:
            found = model.generate(ids, max_new_tokens=12, **options)
        if isinstance(found, dict):
            found, expected = found["sequences"], expected.sequences
        assert torch.equal(found, expected)
        assert accepted_and_drafted(drafting) == (0, 0)
