"""Swarms that the pool builds because a request names a model that no node serves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase

from nesa_node.core.errors import SwarmError
from nesa_node.core.ids import is_model_name
from nesa_node.server.pool.requests import PoolClient

MAX_CONCURRENT_BUILDS = 4
DEMAND_LIFE_S = 3600.0
"""Life of a request to the pool; a model that is asked for again afterwards is built again."""


class DemandBuilder:
    """Asks an orchestrator, once for all requests that wait for the same model."""

    def __init__(self, pool: PoolClient, patterns: Sequence[str]) -> None:
        self._pool = pool
        self._patterns = patterns
        self._builds: dict[str, asyncio.Task[None]] = {}

    def allows(self, name: str) -> bool:
        """Whether the operator's patterns allow the name."""
        return is_model_name(name) and any(fnmatchcase(name, each) for each in self._patterns)

    async def build(self, name: str, wait_s: float) -> None:
        """Ask for a swarm and wait until it serves, at most `wait_s`. Raises `SwarmError`."""
        if name not in self._builds:
            if len(self._builds) >= MAX_CONCURRENT_BUILDS:
                raise SwarmError(
                    f"{MAX_CONCURRENT_BUILDS} swarms are being built for requests; ask again later"
                )
            task = asyncio.create_task(self._run(name, wait_s), name=f"build {name}")
            self._builds[name] = task
            task.add_done_callback(lambda _: self._builds.pop(name, None))
        await asyncio.shield(self._builds[name])

    async def _run(self, name: str, wait_s: float) -> None:
        await self._pool.request(name, until=time.time() + DEMAND_LIFE_S)
        await self._pool.wait_until_serving(name, wait_s)

    async def close(self) -> None:
        """Wait for no build any more; what was asked for stays so until it expires."""
        for task in self._builds.values():
            task.cancel()
        await asyncio.gather(*self._builds.values(), return_exceptions=True)
