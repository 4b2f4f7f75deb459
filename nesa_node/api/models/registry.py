"""Registry of the models that a gateway offers: their names, and which are open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from nesa_node.api.models.discovery import AnnouncedModel, ModelDirectory, watch_missing_blocks
from nesa_node.api.schemas.generation_request import describe_sampling
from nesa_node.core.errors import ModelError, NesaError, ResourceError, SwarmError
from nesa_node.core.ids import ModelId, Span
from nesa_node.core.logging import get_logger
from nesa_node.core.wait_tracking import track_wait
from nesa_node.swarm.adapter_catalog import PublishedAdapter, name_published
from nesa_node.web.problem import HttpProblem

if TYPE_CHECKING:
    from nesa_node.api.models.served_model import ServedModel

log = get_logger(__name__)

POLL_INTERVAL_S = 5.0
"""Interval of looks at the swarm."""
MAX_DISCOVERED = 256
"""Limit on discovered models that are offered."""
MAX_OPEN = 16
"""Limit on discovered models open at once: each takes memory for its embedding and head. Beyond it
the least recently used model without requests is closed."""
_LOCATE_RETRY_S = 600.0
"""Time until a model that could not be located is tried again."""
_OPEN_RETRY_S = 60.0
"""Time until a model that could not be opened is offered again."""
_MAX_REFUSED_MODELS = 1024
MAX_BUILD_WAIT_S = 120.0
"""Longest wait of a request for a swarm that is built for it."""
BUILT_POLL_INTERVAL_S = 0.5
BUILD_RETRY_S = 30.0

OpenModel = Callable[[str, frozenset[ModelId] | None], Awaitable["ServedModel"]]
"""Function that opens a model by name or folder; the ids are those that the swarm announces under
that name, or None if the operator named it. Raises `NesaError` if the model has none of the ids."""
Locate = Callable[[AnnouncedModel], Awaitable[str]]
"""Function that returns the name or folder by which an announced model may be opened, without a
download. Raises `NesaError`, which says what to do, if there is none."""


class SwarmBuilder(Protocol):
    """Asks for swarms of models that are requested and not served."""

    def allows(self, name: str) -> bool:
        """Whether the operator allows a swarm of that name."""

    async def build(self, name: str, wait_s: float) -> None:
        """Return once it serves, or after `wait_s`. Raises `SwarmError` if it is refused."""


@dataclass(slots=True)
class ModelEntry:
    """Offered model. `source` is the name or folder to open, `name` its name in the API.

    `announced_ids` are the ids that the swarm announces under that name, in the order of discovery.
    Which of them is the model's own is known once it is open (`model_id`).
    """

    name: str
    source: str
    created: int
    announced_ids: tuple[ModelId, ...] = ()
    model_id: ModelId | None = None
    context_length: int | None = None
    served: ServedModel | None = None
    adapters: Mapping[str, PublishedAdapter] = field(default_factory=dict)
    """Published for it, by the names that requests give; those of the last look."""
    adapters_read_s: float = 0.0
    """Time of that look, by the monotonic clock."""
    last_used_s: float = 0.0
    """Time of its last request, by the monotonic clock."""
    open_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_open(self) -> bool:
        return self.served is not None

    @property
    def ids(self) -> tuple[ModelId, ...]:
        return self.announced_ids if self.model_id is None else (self.model_id,)


class ModelRegistry:
    """Registry of models, which are opened by name and closed together.

    If models are `given`, only these are offered, whether nodes serve them or not. Otherwise models
    are discovered in the swarm (`discovers`) and opened with their first request.
    """

    def __init__(
        self,
        given: Sequence[str],
        *,
        directory: ModelDirectory,
        open_model: OpenModel,
        locate: Locate,
        build: SwarmBuilder | None = None,
        poll_interval_s: float = POLL_INTERVAL_S,
    ) -> None:
        """`build` asks for swarms of models that no node serves; without it there are none."""
        self._build = build if not given else None
        self._directory = directory
        self._poll_interval_s = poll_interval_s
        self._open = open_model
        self._locate = locate
        self.discovers = not given
        self._entries = [
            ModelEntry(last_part(name), name, int(time.time())) for name in dict.fromkeys(given)
        ]
        self._announced: dict[ModelId, AnnouncedModel] = {}
        self._polled = asyncio.Event()
        self._refused: dict[ModelId, tuple[float, str]] = {}
        """Models that are not offered: until when, and the reason."""
        self._discovery_lock = asyncio.Lock()
        self._open_tasks: set[asyncio.Task[ServedModel]] = set()

    def entries(self) -> Sequence[ModelEntry]:
        return tuple(self._entries)

    def find_entry(self, name: str | None) -> ModelEntry:
        """Model by name, source or id, or by the last part of its name if that is unambiguous.

        None: the first given model, or the only discovered one. Raises `HttpProblem`.
        """
        found = self._match_name(name)
        if len(found) == 1:
            return found[0]
        offered = ", ".join(entry.name for entry in self._entries[:20]) or "none"
        shown = "any model" if name is None else f"`{name[:200]}`"
        reason = f"The model {shown} does not exist here; there are: {offered}"
        if why := self._refusal_reason(name):
            reason = f"The model {shown} is not offered here, though nodes serve it: {why}"
        if found:
            several = ", ".join(entry.source for entry in found[:20])
            reason = f"{shown} may be any of these, ask for one by its whole name: {several}"
        raise HttpProblem(404, reason, code="model_not_found", param="model")

    def _refusal_reason(self, name: str | None) -> str | None:
        for model_id, (_, why) in self._refused.items():
            announced = model_id.rpartition("@")[0]
            names = (None, model_id, announced, last_part(announced))
            if model_id in self._announced and name in names:
                return why
        return None

    def _match_name(self, name: str | None) -> list[ModelEntry]:
        """Models that `name` may mean.

        Whole names take precedence: an untrusted name may end in the name of another model.
        """
        entries = self._entries
        if name is None:
            return entries[:1] if not self.discovers else entries
        whole = [
            entry for entry in entries if name in (entry.name, entry.source) or name in entry.ids
        ]
        found = whole or [entry for entry in entries if last_part(entry.name) == name]
        base, _ = split_adapter(name)
        return found if found or base == name else self._match_name(base)

    def adapter_of(self, name: str | None) -> str | None:
        """The adapter in `base:adapter`, unless a model has that whole name; None: none."""
        if name is None:
            return None
        base, adapter = split_adapter(name)
        is_whole = any(name in (entry.name, entry.source) for entry in self._entries)
        return None if is_whole or not self._match_name(base) else adapter

    async def get(self, name: str | None) -> ServedModel:
        """Model by name, opened if necessary. Raises `HttpProblem` and `NesaError`."""
        entry = await self._find_or_build(name)
        entry.last_used_s = time.monotonic()
        return await self._ensure_open(entry)

    async def _find_or_build(self, name: str | None) -> ModelEntry:
        """Find a model; one that no node serves is built first, if it may be.

        Raises `HttpProblem`: 503 if it is not built, or not within `MAX_BUILD_WAIT_S`.
        """
        try:
            return self.find_entry(name)
        except HttpProblem:
            if name is None or self._build is None or not self._build.allows(name):
                raise
        deadline = time.monotonic() + MAX_BUILD_WAIT_S
        with track_wait("a swarm to be built", limit_s=MAX_BUILD_WAIT_S):
            try:
                await self._build.build(name, MAX_BUILD_WAIT_S)
            except SwarmError as error:
                raise HttpProblem(503, str(error), code="model_not_built", param="model") from error
            while time.monotonic() < deadline:
                if self._match_name(name):
                    break
                await asyncio.sleep(BUILT_POLL_INTERVAL_S)
        if not self._match_name(name):
            raise HttpProblem(
                503,
                f"The model `{name[:200]}` is being built; ask again later",
                code="model_not_built",
                param="model",
                retry_after_s=BUILD_RETRY_S,
            )
        return self.find_entry(name)

    async def _ensure_open(self, entry: ModelEntry) -> ServedModel:
        if entry.served is not None:
            return entry.served
        with track_wait("the model to be opened for the first time"):
            # Shielded: a disconnecting client must not cancel what other requests wait for.
            task = asyncio.create_task(self._open_once(entry), name="open-model")
            self._open_tasks.add(task)
            task.add_done_callback(self._open_tasks.discard)
            return await asyncio.shield(task)

    async def _open_once(self, entry: ModelEntry) -> ServedModel:
        async with entry.open_lock:
            if entry.served is not None:
                return entry.served
            served = await (
                self._open_discovered(entry) if self.discovers else self._open_and_join(entry)
            )
            self._directory.set_num_blocks(served.model_id, served.num_blocks)
            entry.model_id = served.model_id
            entry.context_length = served.context_length
            entry.served = served
            entry.last_used_s = time.monotonic()
            if entry not in self._entries:
                # It was removed from the entries while this request waited for the lock.
                self._entries.append(entry)
            log.info("model_opened", model=entry.model_id, **describe_sampling(served.defaults))
            return served

    async def _open_discovered(self, entry: ModelEntry) -> ServedModel:
        """Open a discovered model; one at a time, since they share the disk limit.

        A model that cannot be opened is not offered for `_OPEN_RETRY_S`.
        """
        async with self._discovery_lock:
            if sum(other.is_open for other in self._entries) >= MAX_OPEN:
                await self._close_least_recently_used()
            try:
                return await self._open_and_join(entry, frozenset(entry.announced_ids))
            except ModelError as error:
                for model_id in entry.announced_ids:
                    self._refuse(model_id, error, _OPEN_RETRY_S)
                self._entries = [other for other in self._entries if other is not entry]
                raise

    async def _close_least_recently_used(self) -> None:
        """Close an unused discovered model. Raises `ResourceError` if all are in use."""
        entry = least_recently_used(self._entries, self._announced)
        if entry is None or entry.served is None:
            raise ResourceError(
                f"{MAX_OPEN} models are open here, which is the most, and answer requests; name "
                "those to serve with --model"
            )
        served, entry.served = entry.served, None
        log.info("model_closed", model=entry.model_id)
        self._directory.forget_num_blocks(served.model_id)
        if entry.model_id in self._announced:
            # Looks do not add the ids of open models to `announced`.
            entry.announced_ids = tuple(dict.fromkeys((entry.model_id, *entry.announced_ids)))
        entry.model_id = None
        await served.close()

    async def _open_and_join(
        self, entry: ModelEntry, ids: frozenset[ModelId] | None = None
    ) -> ServedModel:
        served = await self._open(entry.source, ids)
        try:
            await served.join()
        except BaseException:
            await served.close()
            raise
        return served

    async def open_given(self) -> None:
        """Open all given models at the start, so that a wrong name fails early."""
        for entry in self._entries:
            model = await self._ensure_open(entry)
            # The checkpoint's own name: owner and name for models of the hub.
            entry.name = model.name

    async def close(self) -> None:
        for task in list(self._open_tasks):
            task.cancel()
        await asyncio.gather(*self._open_tasks, return_exceptions=True)
        for entry in self._entries:
            if entry.served is not None:
                await entry.served.close()

    async def watch_blocks(self, model_id: ModelId) -> None:
        """Raise `MissingBlocksError` once blocks of the model are known to be missing."""
        await watch_missing_blocks(self._directory, model_id)

    def holes(self, entry: ModelEntry) -> tuple[Span, ...] | None:
        """Spans without nodes at the last look; None without a look, or if it found no node."""
        found = [self._announced[key] for key in entry.ids if key in self._announced]
        return found[0].holes if found else None

    async def poll_swarm(self) -> None:
        """Poll the swarm every `POLL_INTERVAL_S`; discover models if none are given."""
        async with asyncio.TaskGroup() as group:
            if self.discovers:
                group.create_task(self._locate_candidates())
            while True:
                try:
                    self._update_announced(await self._directory.fetch_all())
                    await self._read_adapters()
                except NesaError as error:
                    log.warning("swarm_poll_failed", reason=str(error))
                await asyncio.sleep(self._poll_interval_s)

    async def _read_adapters(self) -> None:
        """Look up the adapters of one model: that of the oldest look."""
        known = [entry for entry in self._entries if entry.ids]
        entry = min(known, key=lambda entry: entry.adapters_read_s, default=None)
        if entry is not None:
            entry.adapters_read_s = time.monotonic()
            entry.adapters = name_published(await self._directory.fetch_adapters(entry.ids[0]))

    def _update_announced(self, announced: dict[ModelId, AnnouncedModel]) -> None:
        self._announced = announced
        self._polled.set()
        if self.discovers:
            for entry in self._entries:
                entry.announced_ids = tuple(key for key in entry.announced_ids if key in announced)
            # Entries neither open nor announced are dropped, to admit new ones (`MAX_DISCOVERED`).
            self._entries = [
                entry
                for entry in self._entries
                if entry.served or entry.open_lock.locked() or entry.announced_ids
            ]

    async def _locate_candidates(self) -> None:
        """Locate announced models, beside the looks: reading many folders may take long."""
        while True:
            await self._polled.wait()
            self._polled.clear()
            while (one := self._next_candidate()) is not None:
                await self._locate_candidate(one)

    def _next_candidate(self) -> AnnouncedModel | None:
        """Announced model to locate next: the one tried longest ago; None if none is due."""
        if len(self._entries) >= MAX_DISCOVERED:
            return None
        known = {key for entry in self._entries for key in (*entry.announced_ids, entry.model_id)}
        now = time.monotonic()
        tries = {
            model_id: self._refused.get(model_id, (0.0, ""))[0]
            for model_id in self._announced
            if model_id not in known
        }
        first = min(tries, key=tries.__getitem__, default=None)
        return None if first is None or tries[first] > now else self._announced[first]

    async def _locate_candidate(self, candidate: AnnouncedModel) -> None:
        model_id = candidate.model_id
        try:
            source = await self._locate(candidate)
        except NesaError as error:
            self._refuse(model_id, error, _LOCATE_RETRY_S)
            return
        self._refused.pop(model_id, None)
        for entry in self._entries:
            if entry.source == source:
                entry.announced_ids = (*entry.announced_ids, model_id)
                break
        else:
            self._entries.append(
                ModelEntry(candidate.model_name, source, int(time.time()), (model_id,))
            )
        log.info("model_found", model=model_id)

    def _refuse(self, model_id: ModelId, error: NesaError, for_s: float) -> None:
        if model_id not in self._refused:
            log.warning("model_refused", model=model_id, reason=str(error))
        if len(self._refused) >= _MAX_REFUSED_MODELS:
            self._refused.clear()
        self._refused[model_id] = time.monotonic() + for_s, str(error)


def least_recently_used(
    entries: Sequence[ModelEntry], announced: Container[ModelId]
) -> ModelEntry | None:
    """Least recently used open model without requests; models that no node announces go first."""
    idle = [entry for entry in entries if entry.served is not None and not entry.served.running]
    return min(
        idle, key=lambda entry: (entry.model_id in announced, entry.last_used_s), default=None
    )


def split_adapter(name: str) -> tuple[str, str | None]:
    """Split `base:adapter`. The adapter is `name` or `author/name`."""
    base, separator, adapter = name.rpartition(":")
    return (base, adapter) if separator and base and adapter else (name, None)


def last_part(name: str) -> str:
    """Of a name on the hub or a folder, what it is called in the API."""
    return name.rstrip("/").rpartition("/")[2] or name
