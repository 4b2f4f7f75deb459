"""Answers whose tokens are drafted are the answers without drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nesa_node.api.generation.job import Job, SamplingParams
from nesa_node.client.speculation.drafting import Drafting
from nesa_node.core.ids import ModelId
from tests.api.served import Outcome, greedy_job, outcome, served_locally, serving
from tests.client.local_models import local_model
from tests.client.speculation.scripted_drafter import accepted_and_drafted, scripted_drafting
from tests.engine.tiny_models import prompt_ids

NEW_TOKENS = 32


async def with_and_without_drafts(
    folder: Path, job: Job, wrong_every: int = 5
) -> tuple[Outcome, Outcome, Drafting]:
    async with served_locally(folder) as served:
        plain = await outcome(served, job)
    texts = [[*job.prompt, *one.token_ids] for one in plain.answers]
    with local_model(folder) as model:
        drafting = model.drafting = scripted_drafting(texts, wrong_every)
        async with serving(model) as served:
            drafted = await outcome(served, job)
    return plain, drafted, drafting


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sampling": SamplingParams(temperature=0.9, top_p=0.9, seed=4)},
        {"sampling": SamplingParams(temperature=1.1, seed=4, presence_penalty=0.5), "n": 3},
        {"sampling": SamplingParams(temperature=0, repetition_penalty=1.3), "top_logprobs": 2},
        {"n": 2, "top_logprobs": 0},
    ],
    ids=["greedy", "sampled", "three choices", "penalties", "log probabilities"],
)
async def test_answers_are_those_without_drafts(
    tiny: Callable[[str], Path], options: dict[str, Any]
) -> None:
    job = greedy_job(prompt_ids(40), NEW_TOKENS, **options)
    plain, drafted, drafting = await with_and_without_drafts(tiny("llama"), job)
    for before, after in zip(plain.answers, drafted.answers, strict=True):
        assert (after.token_ids, after.text) == (before.token_ids, before.text)
        assert after.finish_reason == before.finish_reason
        for one, other in zip(before.tokens, after.tokens, strict=True):
            assert other.logprob == pytest.approx(one.logprob, abs=1e-4)
            assert [like.token_id for like in other.top] == [like.token_id for like in one.top]
    right, all_drafted = accepted_and_drafted(drafting)
    assert 0 < right < all_drafted


async def test_an_answer_ends_within_a_draft(tiny: Callable[[str], Path]) -> None:
    """At a stop text, and at the last token that was asked for."""
    async with served_locally(tiny("llama")) as served:
        whole = (await outcome(served, greedy_job(prompt_ids(12), 24))).answers[0]
    stop = next(
        whole.text[at : at + 2]
        for at in range(6, len(whole.text))
        if "\ufffd" not in whole.text[at : at + 2]
    )
    for job in (greedy_job(prompt_ids(12), 24, stop=(stop,)), greedy_job(prompt_ids(12), 7)):
        plain, drafted, _ = await with_and_without_drafts(tiny("llama"), job, wrong_every=0)
        assert drafted.answers[0].text == plain.answers[0].text
        assert drafted.answers[0].token_ids == plain.answers[0].token_ids
        assert drafted.answers[0].finish_reason == plain.answers[0].finish_reason


async def test_an_answer_by_a_grammar_is_that_without_drafts(tiny: Callable[[str], Path]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    grammar = json.dumps({"grammars": [{"json_schema": schema}]})
    job = greedy_job(prompt_ids(20), 24, grammar=grammar, ignore_eos=False)
    plain, drafted, drafting = await with_and_without_drafts(tiny("llama"), job)
    assert drafted.answers[0].text == plain.answers[0].text
    assert accepted_and_drafted(drafting)[1] > 0


async def test_lookup_drafts_for_a_text_that_repeats_itself(tiny: Callable[[str], Path]) -> None:
    job = greedy_job([5, 6, 7, 8] * 6, 96)
    async with served_locally(tiny("llama")) as served:
        plain = await outcome(served, job)
    with local_model(tiny("llama")) as model:
        drafting = model.drafting = Drafting(ModelId("tiny"))
        async with serving(model) as served:
            drafted = await outcome(served, job)
    assert drafted.answers[0].token_ids == plain.answers[0].token_ids
    assert accepted_and_drafted(drafting)[1] > 0
