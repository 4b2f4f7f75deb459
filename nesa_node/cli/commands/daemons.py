"""Commands that serve until stopped, and `nesa-node identity`."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from nesa_node.cli.flags import COMPUTE, Flags, ModelArgument, load_command_config
from nesa_node.cli.process_setup import exit_on_interrupt
from nesa_node.core.errors import require_node

if TYPE_CHECKING:
    from nesa_node.core.settings.models import (
        DashboardConfig,
        GatewayConfig,
        NodeConfig,
        OrchestratorConfig,
        PeerConfig,
    )

WhileStdinFlag = Annotated[
    bool, Parameter(show=False, negative=(), help="Stop when standard input ends.")
]
_MAX_OTHER_CONNECTIONS = 32
"""Most connections to the dashboard besides those of its viewers."""


def run(
    model: ModelArgument = None,
    /,
    *,
    while_stdin: WhileStdinFlag = False,
    flags: Flags["NodeConfig"] | None = None,
) -> int:
    """Offer this machine to a swarm, or serve a span of MODEL, until SIGTERM or Ctrl-C.

    Without MODEL it holds what an orchestrator assigns, within the limits of --pool-models and the
    like, or with --shards-gib what owners of models send. Without --initial-peers it starts a new
    swarm and prints the address to join it.
    """
    require_node("nesa-node run")
    from nesa_node.core.settings.models import NodeConfig

    config = load_command_config(NodeConfig, flags, model=model)
    if config.model is None:
        return _hold_shards(config) if config.shards_gib is not None else _offer_machine(config)
    with exit_on_interrupt(), _without_gc():
        from nesa_node.cli.services.side_services import (
            make_gateway_runner,
            serve_metrics_of,
            serve_page_of,
        )
        from nesa_node.server.node.daemon import run_node
        from nesa_node.swarm.p2p import tasks as event_loop

    gateway = make_gateway_runner(config, None if flags is None else flags.get("config"))

    async def serve() -> None:
        async with serve_metrics_of(config) as sources, serve_page_of(config) as show:
            await run_node(
                config,
                show,
                metric_sources=sources,
                side_task=gateway,
                while_stdin=while_stdin,
            )

    event_loop.run_event_loop(serve())
    return 0


def _offer_machine(config: NodeConfig) -> int:
    with exit_on_interrupt(), _without_gc():
        from nesa_node.cli.services.side_services import serve_metrics_of
        from nesa_node.server.pool.member import run_pool_member
        from nesa_node.swarm.p2p import tasks as event_loop

    async def serve() -> None:
        async with serve_metrics_of(config) as sources:
            await run_pool_member(config, metric_sources=sources)

    event_loop.run_event_loop(serve())
    return 0


def _hold_shards(config: NodeConfig) -> int:
    with exit_on_interrupt(), _without_gc():
        from nesa_node.cli.services.side_services import serve_metrics_of
        from nesa_node.server.shards.member import run_shard_member
        from nesa_node.swarm.p2p import tasks as event_loop

    async def serve() -> None:
        async with serve_metrics_of(config) as sources:
            await run_shard_member(config, metric_sources=sources)

    event_loop.run_event_loop(serve())
    return 0


@contextmanager
def _without_gc() -> Iterator[None]:
    """Import without garbage collections, a quarter of the import time, and exclude the imported
    objects from later ones."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def orchestrate(
    model: Annotated[
        str | None,
        Parameter(
            help="The model to plan for: its name, folder or full id. [default: the swarms that "
            "are asked for, or the only model that is served]"
        ),
    ] = None,
    /,
    *,
    flags: Flags["OrchestratorConfig"] | None = None,
) -> int:
    """Build the swarms that are asked for of machines on offer, and plan their placement.

    With MODEL only that swarm's placement is planned. Nodes follow placements of allowed peers
    (--allow-orchestrators), and those that they find to be a gain.
    """
    require_node("nesa-node orchestrate")
    from nesa_node.core.settings.models import OrchestratorConfig

    config = load_command_config(OrchestratorConfig, flags, model=model)
    with exit_on_interrupt():
        from nesa_node.cli.services.side_services import serve_metrics_of, serve_page_of
        from nesa_node.server.node.daemon import run_orchestrator
        from nesa_node.server.pool.builder import run_pool_orchestrator
        from nesa_node.swarm.p2p import tasks as event_loop

    work = run_pool_orchestrator if config.model is None else run_orchestrator

    async def serve() -> None:
        async with serve_metrics_of(config) as sources, serve_page_of(config) as show:
            await work(config, show, metric_sources=sources)

    event_loop.run_event_loop(serve())
    return 0


