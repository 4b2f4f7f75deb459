"""`nesa-node orchestrate`: an orchestrator that serves no blocks."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from cyclopts import Parameter

from nesa_node.cli.flags import configure
from nesa_node.cli.interrupts import leaving_at_once
from nesa_node.cli.peer_flags import OrchestratorFlags
from nesa_node.cli.with_metrics import with_metrics
from nesa_node.cli.with_page import with_page
from nesa_node.core.extras import require_node


def orchestrate(
    model: Annotated[
        str | None,
        Parameter(help="The model to plan for: its name, folder or full id. [default: the only]"),
    ] = None,
    /,
    *,
    flags: OrchestratorFlags | None = None,
) -> int:
    """Watch a swarm and publish signed placements while holding the model's lease.

    Nodes follow placements of allowed peers (--allow-orchestrators), and those that they find
    to be a gain.
    """
    require_node("nesa-node orchestrate")
    from nesa_node.core.config import OrchestratorConfig

    config = configure(OrchestratorConfig, flags, model=model)
    with leaving_at_once():
        from nesa_node.server.daemon import run_orchestrator
        from nesa_node.swarm import event_loop

    event_loop.run(
        with_metrics(
            config, lambda told: with_page(config, partial(run_orchestrator, config, told=told))
        )
    )
    return 0
