"""Sample that `nesa-node eval` measures on: text, multiple-choice items, tasks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from nesa_node.cli.eval import GENERATED
from nesa_node.core.errors import ConfigError
from nesa_node.core.user_file import user_path
from nesa_node.evaluation.choices import LEAST_ITEMS, Item, read_items
from nesa_node.evaluation.encoding import first_tokens
from nesa_node.evaluation.items import count_room, generate_items
from nesa_node.evaluation.perplexity import LEAST_TOKENS, window_queries
from nesa_node.evaluation.rows import Sample
from nesa_node.evaluation.tasks import TABLE_1, Tasks
from nesa_node.evaluation.texts import default_text, read_text


def names(flag: str, given: str | None, default: Sequence[str]) -> tuple[str, ...]:
    """Parse a flag's comma-separated names. Raises `ConfigError` for empty names."""
    if given is None:
        return tuple(default)
    listed = tuple(name.strip() for name in given.split(","))
    if not all(listed):
        raise ConfigError(f"{flag} takes names separated by commas, got {given!r}")
    return listed


def count_parts(nodes: int, num_blocks: int) -> int:
    """Number of spans, at most one per block. Warns if `nodes` is reduced."""
    if nodes > num_blocks:
        _warn(f"--nodes {nodes}: the model has {num_blocks} blocks, so they run in {num_blocks}")
    return min(nodes, num_blocks)


def read_passage(text: str | None, *, needed: bool) -> tuple[str | None, str]:
    """Name and content of the text; (None, "") if it is not `needed`."""
    if not needed:
        return None, ""
    name = default_text() if text is None else text
    return name, read_text(name)


def choose_items(choices: str, passage: str, count: int, seed: int) -> Sequence[Item]:
    if not count:
        return ()
    if count < LEAST_ITEMS:
        raise ConfigError(f"--items {count}: at least {LEAST_ITEMS}, or 0 for none")
    if choices == GENERATED:
        room = count_room(passage)
        if room < LEAST_ITEMS:
            _warn("the text has too few passages for multiple-choice items: none are measured")
            return ()
        if room < count:
            _warn(f"the text has room for {room} items, {count} are asked for: {room} are taken")
        return generate_items(passage, count=min(count, room), seed=seed)
    return read_items(user_path(choices))[:count]


def choose_tasks(given: str | None, folder: Path | None, limit: int | None) -> Tasks | None:
    if given is None:
        return None
    folder = None if folder is None else user_path(folder)
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--task-folder {folder}: no such folder")
    chosen = TABLE_1 if given == "table-1" else names("--tasks", given, ())
    return Tasks(chosen, folder=folder, limit=limit)


def make_sample(
    tokenizer: PreTrainedTokenizerBase,
    passage: str,
    *,
    tokens: int,
    context: int,
    stride: int | None,
    items: Sequence[Item],
    tasks: Tasks | None,
) -> Sample:
    stride = context // 2 if stride is None else stride
    ids: Sequence[int] = ()
    if tokens:
        if tokens < LEAST_TOKENS:
            raise ConfigError(f"--tokens {tokens}: at least {LEAST_TOKENS}, or 0 for none")
        window_queries((), context=context, stride=stride)
        ids = first_tokens(tokenizer, passage, tokens)
        if len(ids) < LEAST_TOKENS:
            _warn(f"the text has {len(ids)} tokens, too few for a perplexity ({LEAST_TOKENS})")
            ids = ()
        elif len(ids) < tokens:
            _warn(f"the text has {len(ids)} tokens, {tokens} are asked for: all are taken")
        if not ids and not items and tasks is None:
            raise ConfigError("the text is too short to measure anything: give a longer --text")
    return Sample(ids, context, stride, items, tasks)


def sample_text(sample: Sample) -> str:
    """Sizes of the sample, for the table's title."""
    parts = []
    if sample.ids:
        parts.append(f"{len(sample.ids)} tokens in windows of {sample.context}")
    if sample.items:
        parts.append(f"{len(sample.items)} items of multiple choice")
    return f": {', '.join(parts)}" if parts else ""


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
