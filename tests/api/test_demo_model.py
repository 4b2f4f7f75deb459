"""A real model and its tokenizer: the same answer as transformers', JSON, characters whole."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from nesa_node.api.generation.grammar import json_schema_grammar
from nesa_node.api.generation.job import Job, SamplingParams
from nesa_node.api.generation.tokenization import REPLACEMENT
from nesa_node.api.models.served_model import ServedModel
from nesa_node.core.ids import ModelId
from nesa_node.core.settings.declaration import default_cache_dir
from nesa_node.engine.weights.demo_model import demo_model_path
from nesa_node.engine.weights.tokenizer import load_tokenizer
from tests.api.served import answer, outcome
from tests.client.local_models import local_model
from tests.engine.tiny_models import reference

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "country": {"type": "string", "maxLength": 40},
        "population": {"type": "integer", "minimum": 0, "maximum": 100_000_000},
    },
    "required": ["city", "country", "population"],
    "additionalProperties": False,
}


@asynccontextmanager
async def serving_demo() -> AsyncIterator[tuple[ServedModel, Path]]:
    folder = demo_model_path(default_cache_dir())
    with local_model(folder) as model:
        tokenizer = load_tokenizer(folder)
        served = ServedModel(model, tokenizer, name="demo", model_id=ModelId("demo@0"))
        try:
            yield served, folder
        finally:
            await served.close()


def chat(served: ServedModel, question: str) -> tuple[int, ...]:
    tokenizer: Any = served.tokenizer
    messages = [{"role": "user", "content": question}]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return tuple(encoded["input_ids"])


async def test_the_answer_is_that_of_transformers() -> None:
    async with serving_demo() as (served, folder):
        prompt = chat(served, "What is the capital of France?")
        job = Job(prompt=prompt, max_tokens=48, sampling=SamplingParams(temperature=0))
        made = await answer(served, job)
        ids_BL = torch.tensor([prompt])
        expected = reference(folder).generate(
            ids_BL, attention_mask=torch.ones_like(ids_BL), max_new_tokens=48, do_sample=False
        )
        new_ids = expected[0, len(prompt) :].tolist()
        assert made.token_ids == new_ids
        assert made.finish_reason == "stop"
        tokenizer: Any = served.tokenizer
        assert made.text == tokenizer.decode(new_ids, skip_special_tokens=True)
        assert "Paris" in made.text


async def test_json_fits_its_schema_for_every_choice() -> None:
    async with serving_demo() as (served, _):
        prompt = chat(served, "Describe Paris as JSON.")
        grammar = json_schema_grammar(SCHEMA)
        sampling = SamplingParams(temperature=0.8, seed=1)
        job = Job(prompt=prompt, max_tokens=120, n=3, sampling=sampling, grammar=grammar)
        made = await outcome(served, job)
        for one in made.answers:
            assert one.finish_reason == "stop"
            jsonschema.validate(json.loads(one.text), SCHEMA)


async def test_characters_of_several_tokens_are_never_cut() -> None:
    async with serving_demo() as (served, _):
        # Each of these has two to four tokens, which a grammar makes the model say.
        text = "🙂🙃 你好世界 👨‍👩‍👧 \u0301"
        job = Job(
            prompt=chat(served, "Hello"),
            max_tokens=200,
            sampling=SamplingParams(temperature=0),
            grammar=json_schema_grammar({"const": text}),
        )
        made = await answer(served, job)
        assert made.finish_reason == "stop"
        assert json.loads(made.text) == text
        assert len(made.tokens) > 1.5 * len(text)
        assert not any(REPLACEMENT in piece for piece in made.pieces)
