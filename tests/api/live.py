"""A gateway over a swarm, in threads of this process, for clients of any kind."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nesa_node.cli.services.gateway import serve_gateway
from nesa_node.core.settings.models import GatewayConfig

READY_S = 40.0


@contextmanager
def live_gateway(
    addresses: Sequence[str], folder: Path, *models: Path, **options: Any
) -> Iterator[str]:
    """Yields its URL, without a path."""
    ready = folder / "gateway.json"
    config = GatewayConfig.model_validate(
        {
            "initial_peers": tuple(addresses),
            "models": tuple(map(str, models)),
            "listen": "127.0.0.1:0",
            "torch_dtype": "float32",
            "ready_file": ready,
            "keys_path": folder / "keys.json",
        }
        | options
    )
    stopping = asyncio.Event()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="gateway")
    thread.start()
    running = asyncio.run_coroutine_threadsafe(serve_gateway(config, stopping), loop)
    try:
        deadline = time.monotonic() + READY_S
        while not ready.exists():
            if running.done():
                running.result()
            assert time.monotonic() < deadline, "the gateway does not serve"
            time.sleep(0.02)
        yield json.loads(ready.read_text(encoding="utf-8"))["url"]
    finally:
        loop.call_soon_threadsafe(stopping.set)
        error = running.exception(READY_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        if error is not None:
            raise error
