"""Answers that must be JSON are JSON, of their schema."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from llguidance import LLTokenizer

from nesa_node.api.generation import grammar
from nesa_node.api.generation.grammar import GrammarCompiler, json_schema_grammar
from nesa_node.api.generation.job import SamplingParams
from nesa_node.api.processes.grammar_program import find_grammar_error
from nesa_node.web.authenticator import caller_context
from nesa_node.web.problem import HttpProblem
from nesa_node.web.rate_limits import FairSlots
from tests.api.served import answer, greedy_job, outcome, served_locally
from tests.api.tokenizers import byte_level_tokenizer
from tests.engine.tiny_models import VOCABULARY, prompt_ids

_WORD = {"type": "string", "maxLength": 8}
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {"name": _WORD, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {
        "type": "array",
        "items": {"enum": ["red", "green", "blue"]},
        "minItems": 2,
        "maxItems": 4,
    },
    {
        "$defs": {"leaf": {"anyOf": [{"type": "boolean"}, {"type": "null"}, _WORD]}},
        "type": "object",
        "properties": {
            "left": {"$ref": "#/$defs/leaf"},
            "right": {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2},
        },
        "required": ["left", "right"],
        "additionalProperties": False,
    },
    {"const": {"a": [1, "äöü 🙂"]}},
    {"type": "string", "pattern": "^[a-c]{2,5}$"},
]


@pytest.mark.parametrize("schema", SCHEMAS)
async def test_answers_fit_their_schema(
    tiny: Callable[[str], Path], schema: dict[str, Any]
) -> None:
    followed = json_schema_grammar(schema)
    sampling = SamplingParams(temperature=1.0, seed=4)
    job = greedy_job(prompt_ids(8), 400, n=3, sampling=sampling, grammar=followed, ignore_eos=False)
    async with served_locally(tiny("llama")) as served:
        made = await outcome(served, job)
        best = await answer(served, greedy_job(prompt_ids(8), 400, grammar=followed))
    for one in (*made.answers, best):
        assert one.finish_reason == "stop"
        assert one.text == "".join(one.pieces)
        jsonschema.validate(json.loads(one.text), schema)


async def test_an_answer_that_is_cut_off_says_so(tiny: Callable[[str], Path]) -> None:
    schema = {"type": "string", "minLength": 200}
    async with served_locally(tiny("llama")) as served:
        job = greedy_job(prompt_ids(8), 12, grammar=json_schema_grammar(schema))
        made = await answer(served, job)
    assert made.finish_reason == "length"
    assert made.text.startswith('"')


async def test_any_object_is_an_object(tiny: Callable[[str], Path]) -> None:
    # The braces are likely enough for an answer to end.
    tokenizer = byte_level_tokenizer()
    braces: Any = tokenizer.convert_tokens_to_ids(["}", '"', ":"])
    sampling = SamplingParams(temperature=1.0, seed=1, logit_bias=dict.fromkeys(braces, 12.0))
    async with served_locally(tiny("llama")) as served:
        job = greedy_job(
            prompt_ids(8), 300, sampling=sampling, grammar=json_schema_grammar({"type": "object"})
        )
        made = await answer(served, job)
    assert isinstance(json.loads(made.text), dict)


def test_log_probabilities_and_masks_take_more_tokens_than_the_tokenizer_has() -> None:
    grammars = GrammarCompiler(byte_level_tokenizer(), VOCABULARY + 100, [0])
    follower = grammars.compile(json_schema_grammar({"const": 1}))
    allowed_V = follower.allowed_mask(VOCABULARY + 100, torch.device("cpu"))
    assert allowed_V.shape == (VOCABULARY + 100,)
    assert not allowed_V[VOCABULARY:].any()
    assert allowed_V.sum() == 1
    other = follower.copy()
    token = int(allowed_V.nonzero()[0])
    assert follower.accept_token(token)
    # It was not moved by the first.
    assert torch.equal(other.allowed_mask(VOCABULARY + 100, torch.device("cpu")), allowed_V)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"$ref": "https://example.com/schema.json"},
        {"$ref": "#/$defs/nowhere"},
        {"type": "object", "properties": {"a": 7}},
        {"type": "string", "pattern": "(?=a)b"},
        {"anyOf": []},
        {"enum": ["x" * 70_000]},
        {"not": {"type": "string"}},
        {"a": {1, 2}},
    ],
)
def test_what_cannot_be_followed_is_refused_at_once(schema: dict[str, Any]) -> None:
    began = time.monotonic()
    try:
        reason = find_grammar_error(json_schema_grammar(schema), LLTokenizer("byte"))
    except ValueError as error:
        reason = str(error)
    assert reason
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "items",
    [
        {"type": "integer", "multipleOf": 99_991},
        {"allOf": [{"type": "integer", "multipleOf": number} for number in (7, 11, 13, 17, 19)]},
    ],
)
def test_a_short_schema_of_much_memory_is_refused(items: dict[str, Any]) -> None:
    followed = json_schema_grammar({"type": "array", "items": items})
    # Also where an earlier one left memory that is free, but not the system's again.
    for _ in range(2):
        assert "MiB to follow" in (find_grammar_error(followed, LLTokenizer("byte")) or "")


@pytest.mark.parametrize(
    "schema",
    [
        *SCHEMAS,
        {"type": "array", "items": {"type": "integer", "multipleOf": 1000}},
        {"type": "number", "multipleOf": 0.01},
        {"enum": [f"value number {number}" for number in range(2500)]},
        {
            "type": "object",
            "properties": {
                f"p{at}": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,40}$"}}
                for at in range(400)
            },
        },
    ],
)
def test_an_honest_schema_takes_little_memory(schema: dict[str, Any]) -> None:
    assert find_grammar_error(json_schema_grammar(schema), LLTokenizer("byte")) is None


def test_a_schema_nested_without_end_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(ValueError, match="JSON schema"):
        json_schema_grammar(schema)


@pytest.mark.parametrize("depth", [50, 500, 4000])
def test_deep_and_wide_schemas_take_bounded_time(depth: int) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    wide = {"properties": {f"key{at}": {"type": "integer"} for at in range(depth // 4)}}
    for one in (schema, wide):
        began = time.monotonic()
        with contextlib.suppress(ValueError):
            GrammarCompiler(byte_level_tokenizer(), VOCABULARY, [0]).compile(
                json_schema_grammar(one)
            )
        assert time.monotonic() - began < 5


def test_a_hard_pattern_is_followed_or_refused_in_bounded_time() -> None:
    schema = {"type": "string", "pattern": "^(((((a{1,900}){1,900}){1,900}){1,900}){1,900})$"}
    tokenizer = byte_level_tokenizer()
    tokens: Any = tokenizer.convert_tokens_to_ids(['"', "a"])
    began = time.monotonic()
    with contextlib.suppress(ValueError):
        follower = GrammarCompiler(tokenizer, VOCABULARY, [0]).compile(json_schema_grammar(schema))
        for token in (tokens[0], *[tokens[1]] * 60):
            follower.allowed_mask(VOCABULARY, torch.device("cpu"))
            follower.accept_token(token)
    assert time.monotonic() - began < 10


def test_a_schema_cannot_change_how_its_grammar_is_made() -> None:
    schema = {"type": "array", "items": {"const": 1}, "x-guidance": {"whitespace_flexible": True}}
    follower = GrammarCompiler(byte_level_tokenizer(), VOCABULARY, [0]).compile(
        json_schema_grammar(schema)
    )
    tokenizer = byte_level_tokenizer()
    tokens: Any = tokenizer.convert_tokens_to_ids(["[", "Ġ"])
    follower.accept_token(tokens[0])
    assert not follower.allowed_mask(VOCABULARY, torch.device("cpu"))[tokens[1]]


def test_an_answer_whose_grammar_gets_too_complex_is_not_taken_for_complete() -> None:
    properties = {f"p{number}": {"type": "integer"} for number in range(600)}
    followed = json_schema_grammar({"type": "object", "properties": properties})
    tokenizer = byte_level_tokenizer()
    follower = GrammarCompiler(tokenizer, len(tokenizer), [0]).compile(followed)
    (token_id,) = tokenizer("{").input_ids
    with pytest.raises(ValueError, match="complex"):
        follower.accept_token(token_id)


def test_a_grammar_whose_steps_take_too_long_ends_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar, "MAX_MATCHER_CPU_S", 1e-6)
    monkeypatch.setattr(grammar, "CPU_S_PER_TOKEN", 0.0)
    grammars = GrammarCompiler(byte_level_tokenizer(), VOCABULARY, [0])
    follower = grammars.compile(json_schema_grammar({"type": "object"}))
    with pytest.raises(ValueError, match="takes too long to follow"):
        follower.allowed_mask(VOCABULARY, torch.device("cpu"))


def test_an_honest_grammar_never_runs_out_of_time() -> None:
    grammars = GrammarCompiler(byte_level_tokenizer(), VOCABULARY, [0])
    follower = grammars.compile(json_schema_grammar({"type": "array", "items": {"const": 1}}))
    tokens: Any = byte_level_tokenizer().convert_tokens_to_ids(["[", "1", ",", "Ġ"])
    for token in (tokens[0], *[tokens[1], tokens[2], tokens[3]] * 1000):
        assert follower.allowed_mask(VOCABULARY, torch.device("cpu"))[token]
        follower.accept_token(token)


def test_so_many_answers_follow_grammars_at_once_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the model: a hard pattern's matcher takes megabytes."""
    monkeypatch.setattr(grammar, "_matcher_shares", FairSlots(3, "answers", retry_after_s=2))
    one, other = (GrammarCompiler(byte_level_tokenizer(), VOCABULARY, [0]) for _ in range(2))
    followed = json_schema_grammar({"type": "object"})
    with pytest.raises(ValueError, match="at most 3 answers"), one.open_matchers(followed, 4):
        pass
    with one.open_matchers(followed, 2) as followers:
        assert len(followers) == 2
        with pytest.raises(HttpProblem, match="2 more answers") as refused:  # noqa: SIM117
            with other.open_matchers(followed, 2):
                pass
        assert (refused.value.status, refused.value.code) == (503, "busy")
        with other.open_matchers(followed, 1):
            pass
    with other.open_matchers(followed, 3):
        pass


def test_one_key_whose_answers_all_follow_a_schema_leaves_room_for_another() -> None:
    grammars = GrammarCompiler(byte_level_tokenizer(), VOCABULARY, [0])
    followed = json_schema_grammar({"type": "object"})
    with contextlib.ExitStack() as stack:

        def ask(caller: str, count: int) -> None:
            with caller_context(caller):
                stack.enter_context(grammars.open_matchers(followed, count))

        ask("a", grammar.MAX_MATCHERS)
        ask("b", 1)
        with pytest.raises(HttpProblem) as refused:
            ask("a", 1)
        assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
        ask("b", 3)


def test_a_tokenizer_that_cannot_follow_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try stops all threads, for as long as it takes to read the vocabulary."""
    tries = []

    def fails(*_: object, **__: object) -> None:
        tries.append(1)
        raise ValueError("odd")

    monkeypatch.setattr(grammar, "from_tokenizer", fails)
    grammars = GrammarCompiler(byte_level_tokenizer(), VOCABULARY, [0])
    for _ in range(3):
        with pytest.raises(ValueError, match=r"cannot be made to follow a grammar: odd"):
            grammars.compile(json_schema_grammar({"type": "object"}))
    assert len(tries) == 1