def bootstrap(*, flags: Flags["PeerConfig"] | None = None) -> int:
    """Run a bootstrap peer of the DHT: the address that peers give as --initial-peers."""
    from nesa_node.core.settings.models import PeerConfig

    config = load_command_config(PeerConfig, flags)
    with exit_on_interrupt():
        from nesa_node.cli.services.side_services import serve_metrics_of
        from nesa_node.server.node.daemon import run_bootstrap
        from nesa_node.swarm.p2p import tasks as event_loop

    async def serve() -> None:
        async with serve_metrics_of(config) as sources:
            await run_bootstrap(config, metric_sources=sources)

    event_loop.run_event_loop(serve())
    return 0


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
    while_stdin: WhileStdinFlag = False,
    flags: Flags["GatewayConfig"] | None = None,
) -> int:
    """Serve OpenAI's API over the models of a swarm, until SIGTERM or Ctrl-C."""
    from nesa_node.core.settings.models import GatewayConfig

    config = load_command_config(GatewayConfig, flags, models=model)
    from nesa_node.cli.client_model import resolve_initial_peers

    config = resolve_initial_peers(config, next(iter(config.offered_models), None))
    with exit_on_interrupt():
        from nesa_node.cli.services.gateway import run_gateway
        from nesa_node.cli.services.side_services import serve_metrics_of
        from nesa_node.swarm.p2p import tasks as event_loop

    async def serve() -> None:
        async with serve_metrics_of(config) as sources:
            await run_gateway(config, sources, while_stdin=while_stdin)

    event_loop.run_event_loop(serve())
    return 0


def dashboard(*, flags: Flags["DashboardConfig"] | None = None) -> int:
    """Serve a live web page about a swarm: its nodes, blocks, links and events."""
    from nesa_node.cli.client_model import resolve_initial_peers, save_last_swarm
    from nesa_node.core.settings.models import DashboardConfig

    config = resolve_initial_peers(load_command_config(DashboardConfig, flags))
    with exit_on_interrupt():
        from nesa_node.cli.swarm_reader import open_reader
        from nesa_node.core.settings.addresses import HttpAddress
        from nesa_node.core.settings.declaration import default_audits_path
        from nesa_node.dashboard.app import Dashboard, make_app
        from nesa_node.dashboard.training_curves import TrainingCurves
        from nesa_node.server.node.shutdown import Shutdown, stop_signals
        from nesa_node.swarm.p2p import tasks as event_loop
        from nesa_node.web.server import serve_authenticated

    async def serve() -> None:
        curves = TrainingCurves(config.trainings) if config.trainings else None
        page = Dashboard(
            curves=curves,
            audits_path=default_audits_path(),
            poll_interval_s=config.look_every_s,
            max_viewers=config.max_viewers,
        )
        connections = config.max_viewers + _MAX_OTHER_CONNECTIONS
        address = HttpAddress.parse(config.listen)
        with stop_signals() as stopping:
            async with (
                open_reader(config) as swarm,
                serve_authenticated(
                    make_app(page),
                    config,
                    address,
                    public=("/healthz",),
                    max_connections=connections,
                ) as found,
                page.watch_swarm(swarm),
            ):
                save_last_swarm(config)
                print(f"nesa-node dashboard listens on http://{found}/", flush=True)
                await Shutdown(stopping, swarm.transport).wait()

    event_loop.run_event_loop(serve())
    return 0


def identity(*, flags: Flags["PeerConfig"] | None = None) -> int:
    """Print the peer id of the key at --identity-path; create the key if there is none.

    The address of a bootstrap peer contains it: /dns4/HOST/tcp/PORT/p2p/PEER-ID.
    """
    from nesa_node.core.settings.models import PeerConfig

    config = load_command_config(PeerConfig, flags)
    from nesa_node.swarm.p2p.identity import Identity

    print(Identity.load_or_create(config.identity_path).peer_id)
    return 0
