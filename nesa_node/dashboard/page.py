"""Cached JSON of the topology page: computed on demand, once for all requests."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import msgspec

STARTING = {"format": "nesa-node topology", "version": 1, "starting": True}


class Source(Protocol):
    """Source of a document. `version` changes with it; `document` is slow: call it in a thread."""

    @property
    def version(self) -> int: ...

    def document(self) -> dict[str, Any] | None:
        """The document; None while there is none."""


class TopologyPage:
    """Encoded document of the source last given to `show`."""

    def __init__(self) -> None:
        self._source: Source | None = None
        self._making = asyncio.Lock()
        self._made: tuple[Source, int, bytes] | None = None

    def show(self, source: Source) -> None:
        self._source = source

    async def json(self) -> bytes:
        """The document as JSON, or `STARTING` while there is none."""
        source = self._source
        if source is None:
            return msgspec.json.encode(STARTING)
        async with self._making:
            version = source.version
            if self._made is None or self._made[:2] != (source, version):
                body = await asyncio.to_thread(_encoded, source)
                self._made = (source, version, body)
            return self._made[2]


def _encoded(source: Source) -> bytes:
    document = source.document()
    return msgspec.json.encode(STARTING if document is None else document)
