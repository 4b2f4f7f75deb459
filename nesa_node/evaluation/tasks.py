"""Data of an evaluation: texts, multiple-choice items, tasks of lm-evaluation-harness.

Texts come from files and from two books packaged by Debian. Items are judged by the likelihood of
their endings; in those generated from running text, endings of other passages are the wrong ones.
Tasks have results per item, for paired tests between runs.
"""

from __future__ import annotations

import functools
import math
import random
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from transformers import PreTrainedTokenizerBase

from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.errors import ConfigError, UnsupportedFeatureError
from nesa_node.core.settings.declaration import read_limited, user_path
from nesa_node.evaluation.scoring import (
    TokenScores,
    encode_pair,
    mcnemar,
    mean_and_error,
    paired_t,
    score_queries,
)

MIN_PARAGRAPH_WORDS = 8
"""Least words of a paragraph; shorter blocks are headings, captions and links."""

_SKIPPED_TAGS = frozenset({"head", "script", "style", "nav", "pre", "svg", "template"})
_BLOCK_TAGS = (
    "address article aside blockquote body br dd div dl dt figure footer form h1 h2 h3 h4 h5 h6 "
    "header hr li main ol p section table td th tr ul"
)
_BLOCK_ELEMENTS = frozenset(_BLOCK_TAGS.split())


class _ParagraphParser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[str] = []
        self._pieces: list[str] = []
        self._skipping: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _SKIPPED_TAGS:
            self._skipping.append(tag)
        if tag in _BLOCK_ELEMENTS or tag in _SKIPPED_TAGS:
            self.end_block()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _BLOCK_ELEMENTS:
            self.end_block()

    def handle_endtag(self, tag: str) -> None:
        if tag in self._skipping:
            while self._skipping.pop() != tag:
                pass
        if tag in _BLOCK_ELEMENTS or tag in _SKIPPED_TAGS:
            self.end_block()

    def handle_data(self, data: str) -> None:
        if not self._skipping:
            self._pieces.append(data)

    def end_block(self) -> None:
        words = "".join(self._pieces).split()
        self._pieces = []
        if len(words) >= MIN_PARAGRAPH_WORDS:
            self.blocks.append(" ".join(words))


def extract_paragraphs(html: str) -> list[str]:
    """The paragraphs of a page in order, each on one line, without code, navigation and headings.

    Malformed HTML is parsed leniently; no input raises an error.
    """
    parser = _ParagraphParser()
    parser.feed(html)
    parser.close()
    parser.end_block()
    return parser.blocks


HANDBOOK = "debian-handbook"
BIBLE = "bible-kjv"
HANDBOOK_FOLDER = Path("/usr/share/doc/debian-handbook/html/en-US")
_BIBLE_COMMAND = "bible"
_WHOLE_BIBLE = "Ge1:1-Rev22:21"
_TIMEOUT_S = 60
MAX_FILE_CHARS = 1 << 28
_HTML_SUFFIXES = frozenset({".html", ".htm", ".xhtml"})


def default_text() -> str:
    """The name of an installed book. Raises `ConfigError` if there is none."""
    if HANDBOOK_FOLDER.is_dir():
        return HANDBOOK
    if shutil.which(_BIBLE_COMMAND):
        return BIBLE
    raise ConfigError(
        f"no text to evaluate on: give --text FILE, or apt-get install {HANDBOOK} or {BIBLE}"
    )


def read_text(source: str) -> str:
    """The text of a file (the paragraphs of HTML), or of `debian-handbook` or `bible-kjv`.

    A file takes precedence over a book of the same name. Raises `ConfigError`.
    """
    path = user_path(source)
    if not path.exists():
        if source == HANDBOOK:
            return _read_handbook(HANDBOOK_FOLDER)
        if source == BIBLE:
            return _read_bible()
        raise ConfigError(f"--text {source}: no such file; the books are {HANDBOOK} and {BIBLE}")
    text = _read_file(path)
    if path.suffix.lower() in _HTML_SUFFIXES:
        text = "\n\n".join(extract_paragraphs(text))
    if not text.strip():
        raise ConfigError(f"--text {source}: the file has no text")
    return text


