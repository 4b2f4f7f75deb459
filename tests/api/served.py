"""Served models for tests, and what a job gives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from nesa_node.api.generation.job import (
    Delta,
    FinishReason,
    Job,
    PrefillDone,
    SequenceToken,
    SessionEnd,
)
from nesa_node.api.models.served_model import ServedModel
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.ids import ModelId
from tests.api.tokenizers import byte_level_tokenizer
from tests.client.local_models import local_model


@dataclass
class Answer:
    text: str = ""
    tokens: list[SequenceToken] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


@dataclass
class Outcome:
    read: PrefillDone
    answers: list[Answer]


async def outcome(served: ServedModel, job: Job) -> Outcome:
    """All of a job's events; each choice's deltas in order, and none after its last."""
    answers = [Answer() for _ in range(job.n)]
    async with served.generate(job) as events:
        read = await anext(events)
        assert isinstance(read, PrefillDone)
        async for event in events:
            if isinstance(event, SessionEnd):
                continue
            assert isinstance(event, Delta)
            answer = answers[event.index]
            assert answer.finish_reason is None
            answer.text += event.text
            answer.pieces.append(event.text)
            answer.tokens += event.tokens
            answer.finish_reason = event.finish_reason
    assert all(answer.finish_reason is not None for answer in answers)
    return Outcome(read, answers)


async def answer(served: ServedModel, job: Job) -> Answer:
    return (await outcome(served, job)).answers[0]


@asynccontextmanager
async def serving(model: DistributedModelForCausalLM) -> AsyncIterator[ServedModel]:
    served = ServedModel(
        model, byte_level_tokenizer(), name="tiny", model_id=ModelId("tiny@0"), threads=8
    )
    try:
        yield served
    finally:
        await served.close()


@asynccontextmanager
async def served_locally(folder: Path) -> AsyncIterator[ServedModel]:
    """Blocks run in this process, in three spans."""
    with local_model(folder) as model:
        async with serving(model) as served:
            yield served


def greedy_job(prompt: Sequence[int], count: int, **options: object) -> Job:
    from nesa_node.api.generation.job import SamplingParams

    values: dict[str, object] = {
        "prompt": tuple(prompt),
        "max_tokens": count,
        "sampling": SamplingParams(temperature=0),
        "ignore_eos": True,
    }
    return Job(**{**values, **options})  # type: ignore[arg-type]
