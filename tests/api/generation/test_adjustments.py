"""What choices move, and how much room they take for it."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from nesa_node.api.generation.decode_loop import ChoiceDecoder, Vocabulary
from nesa_node.api.generation.job import Job, SamplingParams
from nesa_node.api.generation.sampler import LogitsProcessor, SharedLogitsState
from tests.api.tokenizers import byte_level_tokenizer

VOCABULARY = 500
ALL = SamplingParams(
    repetition_penalty=1.3,
    presence_penalty=0.7,
    frequency_penalty=0.1,
    logit_bias={3: 1.1, 4: -0.3, 499: 100.0},
)


class Reference:
    """A number for each token of the vocabulary."""

    def __init__(self, sampling: SamplingParams, prompt: tuple[int, ...]) -> None:
        self._sampling = sampling
        self._seen_V = torch.zeros(VOCABULARY, dtype=torch.bool)
        self._seen_V[list(prompt)] = True
        self._counts = [0] * VOCABULARY
        self._added_V = torch.zeros(VOCABULARY)
        for token, bias in sampling.logit_bias.items():
            self._added_V[token] = bias

    def applied(self, logits_V: torch.Tensor) -> torch.Tensor:
        penalty = self._sampling.repetition_penalty
        lowered_V = torch.where(logits_V < 0, logits_V * penalty, logits_V / penalty)
        return torch.where(self._seen_V, lowered_V, logits_V) + self._added_V

    def note(self, token: int) -> None:
        presence = 0.0 if self._counts[token] else self._sampling.presence_penalty
        self._seen_V[token] = True
        self._counts[token] += 1
        self._added_V[token] += -self._sampling.frequency_penalty - presence


@pytest.mark.parametrize(
    "sampling",
    [
        ALL,
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(presence_penalty=-0.2),
        SamplingParams(frequency_penalty=0.3, logit_bias={7: 0.1}),
        SamplingParams(logit_bias={7: 0.1}),
    ],
)
def test_many_tokens_are_moved_as_by_a_table_of_the_vocabulary(sampling: SamplingParams) -> None:
    draw = random.Random(1)
    prompt = (3, 3, 9, 250)
    adjustments = LogitsProcessor(SharedLogitsState(sampling, prompt))
    reference = Reference(sampling, prompt)
    for seed in range(2000):
        logits_V = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(adjustments.apply(logits_V), reference.applied(logits_V))
        token = min(int(draw.expovariate(0.02)), VOCABULARY - 1)
        adjustments.append_token(token)
        reference.note(token)


def test_an_answer_that_may_be_long_takes_little_room_before_it_is() -> None:
    load: Any = GenerationConfig
    vocabulary = Vocabulary(byte_level_tokenizer(), load(), vocab_size=VOCABULARY)
    job = Job(prompt=(1, 2), max_tokens=10**12, n=2, sampling=ALL)
    ChoiceDecoder(job, 0, vocabulary, None, SharedLogitsState(job.sampling, job.prompt))
    adjustments = LogitsProcessor(SharedLogitsState(job.sampling, job.prompt))
    assert numbers(adjustments) < 1000
    for token in range(VOCABULARY):
        adjustments.append_token(token)
    assert numbers(adjustments) < 10 * VOCABULARY


def test_a_long_prompt_is_kept_once_for_all_choices() -> None:
    common = SharedLogitsState(ALL, tuple(range(10_000)))
    tracemalloc.start()
    try:
        many = [LogitsProcessor(common) for _ in range(128)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    assert sum(map(numbers, many)) < 128 * 1000


def numbers(adjustments: LogitsProcessor) -> int:
    """How many its own tensors have room for."""
    tables = (adjustments._repeated, adjustments._added_values)
    return sum(table._ids.numel() + table._values.numel() for table in tables)
