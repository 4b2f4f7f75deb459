"""Adapters of audited sessions, fetched from nodes that have them and checked by their digest."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from nesa_node.client.verification.session_audit import NotAuditedError
from nesa_node.core.errors import AdapterError, PeerUnreachableError, ProtocolError
from nesa_node.core.ids import ModelId
from nesa_node.engine.adapters.peft_folder import PeftFolder
from nesa_node.engine.weights.adapter_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_WEIGHTS_FILE,
    check_adapter_folder,
)
from nesa_node.swarm.adapter_catalog import PublishedAdapter
from nesa_node.swarm.adapter_transfer import AdapterPeer, find_holders
from nesa_node.swarm.node import Swarm

FindAdapter = Callable[[str], Awaitable[PublishedAdapter]]
"""Finds a published adapter by its digest."""


class AdapterFetcher:
    """Fetches adapters of one model for as long as an audit takes."""

    def __init__(self, swarm: Swarm, model_id: ModelId, num_blocks: int, find: FindAdapter) -> None:
        self._swarm = swarm
        self._model_id = model_id
        self._num_blocks = num_blocks
        self._find = find

    @asynccontextmanager
    async def fetched(self, digest: bytes) -> AsyncIterator[PeftFolder]:
        """The adapter of a digest, in a temporary folder.

        Raises `NotAuditedError` if no node sends it, and what looking it up raises.
        """
        published = await self._find(digest.hex())
        asking = AdapterPeer(self._swarm, self._model_id)
        nodes = self._swarm.directory.addresses(self._model_id, self._num_blocks)
        holders = await find_holders(asking, nodes, published.digest)
        reason = "no node sends it"
        with tempfile.TemporaryDirectory(prefix="nesa-audit-") as scratch:
            for number, (peer, addresses) in enumerate(holders.items()):
                folder = Path(scratch) / str(number)
                folder.mkdir()
                try:
                    await asking.get(
                        peer,
                        addresses,
                        published.digest,
                        published.listed.nbytes,
                        config=folder / ADAPTER_CONFIG_FILE,
                        weights=folder / ADAPTER_WEIGHTS_FILE,
                    )
                    await asyncio.to_thread(check_adapter_folder, folder, published.digest)
                except (PeerUnreachableError, ProtocolError, AdapterError) as error:
                    reason = str(error)
                    continue
                yield await asyncio.to_thread(PeftFolder.open, folder)
                return
        raise NotAuditedError(f"its adapter {published.name} cannot be fetched: {reason}")
