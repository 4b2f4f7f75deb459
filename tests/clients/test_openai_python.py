"""The official Python client, unchanged, against a swarm of the demo model."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from openai import OpenAI

from tests.clients.live_gateway import MODEL, LiveGateway
from tests.clients.local_answers import LocalAnswers, Message

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

QUESTION: list[Message] = [{"role": "user", "content": "What is the capital of France?"}]
STORY: list[Message] = [{"role": "user", "content": "Tell me a story about a lighthouse."}]
NEW_TOKENS = 24
LOGPROB_ERROR = 2e-3
"""Of a logarithm: float32's rounding, by the way that batches are packed."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "size": {"enum": ["small", "large"]},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 2},
    },
    "required": ["city", "size", "rivers"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(gateway: LiveGateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=gateway.url, api_key=gateway.key, max_retries=0, timeout=120) as client:
        yield client


def _ask(client: OpenAI, messages: list[Message], **options: Any) -> Any:
    merged = {"model": MODEL, "temperature": 0, "max_tokens": NEW_TOKENS} | options
    return client.chat.completions.create(messages=messages, **merged)  # type: ignore[call-overload]


def test_a_chat_is_answered_as_the_model_answers_alone(client: OpenAI, local: LocalAnswers) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION[0]["content"]}],
        temperature=0,
        max_completion_tokens=NEW_TOKENS,
        extra_headers={"x-request-id": "of-this-test"},
        user="somebody",
        metadata={"a": "b"},
        store=False,
        parallel_tool_calls=True,
    )
    answer = raw.parse()
    expected = local.greedy(local.prompt(QUESTION), NEW_TOKENS)
    assert answer.choices[0].message.content == local.text(expected)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(local.prompt(QUESTION))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint
    assert raw.headers["x-request-id"] == "of-this-test"


def test_roles_and_parts_are_read(client: OpenAI, local: LocalAnswers) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "Answer in one word."},
        {"role": "user", "content": [{"type": "text", "text": "Which colour has the sky?"}]},
    ]
    plain = [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "Which colour has the sky?"},
    ]
    answer = _ask(client, messages)
    assert answer.choices[0].message.content == local.greedy_chat(plain, NEW_TOKENS)


