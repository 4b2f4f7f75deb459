"""Rows of `nesa-node leakage` as a file, as a table, and as `docs/privacy.md`.

The page says nothing about leakage that is not in a file of results: sentences about modes are the
claims, figures are rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from nesa_node.core.errors import ConfigError
from nesa_node.evaluation.leakage_claims import CLAIMS, TOKEN_ATTACKS
from nesa_node.evaluation.leakage_rows import LeakageRow, Recovered
from nesa_node.evaluation.results import PIPE_COLUMNS, describe_machine

_COLUMNS = (
    "mode",
    "setting",
    "attack",
    "tokens recovered",
    "by chance",
    "perplexity",
    "epsilon of a token, of the text",
    "tokens/s",
    "MB per token",
)
_INTRODUCTION = """# What nodes can learn of a prompt

This page is made by `nesa-node leakage --page {source}`; a test compares both. An attacker is a
node of a live swarm that has the public model and a text of its own. It trains on {training} tokens
of {text}, and attacks {secret} tokens of another part, in prompts of {window} tokens, of which it
received what the mode sends. `ckks` and `masks`, which encrypt, are slow: there both texts have
fewer tokens, and what a token takes is that of one block times the number of blocks. Percentages
are tokens that were recovered of those stated, with 95% intervals; what an attack was given is not
counted. "By chance" is what naming the most frequent token of the attacker's text recovers, for the
logit lens that of the next tokens which it is compared with.
"""


def write_leakage(rows: Sequence[LeakageRow], path: Path, *, options: Mapping[str, object]) -> None:
    """Write a JSON array with one object per row and line. Raises `OSError`."""
    about = {
        "benchmark": "leakage",
        "measured_at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "machine": describe_machine(),
        "options": dict(options),
    }
    lines = [json.dumps(about | asdict(row)) for row in rows]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def read_leakage(path: Path) -> tuple[list[LeakageRow], dict[str, Any]]:
    """Rows and options of a file. Raises `ConfigError` for another file."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        names = set(LeakageRow.__dataclass_fields__)
        rows = [
            LeakageRow(
                **{name: each[name] for name in names - {"recovered"}},
                recovered=tuple(Recovered(**one) for one in each["recovered"]),
            )
            for each in told
        ]
        return rows, dict(told[0]["options"])
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"{path} has no results of nesa-node leakage: {error!r}") from None


def check_claims(rows: Sequence[LeakageRow]) -> list[str]:
    """Sentences about what was measured otherwise than it is claimed; empty if all claims hold.

    A mode that hides tokens must have no attack that recovers more than chance; every claim needs
    a row with each of its attacks.
    """
    wrong = []
    for claim in CLAIMS.values():
        own = [row for row in rows if row.mode == claim.mode]
        done = {each.attack for row in own for each in row.recovered}
        wrong += [
            f"{claim.mode}: not measured by {name}" for name in claim.attacks if name not in done
        ]
        wrong += [
            f"{claim.mode}: {each.attack} recovers {each.percent:.1f}%, by chance "
            f"{_chance(row, each):.1f}%"
            for row in own
            for each in row.recovered
            if claim.hides_tokens
            and each.attack in TOKEN_ATTACKS
            and each.interval[0] > _chance(row, each)
        ]
    wrong += [f"{row.mode}: no claim" for row in rows if row.mode not in CLAIMS]
    return wrong


def print_leakage(rows: Sequence[LeakageRow], *, title: str, out: TextIO) -> None:
    console = Console(file=out, width=None if out.isatty() else PIPE_COLUMNS)
    table = Table(title=title, title_justify="left")
    for column in _COLUMNS:
        table.add_column(column)
    for row in rows:
        for cells in _format_row(row):
            table.add_row(*cells)
    console.print(table)


def make_page(rows: Sequence[LeakageRow], options: Mapping[str, Any], *, source: str) -> str:
    """`docs/privacy.md`. Raises `ConfigError` where a claim is more than what was measured."""
    if wrong := check_claims(rows):
        raise ConfigError(f"results do not hold what is claimed: {'; '.join(wrong)}")
    parts = [_INTRODUCTION.format(source=source, **options)]
    parts.append("| mode | what it keeps | what nodes see in any case |\n|---|---|---|")
    parts[-1] += "".join(
        f"\n| `{claim.mode}` | {claim.statement} | {claim.visible} |" for claim in CLAIMS.values()
    )
    parts.append(f"\n## Measured\n\nOn {options['model']}.\n")
    parts.append(f"| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}")
    parts[-1] += "".join(f"\n| {' | '.join(cells)} |" for row in rows for cells in _format_row(row))
    return "\n".join(parts) + "\n"


def _format_row(row: LeakageRow) -> list[list[str]]:
    """A line for each attack; what is the same for all stands in the first."""
    rest = [
        _number(row.perplexity, ".4g"),
        ""
        if row.epsilon_token is None or row.epsilon_text is None
        else f"{row.epsilon_token:.4g}, {row.epsilon_text:.4g}",
        _number(row.tokens_per_s, ".2g"),
        _number(row.mb_per_token, ".2g"),
    ]
    lines = []
    for at, each in enumerate(row.recovered):
        counts_tokens = each.attack in TOKEN_ATTACKS
        low, high = each.interval
        share = f"{each.percent:.1f}% of {each.tokens} ({low:.1f} to {high:.1f})"
        found = share if counts_tokens else each.detail
        chance = f"{_chance(row, each):.1f}%" if counts_tokens else ""
        name = f"{each.attack}, {each.detail}" if counts_tokens and each.detail else each.attack
        first = [row.mode, row.setting] if at == 0 else ["", ""]
        lines.append([*first, name, found, chance, *(rest if at == 0 else [""] * len(rest))])
    return lines


def _chance(row: LeakageRow, found: Recovered) -> float:
    return row.chance_percent if found.chance_percent is None else found.chance_percent


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
