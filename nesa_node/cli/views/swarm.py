"""Node records as a table and as JSON, once or repeatedly.

A repeated table is shown in place on a terminal, else one after the other.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import SequenceMatcher
from math import isnan
from typing import Literal

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from nesa_node.cli.client_model import short_peer_id
from nesa_node.cli.swarm_reader import open_reader, read_records
from nesa_node.cli.views.text_parts import coverage_text, make_console, make_plain_table
from nesa_node.client.verification.audit_history import AuditHistory
from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import PeerId, Span, model_name_candidates
from nesa_node.core.settings.models import ClientConfig
from nesa_node.swarm.dht.records import NodeRecord, filter_by_model, majority_num_blocks
from nesa_node.topology.links.matrix import peer_digest
from nesa_node.topology.snapshot import count_span_holders, zero_runs

MAX_COVERAGE_CHARS = 60
PIPE_WIDTH_CHARS = 120
"""Width of output to a pipe; narrower terminals omit the `wide_only` columns."""
_NARROW_NAME_CHARS = 16
_MAX_NAMED_MODELS = 5
_EMPTY_SWARM_TEXT = "no node was found: the swarm is empty"
_STATE_STYLES = {"serving": "green", "joining": "yellow", "draining": "yellow"}


@dataclass(frozen=True, slots=True)
class ModelNodes:
    """Nodes of one model id, ordered by their spans.

    `disagreeing_nodes` counts further nodes that announce another number of blocks. Which number is
    right is unknown without the checkpoint.
    """

    model_id: str
    num_blocks: int
    records: tuple[NodeRecord, ...]
    disagreeing_nodes: int = 0

    @property
    def coverage(self) -> tuple[int, ...]:
        """Number of serving nodes per block."""
        serving = (record.span for record in self.records if record.state == "serving")
        return count_span_holders(serving, self.num_blocks)

    @property
    def holes(self) -> tuple[Span, ...]:
        return zero_runs(self.coverage)


@dataclass(frozen=True, slots=True)
class DepartedNode:
    """A departed node: its record expired ("lost"), or it withdrew the record ("left")."""

    record: NodeRecord
    ago_s: float
    departure: Literal["lost", "left"]


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    cell: Callable[[NodeRecord], str]
    right: bool = False
    wide_only: bool = False


def group_by_model(records: Iterable[NodeRecord], wanted: str | None = None) -> list[ModelNodes]:
    """Group `records` by model; only `wanted` (a name, a folder or a full id) if given."""
    groups: dict[str, list[NodeRecord]] = {}
    for record in filter_by_model(records, wanted):
        if record.state != "withdrawn":
            groups.setdefault(record.model_id, []).append(record)
    models = []
    for model_id, group in sorted(groups.items()):
        num_blocks = majority_num_blocks(group)
        agreed = [record for record in group if record.num_blocks == num_blocks]
        ordered = tuple(sorted(agreed, key=lambda record: (record.span, record.peer_id)))
        models.append(ModelNodes(model_id, num_blocks, ordered, len(group) - len(agreed)))
    return models


def describe_absence(records: Iterable[NodeRecord], wanted: str | None) -> str:
    """Message for when no node serves `wanted`: the served models, most similar first."""
    served = {one.model_id: one.model_name for one in records if one.state != "withdrawn"}
    if wanted is None or not served:
        return _EMPTY_SWARM_TEXT
    names = model_name_candidates(wanted)

    def unlikeness(model_id: str) -> tuple[float, str]:
        pairs = ((name.lower(), served[model_id].lower()) for name in names)
        return min(1 - SequenceMatcher(None, *pair).ratio() for pair in pairs), model_id

    told = ", ".join(sorted(served, key=unlikeness)[:_MAX_NAMED_MODELS])
    more = f" and {len(served) - _MAX_NAMED_MODELS} more" if len(served) > _MAX_NAMED_MODELS else ""
    return f"no node serves {wanted!r}; the swarm serves {told}{more}"


def models_to_json(
    models: Sequence[ModelNodes], history: AuditHistory | None = None
) -> list[dict[str, object]]:
    """Models with their nodes and, with a `history`, what audits said of each."""
    return [
        {
            "model_id": model.model_id,
            "num_blocks": model.num_blocks,
            "coverage": list(model.coverage),
            "disagreeing_nodes": model.disagreeing_nodes,
            "holes": [[hole.start, hole.end] for hole in model.holes],
            "nodes": [
                node | ({} if history is None else _audits_to_json(node, history))
                for node in _nodes_to_json(model.records)
            ],
        }
        for model in models
    ]


def _audits_to_json(node: Mapping[str, object], history: AuditHistory) -> dict[str, object]:
    peer = PeerId(str(node["peer_id"]))
    return {
        "audits_passed": history.passed.get(peer, 0),
        "barred_for": history.barred.get(peer, ""),
    }


def _nodes_to_json(records: Sequence[NodeRecord]) -> list[dict[str, object]]:
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


def print_models(models: Sequence[ModelNodes], *, missing: str = _EMPTY_SWARM_TEXT) -> None:
    console = make_console(sys.stdout, PIPE_WIDTH_CHARS)
    console.print(render_models(models, width=console.width, missing=missing))


def render_models(
    models: Sequence[ModelNodes],
    *,
    width: int,
    departed: Sequence[DepartedNode] = (),
    missing: str = _EMPTY_SWARM_TEXT,
) -> Group:
    """Tables of all models with their nodes, then departed nodes of further models.

    `missing` is the text shown if there is no model.
    """
    parts: list[RenderableType] = []
    if not models:
        parts.append(Text(missing))
    for model in models:
        mine = [one for one in departed if one.record.model_id == model.model_id]
        parts += _render_model(model, mine, width=width)
    known = {model.model_id for model in models}
    others = [one for one in departed if one.record.model_id not in known]
    if others:
        parts.append(_nodes_table([], others, width=width))
    return Group(*parts)


def print_audits(models: Sequence[ModelNodes], history: AuditHistory) -> None:
    """Print what this user's audits said of the nodes; nothing of those never audited."""
    nodes = [PeerId(record.peer_id) for model in models for record in model.records]
    passed = [
        f"{short_peer_id(peer)} {history.passed[peer]}"
        for peer in nodes
        if history.passed.get(peer)
    ]
    if passed:
        print(f"audits    passed: {', '.join(passed)}")
    for peer in nodes:
        if reason := history.barred.get(peer):
            print(f"barred    {short_peer_id(peer)}: {reason}")


