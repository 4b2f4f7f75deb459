"""Tokens of supervised texts, against those of the tokenizer itself."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from nesa_node.client.training.data.examples import IGNORED, ExampleTokenizer, SupervisedText
from nesa_node.core.errors import ConfigError
from tests.api.tokenizers import byte_level_tokenizer
from tests.client.training.data.chat_tokenizers import make_spaced_tokenizer, make_tokenizer

TOKENIZERS = {
    "byte-level": byte_level_tokenizer(),
    "spaced": make_spaced_tokenizer(),
    "with a first token": make_tokenizer(begin=True),
}
TEXTS = st.text(st.sampled_from("the cat, sa.\n é:"), max_size=12)


def completion(prompt: str, answer: str) -> SupervisedText:
    whole = prompt + answer
    return SupervisedText(whole, ((len(prompt), len(whole)),), is_rendered=False)


def encode(tokenizer: Any, text: str, **options: bool) -> list[int]:
    ids: list[int] = tokenizer(text, **options)["input_ids"]
    return ids


def decode(tokenizer: PreTrainedTokenizerBase, ids: Any) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=50)
@hypothesis.example(pairs=[("\n", "\n"), ("the cat ", "sat"), ("on the", "re")])
@given(pairs=st.lists(st.tuples(TEXTS, TEXTS.filter(bool)), min_size=1, max_size=4))
def test_completion_follows_exactly_the_tokens_of_its_prompt(
    name: str, pairs: list[tuple[str, str]]
) -> None:
    tokenizer = TOKENIZERS[name]
    examples = ExampleTokenizer(tokenizer).tokenize([completion(*pair) for pair in pairs])
    for (prompt, answer), example in zip(pairs, examples, strict=True):
        given_ids = encode(tokenizer, prompt)
        count = len(given_ids)
        assert example.ids[:count].tolist() == given_ids
        assert set(example.labels[:count].tolist()) <= {IGNORED}
        assert example.labels[count:].tolist() == example.ids[count:].tolist()
        assert example.ids[-1] == tokenizer.eos_token_id
        whole = encode(tokenizer, prompt + answer)
        assert decode(tokenizer, example.ids) == decode(tokenizer, whole)
        if whole[:count] == given_ids:
            assert example.ids[:-1].tolist() == whole


def test_token_over_the_boundary_is_split() -> None:
    """The whole text has one token for `there`."""
    tokenizer = TOKENIZERS["byte-level"]
    [example] = ExampleTokenizer(tokenizer).tokenize([completion("on the", "re")])
    assert len(encode(tokenizer, " there")) == 1
    assert decode(tokenizer, [i for i in example.labels.tolist() if i != IGNORED]) == "re"


def test_word_after_a_prompt_with_a_space_gets_no_second_space() -> None:
    tokenizer = TOKENIZERS["spaced"]
    [example] = ExampleTokenizer(tokenizer).tokenize([completion("the cat ", "sat")])
    assert tokenizer.tokenize("the cat sat") == ["▁the", "▁cat", "▁sat"]
    assert decode(tokenizer, example.ids) == "the cat sat"


def test_text_keeps_the_tokens_of_the_whole_where_they_begin_with_those_of_its_parts() -> None:
    """Its parts would not: none but the first begins a text, though this tokenizer thinks so."""
    tokenizer = make_spaced_tokenizer("always")
    text = "the\ncat<end>sat"
    [example] = ExampleTokenizer(tokenizer).tokenize(
        [SupervisedText(text, ((4, 7), (12, 15)), is_rendered=True)]
    )
    assert tokenizer.convert_ids_to_tokens(example.ids.tolist()) == tokenizer.tokenize(text)
    learned = example.labels[example.labels != IGNORED].tolist()
    assert tokenizer.decode(learned) == "cat sat"
    assert tokenizer.convert_ids_to_tokens(learned)[-1] == "▁sat"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_text_has_the_tokens_that_the_tokenizer_gives_it_and_an_end(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    text = "the cat sat on the mat"
    [example] = ExampleTokenizer(tokenizer).tokenize(
        [SupervisedText(text, ((0, len(text)),), is_rendered=False)]
    )
    assert example.ids.tolist() == [*encode(tokenizer, text), tokenizer.eos_token_id]
    first = [] if name == "with a first token" else example.ids[:1].tolist()
    assert [label for label in example.labels.tolist() if label != IGNORED] == [
        *first,
        *example.ids[1:].tolist(),
    ]
    assert example.num_targets == len(example) - 1


def test_end_that_a_text_has_already_is_not_doubled() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    [example] = ExampleTokenizer(tokenizer).tokenize([completion("the", " cat<end>")])
    assert example.ids.tolist().count(tokenizer.eos_token_id) == 1


def test_tokenizer_without_an_end_is_refused_unless_a_template_wrote_the_text() -> None:
    encoder = ExampleTokenizer(make_tokenizer(end=False))
    with pytest.raises(ConfigError, match="eos_token"):
        encoder.tokenize([completion("the", " cat")])
    [example] = encoder.tokenize([SupervisedText("the cat", ((3, 7),), is_rendered=True)])
    assert example.num_targets > 0


@given(parts=st.lists(TEXTS, min_size=1, max_size=6))
def test_learned_tokens_are_those_of_the_learned_ranges(parts: list[str]) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    text, targets, expected = "", [], ""
    for number, part in enumerate(parts):
        if number % 2:
            targets.append((len(text), len(text) + len(part)))
            expected += part
        text += part
    [example] = ExampleTokenizer(tokenizer).tokenize(
        [SupervisedText(text, tuple(targets), is_rendered=True)]
    )
    assert decode(tokenizer, example.ids) == text
    assert decode(tokenizer, example.labels[example.labels != IGNORED]) == expected


def test_cut_example_keeps_its_first_tokens() -> None:
    [example] = ExampleTokenizer(TOKENIZERS["byte-level"]).tokenize([completion("the cat", " sat")])
    cut = example.cut(2)
    assert cut.ids.tolist() == example.ids[:2].tolist()
    assert cut.labels.tolist() == example.labels[:2].tolist()
    assert cut.ids.base is None
