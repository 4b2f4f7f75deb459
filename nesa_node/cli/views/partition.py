"""Output of a network's partition: table, JSON, and a drawing (matplotlib, extra `plan`)."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from rich.text import Text

from nesa_node.cli.views.text_parts import make_console, make_plain_table
from nesa_node.core.errors import ConfigError, OutputError, is_installed
from nesa_node.sharding.graph_plan import GraphPlan, encode_plan
from nesa_node.sharding.operation_graph import OperationGraph
from nesa_node.sharding.order_search import SearchProgress
from nesa_node.sharding.partition import GraphPartition, Piece

_PARTS = ("receive_s", "work_s", "overflow_s", "send_s")
_PIPE_WIDTH = 110


def print_partition(
    graph: OperationGraph, found: GraphPartition, names: Sequence[str], out: TextIO
) -> None:
    console = make_console(out, _PIPE_WIDTH)
    console.print(
        f"{len(graph)} operations, {graph.total_flop / 1e9:.1f} GFLOP, "
        f"{graph.total_parameter_bytes / 1e6:,.1f} MB of weights"
    )
    if graph.shares:
        runs = ", ".join(f"{share.name} {_times(share.runs)}" for share in graph.shares)
        console.print(f"a request runs {runs}: figures are for all runs")
    table = make_plain_table()
    begins = "network" if graph.shares else "from"
    for name in ("piece", "machine", "operations", begins):
        table.add_column(name, justify="left" if name == begins else "right", no_wrap=True)
    for name in ("receive", "work", "overflow", "send", "total", "weights", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, piece in enumerate(found.pieces, start=1):
        cells = _cells(graph, piece, found.bottleneck_s)
        table.add_row(str(number), _machine(piece, names), *cells)
    console.print(table)
    if idle := sum(not piece.operations for piece in found.pieces):
        console.print(
            f"{idle} machine{'s' if idle > 1 else ''} have no piece: passing values on would take "
            "longer than what is saved"
        )
    proof = (
        "no partition does better"
        if found.gap < 1e-3
        else f"no partition does better than {_ms(found.bound_s)} (gap at most {found.gap:.1%})"
    )
    console.print(f"a request every {_ms(found.bottleneck_s)}; {proof}")
    console.print(
        f"Kahn's order, cut best: {_ms(found.kahn_s)}; {found.generations} generations searched"
    )


def show_progress(progress: SearchProgress) -> None:
    """Keep one line on stderr, if that is a terminal."""
    if sys.stderr.isatty():
        line = f"generation {progress.generation}: {_ms(progress.bottleneck_s)}"
        print(f"\r{line:<40}", end="", file=sys.stderr, flush=True)


def _machine(piece: Piece, names: Sequence[str]) -> str:
    return f"{piece.machine + 1} {names[piece.machine]}".strip()


def _network(graph: OperationGraph, piece: Piece) -> str | None:
    """Of a pipeline the one that the piece is of."""
    if not graph.shares or not piece.operations:
        return None
    return graph.shares[graph.share_of[piece.operations[0]]].name


def _cells(graph: OperationGraph, piece: Piece, bottleneck_s: float) -> list[str | Text]:
    cost = piece.cost
    begins = "-"
    if piece.operations:
        begins = _network(graph, piece) or graph.operations[piece.operations[0]].name
    slowest = cost.total_s == bottleneck_s
    return [
        str(len(piece.operations)),
        begins if len(begins) <= 24 else begins[:23] + "…",
        *(_ms(getattr(cost, part)) for part in _PARTS),
        Text(_ms(cost.total_s), style="bold" if slowest else ""),
        f"{cost.parameter_bytes / 1e6:,.1f} MB",
        f"{cost.peak_bytes / 1e6:,.1f} MB",
    ]


def _times(runs: int) -> str:
    return "once" if runs == 1 else f"{runs} times"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def print_json(graph: OperationGraph, found: GraphPartition, names: Sequence[str]) -> None:
    document = {
        "operations": len(graph),
        "flop": graph.total_flop,
        "parameter_bytes": graph.total_parameter_bytes,
        "bottleneck_s": found.bottleneck_s,
        "bound_s": found.bound_s,
        "gap": found.gap,
        "kahn_s": found.kahn_s,
        "generations": found.generations,
        "networks": [{"name": share.name, "runs": share.runs} for share in graph.shares],
        "pieces": [
            {
                "machine": piece.machine + 1,
                "name": names[piece.machine],
                "network": _network(graph, piece),
                "operations": [graph.operations[each].name for each in piece.operations],
                **asdict(piece.cost),
                "total_s": piece.cost.total_s,
            }
            for piece in found.pieces
        ],
    }
    json.dump(document, sys.stdout, indent=2)
    print()


def check_svg(path: Path) -> None:
    """Check that `path` can be drawn to, before computing. Raises `ConfigError`."""
    if not is_installed("matplotlib"):
        raise ConfigError("--svg needs matplotlib: pip install 'nesa-node[plan]'")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--svg {path}: there is no folder {path.absolute().parent}")


def draw(found: GraphPartition, names: Sequence[str], path: Path) -> None:
    """Draw what each piece's time is made of, and the bound."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.45 * len(found.pieces)), layout="constrained")
    axis = figure.subplots()
    rows = range(len(found.pieces))
    done = [0.0] * len(found.pieces)
    for part in _PARTS:
        widths = [1000 * getattr(piece.cost, part) for piece in found.pieces]
        axis.barh(rows, widths, left=done, label=part.removesuffix("_s"))
        done = [left + width for left, width in zip(done, widths, strict=True)]
    axis.axvline(1000 * found.bound_s, color="black", linestyle="--", label="bound")
    titles = [
        f"{number}: machine {_machine(piece, names)}, {len(piece.operations)} operations"
        for number, piece in enumerate(found.pieces, start=1)
    ]
    axis.set_yticks(rows, titles)
    axis.invert_yaxis()
    axis.set_xlabel("ms of a request")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, 1.0 + 0.9 / (2 + len(titles))), ncols=5)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--svg {path}: {error}") from error


def write_plan(plan: GraphPlan, path: Path) -> None:
    """Write a plan as nodes read it. Raises `OutputError`."""
    try:
        path.write_bytes(encode_plan(plan))
    except OSError as error:
        raise OutputError(f"--out {path} cannot be written: {error.strerror}") from error
