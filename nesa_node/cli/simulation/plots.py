"""Plots of simulation results. Only this module needs matplotlib, of the extra `plan`."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nesa_node.core.errors import ConfigError

if TYPE_CHECKING:
    from nesa_node.cli.simulation.replay import ReplayedSnapshot
    from nesa_node.cli.simulation.swarm_source import SimulationOutcome
    from nesa_node.routing.placement.plan import SwarmPerformance

_SUFFIXES = (".svg", ".png", ".pdf")
_MAX_ROWS = 60


def check_plot(path: Path) -> None:
    """Check that `path` can be plotted to, before computing. Raises `ConfigError`."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'nesa-node[plan]'")
    if path.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"--plot {path}: the name must end in one of {', '.join(_SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.absolute().parent}")


def plot_outcome(outcome: SimulationOutcome, path: Path) -> None:
    """Plot the nodes' spans and the chain, now and after all moves."""
    figure, axes = _make_figure()
    answer = outcome.answer
    moved = {move.peer_id for move in answer.moves.moves}
    _draw_spans(axes[0], answer.before, "now", frozenset(outcome.lost), "lost")
    _draw_spans(axes[1], answer.settled, "after", moved | outcome.joined.keys(), "new or moved")
    axes[1].set_xlabel("block")
    _save_figure(figure, path)


def _draw_spans(
    axis: Any, stage: SwarmPerformance, name: str, marked: frozenset[str] | set[str], what: str
) -> None:
    nodes = sorted(stage.snapshot.nodes, key=lambda node: (node.span, node.peer_id))
    nodes = nodes[:_MAX_ROWS]
    used = {hop.peer_id: hop.span for hop in stage.chain}
    for row, node in enumerate(nodes):
        colour = "tab:orange" if node.peer_id in marked else "tab:blue"
        axis.barh(row, len(node.span), left=node.span.start, height=0.7, color=colour, alpha=0.4)
        if node.peer_id in used:
            run = used[node.peer_id]
            axis.barh(row, len(run), left=run.start, height=0.3, color="black")
    axis.set_yticks(range(len(nodes)), [node.peer_id for node in nodes], fontsize=6)
    axis.invert_yaxis()
    latency = f"{stage.latency_s * 1000:.0f} ms" if math.isfinite(stage.latency_s) else "no chain"
    axis.set_title(f"{name}: {latency}; black: the chain; orange: {what}", fontsize=9)


def plot_replay(rows: Sequence[ReplayedSnapshot], path: Path) -> None:
    """Plot latency and throughput over time, with a line at each time of moves."""
    figure, axes = _make_figure()
    at_min = [row.at_s / 60 for row in rows]
    latency_ms = [row.latency_s * 1000 for row in rows]
    axes[0].plot(at_min, [ms if math.isfinite(ms) else math.nan for ms in latency_ms])
    axes[0].set_ylabel("latency of a token, ms")
    axes[1].plot(at_min, [row.steps_per_s for row in rows])
    axes[1].set_ylabel("tokens/s of all nodes")
    axes[1].set_xlabel("minutes")
    for row, minute in zip(rows, at_min, strict=True):
        if row.moves.moves:
            for axis in axes:
                axis.axvline(minute, color="tab:orange", linewidth=0.8)
    _save_figure(figure, path)


def _make_figure() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7.2), layout="constrained")
    return figure, figure.subplots(2, 1, sharex=True)


def _save_figure(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error.strerror or error}") from None
