"""Sampling keeps what transformers keeps, and draws by the probabilities."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nesa_node.api.generation.job import SamplingParams
from nesa_node.api.generation.sampler import Sampler, SharedLogitsState


def sampler_of(sampling: SamplingParams, prompt: tuple[int, ...] = (), index: int = 0) -> Sampler:
    return Sampler(SharedLogitsState(sampling, prompt), index)


def logits(seed: int, size: int = 2000, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def probabilities(sampling: SamplingParams, logits_V: torch.Tensor) -> torch.Tensor:
    """What transformers would draw by."""
    warpers: Any = LogitsProcessorList()
    warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    warped: torch.Tensor = warpers(torch.tensor([[0]]), logits_V.clone()[None])[0]
    return torch.softmax(warped, -1)


SAMPLINGS = [
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=2.5, top_p=0.97),
    SamplingParams(temperature=0.9, min_p=0.1),
    SamplingParams(temperature=1.1, top_k=40, top_p=0.9, min_p=0.05),
    SamplingParams(temperature=1.0, top_p=1e-9),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_same_tokens_can_come_as_with_transformers(sampling: SamplingParams) -> None:
    for seed in range(20):
        logits_V = logits(seed)
        wanted_V = probabilities(sampling, logits_V)
        sampler = sampler_of(sampling)
        scores_V = (logits_V - logits_V.max()) / sampling.temperature
        ids_K, scores_K = sampler._candidates(scores_V)
        weights_V = torch.zeros_like(logits_V)
        weights_V[slice(None) if ids_K is None else ids_K] = scores_K.exp()
        torch.testing.assert_close(weights_V / weights_V.sum(), wanted_V, atol=1e-6, rtol=1e-4)


def test_tokens_are_drawn_as_often_as_is_likely() -> None:
    logits_V = torch.tensor([0.0, 1.0, 2.0, -math.inf, 0.5])
    wanted_V = torch.softmax(logits_V / 0.8, -1)
    for sampling in (
        SamplingParams(temperature=0.8, seed=1),
        SamplingParams(temperature=0.8, top_k=5, seed=1),
    ):
        sampler = sampler_of(sampling)
        counts = Counter(sampler.choose(logits_V) for _ in range(20_000))
        for token, wanted in enumerate(wanted_V.tolist()):
            assert counts[token] / 20_000 == pytest.approx(wanted, abs=0.012)
        assert counts[3] == 0


def test_seed_and_index_decide() -> None:
    def drawn(seed: int | None, index: int) -> list[int]:
        sampler = sampler_of(SamplingParams(seed=seed), index=index)
        return [sampler.choose(logits(at)) for at in range(20)]

    assert drawn(1, 0) == drawn(1, 0)
    assert len({tuple(drawn(seed, index)) for seed in (1, 2, -1, 2**63) for index in (0, 1)}) == 8
    assert drawn(None, 0) != drawn(None, 0)


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-4])
def test_a_low_temperature_takes_the_best(temperature: float) -> None:
    sampler = sampler_of(SamplingParams(temperature=temperature))
    assert all(sampler.choose(logits(at)) == int(logits(at).argmax()) for at in range(20))


def test_penalties_are_those_of_transformers_and_openai() -> None:
    sampling = SamplingParams(
        temperature=0,
        repetition_penalty=1.5,
        presence_penalty=0.7,
        frequency_penalty=0.3,
        logit_bias={4: 2.0, 7: -3.0},
    )
    prompt = (3, 4, 4)
    sampler = sampler_of(sampling, prompt)
    answer: list[int] = []
    for at in range(40):
        logits_V = logits(at, size=12)
        processor: Any = RepetitionPenaltyLogitsProcessor(1.5)
        expected_V = processor(torch.tensor([[*prompt, *answer]]), logits_V[None])[0]
        for token, count in Counter(answer).items():
            expected_V[token] -= 0.7 + 0.3 * count
        expected_V[4] += 2.0
        expected_V[7] -= 3.0
        before_V = logits_V.clone()
        answer.append(sampler.choose(logits_V))
        assert answer[-1] == int(expected_V.argmax())
        assert torch.equal(logits_V, before_V)
    assert len(set(answer)) > 6


def test_only_what_is_allowed_is_chosen() -> None:
    allowed_V = torch.zeros(2000, dtype=torch.bool)
    allowed_V[[5, 900]] = True
    for sampling in (*SAMPLINGS, SamplingParams(temperature=0)):
        sampler = sampler_of(sampling)
        assert {sampler.choose(logits(at), allowed_V) for at in range(20)} <= {5, 900}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_give_some_token(bad: float) -> None:
    for sampling in (*SAMPLINGS, SamplingParams(temperature=0)):
        for logits_V in (torch.full((50,), bad), torch.tensor([0.0, bad, 1.0, bad])):
            sampler = sampler_of(sampling)
            assert 0 <= sampler.choose(logits_V) < len(logits_V)
