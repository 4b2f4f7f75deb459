"""Output of node records, as a table and as JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from math import isnan
from typing import Literal, TextIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from nesa_node.cli.client_model import short_peer
from nesa_node.core.ids import PeerId, possible_names
from nesa_node.core.span import Span
from nesa_node.swarm.records import NodeRecord, agreed_blocks, of_model
from nesa_node.topology.packed import peer_digest
from nesa_node.topology.snapshot import count_holders, zero_runs

MAX_COVERAGE_CHARS = 60
PIPE_WIDTH = 120
"""Width of output to a pipe; narrower terminals omit the `wide_only` columns."""
_NARROW_NAME = 16
_MOST_NAMED = 5
_EMPTY = "no node was found: the swarm is empty"
_STATE_STYLES = {"serving": "green", "joining": "yellow", "draining": "yellow"}


@dataclass(frozen=True, slots=True)
class ModelView:
    """Nodes of one model id, ordered by their spans.

    `disagreeing` counts further nodes that announce another number of blocks. Which number is right
    is unknown without the checkpoint.
    """

    model_id: str
    num_blocks: int
    records: tuple[NodeRecord, ...]
    disagreeing: int = 0

    @property
    def coverage(self) -> tuple[int, ...]:
        """Number of serving nodes per block."""
        serving = [record.node_state() for record in self.records if record.state == "serving"]
        return count_holders(serving, self.num_blocks)

    @property
    def holes(self) -> tuple[Span, ...]:
        return zero_runs(self.coverage)


@dataclass(frozen=True, slots=True)
class Gone:
    """A departed node: its record expired ("lost"), or it withdrew the record ("left")."""

    record: NodeRecord
    ago_s: float
    how: Literal["lost", "left"]


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    cell: Callable[[NodeRecord], str]
    right: bool = False
    wide_only: bool = False


def group_by_model(records: Iterable[NodeRecord], wanted: str | None = None) -> list[ModelView]:
    """Group `records` by model; only `wanted` (a name, a folder or a full id) if given."""
    groups: dict[str, list[NodeRecord]] = {}
    for record in of_model(records, wanted):
        if record.state != "withdrawn":
            groups.setdefault(record.model_id, []).append(record)
    return [_model_view(model_id, group) for model_id, group in sorted(groups.items())]


def _model_view(model_id: str, group: Sequence[NodeRecord]) -> ModelView:
    num_blocks = agreed_blocks(group)
    agreed = [record for record in group if record.num_blocks == num_blocks]
    return ModelView(
        model_id=model_id,
        num_blocks=num_blocks,
        records=tuple(sorted(agreed, key=lambda record: (record.span, record.peer_id))),
        disagreeing=len(group) - len(agreed),
    )


def absence(records: Iterable[NodeRecord], wanted: str | None) -> str:
    """Message for when no node serves `wanted`: the served models, most similar first."""
    served = {one.model_id: one.model_name for one in records if one.state != "withdrawn"}
    if wanted is None or not served:
        return _EMPTY
    names = possible_names(wanted)

    def unlikeness(model_id: str) -> tuple[float, str]:
        pairs = ((name.lower(), served[model_id].lower()) for name in names)
        return min(1 - SequenceMatcher(None, *pair).ratio() for pair in pairs), model_id

    told = ", ".join(sorted(served, key=unlikeness)[:_MOST_NAMED])
    more = f" and {len(served) - _MOST_NAMED} more" if len(served) > _MOST_NAMED else ""
    return f"no node serves {wanted!r}; the swarm serves {told}{more}"


def to_json(models: Sequence[ModelView]) -> list[dict[str, object]]:
    return [
        {
            "model_id": model.model_id,
            "num_blocks": model.num_blocks,
            "coverage": list(model.coverage),
            "disagreeing_nodes": model.disagreeing,
            "holes": [[hole.start, hole.end] for hole in model.holes],
            "nodes": _plain_nodes(model.records),
        }
        for model in models
    ]


def _plain_nodes(records: Sequence[NodeRecord]) -> list[dict[str, object]]:
    """Records as JSON objects. A link has a peer id if its peer is one of `records`."""
    peers = {peer_digest(PeerId(record.peer_id)): record.peer_id for record in records}
    return [
        record.model_dump(mode="json", exclude={"measured"})
        | {
            "measured": [
                {
                    "peer_id": peers.get(link.digest),
                    "peer_digest": link.digest.hex(),
                    "rtt_ms": round(link.rtt_ms, 3),
                    "rate_bytes_per_s": (
                        None if isnan(link.rate_bytes_per_s) else round(link.rate_bytes_per_s)
                    ),
                    "age_s": round(link.age_s, 1),
                }
                for link in record.measured_links()
            ]
        }
        for record in records
    ]


def make_console(out: TextIO) -> Console:
    return Console(
        file=out,
        width=None if out.isatty() else PIPE_WIDTH,
        # Names in records are untrusted: no markup.
        markup=False,
        emoji=False,
        highlight=False,
    )


def print_models(models: Sequence[ModelView], *, missing: str = _EMPTY) -> None:
    console = make_console(sys.stdout)
    console.print(models_view(models, width=console.width, missing=missing))


def models_view(
    models: Sequence[ModelView], *, width: int, gone: Sequence[Gone] = (), missing: str = _EMPTY
) -> Group:
    """Tables of all models with their nodes, then departed nodes of further models.

    `missing` is the text shown if there is no model.
    """
    parts: list[RenderableType] = []
    if not models:
        parts.append(Text(missing))
    for model in models:
        mine = [one for one in gone if one.record.model_id == model.model_id]
        parts += _model_parts(model, mine, width=width)
    known = {model.model_id for model in models}
    others = [one for one in gone if one.record.model_id not in known]
    if others:
        parts.append(_table([], others, width=width))
    return Group(*parts)


def print_dropped(dropped: Mapping[str, int]) -> None:
    """Print counts of rejected records by reason; nothing if there were none."""
    reasons = {reason: count for reason, count in sorted(dropped.items()) if count}
    if reasons:
        words = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        print(f"dropped   {words} (rejected records)")


def _model_parts(model: ModelView, gone: Sequence[Gone], *, width: int) -> Iterator[RenderableType]:
    nodes = f"{len(model.records)} node{'' if len(model.records) == 1 else 's'}"
    yield Text(f"{model.model_id}, {model.num_blocks} blocks, {nodes}", style="bold")
    yield _table(model.records, gone, width=width)
    yield Text("coverage  ").append_text(_coverage_text(model.coverage))
    if model.holes:
        names = ", ".join(str(hole) for hole in model.holes)
        yield Text(f"holes     {names}: no node serves these blocks", style="bold red")
    else:
        yield Text("holes     none", style="green")
    if model.disagreeing:
        yield Text(
            f"left out  {model.disagreeing} more nodes announce another number of blocks than "
            f"{model.num_blocks}",
            style="yellow",
        )


def _table(records: Sequence[NodeRecord], gone: Sequence[Gone], *, width: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    narrow = width < PIPE_WIDTH
    columns = [column for column in _COLUMNS if not (narrow and column.wide_only)]
    for column in columns:
        table.add_column(
            column.name,
            justify="right" if column.right else "left",
            no_wrap=narrow or column.name != "node",
            max_width=_NARROW_NAME if narrow and column.name == "node" else None,
        )
    table.add_column("state", no_wrap=True)
    for record in records:
        state = Text(_state(record), style=_STATE_STYLES.get(record.state, ""))
        table.add_row(*(column.cell(record) for column in columns), state)
    for one in gone:
        style = "red" if one.how == "lost" else "dim"
        cells = (Text(column.cell(one.record), style=style) for column in columns)
        table.add_row(*cells, Text(f"{one.how} {duration(one.ago_s)} ago", style=style))
    return table


def _state(record: NodeRecord) -> str:
    if record.state == "draining" and record.next_span is not None:
        return f"draining → {Span(*record.next_span)}"
    return record.state


def sends(sent_bytes: Mapping[str, int]) -> str:
    """Codecs of sent hidden states, by share of bytes: `int8@2:16:8 80%, none 20%`."""
    total = sum(sent_bytes.values())
    if not total:
        return "-"
    shares = [(codec, count / total) for codec, count in sent_bytes.items() if count * 100 >= total]
    if len(shares) == 1:
        return shares[0][0]
    largest_first = sorted(shares, key=lambda pair: -pair[1])
    return ", ".join(f"{codec} {share:.0%}" for codec, share in largest_first)


def _coverage_text(coverage: Sequence[int]) -> Text:
    """Count of serving nodes as one character per block, or per group of blocks (its minimum)."""
    group = -(-len(coverage) // MAX_COVERAGE_CHARS)
    lowest = [min(coverage[at : at + group]) for at in range(0, len(coverage), group)]
    text = Text("0 ")
    for count in lowest:
        style = "bold red" if count == 0 else "yellow" if count == 1 else "green"
        text.append("." if count == 0 else str(min(count, 9)), style=style)
    text.append(f" {len(coverage)}")
    if group > 1:
        text.append(f"  (minimum of every {group} blocks)")
    return text


def _precision(record: NodeRecord) -> str:
    return record.dtype if record.quantization == "none" else record.quantization


_COLUMNS = (
    _Column("node", lambda record: record.public_name or "-"),
    _Column("peer", lambda record: short_peer(record.peer_id)),
    _Column("blocks", lambda record: str(Span(*record.span))),
    _Column("dtype", _precision, wide_only=True),
    _Column("prefill", lambda r: f"{r.prefill_tokens_per_s:.0f} t/s", right=True, wide_only=True),
    _Column("decode", lambda r: f"{r.decode_tokens_per_s:.0f} t/s", right=True),
    _Column("cache free", lambda r: f"{r.free_cache_tokens}/{r.total_cache_tokens}", right=True),
    _Column("load", lambda record: f"{record.load:.0%}", right=True),
    _Column("up", lambda record: duration(record.uptime_s), right=True, wide_only=True),
    _Column("sends", lambda record: sends(record.sent_bytes), wide_only=True),
)


def duration(seconds: float) -> str:
    """Duration as text: `42 s`, `7 min`, `3 h`, `12 d`."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
