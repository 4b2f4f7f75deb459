"""The gap bounds what noise can do, and noise that large does it where the bound is exact."""

from __future__ import annotations

import math

import pytest
import torch

from nesa_node.api.generation.job import SamplingParams
from nesa_node.api.generation.sampler import Draw, Sampler, SharedLogitsState
from nesa_node.api.verification.token_gap import DrawGaps

SAMPLINGS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7, seed=0),
    SamplingParams(temperature=1.0, top_k=5, seed=0),
    SamplingParams(temperature=1.3, top_p=0.8, seed=0),
    SamplingParams(temperature=0.9, min_p=0.1, seed=0),
    SamplingParams(temperature=1.1, top_k=20, top_p=0.9, min_p=0.05, seed=0),
]
SIZE = 30


def draw_of(sampling: SamplingParams, logits_V: torch.Tensor) -> Draw:
    return Sampler(SharedLogitsState(sampling, ()), 0).draw(logits_V)


def noise(gap: float, generator: torch.Generator) -> torch.Tensor:
    """Changes of which no two differ by more than `gap`."""
    return gap * (torch.rand(SIZE, generator=generator) - 0.5)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_less_noise_than_the_gap_never_gives_the_token(sampling: SamplingParams) -> None:
    generator = torch.Generator().manual_seed(0)
    changed = 0
    for _ in range(300):
        logits_V = 2 * torch.randn(SIZE, generator=generator)
        gaps = DrawGaps(draw_of(sampling, logits_V), sampling)
        size = float(torch.rand(1, generator=generator)) * 2
        given = draw_of(sampling, logits_V + noise(size, generator)).token_id
        changed += given != draw_of(sampling, logits_V).token_id
        assert gaps.gap(given) <= size + 1e-5
    assert changed > 20


@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
def test_noise_of_the_gap_gives_the_token(sampling: SamplingParams) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        logits_V = 2 * torch.randn(SIZE, generator=generator)
        draw = draw_of(sampling, logits_V)
        weights_V = torch.softmax(logits_V / (sampling.temperature or 1.0), 0)
        # The extra of `half` jumps over the part of a token that is less likely.
        for token_id in (weights_V > 1e-3).nonzero().flatten().tolist():
            half = DrawGaps(draw, sampling).gap(token_id) / 2 + 1e-4
            # What lies before the token moves against what lies behind it; one way is enough.
            ids = torch.arange(SIZE)
            if draw.uniform is None:
                ways = [torch.where(ids == token_id, half, -half)]
            else:
                ways = [
                    torch.where(ids < token_id + own, sign * half, -sign * half)
                    for own in (0, 1)
                    for sign in (1, -1)
                ]
            given = {draw_of(sampling, logits_V + way).token_id for way in ways}
            assert token_id in given


def test_what_was_drawn_has_no_gap_and_what_the_grammar_forbids_an_infinite_one() -> None:
    logits_V = torch.tensor([1.0, 2.0, -math.inf, 0.0])
    for sampling in SAMPLINGS:
        draw = draw_of(sampling, logits_V)
        gaps = DrawGaps(draw, sampling)
        assert gaps.gap(draw.token_id) == 0
        assert gaps.gap(2) == math.inf


def test_greedy_gaps_are_differences_of_logits() -> None:
    logits_V = torch.tensor([1.0, 3.5, 3.0])
    gaps = DrawGaps(draw_of(SAMPLINGS[0], logits_V), SAMPLINGS[0])
    assert [gaps.gap(token) for token in range(3)] == [2.5, 0.0, 0.5]


def test_a_draw_is_what_the_sampler_chooses() -> None:
    sampling = SamplingParams(temperature=1, seed=3, presence_penalty=1.0, top_p=0.9)
    one, two = (Sampler(SharedLogitsState(sampling, ()), 0) for _ in range(2))
    generator = torch.Generator().manual_seed(2)
    for _ in range(50):
        logits_V = torch.randn(SIZE, generator=generator)
        draw = two.draw(logits_V)
        two.append_token(draw.token_id)
        assert one.choose(logits_V) == draw.token_id
