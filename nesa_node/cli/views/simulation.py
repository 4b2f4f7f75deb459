"""Output of simulation results: tables, JSON, and plots (which need matplotlib, extra `plan`)."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nesa_node.cli.simulation_input import SimulationOutcome
from nesa_node.cli.views.text_parts import coverage_text, make_console, make_plain_table
from nesa_node.core.errors import ConfigError
from nesa_node.routing.chains import Hop
from nesa_node.routing.placement.moves import RebalancePlan
from nesa_node.routing.placement.plan import SwarmPerformance
from nesa_node.topology.snapshot import zero_runs

if TYPE_CHECKING:
    from nesa_node.cli.simulation_input import (
        ParetoChain,
        ReplayedSnapshot,
        SimulatedSwarm,
        SimulationOutcome,
    )
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


def plot_pareto(chains: Sequence[ParetoChain], path: Path) -> None:
    """Plot each chain's tokens/s over its latency, and its price; darker ones are more reliable."""
    figure, axes = _make_figure()
    latency_ms = [chain.objectives.latency_s * 1000 for chain in chains]
    reliability = [chain.objectives.reliability for chain in chains]
    for axis, name, values in (
        (axes[0], "tokens/s in a full pipeline", [c.objectives.tokens_per_s for c in chains]),
        (axes[1], "price of a token", [c.objectives.price for c in chains]),
    ):
        points = axis.scatter(latency_ms, values, c=reliability, cmap="Blues", edgecolors="black")
        axis.set_ylabel(name)
        figure.colorbar(points, ax=axis, label="reliability")
    axes[1].set_xlabel("latency of a token, ms")
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


TABLE_WIDTH_CHARS = 100
_MAX_HOPS = 12
_MAX_LISTED = 12
_COVERAGE_CHARS = 80


def print_outcome(outcome: SimulationOutcome, *, as_json: bool) -> None:
    if as_json:
        json.dump(outcome_json(outcome), sys.stdout, indent=2)
        print()
        return
    console = _make_console()
    question, answer = outcome.question, outcome.answer
    before = answer.before.snapshot
    title = f"{outcome.name}: {len(before.nodes)} nodes, {before.num_blocks} blocks"
    console.print(Text(title, style="bold"))
    holders = "a replica" if question.replicas == 1 else f"{question.replicas} replicas"
    console.print(f"wanted    {question.goal}, {holders} of every block")
    console.print(f"client    {outcome.client}")
    if outcome.joined:
        told = [f"{peer} takes {span}" for peer, span in outcome.joined.items()]
        console.print(f"joins     {_join_limited(told)}")
    if outcome.lost:
        console.print(f"lost      {_join_limited(outcome.lost)}")
    console.print()
    console.print(_comparison_table(outcome))
    console.print()
    _print_moves(console, answer.moves)
    console.print()
    for name, stage in _named_stages(outcome):
        counts, _ = coverage_text(stage.coverage, _COVERAGE_CHARS, above_nine="+")
        console.print(f"{name:<13}", counts, sep="")
    console.print()
    console.print(f"chain     {_format_chain(answer.settled.chain)}", soft_wrap=False)
    console.print(_format_bound(outcome))


def _make_console() -> Console:
    console = make_console(sys.stdout, TABLE_WIDTH_CHARS)
    console.width = min(TABLE_WIDTH_CHARS, console.width)
    return console


def _named_stages(outcome: SimulationOutcome) -> list[tuple[str, SwarmPerformance]]:
    answer = outcome.answer
    stages = [("now", answer.before)]
    if outcome.joined or outcome.lost:
        stages.append(("changed", answer.changed))
    if answer.moves.moves:
        stages.append(("after moves", answer.settled))
    stages.append(("placed anew", answer.best))
    return stages


