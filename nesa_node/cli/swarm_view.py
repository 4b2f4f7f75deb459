"""Node records as a table for people and as JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nesa_node.cli.client_model import short_peer
from nesa_node.core.span import Span
from nesa_node.swarm.records import NodeRecord
from nesa_node.topology.snapshot import count_holders, zero_runs

MAX_COVERAGE_CHARS = 60
PIPE_WIDTH = 120
_STATE_STYLES = {"serving": "green", "joining": "yellow", "draining": "yellow"}


@dataclass(frozen=True, slots=True)
class ModelView:
    """The nodes of one model id, ordered by their spans."""

    model_id: str
    num_blocks: int
    records: tuple[NodeRecord, ...]

    @property
    def coverage(self) -> tuple[int, ...]:
        """How many serving nodes hold each block."""
        serving = [record.node_state() for record in self.records if record.state == "serving"]
        return count_holders(serving, self.num_blocks)

    @property
    def holes(self) -> tuple[Span, ...]:
        return zero_runs(self.coverage)


def group_by_model(records: Iterable[NodeRecord], wanted: str | None = None) -> list[ModelView]:
    """The models that `records` serve; only `wanted` (a name, a folder or a full id) if given."""
    groups: dict[str, list[NodeRecord]] = {}
    for record in records:
        if record.state != "withdrawn" and (wanted is None or _is(record, wanted)):
            groups.setdefault(record.model_id, []).append(record)
    return [
        ModelView(
            model_id=model_id,
            num_blocks=max(record.num_blocks for record in group),
            records=tuple(sorted(group, key=lambda record: (record.span, record.peer_id))),
        )
        for model_id, group in sorted(groups.items())
    ]


def _is(record: NodeRecord, wanted: str) -> bool:
    folder = wanted.rstrip("/").rpartition("/")[2]
    return wanted in (record.model_id, record.model_name) or folder == record.model_name


def to_json(models: Sequence[ModelView]) -> list[dict[str, object]]:
    return [
        {
            "model_id": model.model_id,
            "num_blocks": model.num_blocks,
            "coverage": list(model.coverage),
            "holes": [[hole.start, hole.end] for hole in model.holes],
            "nodes": [record.model_dump(mode="json") for record in model.records],
        }
        for model in models
    ]


def print_models(models: Sequence[ModelView]) -> None:
    console = Console(
        file=sys.stdout,
        width=None if sys.stdout.isatty() else PIPE_WIDTH,
        # Names come from strangers and must stay plain text.
        markup=False,
        emoji=False,
        highlight=False,
    )
    if not models:
        console.print("no node was found: the swarm is empty, or serves other models only")
    for model in models:
        _print_model(console, model)


def print_dropped(dropped: Mapping[str, int]) -> None:
    """Say how many records were not believed; nothing if there were none."""
    reasons = {reason: count for reason, count in sorted(dropped.items()) if count}
    if reasons:
        words = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        print(f"dropped   {words} (records that were not believed)")


def _print_model(console: Console, model: ModelView) -> None:
    nodes = f"{len(model.records)} node{'' if len(model.records) == 1 else 's'}"
    console.print(Text(f"{model.model_id}, {model.num_blocks} blocks, {nodes}", style="bold"))
    console.print(_table(model.records))
    console.print(Text("coverage  "), _coverage_text(model.coverage), end="\n", sep="")
    if model.holes:
        names = ", ".join(str(hole) for hole in model.holes)
        console.print(Text(f"holes     {names}: nobody serves these blocks", style="bold red"))
    else:
        console.print(Text("holes     none", style="green"))


def _table(records: Sequence[NodeRecord]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("node")
    for name in ("peer", "blocks", "dtype"):
        table.add_column(name, no_wrap=True)
    for name in ("prefill", "decode", "cache free", "load", "up"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("sends", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for record in records:
        table.add_row(
            record.public_name or "-",
            short_peer(record.peer_id),
            str(Span(*record.span)),
            record.dtype if record.quantization == "none" else record.quantization,
            f"{record.prefill_tokens_per_s:.0f} t/s",
            f"{record.decode_tokens_per_s:.0f} t/s",
            f"{record.free_cache_tokens}/{record.total_cache_tokens}",
            f"{record.load:.0%}",
            duration(record.uptime_s),
            sends(record.sent_bytes),
            Text(record.state, style=_STATE_STYLES.get(record.state, "")),
        )
    return table


def sends(sent_bytes: Mapping[str, int]) -> str:
    """How a node's hidden states travel, by bytes: `int8:64:16`, or `int8:64:16 80%, none 20%`."""
    total = sum(sent_bytes.values())
    if not total:
        return "-"
    shares = [(codec, count / total) for codec, count in sent_bytes.items() if count * 100 >= total]
    if len(shares) == 1:
        return shares[0][0]
    largest_first = sorted(shares, key=lambda pair: -pair[1])
    return ", ".join(f"{codec} {share:.0%}" for codec, share in largest_first)


def _coverage_text(coverage: Sequence[int]) -> Text:
    """One character per block (per group of blocks for deep models): how many nodes hold it."""
    group = -(-len(coverage) // MAX_COVERAGE_CHARS)
    lowest = [min(coverage[at : at + group]) for at in range(0, len(coverage), group)]
    text = Text("0 ")
    for count in lowest:
        style = "bold red" if count == 0 else "yellow" if count == 1 else "green"
        text.append("." if count == 0 else str(min(count, 9)), style=style)
    text.append(f" {len(coverage)}")
    if group > 1:
        text.append(f"  (the least of every {group} blocks)")
    return text


def duration(seconds: float) -> str:
    """`42 s`, `7 min`, `3 h`, `12 d`."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
