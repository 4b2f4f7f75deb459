"""Parts of terminal output that several commands print: console, plain table, coverage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text


def make_console(out: TextIO, pipe_width_chars: int) -> Console:
    """Console on `out`, as wide as the terminal, or `pipe_width_chars` if it is none."""
    width = None if out.isatty() else pipe_width_chars
    # Names of peers, nodes and models are untrusted: no markup.
    return Console(file=out, width=width, markup=False, emoji=False, highlight=False)


def make_plain_table() -> Table:
    return Table(box=None, pad_edge=False, header_style="dim")


def coverage_text(coverage: Sequence[int], max_chars: int, *, above_nine: str) -> tuple[Text, int]:
    """Count of nodes as one character per block, or per group of blocks (its minimum).

    Returns the text and the blocks per character. `above_nine` is shown for more than 9 nodes.
    """
    group = -(-len(coverage) // max_chars)
    text = Text("0 ")
    for at in range(0, len(coverage), group):
        count = min(coverage[at : at + group])
        style = "bold red" if count == 0 else "yellow" if count == 1 else "green"
        text.append("." if count == 0 else above_nine if count > 9 else str(count), style=style)
    text.append(f" {len(coverage)}")
    return text, group