def test_a_stream_says_what_the_whole_answer_says(client: OpenAI) -> None:
    whole = _ask(client, STORY)
    chunks = list(_ask(client, STORY, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    said = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(part.delta.content or "" for part in said) == whole.choices[0].message.content
    assert [part.finish_reason for part in said if part.finish_reason] == ["length"]
    assert len([part for part in said if part.delta.content]) > 8
    assert len({chunk.id for chunk in chunks}) == 1


def test_log_probabilities_are_those_of_the_model(client: OpenAI, local: LocalAnswers) -> None:
    answer = _ask(client, STORY, logprobs=True, top_logprobs=5, max_tokens=12)
    told = answer.choices[0].logprobs.content
    prompt = local.prompt(STORY)
    new = local.greedy(prompt, 12)
    expected_LV = local.log_probabilities([*prompt, *new])[len(prompt) - 1 :]
    assert len(told) == 12
    for token, chosen, expected_V in zip(told, new, expected_LV, strict=False):
        assert token.logprob == pytest.approx(float(expected_V[chosen]), abs=LOGPROB_ERROR)
        best = torch.topk(expected_V, 5).values.tolist()
        assert [top.logprob for top in token.top_logprobs] == pytest.approx(best, abs=LOGPROB_ERROR)
    joined = b"".join(bytes(token.bytes) for token in told)
    assert joined.decode() == answer.choices[0].message.content


def test_three_choices_are_three_answers(client: OpenAI) -> None:
    drawn = _ask(client, STORY, n=3, temperature=1, seed=5)
    assert sorted(choice.index for choice in drawn.choices) == [0, 1, 2]
    assert len({choice.message.content for choice in drawn.choices}) == 3
    alike = _ask(client, STORY, n=3, max_tokens=8)
    assert len({choice.message.content for choice in alike.choices}) == 1
    streamed: dict[int, str] = {}
    for chunk in _ask(client, STORY, n=3, temperature=1, seed=5, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
    assert streamed == {choice.index: choice.message.content for choice in drawn.choices}


def test_stop_strings_end_an_answer_and_are_no_part_of_it(client: OpenAI) -> None:
    whole = _ask(client, STORY).choices[0].message.content
    stop = whole[len(whole) // 2 : len(whole) // 2 + 4]
    expected = whole.partition(stop)[0]
    answer = _ask(client, STORY, stop=[stop, "never said"])
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == "stop"
    parts = _ask(client, STORY, stop=stop, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected


def test_a_seed_repeats_an_answer(client: OpenAI) -> None:
    def draw(seed: int) -> str:
        drawn = _ask(client, STORY, temperature=1, top_p=0.9, seed=seed, extra_body={"top_k": 50})
        return str(drawn.choices[0].message.content)

    first = draw(7)
    assert draw(7) == first
    assert draw(8) != first


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_an_answer_follows_a_json_schema(client: OpenAI, temperature: float) -> None:
    answer = _ask(
        client,
        [{"role": "user", "content": "Describe Paris as JSON."}],
        temperature=temperature,
        seed=1,
        max_tokens=160,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": SCHEMA, "strict": True},
        },
    )
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)


def test_embeddings_are_the_mean_of_the_models_last_states(
    client: OpenAI, local: LocalAnswers
) -> None:
    texts = ["A lighthouse stands on a rock.", "Bread is made of flour and water."]
    # What the client asks for by itself is base64, which it decodes.
    packed = client.embeddings.create(model=MODEL, input=texts)
    plain = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    ids = local.tokenizer(texts[0])["input_ids"]
    by_ids = client.embeddings.create(model=MODEL, input=ids)
    for index, text in enumerate(texts):
        expected_D = local.embedding(text).numpy()
        assert plain.data[index].index == index
        assert np.abs(np.array(plain.data[index].embedding) - expected_D).max() < 1e-4
        assert packed.data[index].embedding == pytest.approx(plain.data[index].embedding, abs=1e-6)
        assert math.isclose(np.linalg.norm(plain.data[index].embedding), 1, abs_tol=1e-5)
    assert by_ids.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-5)
    raw = client.embeddings.with_raw_response.create(
        model=MODEL, input=texts[0], encoding_format="base64"
    )
    told = json.loads(raw.text)["data"][0]["embedding"]
    as_numbers = np.frombuffer(base64.b64decode(told), dtype="<f4")
    assert as_numbers.tolist() == pytest.approx(plain.data[0].embedding, abs=1e-6)


def test_a_completion_echoes_its_prompt_with_log_probabilities(
    client: OpenAI, local: LocalAnswers
) -> None:
    prompt = "The lighthouse keeper"
    ids: list[int] = local.tokenizer(prompt)["input_ids"]
    answer = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=6, temperature=0, echo=True, logprobs=2
    )
    new = local.greedy(ids, 6)
    assert answer.choices[0].text == prompt + local.text(new)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    expected_LV = local.log_probabilities([*ids, *new])
    following = [*ids[1:], *new]
    expected = [float(expected_LV[at, token]) for at, token in enumerate(following)]
    assert logprobs.token_logprobs[1:] == pytest.approx(expected, abs=LOGPROB_ERROR)
    by_ids = client.completions.create(model=MODEL, prompt=ids, max_tokens=6, temperature=0)
    assert by_ids.choices[0].text == local.text(new)


def test_a_response_is_a_chats_answer(client: OpenAI, local: LocalAnswers) -> None:
    expected = local.greedy_chat(QUESTION, NEW_TOKENS)
    options: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": NEW_TOKENS}
    answer = client.responses.create(input=QUESTION[0]["content"], **options)
    assert answer.output_text == expected
    assert answer.status == "completed"
    events = list(client.responses.create(input=QUESTION[0]["content"], stream=True, **options))
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == expected


def test_models_are_listed_and_named(client: OpenAI) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).object == "model"
