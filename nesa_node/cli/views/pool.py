"""Tables of a pool: swarms that were asked for, and machines on offer."""

from __future__ import annotations

import sys

from nesa_node.cli.views.text_parts import make_console, make_plain_table
from nesa_node.server.pool.requests import PoolView

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


def print_machines(view: PoolView) -> None:
    """A line for each machine and model that it holds."""
    console = make_console(sys.stdout, _PIPE_WIDTH_CHARS)
    if not view.offers:
        console.print("no machine is on offer; `nesa-node run` without a model offers one")
        return
    table = make_plain_table()
    for heading in ("MACHINE", "DEVICE", "MEMORY", "MODEL", "STATE", "BLOCKS", "WEIGHTS", "REASON"):
        table.add_column(heading)
    for offer in view.offers:
        name = offer.public_name or offer.peer_id[-8:]
        memory = f"{offer.memory_free_bytes / _GB:.1f} of {offer.memory_total_bytes / _GB:.1f} GB"
        rows: list[tuple[str, ...]] = [
            (each.model, each.state, str(each.blocks), each.quant_type, each.reason)
            for each in offer.held
        ] or [("", "free" if offer.models else "away", "", "", offer.away_reason)]
        for row in rows:
            table.add_row(name, offer.device, memory, *row)
            name, memory = "", ""
    console.print(table)
