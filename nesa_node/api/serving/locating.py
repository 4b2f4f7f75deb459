"""Where a model that nodes announce can be opened here. Its name is a stranger's word."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from nesa_node.api.serving.looking import Seen
from nesa_node.core.config import ClientConfig, secret_text
from nesa_node.core.errors import ModelNotFoundError, NesaError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_FOLDER_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}")


async def locate(config: ClientConfig, seen: Seen) -> str:
    """A name on the hub, or a folder under the cache, that holds the same config and weights.

    Only what is small is fetched. Raises `ModelNotFoundError` with what to do, and other
    `ModelError`s.
    """
    return await asyncio.to_thread(_locate, config, seen)


def _locate(config: ClientConfig, seen: Seen) -> str:
    name = seen.model_name
    if _HUB_NAME.fullmatch(name) and not Path(name).exists():
        source = name
    elif _FOLDER_NAME.fullmatch(name) and (config.cache_dir / name).is_dir():
        source = str(config.cache_dir / name)
    else:
        raise ModelNotFoundError(f"start the gateway with --model FOLDER to offer {name[:96]!r}")
    from nesa_node.engine.checkpoint import open_checkpoint
    from nesa_node.engine.model_id import model_id

    try:
        checkpoint = open_checkpoint(
            source,
            revision=config.revision if source == name else None,
            token=secret_text(config.token),
            cache_dir=config.cache_dir,
        )
        found = model_id(checkpoint)
    except NesaError as error:
        raise ModelNotFoundError(f"{error}; --model names another place") from error
    if found != seen.model_id:
        raise ModelNotFoundError(
            f"{source} holds {found}, which is not the same; --model names another place"
        )
    return source
