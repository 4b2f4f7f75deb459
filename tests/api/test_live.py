"""The official client against a gateway over three nodes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.live import live_gateway
from tests.cli.tiny import BLOCKS
from tests.swarms import in_process_swarm, thirds

NAME = "small"
MESSAGES: Any = [{"role": "user", "content": "hello again the capital"}]


@pytest.fixture(scope="module")
def url(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("live")
    with (
        in_process_swarm(small_model, thirds(BLOCKS), folder) as addresses,
        live_gateway(addresses, folder, small_model) as found,
    ):
        yield found


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def alone(folder: Path, prompt: list[int], count: int) -> list[int]:
    import torch
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM
    model = load.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
    )
    new: list[int] = out[0, len(prompt) :].tolist()
    return new


def test_models_are_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert (model.id, model.owned_by) == (NAME, "nesa-node")
    assert client.models.retrieve(NAME).created == model.created
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("none/such")
    assert raised.value.code == "model_not_found"


def test_greedy_chat_says_what_transformers_says(
    client: openai.OpenAI, small_model: Path, tokenizer: Any
) -> None:
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    expected = tokenizer.decode(alone(small_model, prompt, 24), skip_special_tokens=True)
    answer = client.chat.completions.create(
        model=NAME, messages=MESSAGES, temperature=0, max_completion_tokens=24
    )
    assert (answer.choices[0].message.content or "").split() == expected.split()
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    stream = client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens


def test_a_seed_repeats_itself_and_choices_differ(client: openai.OpenAI) -> None:
    def ask(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model=NAME, messages=MESSAGES, n=3, seed=seed, max_tokens=12, temperature=1.5
        )
        return [choice.message.content for choice in answer.choices]

    first = ask(1)
    assert first == ask(1)
    assert first != ask(2)
    assert len(set(first)) == 3


def test_log_probabilities_sum_to_at_most_one(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=NAME, messages=MESSAGES, logprobs=True, top_logprobs=20, max_tokens=4, temperature=0
    )
    assert answer.choices[0].logprobs is not None
    for token in answer.choices[0].logprobs.content or []:
        assert token.bytes is not None
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob, abs=1e-4)
        assert 0 < sum(math.exp(top.logprob) for top in token.top_logprobs) < 1.0001


def test_a_stop_string_ends_the_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model=NAME, messages=MESSAGES, temperature=0, max_tokens=12
    )
    words = (whole.choices[0].message.content or "").split()
    # As many as editors send.
    stop = [*(f"<never-{at}>" for at in range(13)), words[3]]
    answer = client.chat.completions.create(
        model=NAME, messages=MESSAGES, temperature=0, max_tokens=12, stop=stop
    )
    assert words[3] not in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


def test_completions_echo_and_know_the_prompts_chances(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=NAME,
        prompt=["hello again", "the capital"],
        echo=True,
        logprobs=2,
        max_tokens=3,
        # Drawn, one of them may be the last.
        temperature=0,
    )
    for choice, prompt in zip(answer.choices, ("hello again", "the capital"), strict=True):
        assert choice.text.startswith(prompt)
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert choice.logprobs.tokens[:2] == prompt.split()
        assert choice.logprobs.token_logprobs is not None
        assert len(choice.logprobs.token_logprobs) == 5
        assert choice.logprobs.token_logprobs[0] is None
    scored = client.completions.create(
        model=NAME, prompt="hello again", echo=True, logprobs=0, max_tokens=0
    )
    assert scored.choices[0].text == "hello again"


def test_embeddings_have_length_one(client: openai.OpenAI) -> None:
    told = client.embeddings.create(model=NAME, input=["hello again", "the capital", "hello again"])
    vectors = [item.embedding for item in told.data]
    assert all(math.isclose(sum(x * x for x in v), 1, rel_tol=1e-4) for v in vectors)
    assert vectors[0] == pytest.approx(vectors[2], abs=1e-4)
    assert vectors[0] != pytest.approx(vectors[1], abs=1e-2)


def test_responses_stream_typed_events(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model=NAME, input="hello again", max_output_tokens=8, temperature=0
    )
    stream = client.responses.create(
        model=NAME, input="hello again", max_output_tokens=8, temperature=0, stream=True
    )
    text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == answer.output_text
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(model=NAME, input="x", previous_response_id="resp_1")
    assert raised.value.param == "previous_response_id"


def test_errors_become_the_clients_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert raised.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=NAME, prompt="hello " * 600)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=NAME, prompt="hello", suffix="x")
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "suffix")
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model=NAME, input="hello", dimensions=8)
    assert refused.value.param == "dimensions"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model=NAME, messages=MESSAGES, extra_body={"banana": json.dumps({})}
        )
    assert (refused.value.code, refused.value.param) == ("unknown_parameter", "banana")
