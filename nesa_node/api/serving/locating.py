"""Where a model that nodes announce can be opened here. Its name and id are a stranger's words.

Nothing is fetched from the hub before a request asks for the model, and then into a folder of its
own, which may hold so much and no more.
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
"""The folder under `cache_dir` for what is downloaded because it was discovered."""
RETRY_AFTER_S = 30.0
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_FOLDER_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


async def locate(config: ClientConfig, seen: Seen) -> str:
    """A folder under the cache that holds the same config and weights, or a name for the hub.

    The hub is not asked: whether it has that model is found out when one asks for it. Raises
    `ModelNotFoundError` with what to do, and other `ModelError`s.
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
    """`load` of the checkpoint at `source`, a folder or hub name that `locate` gave, if it has one
    of `ids`. Blocks.

    What is downloaded of the hub, by `load` too, replaces what was used longest ago where it would
    exceed the disk limit. Raises `ModelError`s, also for whatever else a library makes of a
    stranger's files, `DiskLimitError` where the model alone exceeds it, and `BusyError` while
    another process downloads there.
    """
    if Path(source).is_absolute():
        with parsing(f"the model in {source}"):
            folder = open_folder(Path(source))
            require_same(folder, ids)
            return load(folder)
    # Only here: huggingface_hub reads its environment when it is imported.
    from nesa_node.engine.hub import open_hub

    cache_dir = config.cache_dir / DISCOVERED
    cache_dir.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(cache_dir / ".lock", timeout=0), parsing(f"the model {source}"):
            # Not `open_checkpoint`: to a name of the swarm no folder of this machine answers.
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
    """Raises `ModelNotFoundError` unless the checkpoint's id is one of `ids`."""
    found = model_id(checkpoint)
    if found not in ids:
        raise ModelNotFoundError(
            f"{checkpoint.name} holds {found}, which is not the same as the swarm's "
            f"{', '.join(sorted(ids)[:4])}; --model names another place"
        )
