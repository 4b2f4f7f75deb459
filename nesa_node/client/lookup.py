"""Who serves a model, looked up once for all sessions that open at the same time."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from nesa_node.client.request import RouteRequest
from nesa_node.core.errors import ModelMismatchError
from nesa_node.core.ids import ModelId
from nesa_node.core.logging import get_logger
from nesa_node.swarm.node import Swarm
from nesa_node.topology.snapshot import Snapshot

log = get_logger(__name__)

MOST_COPIES_TOLD = 4
FRESH_S = 1.0
"""A session that opens takes what another has found as lately as that."""


GLANCE_S = 1.0
"""How long a look may take that a session waits for whose node is lost."""
GLANCE_MEMBERS = 4
"""How many members of the DHT are asked at once: some may be gone, too."""


class Lookup:
    """Shared by the sessions of a client. `clock` returns seconds and never goes back."""

    def __init__(self, swarm: Swarm, clock: Callable[[], float] = time.monotonic) -> None:
        self._swarm = swarm
        self._clock = clock
        self._looking = asyncio.Lock()
        self._began_at: dict[ModelId, float] = {}
        """When the last lookup began that came to something."""
        self._glanced_at: dict[ModelId, float] = {}

    async def fetch(self, request: RouteRequest, *, after: float = -math.inf) -> Snapshot:
        """What was found at most `FRESH_S` ago, and after the time `after`. As `Directory.fetch`.

        Reports of failures, too.
        """
        model_id, num_blocks = request.model_id, request.num_blocks
        # By when it was asked: however long a lookup takes, it serves all who wait for it.
        since = max(after, self._clock() - FRESH_S)
        async with self._looking:
            if self._began_at.get(model_id, -math.inf) <= since:
                began_at = self._clock()
                snapshot = await self._swarm.directory.fetch(model_id, num_blocks)
                self._began_at[model_id] = began_at
                return snapshot
        return self._swarm.directory.snapshot(model_id, num_blocks)

    async def fetch_now(self, request: RouteRequest, *, reports: bool = True) -> Snapshot:
        """`Directory.fetch`."""
        return await self._swarm.directory.fetch(
            request.model_id, request.num_blocks, reports=reports
        )

    async def glance(self, request: RouteRequest) -> Snapshot:
        """What the first member of the DHT that answers knows, and what was known before.

        What was glanced at most `FRESH_S` ago has to do.
        """
        model_id = request.model_id
        if self._glanced_at.get(model_id, -math.inf) < self._clock() - FRESH_S:
            try:
                async with asyncio.timeout(GLANCE_S):
                    await self._swarm.directory.glance(model_id, members=GLANCE_MEMBERS)
                self._glanced_at[model_id] = self._clock()
            except TimeoutError:
                log.info("glance_timed_out", timeout_s=GLANCE_S)
        return self._swarm.directory.snapshot(model_id, request.num_blocks)

    async def check_copy(self, model_id: ModelId) -> None:
        """Raises `ModelMismatchError` if nodes serve other copies of `model_id`'s model only.

        For a model that no node serves: it asks for the records of all models.
        """
        name = model_id.partition("@")[0]
        served = {record.model_id for record in await self._swarm.directory.fetch_all()}
        copies = sorted(each for each in served if each.partition("@")[0] == name)
        if copies and model_id not in copies:
            digest = model_id.partition("@")[2]
            raise ModelMismatchError(
                f"the swarm serves {', '.join(copies[:MOST_COPIES_TOLD])}, and the copy here "
                f"differs (@{digest}): use the files or the --revision that the nodes have, or "
                "start nodes with this copy"
            )
