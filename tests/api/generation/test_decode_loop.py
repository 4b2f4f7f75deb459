"""Jobs give what transformers gives: tokens, log probabilities, samples."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nesa_node.api.generation.job import Job, SamplingParams
from nesa_node.client.model.inference_session import InferenceSession
from nesa_node.core.errors import ContextLengthError
from tests.api.served import answer, greedy_job, outcome, served_locally
from tests.engine.tiny_models import POSITIONS, VOCABULARY, greedy, prompt_ids, reference

NEW_TOKENS = 32


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
async def test_greedy_tokens_are_those_of_transformers(
    tiny: Callable[[str], Path], family: str
) -> None:
    prompt = prompt_ids(40)
    async with served_locally(tiny(family)) as served:
        made = await answer(served, greedy_job(prompt, NEW_TOKENS))
    assert made.token_ids == greedy(reference(tiny(family)), prompt, NEW_TOKENS)
    assert made.finish_reason == "length"


async def test_penalties_and_biases_give_the_greedy_tokens_of_transformers(
    tiny: Callable[[str], Path],
) -> None:
    prompt = prompt_ids(40)
    ids_BL = torch.tensor([prompt])
    local = reference(tiny("llama"))
    options = {"repetition_penalty": 1.3, "sequence_bias": [[[7], 4.0], [[9], -50.0]]}
    expected = local.generate(
        ids_BL,
        attention_mask=torch.ones_like(ids_BL),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        **options,
    )
    sampling = SamplingParams(temperature=0, repetition_penalty=1.3, logit_bias={7: 4.0, 9: -50.0})
    async with served_locally(tiny("llama")) as served:
        made = await answer(served, greedy_job(prompt, NEW_TOKENS, sampling=sampling))
    assert made.token_ids == expected[0, len(prompt) :].tolist()


async def test_choices_are_repeatable_by_their_seed_and_differ_from_each_other(
    tiny: Callable[[str], Path],
) -> None:
    def job(seed: int) -> Job:
        sampling = SamplingParams(temperature=0.9, top_p=0.95, seed=seed)
        return greedy_job(prompt_ids(40), 16, n=3, sampling=sampling)

    async with served_locally(tiny("llama")) as served:
        first, again, other = [await outcome(served, job(seed)) for seed in (5, 5, 6)]
        alone = await outcome(served, greedy_job(prompt_ids(40), 16, sampling=job(5).sampling))
    made = [[tuple(one.token_ids) for one in result.answers] for result in (first, again, other)]
    assert made[0] == made[1] != made[2]
    assert len(set(made[0])) == 3
    assert tuple(alone.answers[0].token_ids) == made[0][0]


async def test_choices_that_end_early_leave_the_others_as_they_are(
    tiny: Callable[[str], Path],
) -> None:
    sampling = SamplingParams(temperature=1.0, seed=3)
    prompt = prompt_ids(12)
    async with served_locally(tiny("llama")) as served:
        whole = await outcome(served, greedy_job(prompt, 24, n=3, sampling=sampling))
        # One of them ends early, at a piece of text that the others do not hold.
        texts = [one.text for one in whole.answers]
        stop = next(
            text[at : at + 2]
            for text in texts[:1]
            for at in range(4, len(text))
            if "\ufffd" not in text[at : at + 2]
            and not any(text[at : at + 2] in other for other in texts[1:])
        )
        cut = await outcome(served, greedy_job(prompt, 24, n=3, sampling=sampling, stop=(stop,)))
    assert cut.answers[0].finish_reason == "stop"
    assert cut.answers[0].text == texts[0][: texts[0].index(stop)]
    assert [one.token_ids for one in cut.answers[1:]] == [
        one.token_ids for one in whole.answers[1:]
    ]


async def test_log_probabilities_are_those_of_transformers(tiny: Callable[[str], Path]) -> None:
    prompt = prompt_ids(70)
    async with served_locally(tiny("llama")) as served:
        job = greedy_job(prompt, 8, top_logprobs=3, prompt_logprobs=True)
        made = await outcome(served, job)
    answer_ids = made.answers[0].token_ids
    with torch.inference_mode():
        logits_LV = reference(tiny("llama"))(torch.tensor([prompt + answer_ids])).logits[0]
    expected_LV = torch.log_softmax(logits_LV.float(), -1)
    tokens = [*made.read.tokens, *made.answers[0].tokens]
    assert [token.token_id for token in tokens] == prompt + answer_ids
    assert tokens[0].logprob == 0.0
    assert tokens[0].data == served.vocabulary.token_bytes(prompt[0]) != b""
    for at, token in enumerate(tokens[1:]):
        row_V = expected_LV[at]
        assert token.logprob == pytest.approx(float(row_V[token.token_id]), abs=1e-4)
        best_K = row_V.topk(3)
        assert [one.token_id for one in token.top] == best_K.indices.tolist()
        assert [one.logprob for one in token.top] == pytest.approx(best_K.values.tolist(), abs=1e-4)


async def test_a_job_without_new_tokens_only_reads_the_prompt(tiny: Callable[[str], Path]) -> None:
    async with served_locally(tiny("llama")) as served:
        made = await outcome(served, greedy_job(prompt_ids(5), 0, n=2, prompt_logprobs=True))
    assert [token.token_id for token in made.read.tokens] == prompt_ids(5)
    assert [one.tokens for one in made.answers] == [[], []]
    assert [one.finish_reason for one in made.answers] == ["length", "length"]


async def test_the_end_token_ends_an_answer_without_being_part_of_its_text(
    tiny: Callable[[str], Path],
) -> None:
    prompt = prompt_ids(9)
    async with served_locally(tiny("llama")) as served:
        free = await answer(served, greedy_job(prompt, 12))
        biased = SamplingParams(temperature=0, logit_bias={0: 1000.0})
        job = greedy_job(prompt, 12, sampling=biased, ignore_eos=False)
        ended = await answer(served, job)
    assert free.finish_reason == "length"
    assert (ended.text, ended.finish_reason, ended.token_ids) == ("", "stop", [0])


async def test_jobs_that_run_together_are_not_mixed(tiny: Callable[[str], Path]) -> None:
    prompts = [prompt_ids(10 + 7 * seed, seed=seed) for seed in range(6)]
    local = reference(tiny("llama"))
    async with served_locally(tiny("llama")) as served:
        jobs = [greedy_job(prompt, NEW_TOKENS) for prompt in prompts]
        made = await asyncio.gather(*(answer(served, job) for job in jobs))
    for prompt, one in zip(prompts, made, strict=True):
        assert one.token_ids == greedy(local, prompt, NEW_TOKENS)


async def test_more_tokens_than_the_model_holds_are_refused(tiny: Callable[[str], Path]) -> None:
    async with served_locally(tiny("llama")) as served:
        with pytest.raises(ContextLengthError, match="40 tokens and 1000 were asked for"):
            await answer(served, greedy_job(prompt_ids(40), 1000))
        with pytest.raises(ValueError, match="no tokens"):
            await answer(served, greedy_job([], 4))
        longest = await answer(served, greedy_job(prompt_ids(POSITIONS - 2), 2))
    assert len(longest.tokens) == 2


async def test_logits_are_gone_while_nodes_compute(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be a part of what was computed for many jobs: all of that would stay."""
    alive: list[int] = []
    feed = InferenceSession.feed

    def spied(session: InferenceSession, *given: Any, **options: Any) -> torch.Tensor:
        tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
        alive.append(sum(tuple(each.shape[1:]) == (VOCABULARY,) for each in tensors))
        return feed(session, *given, **options)

    sampling = SamplingParams(temperature=0.9, seed=1)
    async with served_locally(tiny("llama")) as served:
        monkeypatch.setattr(InferenceSession, "feed", spied)
        for options in ({}, {"n": 2, "sampling": sampling}, {"prompt_logprobs": True}):
            await outcome(served, greedy_job(prompt_ids(600), 4, top_logprobs=1, **options))
    # Before its first call there are none.
    assert len(alive) == 4 + 4 + 5
    assert set(alive) == {alive[0]}
