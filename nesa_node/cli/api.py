"""`nesa-node api`: OpenAI's API over the models of a swarm."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from cyclopts import Parameter

from nesa_node.cli.flags import COMPUTE, GatewayFlags, configure
from nesa_node.cli.interrupts import leaving_at_once
from nesa_node.cli.with_metrics import with_metrics


def api(
    *,
    model: Annotated[
        tuple[str, ...] | None,
        Parameter(
            metavar="MODEL",
            group=COMPUTE,
            negative=(),
            help="A folder or a hub name; may be repeated. [default: all models of the swarm that "
            "this machine can open]",
        ),
    ] = None,
    while_stdin: Annotated[
        bool, Parameter(show=False, negative=(), help="Stop when standard input ends.")
    ] = False,
    flags: GatewayFlags | None = None,
) -> int:
    """Serve OpenAI's API over the models of a swarm, until SIGTERM or Ctrl-C."""
    from nesa_node.core.config import GatewayConfig

    config = configure(GatewayConfig, flags, models=model)
    from nesa_node.cli.client_model import with_peers

    config = with_peers(config, next(iter(config.offered), None))
    with leaving_at_once():
        from nesa_node.cli.gateway import run_gateway
        from nesa_node.swarm import event_loop

    run = partial(run_gateway, config, while_stdin=while_stdin)
    event_loop.run(with_metrics(config, run))
    return 0
