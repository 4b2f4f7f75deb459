"""Tables of a pool: swarms that were asked for, and machines on offer."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence

from nesa_node.cli.views.text_parts import make_console, make_plain_table
from nesa_node.core.errors import SwarmError
from nesa_node.core.ids import PeerId
from nesa_node.server.pool.dry_run import DryRun, MachineLabel, Wanted
from nesa_node.server.pool.requests import PoolView
from nesa_node.server.pool.speeds import (
    PROMPT_TOKENS,
    TimedSpan,
    chain_s,
    fastest_chain,
    measured_spans,
)
from nesa_node.swarm.dht.pool_notices import Offer
from nesa_node.swarm.dht.records import NodeRecord, majority_num_blocks

_PIPE_WIDTH_CHARS = 160
_GB = 10**9


def print_swarms(view: PoolView) -> None:
    """A line for each swarm."""
    console = make_console(sys.stdout, _PIPE_WIDTH_CHARS)
    if not view.statuses:
        console.print("no orchestrator builds swarms here; start one with `nesa-node orchestrate`")
        return
    if not view.swarms:
        console.print("no swarm is asked for; `nesa-node swarm create MODEL` asks for one")
        return
    table = make_plain_table()
    for heading in ("MODEL", "STATE", "REPLICAS", "MACHINES", "PREDICTED", "REASON"):
        table.add_column(heading)
    for each in view.swarms:
        speed = each.predicted_tokens_per_s
        table.add_row(
            each.model,
            each.state,
            f"{each.replicas} of {each.wanted}",
            str(each.machines),
            f"{speed:.1f} tokens/s" if speed else "",
            each.reason,
        )
    console.print(table)


def print_swarm(
    model: str,
    everything: PoolView,
    records: Sequence[NodeRecord],
    rtts_ms: Mapping[PeerId, float],
    *,
    as_json: bool,
) -> None:
    """A model's swarm: state, prediction, what its nodes measured, machines with and without it.

    `records` are those of its nodes, `rtts_ms` their round trips from here.
    """
    view = everything.of_model(model)
    num_blocks = majority_num_blocks(records)
    chain = fastest_chain(measured_spans(records, rtts_ms), num_blocks) if num_blocks else ()
    measured = 1 / chain_s(chain) if chain else None
    speeds = {record.peer_id: record.decode_tokens_per_s for record in records}
    if as_json:
        content = view.as_json() | {
            "measured_tokens_per_s": measured,
            "decode_tokens_per_s": speeds,
        }
        json.dump(content, sys.stdout, indent=2)
        print()
        return
    print_swarms(view)
    told = "nothing yet" if measured is None else f"{measured:.1f} tokens/s"
    source = "its fastest nodes' own speeds and round trips from here, without the client's head"
    print(f"measured: {told} ({source})")
    print_machines(view, speeds)
    if text := _describe_unused(model, everything):
        print(f"without it: {text}")


def _describe_unused(model: str, view: PoolView) -> str:
    """Machines on offer that hold nothing of a model, by the reason that their offers give."""
    counts: Counter[str] = Counter()
    for offer in view.offers:
        if all(each.model != model for each in offer.held):
            reason = "may hold it" if offer.models else offer.away_reason or "away"
            if offer.models and not offer.allows(model):
                reason = "its operator does not allow it"
            counts[reason] += 1
    return "; ".join(
        f"{count} machine{'s' if count > 1 else ''}: {reason}"
        for reason, count in sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    )


def print_machines(view: PoolView, speeds: Mapping[str, float] | None = None) -> None:
    """A line for each machine and model that it holds.

    `speeds` are measured tokens/s of nodes through their spans, by peer id.
    """
    console = make_console(sys.stdout, _PIPE_WIDTH_CHARS)
    if not view.offers:
        console.print("no machine is on offer; `nesa-node run` without a model offers one")
        return
    table = make_plain_table()
    headings = ["MACHINE", "DEVICE", "MEMORY", "MODEL", "STATE", "BLOCKS", "WEIGHTS", "REASON"]
    if speeds is not None:
        headings.insert(-1, "MEASURED")
    for heading in headings:
        table.add_column(heading)
    for offer in view.offers:
        name = offer.public_name or offer.peer_id[-8:]
        memory = f"{offer.memory_free_bytes / _GB:.1f} of {offer.memory_total_bytes / _GB:.1f} GB"
        for row in _machine_rows(offer, speeds):
            table.add_row(name, offer.device, memory, *row)
            name, memory = "", ""
    console.print(table)


def _machine_rows(offer: Offer, speeds: Mapping[str, float] | None) -> list[list[str]]:
    """The cells from the model on: a row for each model that the machine holds, or one."""
    state = "free" if offer.models else "away"
    rows = [
        [each.model, each.state, str(each.blocks), each.quant_type, each.reason]
        for each in offer.held
    ] or [["", state, "", "", offer.away_reason]]
    if speeds is not None:
        nodes = [each.node or "" for each in offer.held] or [""]
        for row, node in zip(rows, nodes, strict=True):
            row.insert(-1, f"{speeds[node]:.1f} tokens/s" if speeds.get(node) else "")
    return rows


def print_dry_run(
    wanted: Wanted, planned: DryRun, labels: Mapping[PeerId, MachineLabel], *, as_json: bool
) -> None:
    """A line of what would be built, and one for each machine.

    Raises `SwarmError` where not even one replica would be.
    """
    if not planned.replicas:
        raise SwarmError(f"{wanted.model} would not be built: {planned.shortage}")
    if as_json:
        names = {peer: label.name for peer, label in labels.items()}
        content = {"model": wanted.model, "wanted": wanted.replicas, "names": names}
        json.dump(content | planned.as_json(), sys.stdout, indent=2)
        print()
        return
    console = make_console(sys.stdout, _PIPE_WIDTH_CHARS)
    console.print(f"{_describe_dry_run(wanted, planned)}; nothing was asked for", soft_wrap=True)
    table = make_plain_table()
    for heading in ("MACHINE", "DEVICE", "STATE", "BLOCKS", "WEIGHTS", "TAKES", "LEFT", "STEP"):
        table.add_column(heading)
    for held in planned.held:
        label = labels[held.peer]
        state = ("holds it", str(held.span), "", "", "")
        table.add_row(label.name, label.device, *state, _step_text(held))
    for each in planned.spans:
        label, span = labels[each.timed.peer], str(each.timed.span)
        sizes = [f"{count / _GB:.1f} GB" for count in (each.size_bytes, each.left_bytes)]
        row = (label.name, label.device, "would load", span, each.quant_type, *sizes)
        table.add_row(*row, _step_text(each.timed))
    console.print(table)


def _describe_dry_run(wanted: Wanted, planned: DryRun) -> str:
    machines = len(planned.held) + len(planned.spans)
    text = f"{wanted.model}: {planned.replicas} of {wanted.replicas} replicas"
    text += f" on {machines} machines" if machines != 1 else " on 1 machine"
    if not math.isnan(planned.step_s):
        text += (
            f", {1 / planned.step_s:.1f} tokens/s predicted, the first token of a prompt of "
            f"{PROMPT_TOKENS} after {planned.first_token_s:.2f} s"
        )
    return f"{text}; {planned.shortage}" if planned.shortage else text


def _step_text(timed: TimedSpan) -> str:
    """Time of a token through the span, and on the way."""
    known = not math.isnan(timed.step_s)
    return f"{1e3 * timed.step_s:.1f} + {1e3 * timed.hop_s:.1f} ms" if known else ""
