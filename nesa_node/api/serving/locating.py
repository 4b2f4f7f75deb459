"""Opening of discovered models, by names and ids that are untrusted.

Files are downloaded from the hub when a request asks for the model, into a separate folder with a
disk limit.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from nesa_node.api.serving.looking import Seen
from nesa_node.core.config import ClientConfig, GatewayConfig, secret_text
from nesa_node.core.errors import BusyError, ModelNotFoundError, NesaError
from nesa_node.core.ids import ModelId
from nesa_node.engine.checkpoint import Checkpoint, open_folder
from nesa_node.engine.model_id import model_id
from nesa_node.engine.side_files import parsing

T = TypeVar("T")

DISCOVERED = "discovered"
"""Folder under `cache_dir` for downloads of discovered models."""
RETRY_AFTER_S = 30.0
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_FOLDER_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


async def locate(config: ClientConfig, seen: Seen) -> str:
    """Folder under the cache with the same config and weights, or a model's name on the hub.

    Does not ask the hub whether it has the model. Raises `ModelNotFoundError`, which says what to
    do, and other `ModelError`s.
    """
    return await asyncio.to_thread(_locate, config, seen)


def _locate(config: ClientConfig, seen: Seen) -> str:
    name = seen.model_name
    if _HUB_NAME.fullmatch(name) and not Path(name).exists():
        return name
    if not _FOLDER_NAME.fullmatch(name) or not (config.cache_dir / name).is_dir():
        raise ModelNotFoundError(f"start the gateway with --model FOLDER to offer {name[:96]!r}")
    folder = config.cache_dir / name
    try:
        with parsing(f"the model in {folder}"):
            require_same(open_folder(folder), frozenset({seen.model_id}))
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
        with parsing(f"the model in {source}"):
            folder = open_folder(Path(source))
            require_same(folder, ids)
            return load(folder)
    # Imported late: huggingface_hub reads its environment when it is imported.
    from nesa_node.engine.hub import open_hub

    cache_dir = config.cache_dir / DISCOVERED
    cache_dir.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(cache_dir / ".lock", timeout=0), parsing(f"the model {source}"):
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
            require_same(checkpoint, ids)
            return load(checkpoint)
    except Timeout:
        raise BusyError("another gateway here downloads a model", RETRY_AFTER_S) from None


def require_same(checkpoint: Checkpoint, ids: frozenset[ModelId]) -> None:
    """Raise `ModelNotFoundError` unless the checkpoint's id is one of `ids`."""
    found = model_id(checkpoint)
    if found not in ids:
        raise ModelNotFoundError(
            f"{checkpoint.name} holds {found}, which is not the same as the swarm's "
            f"{', '.join(sorted(ids)[:4])}; --model names another place"
        )
