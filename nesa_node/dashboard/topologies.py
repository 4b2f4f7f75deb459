"""Topology documents of a swarm's models, with their history, for the topology page.

Cached JSON of the topology page: computed on demand, once for all requests.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import msgspec

from nesa_node.core.ids import ModelId
from nesa_node.server.orchestrator.history import History
from nesa_node.server.orchestrator.planner import ChangeMonitor
from nesa_node.swarm.dht.notices import PlacementNotice
from nesa_node.topology.changes.triggers import Sensitivity
from nesa_node.topology.snapshot import Snapshot

STARTING_DOCUMENT = {"format": "nesa-node topology", "version": 1, "starting": True}


class DocumentSource(Protocol):
    """Source of a document. `version` changes with it; `document` is slow: call it in a thread."""

    @property
    def version(self) -> int: ...

    def document(self) -> dict[str, Any] | None:
        """The document; None while there is none."""


class TopologyDocument:
    """Encoded document of the source last given to `set_source`."""

    def __init__(self) -> None:
        self._source: DocumentSource | None = None
        self._encode_lock = asyncio.Lock()
        self._encoded: tuple[DocumentSource, int, bytes] | None = None

    def set_source(self, source: DocumentSource) -> None:
        self._source = source

    async def encode_json(self) -> bytes:
        """The document as JSON, or `STARTING_DOCUMENT` while there is none."""
        source = self._source
        if source is None:
            return msgspec.json.encode(STARTING_DOCUMENT)
        async with self._encode_lock:
            version = source.version
            if self._encoded is None or self._encoded[:2] != (source, version):
                body = await asyncio.to_thread(_encode_source, source)
                self._encoded = (source, version, body)
            return self._encoded[2]


def _encode_source(source: DocumentSource) -> bytes:
    document = source.document()
    return msgspec.json.encode(STARTING_DOCUMENT if document is None else document)


MAX_WATCHED_MODELS = 4


class ModelTopologies:
    """A document per model, from an orchestrator in this process or from own observations."""

    def __init__(self) -> None:
        self._documents: dict[ModelId, TopologyDocument] = {}
        self._watched: dict[ModelId, tuple[History, ChangeMonitor]] = {}
        self._with_source: set[ModelId] = set()

    def set_source(self, model: ModelId, source: DocumentSource) -> None:
        """Use `source` for the document of `model`, instead of own observations."""
        self._with_source.add(model)
        self._document(model).set_source(source)

    def observes(self, model: ModelId) -> bool:
        """Whether `observe_snapshot` should be called for this model."""
        return model not in self._with_source

    def observe_snapshot(self, snapshot: Snapshot, active: PlacementNotice | None) -> None:
        """Add a snapshot to its model's history. Slow: call it in a thread.

        `active` is the newest placement.
        """
        if not snapshot.nodes:
            return
        model = snapshot.model_id
        if model not in self._watched:
            self._watched[model] = History(), ChangeMonitor(Sensitivity())
            self._document(model).set_source(self._watched[model][0])
        history, watch = self._watched[model] = self._watched.pop(model)
        self._evict_oldest()
        triggers = watch.observe(snapshot, None).triggers
        history.record(snapshot, None, active, leads=False, triggers=triggers)

    async def encode_json(self, model: str | None) -> bytes | None:
        """JSON of a model's document, of the first model's if None; None if it is not observed."""
        if model is None:
            page = next(iter(self._documents.values()), TopologyDocument())
            return await page.encode_json()
        found = self._documents.get(ModelId(model))
        return None if found is None else await found.encode_json()

    def _document(self, model: ModelId) -> TopologyDocument:
        return self._documents.setdefault(model, TopologyDocument())

    def _evict_oldest(self) -> None:
        """Drop the least recently observed models beyond `MAX_WATCHED_MODELS`.

        Models that come and go must not displace those that stay.
        """
        while len(self._watched) > MAX_WATCHED_MODELS:
            oldest = next(iter(self._watched))
            del self._watched[oldest]
            if oldest not in self._with_source:
                self._documents.pop(oldest, None)
