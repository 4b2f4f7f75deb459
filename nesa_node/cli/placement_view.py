"""Terminal output of a logged placement decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nesa_node.cli.client_model import short_peer

_CAUSES = {
    "hole": "unserved blocks",
    "replicas": "missing replicas",
    "gain": "a gain that lasts",
}
_PARAMETERS = {
    "min_gain": ("a gain of at least {:.0%}", 1.0),
    "horizon_s": ("which pays back within {:.0f} min", 1 / 60),
    "replicas": ("{:.0f} replicas of every block", 1.0),
}


def print_placement(console: Console, name: str, when: str, body: Mapping[str, Any]) -> None:
    """Print the trigger, the effect, each move and the reasons of moves not made."""
    done = "published" if body["published"] else "nothing was published"
    console.print(Text(f"placement {name}, {when}: {done}"))
    console.print(
        Text(
            f"model {body['model']}, {body['nodes']} nodes, epoch {body['epoch']}, strategy "
            f"{body['strategy']}{_schema(body)}\nfrom snapshot {body['based_on']}"
        )
    )
    if body["trigger"] != "none":
        console.print(Text(f"because of {_CAUSES.get(body['trigger'], body['trigger'])}"))
    console.print(Text(f"reason: {body['reason']}"))
    if body["refused"] and body["refused"] not in body["reason"]:
        console.print(Text(f"not done: {body['refused']}"))
    if body["moves"]:
        console.print(_before_and_after(body))
        console.print(_moves(body["moves"]))
        lost_s = body["parameters"].get("cost_s")
        if lost_s is not None:
            console.print(Text(f"moving costs {lost_s:.2g} s of the whole swarm's work"))
    elif body["latency_s"][0] is not None:
        console.print(
            Text(f"a step took {_ms(body['latency_s'][0])}, {_rate(body['steps_per_s'][0])} in all")
        )
    if body["parameters"]:
        console.print(Text(f"wanted: {_parameters(body)}"))
    if body["triggers"]:
        console.print(_triggers(body["triggers"]))


def _schema(body: Mapping[str, Any]) -> str:
    return f", schema {body['schema']}" if body["schema"] else ""


def _before_and_after(body: Mapping[str, Any]) -> Table:
    table = Table("", "before", "after", "")
    for title, key, shown in (("a step", "latency_s", _ms), ("all sessions", "steps_per_s", _rate)):
        before, after = body[key]
        change = f"{after / before - 1:+.0%}" if before and after is not None else ""
        table.add_row(title, shown(before), shown(after), change)
    if body["repairs"]:
        table.add_row("blocks repaired", "", str(body["repairs"]), "")
    return table


def _moves(moves: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("node", "from", "to", "saves", "loads", "hands over", "away", "wave")
    for move in moves:
        known = "load_s" in move
        table.add_row(
            short_peer(move["peer"]),
            "{}:{}".format(*move["was"]),
            "{}:{}".format(*move["to"]),
            f"{move['gain']:.1%}" if move["gain"] else "-",
            f"{move['load_bytes'] / 1e9:.1f} GB" if known else "",
            f"{move['hand_over_tokens']} tokens" if known else "",
            f"{move['load_s'] + move['hand_over_s']:.0f} s" if known else "",
            f"{move['wave'] + 1}" if known else "",
        )
    return table


def _triggers(triggers: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("trigger", "value", "threshold", "fired", "reason")
    for trigger in triggers:
        table.add_row(
            trigger["name"],
            "inf" if trigger["figure"] is None else f"{trigger['figure']:.3g}",
            f"{trigger['threshold']:.3g}",
            "yes" if trigger["fired"] else "no",
            Text(trigger["reason"]),
        )
    return table


def _parameters(body: Mapping[str, Any]) -> str:
    words = []
    for name, value in body["parameters"].items():
        if name == "cost_s":
            continue
        text, factor = _PARAMETERS.get(name, (f"{name} {{:.4g}}", 1.0))
        words.append(text.format(factor * value))
    return ", ".join(words)


def _ms(seconds: float | None) -> str:
    return "no chain" if seconds is None else f"{1000 * seconds:.1f} ms"


def _rate(steps_per_s: float | None) -> str:
    return "-" if steps_per_s is None else f"{steps_per_s:.1f} steps/s"
