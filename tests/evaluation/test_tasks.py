"""Multiple choice against brute force, its file, and items out of running text."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from nesa_node.core.errors import ConfigError
from nesa_node.evaluation.tasks import (
    Accuracy,
    MultipleChoiceItem,
    generate_items,
    measure_choices,
    read_items,
)
from tests.evaluation.models import load_tokenizer, local_model, random_text, reference


def brute_force(
    model: Any, tokenizer: Any, items: list[MultipleChoiceItem]
) -> tuple[list[bool], list[bool]]:
    """One text at a time through transformers: right by sums, and by sums per character."""
    plain, normalised = [], []
    for item in items:
        sums = []
        for ending in item.endings:
            ids = tokenizer(f"{item.context} {ending}", return_tensors="pt")["input_ids"]
            begin = len(tokenizer(item.context)["input_ids"])
            with torch.no_grad():
                log_p = model(ids).logits[0].log_softmax(-1)
            sums.append(sum(float(log_p[at - 1, ids[0, at]]) for at in range(begin, len(ids[0]))))
        means = [one / len(ending) for one, ending in zip(sums, item.endings, strict=True)]
        plain.append(sums.index(max(sums)) == item.label)
        normalised.append(means.index(max(means)) == item.label)
    return plain, normalised


def uneven_items(count: int) -> list[MultipleChoiceItem]:
    """Endings of different lengths, so that the two accuracies differ."""
    return [
        MultipleChoiceItem(
            context=random_text(12, seed=seed),
            endings=tuple(
                random_text(2 + 3 * index, seed=100 * seed + index) for index in range(3)
            ),
            label=seed % 3,
        )
        for seed in range(count)
    ]


def test_answers_equal_those_of_brute_force(words_model: Path) -> None:
    items = uneven_items(40)
    tokenizer = load_tokenizer(words_model)
    with local_model(words_model) as model:
        ours = measure_choices(model, tokenizer, items)
    plain, normalised = brute_force(reference(words_model), tokenizer, items)
    assert list(ours.plain.right) == plain
    assert list(ours.normalised.right) == normalised
    assert plain != normalised
    assert 0 < sum(normalised) < 40


def test_standard_error_of_a_share() -> None:
    accuracy = Accuracy((True, True, True, False))
    assert accuracy.value == 0.75
    assert accuracy.standard_error == pytest.approx(math.sqrt(0.75 * 0.25 / 3))


def test_items_are_read_from_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "items.jsonl"
    line = {"context": "The sky is", "endings": ["blue", "a fish"], "label": 0}
    file.write_text(f"{json.dumps(line)}\n\n{json.dumps(line | {'label': 1})}\n", encoding="utf-8")
    first, second = read_items(file)
    assert first == MultipleChoiceItem(context="The sky is", endings=("blue", "a fish"), label=0)
    assert second.label == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2"),
        ('{"context": "a", "endings": ["b", "c"]}', "label: Field required"),
        ('{"context": "a", "endings": ["b", "c"], "label": 2}', "label 2 of 2 endings"),
        ('{"context": "a", "endings": ["b", "c"], "label": -1}', "label: "),
        ('{"context": "a", "endings": ["b", "c"], "label": "1"}', "label: "),
        ('{"context": "a", "endings": ["b"], "label": 0}', "endings: "),
        ('{"context": "a", "endings": ["b", " "], "label": 0}', "an ending is empty"),
        ('{"context": "", "endings": ["b", "c"], "label": 0}', "context: "),
        ('{"context": "a", "endings": ["b", "c"], "label": 0, "id": 3}', "id: "),
        ("[1, 2]", "line 2"),
    ],
)
def test_a_wrong_line_is_named(line: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "items.jsonl"
    right = '{"context": "a", "endings": ["b", "c"], "label": 0}'
    file.write_text(f"{right}\n{line}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2") as caught:
        read_items(file)
    assert words in str(caught.value)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_items(tmp_path / "none.jsonl")
    (tmp_path / "few.jsonl").write_text("\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="0 items"):
        read_items(tmp_path / "few.jsonl")


def test_generated_items_are_the_same_for_a_seed() -> None:
    text = random_text(6000)
    items = generate_items(text, count=50, seed=3)
    assert items == generate_items(text, count=50, seed=3)
    assert items != generate_items(text, count=50, seed=4)


@pytest.mark.parametrize("count", [40, 42])
def test_labels_are_as_even_as_they_can_be(count: int) -> None:
    items = generate_items(random_text(6000), count=count, seed=0)
    counts = Counter(item.label for item in items)
    assert len(counts) == 4
    assert max(counts.values()) - min(counts.values()) == (count % 4 > 0)


def test_the_real_ending_follows_its_context_and_no_other_ending_does() -> None:
    text = random_text(9000)
    items = generate_items(text, count=120, seed=1)
    for item in items:
        real = item.endings[item.label]
        assert f"{item.context} {real}" in text
        assert item.endings.count(real) == 1
        assert len(set(item.endings)) == 4
        assert {len(ending.split()) for ending in item.endings} == {8}
        for wrong in {*item.endings} - {real}:
            assert f"{item.context} {wrong}" not in text
            assert wrong in text
    assert len({item.context for item in items}) == len(items)


def test_a_text_that_repeats_itself_never_offers_the_real_ending_twice() -> None:
    passages = [random_text(31, seed=seed).replace(".", "") + " end." for seed in range(6)]
    items = generate_items(" ".join(passages * 5), count=25, seed=0)
    for item in items:
        assert len(set(item.endings)) == 4


def test_a_text_too_short_for_the_items_says_how_many_there_are() -> None:
    with pytest.raises(ConfigError, match=r"room for \d+ multiple-choice items, 100 are asked for"):
        generate_items(random_text(500), count=100, seed=0)
    with pytest.raises(ConfigError, match="room for 0"):
        generate_items("", count=2, seed=0)