def print_dropped(dropped: Mapping[str, int]) -> None:
    """Print counts of rejected records by reason; nothing if there were none."""
    reasons = {reason: count for reason, count in sorted(dropped.items()) if count}
    if reasons:
        words = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        print(f"dropped   {words} (rejected records)")


def _render_model(
    model: ModelNodes, departed: Sequence[DepartedNode], *, width: int
) -> Iterator[RenderableType]:
    nodes = f"{len(model.records)} node{'' if len(model.records) == 1 else 's'}"
    yield Text(f"{model.model_id}, {model.num_blocks} blocks, {nodes}", style="bold")
    yield _nodes_table(model.records, departed, width=width)
    counts, group = coverage_text(model.coverage, MAX_COVERAGE_CHARS, above_nine="9")
    if group > 1:
        counts.append(f"  (minimum of every {group} blocks)")
    yield Text("coverage  ").append_text(counts)
    if model.holes:
        names = ", ".join(str(hole) for hole in model.holes)
        yield Text(f"holes     {names}: no node serves these blocks", style="bold red")
    else:
        yield Text("holes     none", style="green")
    if model.disagreeing_nodes:
        yield Text(
            f"left out  {model.disagreeing_nodes} more nodes announce another number of blocks "
            f"than {model.num_blocks}",
            style="yellow",
        )


def _nodes_table(
    records: Sequence[NodeRecord], departed: Sequence[DepartedNode], *, width: int
) -> Table:
    table = make_plain_table()
    narrow = width < PIPE_WIDTH_CHARS
    columns = [column for column in _COLUMNS if not (narrow and column.wide_only)]
    for column in columns:
        table.add_column(
            column.name,
            justify="right" if column.right else "left",
            no_wrap=narrow or column.name != "node",
            max_width=_NARROW_NAME_CHARS if narrow and column.name == "node" else None,
        )
    table.add_column("state", no_wrap=True)
    for record in records:
        state = Text(_format_state(record), style=_STATE_STYLES.get(record.state, ""))
        table.add_row(*(column.cell(record) for column in columns), state)
    for one in departed:
        style = "red" if one.departure == "lost" else "dim"
        cells = (Text(column.cell(one.record), style=style) for column in columns)
        table.add_row(
            *cells, Text(f"{one.departure} {format_duration(one.ago_s)} ago", style=style)
        )
    return table


def _format_state(record: NodeRecord) -> str:
    if record.state == "draining" and record.next_span is not None:
        return f"draining → {Span(*record.next_span)}"
    return record.state


def format_codecs(sent_bytes: Mapping[str, int]) -> str:
    """Codecs of sent hidden states, by share of bytes: `int8@2:16:8 80%, none 20%`."""
    total = sum(sent_bytes.values())
    if not total:
        return "-"
    shares = [(codec, count / total) for codec, count in sent_bytes.items() if count * 100 >= total]
    if len(shares) == 1:
        return shares[0][0]
    largest_first = sorted(shares, key=lambda pair: -pair[1])
    return ", ".join(f"{codec} {share:.0%}" for codec, share in largest_first)


