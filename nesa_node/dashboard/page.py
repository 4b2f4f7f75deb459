"""What a page shows, as bytes: computed once for all who ask, and only when somebody does."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import msgspec

STARTING = {"format": "nesa-node topology", "version": 1, "starting": True}


class Source(Protocol):
    """`version` changes with the document, which takes a while to make and belongs in a thread."""

    @property
    def version(self) -> int: ...

    def document(self) -> dict[str, Any] | None:
        """None while there is nothing to show."""


class TopologyPage:
    """Give it a source with `show` as soon as there is one; the last one counts."""

    def __init__(self) -> None:
        self._source: Source | None = None
        self._making = asyncio.Lock()
        self._made: tuple[Source, int, bytes] | None = None

    def show(self, source: Source) -> None:
        self._source = source

    async def json(self) -> bytes:
        """The document, or one that says that it is not there yet."""
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
