"""Models that nodes of the swarm announce: their missing blocks, and opening them.

Names and ids are untrusted. Files are downloaded from the hub when a request asks for the model,
into a separate folder with a disk limit.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from filelock import FileLock, Timeout

from nesa_node.core.errors import BusyError, MissingBlocksError, ModelNotFoundError, NesaError
from nesa_node.core.ids import ModelId, Span
from nesa_node.core.logging import get_logger
from nesa_node.core.settings.declaration import secret_text
from nesa_node.core.settings.models import ClientConfig, GatewayConfig
from nesa_node.engine.gguf.checkpoint import open_local
from nesa_node.engine.weights.checkpoint import Checkpoint, compute_model_id
from nesa_node.engine.weights.files import convert_parse_errors
from nesa_node.swarm.adapter_catalog import PublishedAdapter, list_published
from nesa_node.swarm.dht.adapter_notices import AdapterNotice
from nesa_node.swarm.dht.records import NodeRecord, majority_num_blocks
from nesa_node.swarm.directory import Directory
from nesa_node.swarm.node import Swarm, open_swarm
from nesa_node.swarm.notice_store import NoticeStore
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.p2p.tasks import SharedCall
from nesa_node.topology.snapshot import count_span_holders, zero_runs

log = get_logger(__name__)

MAX_AGE_S = 0.7
"""Age up to which the last look at a model is reused."""
MAX_LISTED_MODELS = 256
"""Limit on the models of one look; those with the most nodes are kept."""


@dataclass(frozen=True, slots=True)
class AnnouncedModel:
    """Model that nodes announce.

    `holes` are spans that no node serves, `joining` spans that joining nodes will serve.
    `num_blocks` comes from the opened checkpoint; without one, from the nodes' records.
    """

    model_id: ModelId
    num_blocks: int
    holes: tuple[Span, ...]
    joining: tuple[Span, ...] = ()

    @property
    def unserved_blocks(self) -> set[int]:
        """Blocks that no node serves and no joining node will serve."""
        return _blocks(self.holes) - _blocks(self.joining)

    @property
    def model_name(self) -> str:
        """The id without its digest: a hub name or folder. Untrusted."""
        return self.model_id.rpartition("@")[0]


class ModelDirectory(Protocol):
    """Source of the models that the swarm announces."""

    async def fetch_all(self) -> dict[ModelId, AnnouncedModel]: ...

    async def fetch(self, model_id: ModelId) -> AnnouncedModel | None: ...

    async def fetch_adapters(self, model_id: ModelId) -> Sequence[PublishedAdapter]: ...

    def set_num_blocks(self, model_id: ModelId, num_blocks: int) -> None:
        """Set a model's number of blocks, from its checkpoint."""

    def forget_num_blocks(self, model_id: ModelId) -> None:
        """Forget the number of blocks, which then comes from the nodes' records again."""


class DhtModelDirectory:
    """Reads models from the DHT; requests for one model share a look for `MAX_AGE_S`."""

    def __init__(self, directory: Directory, notices: NoticeStore) -> None:
        self._directory = directory
        self._notices = notices
        self._fetches: dict[ModelId, SharedCall] = {}
        self._announced: dict[ModelId, AnnouncedModel | None] = {}

    async def fetch_all(self) -> dict[ModelId, AnnouncedModel]:
        """Announced models by id: at most `MAX_LISTED_MODELS`, those with the most nodes."""
        groups: dict[ModelId, list[NodeRecord]] = {}
        for record in await self._directory.fetch_all():
            groups.setdefault(ModelId(record.model_id), []).append(record)
        most = sorted(groups, key=lambda key: (-len(groups[key]), key))[:MAX_LISTED_MODELS]
        return {key: _summarize_records(groups[key]) for key in most}

    async def fetch_adapters(self, model_id: ModelId) -> Sequence[PublishedAdapter]:
        """Adapters that are published for a model. Raises `NesaError` if the DHT fails."""
        return list_published(await self._notices.fetch(AdapterNotice, model_id))

    def set_num_blocks(self, model_id: ModelId, num_blocks: int) -> None:
        self._directory.set_num_blocks(model_id, num_blocks)
        # Not dropped: a fetch in progress must end with this object.
        if model_id in self._fetches:
            self._fetches[model_id].expire()

    def forget_num_blocks(self, model_id: ModelId) -> None:
        self._directory.clear_num_blocks(model_id)

    async def fetch(self, model_id: ModelId) -> AnnouncedModel | None:
        """Look at one model; None if no node announces it. Raises `NesaError` if the DHT fails."""
        fetch = self._fetches.setdefault(model_id, SharedCall(partial(self._fetch, model_id)))
        await fetch.run_since(time.monotonic() - MAX_AGE_S)
        return self._announced[model_id]

    async def _fetch(self, model_id: ModelId) -> None:
        snapshot = await self._directory.fetch(model_id, reports=False)
        announced = None
        if snapshot.nodes or snapshot.joining:
            joining = tuple(node.span for node in snapshot.joining)
            announced = AnnouncedModel(model_id, snapshot.num_blocks, snapshot.holes(), joining)
        self._announced[model_id] = announced

    async def close(self) -> None:
        """Cancel the fetches in progress."""
        for fetch in self._fetches.values():
            await fetch.close()


def _summarize_records(records: list[NodeRecord]) -> AnnouncedModel:
    num_blocks = majority_num_blocks(records)
    serving = (
        record.span
        for record in records
        if record.state == "serving" and record.num_blocks == num_blocks
    )
    holes = zero_runs(count_span_holders(serving, num_blocks))
    return AnnouncedModel(ModelId(records[0].model_id), num_blocks, holes)