def _read_handbook(folder: Path) -> str:
    pages = sorted(folder.glob("*.html"))
    # The index only repeats headings.
    blocks = [
        block
        for page in pages
        if page.stem != "index"
        for block in extract_paragraphs(_read_file(page))
    ]
    if not blocks:
        raise ConfigError(f"--text {HANDBOOK}: not installed: apt-get install {HANDBOOK}")
    return "\n\n".join(blocks)


def _read_bible() -> str:
    try:
        told = subprocess.run(
            [_BIBLE_COMMAND, "-f", _WHOLE_BIBLE],
            capture_output=True,
            encoding="utf-8",
            timeout=_TIMEOUT_S,
            check=True,
        )
    except FileNotFoundError as error:
        raise ConfigError(f"--text {BIBLE}: not installed: apt-get install {BIBLE}") from error
    except (subprocess.SubprocessError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {BIBLE}: the command `bible` failed ({error})") from error
    # With -f each line is a verse after its reference, such as `Ge1:1`.
    return re.sub(r"^\S+:\d+ ", "", told.stdout, flags=re.MULTILINE)


def _read_file(path: Path) -> str:
    try:
        return read_limited(path, MAX_FILE_CHARS)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path}: cannot be read as UTF-8 ({error})") from error


PAPER_TABLE_1_TASKS = (
    "hellaswag",
    "lambada_openai",
    "bigbench_causal_judgment_multiple_choice",
    "bigbench_disambiguation_qa_multiple_choice",
    "bigbench_logical_deduction_multiple_choice",
)
"""The tasks of table 1 of the Nesa paper."""

_PREFERRED_METRICS = ("acc_norm", "acc", "exact_match")


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One value per item of the reported metric: `acc_norm`, else `acc`, else `exact_match`."""

    metric: str
    values: tuple[float, ...]

    @property
    def value(self) -> float:
        return sum(self.values) / len(self.values)

    @property
    def standard_error(self) -> float:
        """s / sqrt(n), as the harness states for means."""
        return mean_and_error(self.values)[1]

    def p_value(self, baseline: TaskResult) -> float:
        """McNemar's test if all values are 0 or 1, else a paired t-test."""
        if set(self.values) | set(baseline.values) <= {0.0, 1.0}:
            return mcnemar(
                [value == 1 for value in self.values], [value == 1 for value in baseline.values]
            )
        return paired_t(self.values, baseline.values).p_value


class HarnessTasks:
    """Named tasks of the harness; datasets come from the hub, unless a task names local files."""

    def __init__(
        self, names: Sequence[str], *, folder: Path | None = None, limit: int | None = None
    ) -> None:
        """`folder`: YAML files of further tasks. `limit`: most items per task.

        Raises `UnsupportedFeatureError` without the harness, `ConfigError` for an unknown name.
        """
        require_harness()
        from lm_eval.tasks import TaskManager

        self._names = tuple(names)
        self._limit = limit
        own = None if folder is None else str(folder)
        # The harness reads thousands of files to index its own tasks: only if needed.
        self._manager: Any = own and TaskManager(include_path=own, include_defaults=False)
        if not own or self._unknown_names():
            self._manager = TaskManager(include_path=own)
        if unknown := self._unknown_names():
            raise ConfigError(f"--tasks {unknown[0]}: lm-evaluation-harness has no such task")

    def _unknown_names(self) -> list[str]:
        return [name for name in self._names if not self._manager.match_tasks([name])]

    def measure(
        self, model: DistributedModelForCausalLM, tokenizer: PreTrainedTokenizerBase
    ) -> dict[str, TaskResult]:
        """Run the tasks. Raises as sessions do, and `ConfigError` if a dataset is unavailable."""
        from lm_eval import simple_evaluate

        from nesa_node.evaluation.harness import HarnessModel

        try:
            told: Any = simple_evaluate(
                model=HarnessModel(model, tokenizer),
                tasks=list(self._names),
                task_manager=self._manager,
                limit=self._limit,
                bootstrap_iters=0,
            )
        except OSError as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"--tasks: a dataset cannot be loaded: {reason}") from error
        return {name: _make_result(name, items) for name, items in told["samples"].items()}


@functools.cache
def require_harness() -> None:
    """Raise `UnsupportedFeatureError` if lm-evaluation-harness is not installed."""
    import nesa_node.evaluation.harness  # noqa: F401


