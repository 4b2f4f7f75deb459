"""A training session's checkpoint on disk: what continues it after the client has ended."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from nesa_node.client.training.training_span import SpanState
from nesa_node.core.errors import ConfigError
from nesa_node.engine.training.training_state import hash_state

FORMAT = "nesa-node training checkpoint 1"


@dataclass(frozen=True, slots=True)
class CheckpointLabel:
    """What a session is: a checkpoint of another one does not continue it."""

    model_id: str
    spec: str
    """Hexadecimal digits of the encoded `TrainingSpec`, the label of the client's prompt, and the
    digest of initial values."""
    data: str = ""
    """Digest of the order of micro-batches; empty if the caller makes them."""


def save_checkpoint(path: Path, label: CheckpointLabel, state: SpanState) -> None:
    """Write a checkpoint in place of the last one, which stays whole until then.

    Raises `OSError`.
    """
    metadata = {
        "format": FORMAT,
        "model_id": label.model_id,
        "spec": label.spec,
        "data": label.data,
        "applied": str(state.applied),
        "digest": hash_state(state.tensors).hex(),
    }
    content = save({name: each.contiguous() for name, each in state.tensors.items()}, metadata)
    write_atomically(path, content)


def load_checkpoint(path: Path, label: CheckpointLabel) -> SpanState | None:
    """Read the checkpoint of a session; None where there is no file.

    Raises `ConfigError` for a file that is damaged, or of another session.
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors: dict[str, Tensor] = {
                name: file.get_tensor(name)
                for name in file.keys()  # noqa: SIM118  # it is no dictionary
            }
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is no checkpoint: {error}; delete it to begin anew") from None
    if metadata.get("format") != FORMAT:
        raise ConfigError(f"{path} is no checkpoint of this program: delete it to begin anew")
    if metadata.get("digest") != hash_state(tensors).hex():
        raise ConfigError(f"{path} is damaged: its digest differs; delete it to begin anew")
    for name, what in (
        ("model_id", "the model"),
        ("spec", "the adapters, optimizer or seed"),
        ("data", "the data, its order or the batches"),
    ):
        if metadata.get(name) != getattr(label, name):
            raise ConfigError(
                f"{path} belongs to a session in which {what} differed: repeat its options, or "
                "delete it (or choose another output folder) to begin anew"
            )
    return SpanState(int(metadata["applied"]), tensors)


def write_atomically(path: Path, content: bytes | str) -> None:
    """Replace a file at once, so that it is never seen half written. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # as files are made; `mkstemp` keeps them for their owner
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def dump_json(value: object) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"
