"""Dashboard process: serves the page as a DHT client that answers no requests of peers."""

from __future__ import annotations

from nesa_node.cli.client_model import save_last_swarm
from nesa_node.cli.swarm_reader import open_reader
from nesa_node.core.settings.addresses import HttpAddress
from nesa_node.core.settings.models import DashboardConfig
from nesa_node.dashboard.app import Dashboard, make_app
from nesa_node.server.node.shutdown import Shutdown, stop_signals
from nesa_node.web.server import serve_authenticated

PUBLIC_PATHS = ("/healthz",)
_EXTRA_CONNECTIONS = 32


async def serve_dashboard(config: DashboardConfig) -> None:
    """Serve the page until SIGTERM or SIGINT.

    Raises `BootstrapError` if no initial peer answers, `SwarmError` if libp2p's daemon ends,
    `ConfigError` if the page would be public without a key, and `AddressInUseError`.
    """
    page = Dashboard(poll_interval_s=config.look_every_s, max_viewers=config.max_viewers)
    connections = config.max_viewers + _EXTRA_CONNECTIONS
    address = HttpAddress.parse(config.listen)
    with stop_signals() as stopping:
        async with (
            open_reader(config) as swarm,
            serve_authenticated(
                make_app(page), config, address, public=PUBLIC_PATHS, max_connections=connections
            ) as found,
            page.watch_swarm(swarm),
        ):
            save_last_swarm(config)
            print(f"nesa-node dashboard listens on http://{found}/", flush=True)
            await Shutdown(stopping, swarm).wait()
