"""Adapters of a span in memory: loaded for the sessions that use them, kept while there is room."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from nesa_node.core.errors import (
    AdapterError,
    BusyError,
    DiskLimitError,
    ModelError,
    ProtocolError,
    SwarmError,
)
from nesa_node.core.logging import get_logger
from nesa_node.engine.adapters.peft_folder import PeftFolder
from nesa_node.engine.adapters.served_adapter import ServedAdapter, compute_adapter_bytes
from nesa_node.engine.model.blocks import ModelBlocks

log = get_logger(__name__)

RETRY_AFTER_S = 2.0


class AdapterSource(Protocol):
    """Has the files of adapters."""

    async def open_digest(self, digest: str) -> Path:
        """The folder of an adapter. Raises `AdapterError` and what fetching it raises."""
        ...


class LoadedAdapters:
    """Adapters by digest, within `max_bytes`. Those that no session uses make room for new ones."""

    def __init__(self, blocks: ModelBlocks, source: AdapterSource, max_bytes: int) -> None:
        self._blocks = blocks
        self._source = source
        self._max_bytes = max_bytes
        self._loaded: dict[str, ServedAdapter] = {}
        """The least recently used first."""
        self._users: Counter[str] = Counter()
        self._locks: dict[str, asyncio.Lock] = {}
        self._loading_bytes = 0

    @asynccontextmanager
    async def using(self, digest: bytes) -> AsyncIterator[ServedAdapter | None]:
        """Hold an adapter, fetched and loaded if it is not here. An empty digest: the base model.

        Raises `ProtocolError("unknown_adapter")`, `ProtocolError("wrong_adapter")` for one that
        does not fit the model, `ProtocolError("adapter_too_large")`, and `BusyError` where sessions
        use all of the room.
        """
        if not digest:
            yield None
            return
        name = digest.hex()
        self._users[name] += 1
        try:
            async with self._locks.setdefault(name, asyncio.Lock()):
                adapter = self._loaded.pop(name, None) or await self._load(name)
                self._loaded[name] = adapter
            yield adapter
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name], self._locks[name]

    async def _load(self, name: str) -> ServedAdapter:
        try:
            adapter = await self._read(await self._source.open_digest(name))
        except (AdapterError, DiskLimitError, SwarmError, FileNotFoundError) as error:
            raise ProtocolError("unknown_adapter", f"adapter {name[:16]}: {error}") from None
        except ModelError as error:
            raise ProtocolError("wrong_adapter", f"adapter {name[:16]}: {error}") from None
        log.info("adapter_loaded", digest=name[:16], kib=adapter.nbytes >> 10)
        return adapter

    async def _read(self, path: Path) -> ServedAdapter:
        folder = await asyncio.to_thread(PeftFolder.open, path)
        nbytes = compute_adapter_bytes(folder, self._blocks.adapter_layout)
        self._make_room(nbytes)
        self._loading_bytes += nbytes
        try:
            return await asyncio.to_thread(self._blocks.load_adapter, folder)
        finally:
            self._loading_bytes -= nbytes

    def _make_room(self, nbytes: int) -> None:
        if nbytes > self._max_bytes:
            raise ProtocolError(
                "adapter_too_large",
                f"this adapter takes {nbytes >> 10} KiB here, and this node has "
                f"{self._max_bytes >> 10} KiB for adapters",
            )
        held = self._loading_bytes + sum(each.nbytes for each in self._loaded.values())
        for name in [name for name in self._loaded if not self._users[name]]:
            if held + nbytes <= self._max_bytes:
                return
            held -= self._loaded.pop(name).nbytes
        if held + nbytes > self._max_bytes:
            raise BusyError("sessions use all of the memory for adapters", RETRY_AFTER_S)
