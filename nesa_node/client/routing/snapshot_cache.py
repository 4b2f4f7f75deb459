"""Cache of a model's snapshot, fetched once for all sessions that open at the same time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

from nesa_node.client.routing.request import RouteRequest
from nesa_node.core.errors import ModelMismatchError
from nesa_node.core.ids import ModelId
from nesa_node.swarm.directory import Directory
from nesa_node.swarm.p2p.tasks import SharedCall
from nesa_node.topology.snapshot import Snapshot

MAX_NAMED_MODELS = 4
"""Most models that an error message names."""
SNAPSHOT_FRESH_S = 1.0
"""Largest age of a snapshot, in seconds, that an opening session uses."""
FETCH_WAIT_S = 1.0
"""Seconds to wait for all members of the DHT. A longer fetch continues in the background: some
members may be gone."""


class SnapshotCache:
    """Single-flight cache of snapshots for all sessions of a client. `clock`: monotonic seconds."""

    def __init__(self, directory: Directory, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        self._fetches: dict[ModelId, SharedCall] = {}
        self._quick_fetch_at: dict[ModelId, float] = {}

    async def fetch(self, request: RouteRequest, *, after: float = -math.inf) -> Snapshot:
        """Snapshot at most `SNAPSHOT_FRESH_S` old and fetched after `after`, with failure reports.

        Where members of the DHT do not answer, the first member's answer and earlier records
        suffice if they cover the whole model. Raises what `Directory.fetch` raises.
        """
        model_id, num_blocks = request.model_id, request.num_blocks
        fetch = self._fetches.setdefault(
            model_id, SharedCall(partial(self._directory.fetch, model_id), clock=self._clock)
        )
        # By start time: a fetch, however slow, serves all sessions that wait for it.
        since = max(after, self._clock() - SNAPSHOT_FRESH_S)
        if not await fetch.run_since(since, wait_s=FETCH_WAIT_S):
            known = await self.fetch_from_one_member(request)
            if known.nodes and not known.holes():
                return known
            await fetch.run_since(since)
        return self._directory.snapshot(model_id, num_blocks)

    async def close(self) -> None:
        """Cancel fetches in the background."""
        for fetch in self._fetches.values():
            await fetch.close()

    async def fetch_from_one_member(self, request: RouteRequest) -> Snapshot:
        """Snapshot of what the first member of the DHT to answer knows, and of earlier records.

        Asks no member within `SNAPSHOT_FRESH_S` of the last time.
        """
        model_id = request.model_id
        due = self._quick_fetch_at.get(model_id, -math.inf) < self._clock() - SNAPSHOT_FRESH_S
        if due and await self._directory.try_fetch_one(model_id):
            self._quick_fetch_at[model_id] = self._clock()
        return self._directory.snapshot(model_id, request.num_blocks)

    async def check_model_copy(self, model_id: ModelId) -> tuple[str, ...]:
        """List the models that nodes serve if `model_id` is not among them, else nothing.

        Raises `ModelMismatchError` if nodes serve a different copy of this model, or the same
        weights under another name. Asks for the records of all models, so it is for models without
        a node.
        """
        name, _, digest = model_id.partition("@")
        served = {record.model_id for record in await self._directory.fetch_all()}
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
