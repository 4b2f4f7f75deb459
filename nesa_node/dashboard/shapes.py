"""The topology of each model of a swarm, watched over time, for the page that shows it."""

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
    """A page per model: that of an orchestrator in this process, or what we see ourselves."""

    def __init__(self) -> None:
        self._pages: dict[ModelId, TopologyPage] = {}
        self._watched: dict[ModelId, tuple[History, Watch]] = {}
        self._shown: set[ModelId] = set()

    def show(self, model: ModelId, source: Source) -> None:
        """Take what is shown of `model` from there, instead of watching it here."""
        self._shown.add(model)
        self._page(model).show(source)

    def wants(self, model: ModelId) -> bool:
        """Whether to call `saw` for it."""
        return model not in self._shown

    def saw(self, snapshot: Snapshot, active: Placement | None) -> None:
        """Takes a while: not for an event loop. `active`: the newest placement."""
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
        """The document; that of the first model if none is named. None if it is not watched."""
        if model is None:
            page = next(iter(self._pages.values()), TopologyPage())
            return await page.json()
        found = self._pages.get(ModelId(model))
        return None if found is None else await found.json()

    def _page(self, model: ModelId) -> TopologyPage:
        return self._pages.setdefault(model, TopologyPage())

    def _forget(self) -> None:
        """Who has not been seen for longest, if there are too many: strangers' models come and go,
        and must not take that of the models that stay.
        """
        while len(self._watched) > MAX_WATCHED:
            oldest = next(iter(self._watched))
            del self._watched[oldest]
            if oldest not in self._shown:
                self._pages.pop(oldest, None)