def _comparison_table(outcome: SimulationOutcome) -> Table:
    stages = _named_stages(outcome)
    table = make_plain_table()
    table.add_column("")
    for name, _ in stages:
        table.add_column(name, justify="right", no_wrap=True)
    first = stages[0][1]

    def row(title: str, cell: Callable[[SwarmPerformance], str]) -> None:
        table.add_row(title, *(cell(stage) for _, stage in stages))

    row(
        "latency of a token",
        lambda each: _format_change(_format_ms(each.latency_s), each.latency_s, first.latency_s),
    )
    row(
        "tokens/s of all nodes",
        lambda each: _format_change(f"{each.steps_per_s:.1f}", each.steps_per_s, first.steps_per_s),
    )
    row("hops of the chain", lambda each: str(len(each.chain)) if each.chain else "no chain")
    row("fewest holders of a block", lambda each: str(min(each.coverage)))
    row("unserved blocks", _format_holes)
    row("exposures", lambda each: str(each.exposed or "none"))
    row("replicas missing", lambda each: str(each.deficit.replicas or "none"))
    return table


def _format_change(text: str, value: float, first: float) -> str:
    """`text` with the change from `first` in percent, padded to a fixed width."""
    if value == first or not (math.isfinite(value) and math.isfinite(first)) or first == 0:
        return f"{text}       "
    return f"{text} {value / first - 1:>+6.0%}"


def _format_holes(stage: SwarmPerformance) -> str:
    holes = zero_runs(stage.coverage)
    return ", ".join(map(str, holes[:2])) + (", ..." if len(holes) > 2 else "") or "none"


def _print_moves(console: Console, moves: RebalancePlan) -> None:
    if not moves.moves:
        console.print("moves     none" + (f": {moves.refused}" if moves.refused else ""))
        return
    why = {
        "hole": "unserved blocks",
        "replicas": "missing replicas",
        "ahead": moves.forecast,
        "gain": f"a gain of {moves.gain:.0%} that pays back in {_format_duration(moves.payback_s)}",
        "spread": "blocks that are exposed to a failure domain",
        "none": "",
    }[moves.trigger]
    console.print(f"moves     because of {why}")
    table = make_plain_table()
    for name in ("node", "from", "to"):
        table.add_column(name, no_wrap=True)
    for name in ("saves", "loads", "hands over", "away", "wave"):
        table.add_column(name, justify="right", no_wrap=True)
    for move in moves.moves:
        table.add_row(
            move.peer_id,
            str(move.before) if len(move.before) else "nothing",
            str(move.after),
            f"{move.gain:.0%}" if move.reason == "gain" else "-",
            f"{move.load_bytes / 1e9:.1f} GB",
            f"{move.cache_tokens} tokens" if move.cache_tokens else "nothing",
            _format_duration(move.away_s),
            str(move.wave + 1),
        )
    console.print(table)
    if moves.refused:
        console.print(f"          {moves.refused}")


def _format_chain(chain: Sequence[Hop]) -> str:
    if not chain:
        return "none: some blocks are unserved"
    names = [f"{hop.peer_id} {hop.span}" for hop in chain[:_MAX_HOPS]]
    return " -> ".join(names) + (" -> ..." if len(chain) > _MAX_HOPS else "")


def _format_bound(outcome: SimulationOutcome) -> str:
    placement = outcome.answer.placement
    if not math.isfinite(placement.bound) or placement.bound == 0:
        return "bound     these nodes cannot hold the model, wherever they are placed"
    least = (
        f"is below {_format_ms(placement.bound)}"
        if placement.goal == "latency"
        else f"does more than {placement.bound:.1f} tokens/s"
    )
    return (
        f"bound     no placement {least}; placed anew ({placement.method}) they are within "
        f"{max(placement.gap, 0.0):.1%} of that"
    )


def _format_ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if math.isfinite(seconds) else "-"