def _make_result(name: str, items: Sequence[Mapping[str, Any]]) -> TaskResult:
    # There is one entry per item and filter; the first filter does not change answers.
    first = items[0].get("filter")
    own = sorted(
        (item for item in items if item.get("filter") == first), key=lambda item: item["doc_id"]
    )
    for metric in _PREFERRED_METRICS:
        if metric in own[0]:
            return TaskResult(metric, tuple(float(item[metric]) for item in own))
    raise UnsupportedFeatureError(
        f"--tasks {name}: none of its metrics is a mean over items "
        f"({', '.join(_PREFERRED_METRICS)})"
    )


MIN_ITEMS = 2


class MultipleChoiceItem(BaseModel):
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


def read_items(path: Path) -> tuple[MultipleChoiceItem, ...]:
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
                items.append(MultipleChoiceItem.model_validate_json(line))
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                where = ".".join(map(str, first["loc"]))
                raise ConfigError(
                    f"{path}, line {number}: {where + ': ' if where else ''}{first['msg']}; a line "
                    'is {"context": "...", "endings": ["...", "..."], "label": 0}'
                ) from error
    if len(items) < MIN_ITEMS:
        raise ConfigError(f"{path} has {len(items)} items; at least {MIN_ITEMS} are needed")
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
    items: Sequence[MultipleChoiceItem],
) -> ChoiceResult:
    """Accuracy on `items`; endings follow their context after a space."""
    queries = [
        encode_pair(tokenizer, item.context, f" {ending}", max_tokens=model.context_length)
        for item in items
        for ending in item.endings
    ]
    scores = score_queries(model, queries)
    plain, normalised = [], []
    for item in items:
        own = [next(scores) for _ in item.endings]
        plain.append(_argmax([one.total for one in own]) == item.label)
        normalised.append(_argmax(_per_character(own, item)) == item.label)
    return ChoiceResult(Accuracy(tuple(plain)), Accuracy(tuple(normalised)))


def _per_character(scores: Sequence[TokenScores], item: MultipleChoiceItem) -> list[float]:
    # As in the harness, the space before an ending does not count.
    return [one.total / len(text) for one, text in zip(scores, item.endings, strict=True)]


def _argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


CONTEXT_WORDS = 24
ENDING_WORDS = 8
NUM_ENDINGS = 4
_SENTENCE_ENDS = (".", "!", "?", '."', "!”", ".”", ".)")


def generate_items(text: str, *, count: int, seed: int) -> tuple[MultipleChoiceItem, ...]:
    """`count` items from non-overlapping passages of `text`.

    Each passage begins at a sentence; its first `CONTEXT_WORDS` words are the context, the next
    `ENDING_WORDS` the correct ending. Wrong endings are those of other passages, of equal length in
    words. Labels are evenly distributed. The same arguments give the same items. Raises
    `ConfigError` if the text has too few passages.
    """
    passages = _split_passages(text.split())
    distinct = list(dict.fromkeys(ending for _, ending in passages))
    if len(passages) < count or len(distinct) < NUM_ENDINGS:
        raise ConfigError(
            f"the text has room for {len(passages)} multiple-choice items, {count} are asked for: "
            "give a longer --text or fewer --items"
        )
    rng = random.Random(seed)
    labels = [index % NUM_ENDINGS for index in range(count)]
    rng.shuffle(labels)
    items = []
    for (context, real), label in zip(rng.sample(passages, count), labels, strict=True):
        # One more than needed, since the correct one may be among them.
        drawn = rng.sample(distinct, NUM_ENDINGS)
        wrong = [ending for ending in drawn if ending != real][: NUM_ENDINGS - 1]
        choices = (*wrong[:label], real, *wrong[label:])
        items.append(MultipleChoiceItem(context=context, endings=choices, label=label))
    return tuple(items)


def count_possible_items(text: str) -> int:
    """The number of items that `generate_items` can make of `text`."""
    passages = _split_passages(text.split())
    return len(passages) if len({ending for _, ending in passages}) >= NUM_ENDINGS else 0


def _split_passages(words: Sequence[str]) -> list[tuple[str, str]]:
    length = CONTEXT_WORDS + ENDING_WORDS
    passages, at = [], 0
    while at + length <= len(words):
        if at == 0 or words[at - 1].endswith(_SENTENCE_ENDS):
            middle = at + CONTEXT_WORDS
            passages.append((" ".join(words[at:middle]), " ".join(words[middle : at + length])))
            at += length
        else:
            at += 1
    return passages
