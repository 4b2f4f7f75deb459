"""`nesa-node run MODEL`: serve a span of a model until stopped."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from nesa_node.cli.flags import ModelArgument, configure
from nesa_node.cli.interrupts import leaving_at_once
from nesa_node.cli.peer_flags import NodeFlags
from nesa_node.cli.with_metrics import with_metrics
from nesa_node.cli.with_page import with_page
from nesa_node.core.extras import require_node


def run(model: ModelArgument = None, /, *, flags: NodeFlags | None = None) -> int:
    """Serve a span of MODEL to the swarm, until SIGTERM or Ctrl-C.

    Without --initial-peers it starts a new swarm and prints the address to join it.
    """
    require_node("nesa-node run")
    from nesa_node.core.config import NodeConfig

    config = configure(NodeConfig, flags, model=model)
    with leaving_at_once(), _uncollected():
        from nesa_node.cli.with_api import with_api
        from nesa_node.server.daemon import run_node
        from nesa_node.swarm import event_loop

    beside = with_api(config, None if flags is None else flags.config)
    event_loop.run(
        with_metrics(
            config,
            lambda told: with_page(config, partial(run_node, config, told=told, beside=beside)),
        )
    )
    return 0


@contextmanager
def _uncollected() -> Iterator[None]:
    """Import without garbage collections, a quarter of the import time, and exclude the imported
    objects from later ones."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
