"""Ready file: a JSON file that exists exactly as long as a daemon serves, for scripts and tests."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from nesa_node.compression.tensors import DTYPE_NAMES
from nesa_node.core.errors import ConfigError
from nesa_node.core.span import Span
from nesa_node.server.node.node_model import NodeModel
from nesa_node.swarm.node import Swarm


def ready_file_fields(
    swarm: Swarm, served: NodeModel | None = None, span: Span | None = None
) -> Mapping[str, object]:
    """The file's content."""
    return {
        "peer_id": swarm.identity.peer_id,
        "addresses": list(swarm.transport.addresses),
        "model": None if served is None else served.model_id,
        "span": None if span is None else [span.start, span.end],
        "dtype": None if served is None else DTYPE_NAMES[served.dtype],
        "quant_type": None if served is None else served.quant_type,
    }


@contextmanager
def ready_file(path: Path | None, fields: Mapping[str, object]) -> Iterator[None]:
    """Write `fields` to `path` atomically, and remove the file on exit. Without a path, no file.

    Raises `ConfigError` if it cannot be written.
    """
    if path is None:
        yield
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ConfigError(f"cannot write the ready file {path}: {error.strerror}") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def check_ready_file(path: Path | None) -> None:
    """Check before loading that the file can be written. Raises `ConfigError`."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise ConfigError(f"--ready-file {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ConfigError(f"--ready-file {path} is a folder")
    path.unlink(missing_ok=True)
