"""`docs/papers.md` names what exists, and its counts are those of its rows."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs/papers.md"

STATES = ("built", "corrected", "part", "not built", "background")
MIN_ITEMS = 227
"""Items that the papers had at the first count."""

HEADER = "| item | what it asks | where / corrected how / not built |"
_CODE = re.compile(r"`([^`]+)`")
_PATH = re.compile(r"[\w.-]+(/[\w.@-]+)+/?|[\w-]+\.(md|toml|py)")
_BENCHMARK = re.compile(r"python -m benchmarks (\w+)")
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, slots=True)
class Row:
    """One item: the paper that it is of, its three cells, and the state that the last begins with.

    `state` is empty where the last cell begins with no known one.
    """

    paper: str
    item: str
    asks: str
    where: str

    @property
    def state(self) -> str:
        begin = self.where.partition(":")[0]
        return begin if begin in STATES else ""

    def spans(self) -> list[str]:
        """Text in backticks in the last cell."""
        return _CODE.findall(self.where)


def rows_of(text: str) -> Iterator[Row]:
    paper, in_items = "", False
    for line in text.splitlines():
        if line.startswith("## "):
            paper = line.removeprefix("## ")
        if not line.startswith("|"):
            in_items = False
        elif line == HEADER:
            in_items = True
        elif in_items and line != "|-|-|-|":
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            assert len(cells) == 3, f"not three cells: {line}"
            yield Row(paper, *cells)


def count_table(rows: list[Row]) -> list[str]:
    """The table of counts as it stands at the top: a line for each paper and one for all."""
    papers = list(dict.fromkeys(row.paper for row in rows))
    lines = []
    for name in (*papers, "all"):
        states = Counter(row.state for row in rows if name in (row.paper, "all"))
        figures = [*(states[state] for state in STATES), states.total()]
        lines.append(f"| {name} | {' | '.join(map(str, figures))} |")
    return lines


TEXT = DOCUMENT.read_text(encoding="utf-8")
ROWS = list(rows_of(TEXT))


def test_every_item_has_a_row_and_a_state() -> None:
    assert len(ROWS) >= MIN_ITEMS
    assert not [row for row in ROWS if not (row.state and row.item and row.asks)]
    assert not [key for key, n in Counter((r.paper, r.item) for r in ROWS).items() if n > 1]


def test_built_items_say_where() -> None:
    for row in ROWS:
        if row.state in ("built", "corrected", "part"):
            assert len(row.where) > len(row.state) + 2, row


def test_counts_at_the_top_are_those_of_the_rows() -> None:
    top = TEXT.split("\n## ")[0]
    assert [line for line in top.splitlines() if re.search(r"\d \|$", line)] == count_table(ROWS)


def test_paths_exist() -> None:
    spans = {span for span in _CODE.findall(TEXT) if _PATH.fullmatch(span)}
    assert len(spans) > 50
    assert not sorted(span for span in spans if not (ROOT / span).exists())


def test_names_are_defined_in_the_files_of_their_row() -> None:
    missing = []
    for row in ROWS:
        modules = [ROOT / span for span in row.spans() if span.endswith(".py")]
        words = {word for path in modules if path.is_file() for word in words_of(path)}
        missing += [
            f"{row.item}: {span}"
            for span in row.spans()
            if not _PATH.fullmatch(span) and not is_known(span, words)
        ]
    assert not missing


def is_known(span: str, words: set[str]) -> bool:
    if found := _BENCHMARK.fullmatch(span):
        return (ROOT / f"benchmarks/{found[1]}.py").is_file()
    if span.startswith("test_"):
        return span in defined_tests()
    if _NAME.fullmatch(span):
        return all(part in words for part in span.split("."))
    return span in words


@cache
def words_of(path: Path) -> frozenset[str]:
    """Names that a module defines, and its short string constants."""
    words: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            words.add(node.id)
        elif isinstance(node, ast.arg):
            words.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.add(node.value[:64])
    return frozenset(words)


@cache
def defined_tests() -> frozenset[str]:
    """Names of all tests."""
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    return frozenset(
        name for text in texts for name in re.findall(r"^ *(?:async )?def (test_\w+)", text, re.M)
    )
