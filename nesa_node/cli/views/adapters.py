"""Table of the adapters that are published for a model."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence

from nesa_node.cli.views.text_parts import make_console, make_plain_table
from nesa_node.core.ids import ModelId
from nesa_node.swarm.adapter_catalog import PublishedAdapter

_PIPE_WIDTH_CHARS = 160
_AUTHOR_CHARS = 8
_DAY_S = 86_400.0


def format_bytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.1f} KiB"


def print_adapters(model_id: ModelId, published: Sequence[PublishedAdapter]) -> None:
    """A line for each adapter. NAME is what `pull` takes: with its author where two have it."""
    console = make_console(sys.stdout, _PIPE_WIDTH_CHARS)
    if not published:
        console.print(
            f"no adapter is published for {model_id}; `nesa-node adapters publish` publishes one"
        )
        return
    counts = Counter(each.listed.name for each in published)
    table = make_plain_table()
    for heading in ("NAME", "AUTHOR", "SIZE", "RANK", "MODULES", "METRICS", "AGE", "DESCRIPTION"):
        table.add_column(heading)
    now = time.time()
    for each in published:
        listed, author = each.listed, each.author[-_AUTHOR_CHARS:]
        metrics = (f"{name} {value:g}" for name, value in listed.metrics.items())
        table.add_row(
            f"{author}/{listed.name}" if counts[listed.name] > 1 else listed.name,
            f"…{author}",
            format_bytes(listed.nbytes),
            str(listed.rank),
            " ".join(listed.target_modules),
            ", ".join(metrics),
            f"{max(now - listed.created_at, 0.0) / _DAY_S:.1f} d",
            listed.description,
        )
    console.print(table)
