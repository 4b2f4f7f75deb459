"""Models that nodes of the swarm announce, and their blocks that no node serves."""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from nesa_node.core.config import ClientConfig, secret_text
from nesa_node.core.errors import MissingBlocksError, NesaError
from nesa_node.core.ids import ModelId
from nesa_node.core.logging import get_logger
from nesa_node.core.span import Span
from nesa_node.swarm.identity import Identity
from nesa_node.swarm.node import Swarm, open_swarm
from nesa_node.swarm.records import NodeRecord, agreed_blocks
from nesa_node.topology.snapshot import count_holders, zero_runs

log = get_logger(__name__)

FRESH_S = 0.7
"""Age up to which the last look at a model is reused."""
MAX_MODELS = 256
"""Limit on the models of one look; those with the most nodes are kept."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Model that nodes announce.

    `holes` are spans that no node serves, `joining` spans that joining nodes will serve.
    `num_blocks` comes from the opened checkpoint; without one, from the nodes' records.
    """

    model_id: ModelId
    num_blocks: int
    holes: tuple[Span, ...]
    joining: tuple[Span, ...] = ()

    @property
    def hopeless(self) -> set[int]:
        """Blocks that no node serves and no joining node will serve."""
        coming = {block for span in self.joining for block in range(*_ends(span))}
        return {block for hole in self.holes for block in range(*_ends(hole))} - coming

    @property
    def model_name(self) -> str:
        """The id without its digest: a hub name or folder. Untrusted."""
        return self.model_id.rpartition("@")[0]


class Look(Protocol):
    """Source of the models that the swarm announces."""

    async def all(self) -> dict[ModelId, Seen]: ...

    async def one(self, model_id: ModelId) -> Seen | None: ...

    def know_blocks(self, model_id: ModelId, num_blocks: int) -> None:
        """Set a model's number of blocks, from its checkpoint."""

    def forget_blocks(self, model_id: ModelId) -> None:
        """Forget the number of blocks, which then comes from the nodes' records again."""


class SwarmLook:
    """Reads models from the DHT; requests for one model share a look for `FRESH_S`."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._asking: dict[ModelId, asyncio.Lock] = {}
        self._answers: dict[ModelId, tuple[float, Seen | None]] = {}

    async def all(self) -> dict[ModelId, Seen]:
        """Announced models by id: at most `MAX_MODELS`, those with the most nodes."""
        groups: dict[ModelId, list[NodeRecord]] = {}
        for record in await self._swarm.directory.fetch_all():
            groups.setdefault(ModelId(record.model_id), []).append(record)
        most = sorted(groups, key=lambda key: (-len(groups[key]), key))[:MAX_MODELS]
        return {key: _seen(groups[key]) for key in most}

    def know_blocks(self, model_id: ModelId, num_blocks: int) -> None:
        self._swarm.directory.know_blocks(model_id, num_blocks)
        self._answers.pop(model_id, None)

    def forget_blocks(self, model_id: ModelId) -> None:
        self._swarm.directory.forget_blocks(model_id)

    async def one(self, model_id: ModelId) -> Seen | None:
        """Look at one model; None if no node announces it. Raises `NesaError` if the DHT fails."""
        async with self._asking.setdefault(model_id, asyncio.Lock()):
            at, seen = self._answers.get(model_id, (-math.inf, None))
            if time.monotonic() - at > FRESH_S:
                directory = self._swarm.directory
                snapshot = await directory.fetch(model_id, reports=False)
                seen = None
                if snapshot.nodes or snapshot.joining:
                    joining = tuple(node.span for node in snapshot.joining)
                    seen = Seen(model_id, snapshot.num_blocks, snapshot.holes(), joining)
                self._answers[model_id] = (time.monotonic(), seen)
            return seen


def _seen(records: list[NodeRecord]) -> Seen:
    num_blocks = agreed_blocks(records)
    serving = [
        record.node_state()
        for record in records
        if record.state == "serving" and record.num_blocks == num_blocks
    ]
    holes = zero_runs(count_holders(serving, num_blocks))
    return Seen(ModelId(records[0].model_id), num_blocks, holes)


async def watch_holes(look: Look, model_id: ModelId, *, every_s: float = 1.0) -> None:
    """Raise `MissingBlocksError` when two consecutive looks find the same hole that no node is
    joining to fill.

    A single look may miss records of a DHT member that did not answer. Never returns.
    """
    before: set[int] = set()
    while True:
        try:
            seen = await look.one(model_id)
        except NesaError as error:
            log.warning("swarm_poll_failed", reason=str(error))
        else:
            # Without nodes the number of blocks is unknown.
            now = {-1} if seen is None else seen.hopeless
            if still := before & now:
                raise missing_blocks(model_id, seen, still)
            before = now
        await asyncio.sleep(every_s)


def missing_blocks(model_id: ModelId, seen: Seen | None, blocks: set[int]) -> MissingBlocksError:
    if seen is None:
        return MissingBlocksError((), f"no node serves {model_id} now; ask again later")
    runs = zero_runs([0 if block in blocks else 1 for block in range(seen.num_blocks)])
    names = ", ".join(str(run) for run in runs)
    return MissingBlocksError(
        [_ends(run) for run in runs],
        f"no node serves the blocks {names} of {model_id}, which has {seen.num_blocks}; ask again "
        "later, or start a node with --block-indices",
    )


def _ends(span: Span) -> tuple[int, int]:
    return span.start, span.end


@asynccontextmanager
async def open_look(config: ClientConfig) -> AsyncIterator[tuple[SwarmLook, Swarm]]:
    """Join the swarm as a client that does not listen. Raises as `open_swarm` does."""
    with tempfile.TemporaryDirectory(prefix="nesa-gateway-") as folder:
        async with open_swarm(
            Identity.ephemeral(Path(folder)),
            initial_peers=config.initial_peers,
            swarm_key=secret_text(config.swarm_key),
            listen=False,
        ) as swarm:
            yield SwarmLook(swarm), swarm
