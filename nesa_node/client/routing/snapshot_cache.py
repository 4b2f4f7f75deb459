"""Cache of a model's snapshot, fetched once for all sessions that open at the same time."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from functools import partial

from nesa_node.client.routing.request import RouteRequest
from nesa_node.core.errors import ModelMismatchError
from nesa_node.core.ids import ModelId
from nesa_node.core.logging import get_logger
from nesa_node.swarm.node import Swarm
from nesa_node.topology.snapshot import Snapshot

log = get_logger(__name__)

MAX_NAMED_MODELS = 4
"""Most models that an error message names."""
SNAPSHOT_FRESH_S = 1.0
"""Largest age of a snapshot, in seconds, that an opening session uses."""
FETCH_WAIT_S = 1.0
"""Seconds to wait for all members of the DHT. A longer fetch continues in the background: some
members may be gone."""


class SnapshotCache:
    """Single-flight cache of snapshots for all sessions of a client. `clock`: monotonic seconds."""

    def __init__(self, swarm: Swarm, clock: Callable[[], float] = time.monotonic) -> None:
        self._swarm = swarm
        self._clock = clock
        self._fetch_lock = asyncio.Lock()
        self._fetch_began_at: dict[ModelId, float] = {}
        """Start time of the last successful fetch."""
        self._quick_fetch_at: dict[ModelId, float] = {}
        self._pending_fetches: dict[ModelId, asyncio.Task[Snapshot]] = {}
        """Running fetches, some continuing after the sessions that started them."""

    async def fetch(self, request: RouteRequest, *, after: float = -math.inf) -> Snapshot:
        """Snapshot at most `SNAPSHOT_FRESH_S` old and fetched after `after`, with failure reports.

        Where members of the DHT do not answer, the first member's answer and earlier records
        suffice if they cover the whole model. Raises what `Directory.fetch` raises.
        """
        model_id, num_blocks = request.model_id, request.num_blocks
        # By start time: a fetch, however slow, serves all sessions that wait for it.
        since = max(after, self._clock() - SNAPSHOT_FRESH_S)
        async with self._fetch_lock:
            if self._fetch_began_at.get(model_id, -math.inf) <= since:
                began_at = self._clock()
                snapshot = await self._fetch_or_fall_back(request)
                self._fetch_began_at[model_id] = began_at
                return snapshot
        return self._swarm.directory.snapshot(model_id, num_blocks)

    async def _fetch_or_fall_back(self, request: RouteRequest) -> Snapshot:
        model_id, wait_s = request.model_id, 0.0
        looking = self._pending_fetches.get(model_id)
        if looking is None:
            fetching = self._swarm.directory.fetch(model_id, request.num_blocks)
            looking = asyncio.create_task(fetching, name="directory-look")
            self._pending_fetches[model_id] = looking
            looking.add_done_callback(partial(self._fetch_done, model_id))
            wait_s = FETCH_WAIT_S
        try:
            await asyncio.wait({looking}, timeout=wait_s)
            if not looking.done():
                known = await self.fetch_from_one_member(request)
                if known.nodes and not known.holes():
                    return known
            return await looking
        except asyncio.CancelledError:
            looking.cancel()
            self._pending_fetches.pop(model_id, None)
            raise

    def _fetch_done(self, model_id: ModelId, looking: asyncio.Task[Snapshot]) -> None:
        if self._pending_fetches.get(model_id) is looking:
            del self._pending_fetches[model_id]
        if not looking.cancelled() and (error := looking.exception()) is not None:
            log.debug("snapshot_fetch_failed", reason=str(error))

    async def close(self) -> None:
        """Cancel fetches in the background."""
        fetches = list(self._pending_fetches.values())
        for fetching in fetches:
            fetching.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)

    async def fetch_uncached(self, request: RouteRequest, *, reports: bool = True) -> Snapshot:
        """`Directory.fetch`, bypassing the cache."""
        return await self._swarm.directory.fetch(
            request.model_id, request.num_blocks, reports=reports
        )

    async def fetch_from_one_member(self, request: RouteRequest) -> Snapshot:
        """Snapshot of what the first member of the DHT to answer knows, and of earlier records.

        Asks no member within `SNAPSHOT_FRESH_S` of the last time.
        """
        model_id = request.model_id
        due = self._quick_fetch_at.get(model_id, -math.inf) < self._clock() - SNAPSHOT_FRESH_S
        if due and await self._swarm.directory.try_fetch_one(model_id):
            self._quick_fetch_at[model_id] = self._clock()
        return self._swarm.directory.snapshot(model_id, request.num_blocks)

    async def check_model_copy(self, model_id: ModelId) -> tuple[str, ...]:
        """List the models that nodes serve if `model_id` is not among them, else nothing.

        Raises `ModelMismatchError` if nodes serve a different copy of this model, or the same
        weights under another name. Asks for the records of all models, so it is for models without
        a node.
        """
        name, _, digest = model_id.partition("@")
        served = {record.model_id for record in await self._swarm.directory.fetch_all()}
        if model_id in served:
            return ()
        same = sorted(each for each in served if each.partition("@")[2] == digest)
        if same:
            known_as = same[0].partition("@")[0]
            raise ModelMismatchError(
                f"the swarm serves these very weights as {', '.join(same[:MAX_NAMED_MODELS])}, and "
                f"they are called {name!r} here: name the folder {known_as!r}, or start nodes "
                "with this one"
            )
        copies = sorted(each for each in served if each.partition("@")[0] == name)
        if copies:
            raise ModelMismatchError(
                f"the swarm serves {', '.join(copies[:MAX_NAMED_MODELS])}, and the copy here "
                f"differs (@{digest}): use the files or the --revision that the nodes have, or "
                "start nodes with this copy"
            )
        return tuple(sorted(served))