async def watch_missing_blocks(
    directory: ModelDirectory, model_id: ModelId, *, interval_s: float = 1.0
) -> None:
    """Raise `MissingBlocksError` when two looks in a row find a hole that no node will fill.

    A single look may miss records of a DHT member that did not answer. Never returns.
    """
    before: set[int] = set()
    while True:
        try:
            seen = await directory.fetch(model_id)
        except NesaError as error:
            log.warning("swarm_poll_failed", reason=str(error))
        else:
            # Without nodes the number of blocks is unknown.
            now = {-1} if seen is None else seen.unserved_blocks
            if still := before & now:
                raise missing_blocks_error(model_id, seen, still)
            before = now
        await asyncio.sleep(interval_s)


def missing_blocks_error(
    model_id: ModelId, announced: AnnouncedModel | None, blocks: set[int]
) -> MissingBlocksError:
    if announced is None:
        return MissingBlocksError((), f"no node serves {model_id} now; ask again later")
    runs = zero_runs([0 if block in blocks else 1 for block in range(announced.num_blocks)])
    names = ", ".join(str(run) for run in runs)
    return MissingBlocksError(
        [(run.start, run.end) for run in runs],
        f"no node serves the blocks {names} of {model_id}, which has {announced.num_blocks}; "
        "ask again later, or start a node with --block-indices",
    )


def _blocks(spans: Iterable[Span]) -> set[int]:
    return {block for span in spans for block in range(span.start, span.end)}


@asynccontextmanager
async def open_model_directory(
    config: ClientConfig,
) -> AsyncIterator[tuple[DhtModelDirectory, Swarm]]:
    """Join the swarm as a client that does not listen. Raises as `open_swarm` does."""
    with tempfile.TemporaryDirectory(prefix="nesa-gateway-") as folder:
        async with open_swarm(
            Identity.ephemeral(Path(folder)),
            initial_peers=config.initial_peers,
            swarm_key=secret_text(config.swarm_key),
            listen=False,
        ) as swarm:
            directory = DhtModelDirectory(swarm.directory, swarm.notices)
            try:
                yield directory, swarm
            finally:
                await directory.close()


T = TypeVar("T")

DISCOVERED_FOLDER = "discovered"
"""Folder under `cache_dir` for downloads of discovered models."""
DOWNLOAD_RETRY_S = 30.0
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_FOLDER_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


async def locate(config: ClientConfig, announced: AnnouncedModel) -> str:
    """Folder or GGUF file under the cache with the same config and weights, or a model's name on
    the hub.

    Does not ask the hub whether it has the model. Raises `ModelNotFoundError`, which says what to
    do, and other `ModelError`s.
    """
    return await asyncio.to_thread(_locate, config, announced)


def _locate(config: ClientConfig, announced: AnnouncedModel) -> str:
    name = announced.model_name
    if _HUB_NAME.fullmatch(name) and not Path(name).exists():
        return name
    folder = None
    if _FOLDER_NAME.fullmatch(name):
        places = (config.cache_dir / name, config.cache_dir / f"{name}.gguf")
        folder = next((place for place in places if place.exists()), None)
    if folder is None:
        raise ModelNotFoundError(f"start the gateway with --model FOLDER to offer {name[:96]!r}")
    try:
        with convert_parse_errors(f"the model in {folder}"):
            found = open_local(folder, config.cache_dir)
            require_model_id(found, frozenset({announced.model_id}))
    except NesaError as error:
        raise ModelNotFoundError(f"{error}; --model names another place") from error
    return str(folder)


def open_discovered(
    config: GatewayConfig,
    source: str,
    ids: frozenset[ModelId],
    load: Callable[[Checkpoint], T],
    *,
    endpoint: str | None = None,
) -> T:
    """Call `load` with the checkpoint at `source`, which must have one of `ids`. Blocks.

    `source` is a folder or hub name from `locate`. Downloads, also those of `load`, evict the least
    recently used models if they would exceed the disk limit. Raises `ModelError`s, also for errors
    of libraries that parse untrusted files, `DiskLimitError` if the model alone exceeds the limit,
    and `BusyError` while another process downloads into that folder.
    """
    if Path(source).is_absolute():
        with convert_parse_errors(f"the model in {source}"):
            local = open_local(Path(source), config.cache_dir)
            require_model_id(local, ids)
            return load(local)
    # Imported late: huggingface_hub reads its environment when it is imported.
    from nesa_node.engine.weights.hub import open_hub

    cache_dir = config.cache_dir / DISCOVERED_FOLDER
    cache_dir.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(cache_dir / ".lock", timeout=0), convert_parse_errors(f"the model {source}"):
            # Not `open_checkpoint`: an untrusted name must not open a folder of this machine.
            checkpoint = open_hub(
                source,
                revision=config.revision,
                token=secret_text(config.token),
                cache_dir=cache_dir,
                max_disk_bytes=int(config.discovered_disk_gib * 2**30),
                evicts=True,
                endpoint=endpoint,
            )
            require_model_id(checkpoint, ids)
            return load(checkpoint)
    except Timeout:
        raise BusyError("another gateway here downloads a model", DOWNLOAD_RETRY_S) from None


def require_model_id(checkpoint: Checkpoint, ids: frozenset[ModelId]) -> None:
    """Raise `ModelNotFoundError` unless the checkpoint's id is one of `ids`."""
    found = compute_model_id(checkpoint)
    if found not in ids:
        raise ModelNotFoundError(
            f"{checkpoint.name} holds {found}, which is not the same as the swarm's "
            f"{', '.join(sorted(ids)[:4])}; --model names another place"
        )
