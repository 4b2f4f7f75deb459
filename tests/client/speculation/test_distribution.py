"""Sampled tokens have the model's distribution, however they are drafted.

The model is a Markov chain of eight tokens, whose distribution is known exactly: after each token
the next ones are counted, and compared by a chi-square test.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList

from nesa_node.api.generation.job import SamplingParams
from nesa_node.api.generation.sampler import Sampler, SharedLogitsState
from nesa_node.client.model import speculative_decoding
from nesa_node.client.model.speculative_decoding import SpeculativeDecoding
from nesa_node.client.speculation.drafting import Drafting
from nesa_node.client.speculation.drafts import DraftSource, DraftToken
from nesa_node.core.ids import ModelId
from tests.client.speculation.scripted_drafter import SURE, Clock, accepted_and_drafted

MANY = [pytest.mark.slow, pytest.mark.timeout(300)]
VOCABULARY = 8
TEXT_TOKENS = 1000
LOGITS_VV = 1.5 * torch.randn((VOCABULARY, VOCABULARY), generator=torch.Generator().manual_seed(7))
WARPERS = LogitsProcessorList(
    [TemperatureLogitsWarper(0.8), TopKLogitsWarper(6), TopPLogitsWarper(0.9)]
)
Counts = dict[int, Counter[int]]


class MarkovSession:
    """A session of one row whose logits depend on the last token alone."""

    max_length = 1 << 20
    num_decoding = 1

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held: list[int] = []
        self.ends = SimpleNamespace(device=torch.device("cpu"), head=lambda ids_T: LOGITS_VV[ids_T])

    @property
    def lengths(self) -> tuple[int, ...]:
        return (len(self._held),)

    def feed(self, row_ids: Sequence[torch.Tensor], want: str = "all") -> torch.Tensor:
        self._held += row_ids[0].tolist()
        self._clock.now += 0.01 + 0.0005 * len(row_ids[0])
        return row_ids[0] if want == "all" else row_ids[0][-1:]

    def rollback(self, lengths: Sequence[int]) -> None:
        del self._held[lengths[0] :]


class LikelyDrafter:
    """Drafts what is likely after each token by the model itself, or any token, by chance."""

    source: DraftSource = "model"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._last = 0

    def append(self, tokens: Sequence[int]) -> None:
        self._last = tokens[-1] if tokens else self._last

    def draft(self) -> Iterator[DraftToken]:
        last = self._last
        while True:
            likely = int(LOGITS_VV[last].argmax())
            last = likely if self._rng.random() < 0.7 else self._rng.randrange(VOCABULARY)
            yield last, SURE

    def close(self) -> None:
        pass


def sample(draws: int, warpers: LogitsProcessorList, clock: Clock) -> tuple[Counts, float]:
    """What followed each token, and the share of drafted tokens that were right."""
    torch.manual_seed(1)
    rng, counts = random.Random(2), {token: Counter[int]() for token in range(VOCABULARY)}
    drafting = Drafting(ModelId("markov"), new_model_drafter=lambda: LikelyDrafter(rng))
    make_config: Any = GenerationConfig
    config = make_config(do_sample=True)
    for _ in range(-(-draws // TEXT_TOKENS)):
        session: Any = MarkovSession(clock)
        start = torch.tensor([[rng.randrange(VOCABULARY)]])
        criteria = StoppingCriteriaList([MaxLengthCriteria(1 + TEXT_TOKENS)])
        with drafting.speculate(b"", start.tolist()) as speculator:
            decoding = SpeculativeDecoding(
                session, speculator, config, warpers, criteria, greedy_stop=None
            )
            text = decoding.run(start, [start[0]])[0].tolist()
        assert len(text) == 1 + TEXT_TOKENS
        for before, after in pairwise(text):
            counts[before][after] += 1
    right, drafted = accepted_and_drafted(drafting)
    assert drafted > draws / 4
    return counts, right / drafted


def p_value(counts: Counts, probabilities_VV: torch.Tensor) -> float:
    """Of the deviation of `counts` from what is expected; unlikely tokens are put together."""
    statistic, freedom = 0.0, 0
    for before, found in counts.items():
        total = found.total()
        expected = [total * p for p in probabilities_VV[before].tolist()]
        assert not any(found[token] for token, n in enumerate(expected) if n == 0)
        rare = [token for token, n in enumerate(expected) if 0 < n < 5]
        cells = [(found[token], n) for token, n in enumerate(expected) if n >= 5]
        if rare:
            cells.append((sum(found[t] for t in rare), sum(expected[t] for t in rare)))
        statistic += sum((n - wanted) ** 2 / wanted for n, wanted in cells)
        freedom += max(len(cells) - 1, 0)
    return float(chi2.sf(statistic, freedom))


@pytest.mark.parametrize("draws", [3000, pytest.param(100_000, marks=MANY)])
@pytest.mark.parametrize("warpers", [LogitsProcessorList(), WARPERS], ids=["plain", "warped"])
def test_generated_tokens_have_the_distribution_of_the_model(
    warpers: LogitsProcessorList, draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(speculative_decoding, "perf_counter", clock)
    counts, share = sample(draws, warpers, clock)
    ids = torch.arange(VOCABULARY)[:, None]
    scores_VV = warpers(ids, LOGITS_VV.clone())  # type: ignore[arg-type]
    assert p_value(counts, scores_VV.softmax(-1)) > 1e-3
    assert 0.2 < share < 0.8


def test_the_test_notices_a_draft_that_is_believed_too_often() -> None:
    """If a drafted token were taken one time in ten although the model chose another one."""
    rng, generator = random.Random(3), torch.Generator().manual_seed(4)
    counts = {token: Counter[int]() for token in range(VOCABULARY)}
    probabilities_VV, last = LOGITS_VV.softmax(-1), 0
    for _ in range(3000):
        token = int(torch.multinomial(probabilities_VV[last], 1, generator=generator))
        if rng.random() < 0.1:
            token = int(LOGITS_VV[last].argmax())
        counts[last][token] += 1
        last = token
    assert p_value(counts, probabilities_VV) < 1e-3


@pytest.mark.parametrize("draws", [3000, pytest.param(100_000, marks=MANY)])
def test_the_gateways_sampler_keeps_the_distribution_where_drafts_end_a_step(draws: int) -> None:
    """It stops at the first token that is not the drafted one, and goes on with the next number."""
    sampling = SamplingParams(temperature=0.8, top_k=6, seed=11)
    sampler = Sampler(SharedLogitsState(sampling, ()), 0)
    drafter = LikelyDrafter(random.Random(5))
    counts = {token: Counter[int]() for token in range(VOCABULARY)}
    last = 0
    while sum(found.total() for found in counts.values()) < draws:
        drafter.append([last])
        drafted = drafter.draft()
        for _ in range(4):
            token = sampler.choose(LOGITS_VV[last])
            counts[last][token] += 1
            last = token
            if token != next(drafted)[0]:
                break
    scores_VV = LOGITS_VV / 0.8
    scores_VV = scores_VV.masked_fill(scores_VV < scores_VV.topk(6).values[:, -1:], -torch.inf)
    assert p_value(counts, scores_VV.softmax(-1)) > 1e-3