def _format_precision(record: NodeRecord) -> str:
    weights = record.dtype if record.quantization == "none" else record.quantization
    return weights if record.cache_dtype == "auto" else f"{weights}, cache {record.cache_dtype}"


_COLUMNS = (
    _Column("node", lambda record: record.public_name or "-"),
    _Column("peer", lambda record: short_peer_id(record.peer_id)),
    _Column("blocks", lambda record: str(Span(*record.span))),
    _Column("dtype", _format_precision, wide_only=True),
    _Column("prefill", lambda r: f"{r.prefill_tokens_per_s:.0f} t/s", right=True, wide_only=True),
    _Column("decode", lambda r: f"{r.decode_tokens_per_s:.0f} t/s", right=True),
    _Column("cache free", lambda r: f"{r.free_cache_tokens}/{r.total_cache_tokens}", right=True),
    _Column("load", lambda record: f"{record.load:.0%}", right=True),
    _Column("up", lambda record: format_duration(record.uptime_s), right=True, wide_only=True),
    _Column("sends", lambda record: format_codecs(record.sent_bytes), wide_only=True),
)


def format_duration(seconds: float) -> str:
    """Duration as text: `42 s`, `7 min`, `3 h`, `12 d`."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


INTERVAL_BOUNDS_S = (0.2, 3600.0)
SHOW_DEPARTED_S = 600.0
"""Seconds for which departed nodes are shown."""
MAX_DEPARTED_NODES = 200


def check_interval(seconds: float) -> float:
    """Return `seconds`; raise `ConfigError` if it is out of range."""
    least, most = INTERVAL_BOUNDS_S
    if not least <= seconds <= most:
        raise ConfigError(f"--watch {seconds:g}: give {least:g} to {most:g} seconds")
    return seconds


class DepartureTracker:
    """Tracker of departed nodes. `clock` returns Unix seconds, as in records."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._last_records: Mapping[str, NodeRecord] = {}
        self._departed: dict[str, tuple[NodeRecord, float, Literal["lost", "left"]]] = {}

    def update(self, records: Sequence[NodeRecord]) -> list[DepartedNode]:
        """Process the current records; return departed nodes, the latest first."""
        now, here = self._clock(), {record.peer_id: record for record in records}
        for peer, record in self._last_records.items():
            if peer not in here:
                # A node that leaves in order withdraws its record before that expires.
                how: Literal["lost", "left"] = "lost" if record.expires_at <= now else "left"
                self._departed[peer] = (record, now, how)
        self._last_records = here
        kept = sorted(
            (entry for peer, entry in self._departed.items() if peer not in here),
            key=lambda entry: -entry[1],
        )[:MAX_DEPARTED_NODES]
        self._departed = {record.peer_id: (record, at, how) for record, at, how in kept}
        return [
            DepartedNode(record, now - at, how)
            for record, at, how in kept
            if now - at < SHOW_DEPARTED_S
        ]


@dataclass(frozen=True, slots=True)
class WatchFrame:
    """One reading of the swarm: its records, departed nodes, and rejected records by reason."""

    records: Sequence[NodeRecord]
    departed: Sequence[DepartedNode]
    dropped: Mapping[str, int]


async def watch_swarm(
    config: ClientConfig, every_s: float, show: Callable[[WatchFrame], None]
) -> None:
    """Read the swarm every `every_s` seconds until cancelled. Raises `BootstrapError`."""
    goings = DepartureTracker()
    async with open_reader(config) as swarm:
        while True:
            started = time.monotonic()
            seen = await read_records(swarm)
            show(WatchFrame(seen.records, goings.update(seen.records), seen.dropped))
            await asyncio.sleep(max(every_s - (time.monotonic() - started), 0.1))


@contextmanager
def open_watch_table(wanted: str | None) -> Iterator[Callable[[WatchFrame], None]]:
    """Yield a function that shows a reading on stdout."""
    console = make_console(sys.stdout, PIPE_WIDTH_CHARS)

    def view(look: WatchFrame) -> Group:
        return render_models(
            group_by_model(look.records, wanted),
            width=console.width,
            departed=[gone for gone in look.departed if group_by_model([gone.record], wanted)],
            missing=describe_absence(look.records, wanted),
        )

    def print_below(look: WatchFrame) -> None:
        console.print(time.strftime("--- %H:%M:%S"))
        console.print(view(look))
        sys.stdout.flush()

    if not console.is_terminal:
        yield print_below
        return
    with Live(console=console, auto_refresh=False, transient=False) as live:
        yield lambda look: live.update(view(look), refresh=True)
