"""Terminal output of logged decisions, for `nesa-node explain`."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from itertools import groupby, islice
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nesa_node.cli.client_model import short_peer
from nesa_node.cli.placement_view import print_placement
from nesa_node.cli.tuning_view import print_tuning
from nesa_node.core.decision_log import Decision

PIPE_WIDTH = 100
_TERMS = {
    "entry_s": "transfer to the first node",
    "visits_s": "receiving and sending at nodes, and penalties for failures",
    "compute_s": "computing, including queueing",
    "transfer_s": "transfers between nodes",
    "exit_s": "transfer back",
}


def print_list(decisions: Sequence[Decision], rows: int) -> None:
    """Print a table of at most `rows` rows, of `decisions` from the newest; repeats share a row."""
    console = _console()
    if not decisions:
        console.print(
            "no decision was logged on this machine yet: run `generate` or `orchestrate` first"
        )
        return
    table = Table()
    for title in ("when", "what", "name", "strategy", "a step", "nodes or reason"):
        table.add_column(title, no_wrap=title in ("when", "name", "a step"))
    for told, group in islice(groupby(decisions, key=_told), rows):
        repeats = list(group)
        decision, (kind, strategy, reason) = repeats[0], told
        count = f" ({len(repeats)} times)" if len(repeats) > 1 else ""
        table.add_row(
            _when(decision)[5:],
            kind,
            _handle(decision),
            Text(strategy),
            _step(decision.body),
            Text(f"{reason}{count}"),
        )
    console.print(table)
    console.print("`nesa-node explain NAME` says why.")


def _told(decision: Decision) -> tuple[str, str, str]:
    """Key of a row: kind, strategy and reason. Equal neighbours are repeats."""
    chain = decision.body.get("chain") or []
    reason = " → ".join(map(_hop, chain)) or str(decision.body.get("reason", ""))
    return decision.kind, str(decision.body.get("strategy", "")), reason


def print_decision(decision: Decision) -> None:
    """Print one decision with its cost terms and alternatives."""
    if decision.kind == "session":
        _print_session(decision)
    elif decision.kind == "tuning":
        print_tuning(_console(), decision.name, _when(decision), decision.body)
    else:
        print_placement(_console(), decision.name, _when(decision), decision.body)


def _print_session(decision: Decision) -> None:
    console, body = _console(), decision.body
    console.print(
        Text(
            f"session {decision.name}, {_when(decision)}: {body['reason']}\n"
            f"model {body['model']}, strategy {body['strategy']}, among {body['nodes']} nodes"
            + (f" ({body['excluded']} were excluded)" if body["excluded"] else "")
        )
    )
    table = Table("node", "blocks", "transfer to it", "overhead", "computing", "load")
    for visit in body["chain"]:
        table.add_row(
            short_peer(visit["peer"]),
            _blocks(visit),
            *(_ms(visit[key]) for key in ("way_s", "visit_s", "compute_s")),
            f"{visit['load']:.2f}",
        )
    console.print(table)
    step_s = body["step_s"]
    causes = ", ".join(
        f"{_ms(seconds)} {_TERMS.get(term, term)}" for term, seconds in step_s.items() if seconds
    )
    console.print(Text(f"a step was expected to take {_ms(sum(step_s.values()))}: {causes}"))
    own = dict(body["terms"])
    lost_s = own.pop("failures_s", 0.0)
    if lost_s:
        console.print(Text(f"failures are expected to cost {_ms(lost_s)} more per token"))
    if own != dict(step_s):
        terms = ", ".join(f"{term} {value:.4g}" for term, value in body["terms"].items())
        console.print(Text(f"the strategy's own cost was {body['cost']:.4g}: {terms}"))
    _print_alternatives(console, body)


def _print_alternatives(console: Console, body: Mapping[str, Any]) -> None:
    table = Table("without", "instead", "a step", "more")
    chosen_s = sum(body["step_s"].values())
    for alternative in body["alternatives"]:
        chain = alternative["chain"]
        if chain is None:
            table.add_row(short_peer(alternative["without"]), "no other chain", "", "")
            continue
        table.add_row(
            short_peer(alternative["without"]),
            Text(" → ".join(_hop(visit) for visit in chain)),
            _ms(alternative["step_s"]),
            f"{100 * (alternative['step_s'] / chosen_s - 1):+.0f} %" if chosen_s else "",
        )
    console.print(table)


def _handle(decision: Decision) -> str:
    """Name of a decision as `explain` accepts it: 12 characters of a session's."""
    return decision.name[:12] if decision.kind == "session" else decision.name


def _step(body: Mapping[str, Any]) -> str:
    if body.get("step_s"):
        return _ms(sum(body["step_s"].values()))
    seconds = body.get("latency_s", (None, None))[0 if not body.get("moves") else 1]
    return "" if seconds is None else _ms(seconds)


def _hop(visit: Mapping[str, Any]) -> str:
    return f"{short_peer(visit['peer'])} {_blocks(visit)}"


def _blocks(visit: Mapping[str, Any]) -> str:
    start, end = visit["blocks"]
    return f"{start}:{end}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def _when(decision: Decision) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(decision.made_at))


def _console() -> Console:
    # Peer ids and model names are untrusted: no markup.
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False)
