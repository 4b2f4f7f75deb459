"""Terminal output of logged decisions, for `nesa-node explain`."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from itertools import groupby, islice
from typing import Any

from rich.console import Console
from rich.table import Table

from nesa_node.cli.client_model import short_peer_id
from nesa_node.cli.views.text_parts import make_console
from nesa_node.core.decision_log import LoggedDecision
from nesa_node.verification.detection import sessions_until_found

_TRIGGER_LABELS = {
    "hole": "unserved blocks",
    "replicas": "missing replicas",
    "ahead": "blocks that are likely to lose all holders within the hour",
    "gain": "a gain that lasts",
    "spread": "blocks that are exposed to a failure domain",
}
_PARAMETER_LABELS = {
    "min_gain": ("a gain of at least {:.0%}", 1.0),
    "horizon_s": ("which pays back within {:.0f} min", 1 / 60),
    "replicas": ("{:.0f} replicas of every block", 1.0),
}


def _print_placement(console: Console, name: str, when: str, body: Mapping[str, Any]) -> None:
    """Print the trigger, the effect, each move and the reasons of moves not made."""
    done = "published" if body["published"] else "nothing was published"
    schema = f", schema {body['schema']}" if body["schema"] else ""
    console.print(f"placement {name}, {when}: {done}")
    console.print(
        f"model {body['model']}, {body['nodes']} nodes, epoch {body['epoch']}, strategy "
        f"{body['strategy']}{schema}\nfrom snapshot {body['based_on']}"
    )
    if body["trigger"] != "none":
        console.print(f"because of {_TRIGGER_LABELS.get(body['trigger'], body['trigger'])}")
    console.print(f"reason: {body['reason']}")
    if body.get("planning"):  # entries of earlier versions have none
        console.print(body["planning"])
    if body["refused"] and body["refused"] not in body["reason"]:
        console.print(f"not done: {body['refused']}")
    if body["moves"]:
        console.print(_comparison_table(body))
        console.print(_moves_table(body["moves"]))
        lost_s = body["parameters"].get("cost_s")
        if lost_s is not None:
            console.print(f"moving costs {lost_s:.2g} s of the whole swarm's work")
    elif body["latency_s"][0] is not None:
        latency, rate = _format_latency(body["latency_s"][0]), _format_rate(body["steps_per_s"][0])
        console.print(f"a step took {latency}, {rate} in all")
    if body["parameters"]:
        console.print(f"wanted: {_format_parameters(body)}")
    if body["triggers"]:
        console.print(_triggers_table(body["triggers"]))


def _comparison_table(body: Mapping[str, Any]) -> Table:
    table = Table("", "before", "after", "")
    for title, key, shown in (
        ("a step", "latency_s", _format_latency),
        ("all sessions", "steps_per_s", _format_rate),
    ):
        before, after = body[key]
        change = f"{after / before - 1:+.0%}" if before and after is not None else ""
        table.add_row(title, shown(before), shown(after), change)
    if body["repairs"]:
        table.add_row("blocks repaired", "", str(body["repairs"]), "")
    return table


def _moves_table(moves: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("node", "from", "to", "saves", "loads", "hands over", "away", "wave")
    for move in moves:
        known = "load_s" in move
        table.add_row(
            short_peer_id(move["peer"]),
            "{}:{}".format(*move["was"]),
            "{}:{}".format(*move["to"]),
            f"{move['gain']:.1%}" if move["gain"] else "-",
            f"{move['load_bytes'] / 1e9:.1f} GB" if known else "",
            f"{move['hand_over_tokens']} tokens" if known else "",
            f"{move['load_s'] + move['hand_over_s']:.0f} s" if known else "",
            f"{move['wave'] + 1}" if known else "",
        )
    return table


def _triggers_table(triggers: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("trigger", "value", "threshold", "fired", "reason")
    for trigger in triggers:
        table.add_row(
            trigger["name"],
            "inf" if trigger["figure"] is None else f"{trigger['figure']:.3g}",
            f"{trigger['threshold']:.3g}",
            "yes" if trigger["fired"] else "no",
            trigger["reason"],
        )
    return table


def _format_parameters(body: Mapping[str, Any]) -> str:
    words = []
    for name, value in body["parameters"].items():
        if name == "cost_s":
            continue
        text, factor = _PARAMETER_LABELS.get(name, (f"{name} {{:.4g}}", 1.0))
        words.append(text.format(factor * value))
    return ", ".join(words)


def _format_latency(seconds: float | None) -> str:
    return "no chain" if seconds is None else _format_ms(seconds)


def _format_rate(steps_per_s: float | None) -> str:
    return "-" if steps_per_s is None else f"{steps_per_s:.1f} steps/s"


def _print_tuning(console: Console, name: str, when: str, body: Mapping[str, Any]) -> None:
    """Print the tuned values with the reasons for them, and the result for schemas."""
    done = "changed" if body["published"] else "nothing was changed"
    console.print(f"{name}, {when}: {done}\nmodel {body['model']}")
    if body["candidates"]:
        console.print(
            f"{body['candidates']} candidates each, by the genetic algorithm and by chance, on "
            f"{body['learnt_from']} sessions; judged on {body['held_out']} that came later"
        )
    console.print(f"greedy rule: {body['reason']}")
    if body.get("cost_reason"):
        console.print(f"default cost: {body['cost_reason']}")
    values = ", ".join(f"{term} {value:.3g}" for term, value in body["exponents"].items())
    console.print(f"in use (version {body['version']}): {values}")
    console.print(f"schemas: {body['schemas']}")


PIPE_WIDTH_CHARS = 100
_TERM_LABELS = {
    "entry_s": "transfer to the first node",
    "visits_s": "receiving and sending at nodes, and penalties for failures",
    "compute_s": "computing, including queueing",
    "transfer_s": "transfers between nodes",
    "exit_s": "transfer back",
}

_WEIGHED_LABELS = {
    "failures_s": "failures are expected to cost",
    "stability_s": "unstable places in the network are expected to cost",
    "queueing_s": "tuned weights count queueing",
}
"""What the default cost of sessions adds to the time of a step."""


def print_decisions(decisions: Sequence[LoggedDecision], rows: int) -> None:
    """Print a table of at most `rows` rows, of `decisions` from the newest; repeats share a row."""
    console = make_console(sys.stdout, PIPE_WIDTH_CHARS)
    if not decisions:
        console.print(
            "no decision was logged on this machine yet: run `generate` or `orchestrate` first"
        )
        return
    table = Table()
    for title in ("when", "what", "name", "strategy", "a step", "nodes or reason"):
        table.add_column(title, no_wrap=title in ("when", "name", "a step"))
    for told, group in islice(groupby(decisions, key=_row_key), rows):
        repeats = list(group)
        decision, (kind, strategy, reason) = repeats[0], told
        count = f" ({len(repeats)} times)" if len(repeats) > 1 else ""
        table.add_row(
            _format_time(decision)[5:],
            kind,
            _short_name(decision),
            strategy,
            _format_step(decision.body),
            f"{reason}{count}",
        )
    console.print(table)
    console.print("`nesa-node explain NAME` says why.")


def _row_key(decision: LoggedDecision) -> tuple[str, str, str]:
    """Key of a row: kind, strategy and reason. Equal neighbours are repeats."""
    body = decision.body
    if decision.kind == "audit":
        audited = f"{_format_audited(body)} {_format_blocks(body)}"
        return decision.kind, "", f"{audited} {body['outcome']}"
    if decision.kind == "speculation":
        told = f"{body['tokens']} tokens in {body['steps']} steps, {body['gain']:.2f} x as fast"
        return decision.kind, "+".join(body["drafted"]), told
    chain = body.get("chain") or []
    reason = " → ".join(map(_format_hop, chain)) or str(body.get("reason", ""))
    return decision.kind, str(decision.body.get("strategy", "")), reason


def print_decision(decision: LoggedDecision) -> None:
    """Print one decision with its cost terms and alternatives."""
    printers = {
        "session": _print_session,
        "tuning": _print_tuning,
        "audit": _print_audit,
        "speculation": _print_speculation,
    }
    printer = printers.get(decision.kind, _print_placement)
    console = make_console(sys.stdout, PIPE_WIDTH_CHARS)
    printer(console, decision.name, _format_time(decision), decision.body)


def _print_audit(console: Console, name: str, when: str, body: Mapping[str, Any]) -> None:
    start, end = body["blocks"]
    what = f"audit of {_format_audited(body)}, blocks {start}:{end}, by the {body['auditor']}"
    console.print(f"{what}, {when}: {body['outcome']}")
    if body["worst"] is not None:
        allowed = body["of_allowed"]
        compared = "" if allowed is None else f", {allowed:.2g} of what is allowed"
        console.print(
            f"{body['tokens']} tokens: worst error {body['worst']:.2g}, mean {body['mean']:.2g}"
            f"{compared} ({body.get('scheme', 'relative-l2')})"
        )
    if body.get("excused"):
        console.print(f"{body['excused']} tokens were not judged: routers were undecided for them")
    if body["reason"]:
        console.print(body["reason"])
    rate = body["drawn_with"]
    console.print(
        f"drawn with a probability of {rate:.0%}: a node that lies in each session is found within "
        f"{sessions_until_found(rate)} of them (95 %)"
    )


def _print_speculation(console: Console, name: str, when: str, body: Mapping[str, Any]) -> None:
    console.print(
        f"speculation in session {name}, {when}: {body['tokens']} tokens in {body['steps']} steps, "
        f"{body['gain']:.2f} times as fast as one by one"
    )
    for source, drafted in body["drafted"].items():
        accepted = body["accepted"].get(source, 0)
        console.print(
            f"drafted by {source}: {drafted} tokens, {accepted} accepted ({accepted / drafted:.0%})"
        )


def _format_audited(body: Mapping[str, Any]) -> str:
    """The node, or the chain as a whole, that an audit is about."""
    peers = body.get("chain") or [body["peer"]]
    return " → ".join(map(short_peer_id, peers))


def _print_session(console: Console, name: str, when: str, body: Mapping[str, Any]) -> None:
    excluded = f" ({body['excluded']} were excluded)" if body["excluded"] else ""
    console.print(
        f"session {name}, {when}: {body['reason']}\n"
        f"model {body['model']}, strategy {body['strategy']}, among {body['nodes']} nodes{excluded}"
    )
    table = Table("node", "blocks", "transfer to it", "overhead", "computing", "load")
    for visit in body["chain"]:
        table.add_row(
            short_peer_id(visit["peer"]),
            _format_blocks(visit),
            *(_format_ms(visit[key]) for key in ("way_s", "visit_s", "compute_s")),
            f"{visit['load']:.2f}",
        )
    console.print(table)
    step_s = body["step_s"]
    causes = ", ".join(
        f"{_format_ms(seconds)} {_TERM_LABELS.get(term, term)}"
        for term, seconds in step_s.items()
        if seconds
    )
    prompt = body.get("prompt_tokens", 0)
    what = f"a step, with its share of a prompt of {prompt} tokens," if prompt else "a step"
    console.print(f"{what} was expected to take {_format_ms(sum(step_s.values()))}: {causes}")
    own = dict(body["terms"])
    for term, cause in _WEIGHED_LABELS.items():
        if own.pop(term, 0.0):
            console.print(f"{cause} {_format_ms(body['terms'][term])} more per token")
    if own != dict(step_s):
        terms = ", ".join(f"{term} {value:.4g}" for term, value in body["terms"].items())
        console.print(f"the strategy's own cost was {body['cost']:.4g}: {terms}")
    _print_alternatives(console, body)


def _print_alternatives(console: Console, body: Mapping[str, Any]) -> None:
    table = Table("without", "instead", "a step", "more")
    chosen_s = sum(body["step_s"].values())
    for alternative in body["alternatives"]:
        without, chain = short_peer_id(alternative["without"]), alternative["chain"]
        if chain is None:
            table.add_row(without, "no other chain", "", "")
            continue
        table.add_row(
            without,
            " → ".join(map(_format_hop, chain)),
            _format_ms(alternative["step_s"]),
            f"{100 * (alternative['step_s'] / chosen_s - 1):+.0f} %" if chosen_s else "",
        )
    console.print(table)


def _short_name(decision: LoggedDecision) -> str:
    """Name of a decision as `explain` accepts it: 12 characters of a session's."""
    return (
        decision.name[:12]
        if decision.kind in ("session", "audit", "speculation")
        else decision.name
    )


def _format_step(body: Mapping[str, Any]) -> str:
    if body.get("step_s"):
        return _format_ms(sum(body["step_s"].values()))
    seconds = body.get("latency_s", (None, None))[0 if not body.get("moves") else 1]
    return "" if seconds is None else _format_ms(seconds)


def _format_hop(visit: Mapping[str, Any]) -> str:
    return f"{short_peer_id(visit['peer'])} {_format_blocks(visit)}"


def _format_blocks(visit: Mapping[str, Any]) -> str:
    start, end = visit["blocks"]
    return f"{start}:{end}"


def _format_ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def _format_time(decision: LoggedDecision) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(decision.made_at))
