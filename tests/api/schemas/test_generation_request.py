"""What requests get that do not say how to choose tokens."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from nesa_node.api.generation.job import SamplingParams
from nesa_node.api.models.served_model import open_served_model
from nesa_node.api.schemas.generation_request import read_default_sampling
from nesa_node.core.settings.choices import SamplingDefaults
from nesa_node.core.settings.models import ClientConfig
from nesa_node.engine.weights.checkpoint import open_folder
from tests.api.scripted import NAME, chat_body, serving
from tests.cli.tiny import write_tiny_model

CONFIG: Any = GenerationConfig
ADVICE = SamplingParams(temperature=0.7, top_p=0.8, top_k=20, min_p=0.1, repetition_penalty=1.05)
ENDPOINTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", chat_body()),
    ("/v1/completions", {"model": NAME, "prompt": "hello"}),
    ("/v1/responses", {"model": NAME, "input": "hello"}),
)


def test_what_authors_leave_open_is_openais() -> None:
    assert read_default_sampling(CONFIG()) == SamplingParams()
    some = CONFIG(do_sample=True, temperature=0.6, top_k=-1)
    assert read_default_sampling(some) == SamplingParams(temperature=0.6)


def test_what_no_request_might_ask_for_is_passed_over() -> None:
    config = CONFIG()
    config.temperature, config.top_p, config.top_k = 9.0, "most", True
    config.min_p, config.repetition_penalty = float("nan"), 1
    assert read_default_sampling(config) == SamplingParams()


async def test_what_a_request_says_goes_before_the_authors_advice(tokenizer: Any) -> None:
    asked = {"temperature": 0, "top_p": 1.0}
    async with serving(tokenizer) as server:
        server.model.defaults = ADVICE
        for path, body in ENDPOINTS:
            for more in ({}, {"temperature": None, "top_p": None}, asked):
                response = await server.post(path, body | more)
                assert response.status_code == 200, response.text
                told = response.json()
                sampling = server.model.jobs.pop().sampling
                wanted = (0, 1) if more is asked else (0.7, 0.8)
                assert (sampling.temperature, sampling.top_p) == wanted
                assert (sampling.top_k, sampling.min_p) == (20, 0.1)
                assert sampling.repetition_penalty == 1.05
                if path == "/v1/responses":
                    assert (told["temperature"], told["top_p"]) == wanted
        own = {"top_k": 0, "min_p": 0, "repetition_penalty": 1}
        await server.chat(**asked, **own)
        assert server.model.jobs.pop().sampling == SamplingParams(temperature=0)


async def test_the_advice_is_told_with_the_model(tokenizer: Any) -> None:
    async with serving(tokenizer) as server:
        server.model.defaults = ADVICE
        (card,) = (await server.client.get("/v1/models")).json()["data"]
    assert card["default_sampling"] == {
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "min_p": 0.1,
        "repetition_penalty": 1.05,
    }


@pytest.mark.parametrize(
    ("advice", "wanted"),
    [("model", SamplingParams(temperature=0.6, top_p=0.9)), ("openai", SamplingParams())],
)
async def test_the_advice_is_read_from_the_models_files(
    tmp_path: Path, advice: SamplingDefaults, wanted: SamplingParams
) -> None:
    folder = write_tiny_model(tmp_path / "words")
    path = folder / "generation_config.json"
    told = json.loads(path.read_text()) | {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
    path.write_text(json.dumps(told))
    config = ClientConfig(torch_dtype="float32", cache_dir=tmp_path)
    served = await asyncio.to_thread(open_served_model, config, open_folder(folder), advice=advice)
    try:
        assert served.defaults == wanted
    finally:
        await served.close()
