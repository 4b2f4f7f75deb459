"""Sample that `nesa-node eval` measures on: text, multiple-choice items, tasks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from nesa_node.core.errors import ConfigError
from nesa_node.core.settings.choices import GENERATED_ITEMS
from nesa_node.core.settings.declaration import user_path
from nesa_node.evaluation.results import EvaluationSample
from nesa_node.evaluation.scoring import MIN_TOKENS, first_tokens, window_queries
from nesa_node.evaluation.tasks import (
    MIN_ITEMS,
    PAPER_TABLE_1_TASKS,
    HarnessTasks,
    MultipleChoiceItem,
    count_possible_items,
    generate_items,
    read_items,
)


def parse_names(flag: str, given: str | None, default: Sequence[str]) -> tuple[str, ...]:
    """Parse a flag's comma-separated names. Raises `ConfigError` for empty names."""
    if given is None:
        return tuple(default)
    listed = tuple(name.strip() for name in given.split(","))
    if not all(listed):
        raise ConfigError(f"{flag} takes names separated by commas, got {given!r}")
    return listed


def limit_parts(nodes: int, num_blocks: int) -> int:
    """Number of spans, at most one per block. Warns if `nodes` is reduced."""
    if nodes > num_blocks:
        _warn(f"--nodes {nodes}: the model has {num_blocks} blocks, so they run in {num_blocks}")
    return min(nodes, num_blocks)


def choose_items(choices: str, passage: str, count: int, seed: int) -> Sequence[MultipleChoiceItem]:
    if not count:
        return ()
    if count < MIN_ITEMS:
        raise ConfigError(f"--items {count}: at least {MIN_ITEMS}, or 0 for none")
    if choices == GENERATED_ITEMS:
        room = count_possible_items(passage)
        if room < MIN_ITEMS:
            _warn("the text has too few passages for multiple-choice items: none are measured")
            return ()
        if room < count:
            _warn(f"the text has room for {room} items, {count} are asked for: {room} are taken")
        return generate_items(passage, count=min(count, room), seed=seed)
    return read_items(user_path(choices))[:count]


def choose_tasks(given: str | None, folder: Path | None, limit: int | None) -> HarnessTasks | None:
    if given is None:
        return None
    folder = None if folder is None else user_path(folder)
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--task-folder {folder}: no such folder")
    chosen = PAPER_TABLE_1_TASKS if given == "table-1" else parse_names("--tasks", given, ())
    return HarnessTasks(chosen, folder=folder, limit=limit)


def make_sample(
    tokenizer: PreTrainedTokenizerBase,
    passage: str,
    *,
    tokens: int,
    context: int,
    stride: int | None,
    items: Sequence[MultipleChoiceItem],
    tasks: HarnessTasks | None,
) -> EvaluationSample:
    stride = context // 2 if stride is None else stride
    ids: Sequence[int] = ()
    if tokens:
        if tokens < MIN_TOKENS:
            raise ConfigError(f"--tokens {tokens}: at least {MIN_TOKENS}, or 0 for none")
        window_queries((), context=context, stride=stride)
        ids = first_tokens(tokenizer, passage, tokens)
        if len(ids) < MIN_TOKENS:
            _warn(f"the text has {len(ids)} tokens, too few for a perplexity ({MIN_TOKENS})")
            ids = ()
        elif len(ids) < tokens:
            _warn(f"the text has {len(ids)} tokens, {tokens} are asked for: all are taken")
        if not ids and not items and tasks is None:
            raise ConfigError("the text is too short to measure anything: give a longer --text")
    return EvaluationSample(ids, context, stride, items, tasks)


def describe_sample(sample: EvaluationSample) -> str:
    """Sizes of the sample, for the table's title."""
    parts = []
    if sample.ids:
        parts.append(f"{len(sample.ids)} tokens in windows of {sample.context}")
    if sample.items:
        parts.append(f"{len(sample.items)} items of multiple choice")
    return f": {', '.join(parts)}" if parts else ""


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
