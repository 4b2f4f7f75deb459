"""Swarms known to this user: those of nodes that run on this machine, and the last one used.

Stored as files in the state folder. A running node holds a lock on its file; a file without a lock
is a killed node's, and the next reader deletes it. Secrets are not stored: the key of a private
swarm is given each time.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import model_name_candidates
from nesa_node.core.settings.addresses import parse_peer_address

MAX_FILE_BYTES = 65_536
MAX_ADDRESSES = 64
_MAX_TIMESTAMP_S = 1e11
"""Latest accepted timestamp, in Unix seconds (year 5138): later ones cannot be shown as a date."""
_LAST_SWARM_FILE = "last-swarm.json"
_NODES_FOLDER = "nodes"


@dataclass(frozen=True, slots=True)
class KnownSwarm:
    """Addresses and model of a known swarm. `name` is the running node's public name."""

    addresses: tuple[str, ...]
    model: str | None
    saved_at: float
    source: Literal["running", "last"]
    name: str | None = None


class KnownSwarmStore:
    """Store of known swarms in `folder`. I/O errors are ignored: it is a convenience only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save_last(self, addresses: Sequence[str], model: str | None) -> None:
        """Save `addresses` as the last swarm; without `model`, keep the model saved with them.

        Does nothing for a node that runs on this machine: its local addresses end with it.
        """
        if any(set(addresses) & set(node.addresses) for node in self._running_nodes()):
            return
        last = _read_swarm(self._folder / _LAST_SWARM_FILE, "last")
        if model is None and last is not None and last.addresses == tuple(addresses):
            model = last.model
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            draft = self._folder / f".{_LAST_SWARM_FILE}.{os.getpid()}"
            draft.write_text(_encode_swarm(addresses, model, None), encoding="utf-8")
            draft.replace(self._folder / _LAST_SWARM_FILE)

    @contextmanager
    def register_node(
        self, addresses: Sequence[str], model: str, name: str | None
    ) -> Iterator[None]:
        """List a node of this machine until the context or its process ends."""
        path = self._folder / _NODES_FOLDER / f"{os.getpid()}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError:
            yield
            return
        try:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.write(descriptor, _encode_swarm(addresses, model, name).encode())
            yield
        finally:
            path.unlink(missing_ok=True)
            os.close(descriptor)

    def find(self, model: str | None = None) -> KnownSwarm | None:
        """Best known swarm for `model` (a name, folder or full id), or None.

        Order: a running node of `model`, the last swarm if it served `model`, any running node,
        the last swarm; the newest first among equals.
        """
        nodes = sorted(self._running_nodes(), key=lambda known: -known.saved_at)
        last = _read_swarm(self._folder / _LAST_SWARM_FILE, "last")
        known = [*nodes, *([] if last is None else [last])]
        return next((one for one in known if _matches_model(one, model)), next(iter(known), None))

    def _running_nodes(self) -> Iterator[KnownSwarm]:
        for path in (self._folder / _NODES_FOLDER).glob("*.json"):
            with suppress(OSError):
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    path.unlink(missing_ok=True)
                except BlockingIOError:
                    if (known := _read_swarm(path, "running")) is not None:
                        yield known
                finally:
                    os.close(descriptor)


def _matches_model(known: KnownSwarm, model: str | None) -> bool:
    if model is None:
        return True
    if known.model is None:
        return False
    name = Path(known.model.partition("@")[0]).name
    return not model_name_candidates(model).isdisjoint((known.model, name))


def _encode_swarm(addresses: Sequence[str], model: str | None, name: str | None) -> str:
    kept = list(addresses[:MAX_ADDRESSES])
    return json.dumps({"addresses": kept, "model": model, "name": name, "saved_at": time.time()})


def _read_swarm(path: Path, source: Literal["running", "last"]) -> KnownSwarm | None:
    """The swarm in a file; None if it is missing, too large or malformed."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return None
        said: Any = json.loads(path.read_text(encoding="utf-8"))
        addresses = tuple(parse_peer_address(str(address)) for address in said["addresses"])
        model, name = said["model"], said["name"]
        saved_at = float(said["saved_at"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, ConfigError):
        return None
    if not addresses or not 0 <= saved_at <= _MAX_TIMESTAMP_S:
        return None
    return KnownSwarm(addresses, model and str(model), saved_at, source, name and str(name))
