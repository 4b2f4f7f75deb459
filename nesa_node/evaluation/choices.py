"""Multiple-choice items and the model's accuracy on them, by likelihood of the endings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from transformers import PreTrainedTokenizerBase

from nesa_node.client.causal_lm import DistributedModelForCausalLM
from nesa_node.core.errors import ConfigError
from nesa_node.core.user_file import read_limited
from nesa_node.evaluation.encoding import encode_pair
from nesa_node.evaluation.scoring import Scores, score
from nesa_node.evaluation.texts import MAX_FILE_CHARS

LEAST_ITEMS = 2


class Item(BaseModel):
    """A context with possible endings, of which `endings[label]` is correct."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    context: str = Field(min_length=1)
    endings: tuple[str, ...] = Field(min_length=2, strict=False)
    label: int = Field(ge=0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.label >= len(self.endings):
            raise ValueError(f"label {self.label} of {len(self.endings)} endings, counted from 0")
        if not all(ending.strip() for ending in self.endings):
            raise ValueError("an ending is empty")
        return self


def read_items(path: Path) -> tuple[Item, ...]:
    """Items from JSON lines `{"context": "...", "endings": ["...", "..."], "label": 0}`.

    Raises `ConfigError`, with the line number for a bad line.
    """
    try:
        lines = read_limited(path, MAX_FILE_CHARS).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--choices {path}: cannot be read ({error})") from error
    items = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                items.append(Item.model_validate_json(line))
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                where = ".".join(map(str, first["loc"]))
                raise ConfigError(
                    f"{path}, line {number}: {where + ': ' if where else ''}{first['msg']}; a line "
                    'is {"context": "...", "endings": ["...", "..."], "label": 0}'
                ) from error
    if len(items) < LEAST_ITEMS:
        raise ConfigError(f"{path} has {len(items)} items; at least {LEAST_ITEMS} are needed")
    return tuple(items)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The share p of correct answers among n; standard error sqrt(p (1 - p) / (n - 1))."""

    right: tuple[bool, ...]

    @property
    def value(self) -> float:
        return sum(self.right) / len(self.right)

    @property
    def standard_error(self) -> float:
        return math.sqrt(self.value * (1 - self.value) / (len(self.right) - 1))


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """Accuracies by total log-likelihood (`plain`) and per character (`normalised`).

    They equal `acc` and `acc_norm` of lm-evaluation-harness.
    """

    plain: Accuracy
    normalised: Accuracy


def measure_choices(
    model: DistributedModelForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[Item],
) -> ChoiceResult:
    """Accuracy on `items`; endings follow their context after a space. Raises as `score` does."""
    queries = [
        encode_pair(tokenizer, item.context, f" {ending}", most_tokens=model.context_length)
        for item in items
        for ending in item.endings
    ]
    scores = score(model, queries)
    plain, normalised = [], []
    for item in items:
        own = [next(scores) for _ in item.endings]
        plain.append(_best([one.total for one in own]) == item.label)
        normalised.append(_best(_per_character(own, item)) == item.label)
    return ChoiceResult(Accuracy(tuple(plain)), Accuracy(tuple(normalised)))


def _per_character(scores: Sequence[Scores], item: Item) -> list[float]:
    # As in the harness, the space before an ending does not count.
    return [one.total / len(text) for one, text in zip(scores, item.endings, strict=True)]


def _best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)