def _format_duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _join_limited(words: Sequence[str]) -> str:
    more = len(words) - _MAX_LISTED
    return ", ".join(words[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def outcome_json(outcome: SimulationOutcome) -> dict[str, Any]:
    question, answer = outcome.question, outcome.answer
    return {
        "swarm": outcome.name,
        "goal": question.goal,
        "replicas": question.replicas,
        "joined": {peer: str(span) for peer, span in outcome.joined.items()},
        "lost": list(outcome.lost),
        "now": _stage_json(answer.before),
        "changed": _stage_json(answer.changed),
        "after_moves": _stage_json(answer.settled),
        "placed_anew": _stage_json(answer.best)
        | {"bound": _finite_or_none(answer.placement.bound), "method": answer.placement.method},
        "moves": moves_json(answer.moves),
    }


def _stage_json(stage: SwarmPerformance) -> dict[str, Any]:
    return {
        "latency_s": _finite_or_none(stage.latency_s),
        "tokens_per_s": _finite_or_none(stage.steps_per_s),
        "coverage": list(stage.coverage),
        "holes": [[hole.start, hole.end] for hole in zero_runs(stage.coverage)],
        "replicas_missing": stage.deficit.replicas,
        "exposed": stage.exposed,
        "chain": [[hop.peer_id, hop.span.start, hop.span.end] for hop in stage.chain],
        "spans": {node.peer_id: str(node.span) for node in stage.snapshot.nodes},
    }


def moves_json(moves: RebalancePlan) -> dict[str, Any]:
    return {
        "trigger": moves.trigger,
        "gain": _finite_or_none(moves.gain),
        "cost_s": _finite_or_none(moves.cost_s),
        "pays_back_s": _finite_or_none(moves.payback_s),
        "refused": moves.refused,
        "moves": [
            {
                "node": move.peer_id,
                "from": str(move.before),
                "to": str(move.after),
                "reason": move.reason,
                "gain": _finite_or_none(move.gain),
                "load_bytes": move.load_bytes,
                "load_s": move.load_s,
                "cache_tokens": move.cache_tokens,
                "hand_over_s": move.hand_over_s,
                "wave": move.wave,
            }
            for move in moves.moves
        ],
    }


def _finite_or_none(value: float) -> float | None:
    """`value`, or None if it is infinite or NaN, which JSON lacks."""
    return value if math.isfinite(value) else None


def print_pareto(swarm: SimulatedSwarm, chains: Sequence[ParetoChain], *, as_json: bool) -> None:
    if as_json:
        json.dump([_pareto_json(chain) for chain in chains], sys.stdout, indent=2)
        print()
        return
    console = _make_console()
    console.print(Text(f"{swarm.name}: {len(chains)} chains on the Pareto front", style="bold"))
    if not chains:
        console.print(_format_chain(()))
        return
    table = make_plain_table()
    for name in ("latency", "tokens/s", "reliability", "price"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("chain")
    for chain in chains:
        of = chain.objectives
        table.add_row(
            _format_ms(of.latency_s),
            f"{of.tokens_per_s:.1f}",
            f"{of.reliability:.1%}",
            f"{of.price:.4g}",
            _format_chain(chain.hops),
        )
    console.print(table)


def _pareto_json(chain: ParetoChain) -> dict[str, Any]:
    of = chain.objectives
    return {
        "latency_s": of.latency_s,
        "tokens_per_s": _finite_or_none(of.tokens_per_s),
        "reliability": of.reliability,
        "price": of.price,
        "chain": [[hop.peer_id, hop.span.start, hop.span.end] for hop in chain.hops],
    }


def print_replay(rows: Sequence[ReplayedSnapshot], *, as_json: bool) -> None:
    if as_json:
        json.dump([_replayed_json(row) for row in rows], sys.stdout, indent=2)
        print()
        return
    console = _make_console()
    table = make_plain_table()
    for name in ("at", "nodes", "latency", "tokens/s", "holders", "holes", "triggers"):
        table.add_column(name, justify="left" if name == "triggers" else "right", no_wrap=True)
    table.add_column("moves it would have made")
    for row in rows:
        words = [f"{move.peer_id} {move.before}>{move.after}" for move in row.moves.moves]
        table.add_row(
            _format_duration(row.at_s),
            str(row.nodes),
            _format_ms(row.latency_s),
            f"{row.steps_per_s:.1f}",
            str(row.fewest_holders),
            ", ".join(map(str, row.holes)) or "none",
            row.moves.trigger if row.moves.trigger != "none" else "-",
            _join_limited(words) or row.moves.refused or "-",
        )
    console.print(table)
    moved = sum(len(row.moves.moves) for row in rows)
    console.print(f"{len(rows)} snapshots, {moved} moves")


def _replayed_json(row: ReplayedSnapshot) -> dict[str, Any]:
    return {
        "at_s": row.at_s,
        "nodes": row.nodes,
        "latency_s": _finite_or_none(row.latency_s),
        "tokens_per_s": _finite_or_none(row.steps_per_s),
        "fewest_holders": row.fewest_holders,
        "holes": [[hole.start, hole.end] for hole in row.holes],
        **moves_json(row.moves),
    }
