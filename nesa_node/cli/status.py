"""`nesa-node status`: who serves which blocks, and which blocks nobody serves."""

from __future__ import annotations

import json
import sys
from typing import Annotated

from cyclopts import Parameter

from nesa_node.cli.flags import OUTPUT, ClientFlags, configure


def status(
    model: Annotated[
        str | None, Parameter(help="Only this model: its name, folder or full id. [default: all]")
    ] = None,
    /,
    *,
    as_json: Annotated[
        bool, Parameter(name="--json", negative=(), group=OUTPUT, help="Print JSON.")
    ] = False,
    flags: ClientFlags | None = None,
) -> int:
    """Show the nodes of a swarm, their blocks and speeds, and the blocks that nobody serves."""
    import asyncio

    from nesa_node.cli.client_model import require_peers
    from nesa_node.core.config import ClientConfig

    config = configure(ClientConfig, flags, model=model)
    require_peers(config)
    from nesa_node.cli.reading import read_swarm
    from nesa_node.cli.swarm_view import group_by_model, print_dropped, print_models, to_json

    reading = asyncio.run(read_swarm(config))
    models = group_by_model(reading.records, config.model)
    if as_json:
        json.dump(to_json(models), sys.stdout, indent=2)
        print()
    else:
        print_models(models)
        print_dropped(reading.dropped)
    return 0
