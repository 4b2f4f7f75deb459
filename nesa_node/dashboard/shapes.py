"""Topology documents of a swarm's models, with their history, for the topology page."""

from __future__ import annotations

from nesa_node.core.ids import ModelId
from nesa_node.dashboard.page import Source, TopologyPage
from nesa_node.server.history import History
from nesa_node.server.watch import Watch
from nesa_node.swarm.notices import Placement
from nesa_node.topology.changes.triggers import Sensitivity
from nesa_node.topology.snapshot import Snapshot

MAX_WATCHED = 4


class Shapes:
    """A document per model, from an orchestrator in this process or from own observations."""

    def __init__(self) -> None:
        self._pages: dict[ModelId, TopologyPage] = {}
        self._watched: dict[ModelId, tuple[History, Watch]] = {}
        self._shown: set[ModelId] = set()

    def show(self, model: ModelId, source: Source) -> None:
        """Use `source` for the document of `model`, instead of own observations."""
        self._shown.add(model)
        self._page(model).show(source)

    def wants(self, model: ModelId) -> bool:
        """Whether `saw` should be called for this model."""
        return model not in self._shown

    def saw(self, snapshot: Snapshot, active: Placement | None) -> None:
        """Add a snapshot to its model's history. Slow: call it in a thread.

        `active` is the newest placement.
        """
        if not snapshot.nodes:
            return
        model = snapshot.model_id
        if model not in self._watched:
            self._watched[model] = History(), Watch(Sensitivity())
            self._page(model).show(self._watched[model][0])
        history, watch = self._watched[model] = self._watched.pop(model)
        self._forget()
        triggers = watch.observe(snapshot, None).triggers
        history.saw(snapshot, None, active, leads=False, triggers=triggers)

    async def json(self, model: str | None) -> bytes | None:
        """JSON of a model's document, of the first model's if None; None if it is not observed."""
        if model is None:
            page = next(iter(self._pages.values()), TopologyPage())
            return await page.json()
        found = self._pages.get(ModelId(model))
        return None if found is None else await found.json()

    def _page(self, model: ModelId) -> TopologyPage:
        return self._pages.setdefault(model, TopologyPage())

    def _forget(self) -> None:
        """Drop the least recently observed models beyond `MAX_WATCHED`.

        Models that come and go must not displace those that stay.
        """
        while len(self._watched) > MAX_WATCHED:
            oldest = next(iter(self._watched))
            del self._watched[oldest]
            if oldest not in self._shown:
                self._pages.pop(oldest, None)
