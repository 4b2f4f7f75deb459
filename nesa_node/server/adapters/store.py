"""Adapters on disk, each under its digest, and the notices of their authors.

::

    <cache-dir>/adapters/<digest>/      adapter_config.json and adapter_model.safetensors
    <cache-dir>/adapters/notices/       one file for each model and author
    <cache-dir>/adapters/incoming-*/    files that are being received

Several daemons of one user may share the folder: additions and evictions take a file lock.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from filelock import FileLock

from nesa_node.core.errors import AdapterError, DiskLimitError
from nesa_node.core.ids import ModelId
from nesa_node.core.logging import get_logger
from nesa_node.engine.weights.adapter_files import ADAPTER_CONFIG_FILE
from nesa_node.swarm.dht.adapter_notices import AdapterNotice

log = get_logger(__name__)

AUTHOR_SHARE = 4
"""An author's adapters take at most this fraction of the store: 1 / `AUTHOR_SHARE`."""
MAX_HELD_ADAPTERS = 1024
MAX_KEPT_NOTICES = 256
"""Of all models of this machine: four times those under one key of the DHT."""
_LOCK_TIMEOUT_S = 30.0
_STALE_INCOMING_S = 3600.0
_GRACE_S = 600.0
"""Age from which an adapter without a notice is deleted: another daemon may have just added it."""
_DIGEST_PATTERN = re.compile(r"[0-9a-f]{64}")
_MAX_NOTICE_FILE_BYTES = 64 * 1024


class KeptNotice(msgspec.Struct, frozen=True):
    """A notice as this machine keeps it, with what is needed of it beside the sealed bytes."""

    model_id: str
    author: str
    order: tuple[int, int]
    expires_at: float
    digests: tuple[str, ...]
    sealed: bytes


class AdapterStore:
    """Bounded, content-addressed store of adapters. All methods block the thread.

    Beyond `max_bytes` the adapters that were opened or served the longest time ago are evicted.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._folder = folder
        self._notices = folder / "notices"

    @property
    def max_author_bytes(self) -> int:
        return self.max_bytes // AUTHOR_SHARE

    def held(self) -> dict[str, int]:
        """Bytes of each adapter, by digest, the one to evict first at the beginning."""
        found = []
        for entry in self._entries():
            with suppress(OSError):
                found.append((entry.stat().st_mtime, entry.name, _folder_bytes(entry)))
        return {digest: nbytes for _, digest, nbytes in sorted(found)}

    def holds(self, digest: str) -> bool:
        return _DIGEST_PATTERN.fullmatch(digest) is not None and (self._folder / digest).is_dir()

    def open(self, digest: str) -> Path:
        """The PEFT folder of an adapter, which counts as used now.

        It may be evicted afterwards: read it at once, and fetch it again where a file is missing.
        Raises `AdapterError` if it is not held.
        """
        if not self.holds(digest):
            raise AdapterError(f"the adapter {digest:.64} is not on this machine")
        path = self._folder / digest
        with suppress(FileNotFoundError):
            os.utime(path)
        return path

    @contextmanager
    def incoming(self) -> Iterator[Path]:
        """A new folder for files that are being received, removed at the end."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix="incoming-", dir=self._folder))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def add(self, incoming: Path, digest: str, own: Collection[str] = ()) -> None:
        """Move a checked folder into the store, and evict what no longer fits.

        Of its author's adapters, `own`, those are evicted that exceed the author's share. Raises
        `DiskLimitError` for an adapter that is larger than the store.
        """
        nbytes = _folder_bytes(incoming)
        if nbytes > self.max_bytes:
            raise DiskLimitError(
                f"the adapter has {nbytes} bytes, the store {self.max_bytes} (--adapter-store-gib)"
            )
        assert _DIGEST_PATTERN.fullmatch(digest)
        target = self._folder / digest
        with self._lock():
            if not target.is_dir():
                held = self.held()
                self._evict(
                    {each: held[each] for each in held if each in own},
                    self.max_author_bytes - nbytes,
                )
                self._evict(self.held(), self.max_bytes - nbytes)
                incoming.rename(target)
            os.utime(target)

    def author_bytes(self, digests: tuple[str, ...]) -> int:
        """Bytes of those of an author's adapters that are held."""
        held = self.held()
        return sum(held.get(digest, 0) for digest in set(digests))

    def keep_notice(self, notice: AdapterNotice, sealed: bytes) -> None:
        """Keep a valid notice in place of its author's earlier one, until it expires.

        Raises `DiskLimitError` where `MAX_KEPT_NOTICES` list adapters that are held.
        """
        kept = KeptNotice(
            model_id=notice.model_id,
            author=notice.peer_id,
            order=notice.order,
            expires_at=notice.expires_at,
            digests=tuple(each.digest for each in notice.adapters),
            sealed=sealed,
        )
        self._notices.mkdir(parents=True, exist_ok=True)
        path = self._notice_path(kept.model_id, kept.author)
        with self._lock():
            known = _read_notice(path)
            if known is not None and known.order >= kept.order:
                return
            if known is None:
                self._make_room_for_notice()
            partial = path.with_suffix(".part")
            partial.write_bytes(msgspec.msgpack.encode(kept))
            partial.replace(path)

    def notices(self, model_id: ModelId | None = None) -> list[KeptNotice]:
        """The notices of a model that are kept, or of all models, expired ones left out."""
        now = time.time()
        paths = sorted(self._notices.glob("*.bin")) if self._notices.is_dir() else []
        kept = [notice for path in paths if (notice := _read_notice(path)) is not None]
        return [
            each
            for each in kept
            if each.expires_at > now and (model_id is None or each.model_id == model_id)
        ]

    def sweep(self) -> list[str]:
        """Delete what no kept notice lists, expired notices, and what a killed process left.

        Returns the digests of deleted adapters. An author's removal takes effect here.
        """
        if not self._folder.is_dir():
            return []
        with self._lock():
            now = time.time()
            held = self.held()
            for path in self._notices.glob("*") if self._notices.is_dir() else ():
                kept = _read_notice(path)
                if kept is None or kept.expires_at <= now:
                    path.unlink(missing_ok=True)
            listed = {digest for kept in self.notices() for digest in kept.digests}
            unlisted = [digest for digest in held if digest not in listed]
            deleted = [digest for digest in unlisted if self._delete_older(digest, now - _GRACE_S)]
            for path in self._folder.glob("incoming-*"):
                with suppress(OSError):
                    if path.stat().st_mtime < now - _STALE_INCOMING_S:
                        shutil.rmtree(path, ignore_errors=True)
        return deleted

    def _delete_older(self, digest: str, before: float) -> bool:
        path = self._folder / digest
        with suppress(OSError):
            # The folder's own times are those of its last use.
            if (path / ADAPTER_CONFIG_FILE).stat().st_mtime > before:
                return False
        shutil.rmtree(path, ignore_errors=True)
        return True

    def _make_room_for_notice(self) -> None:
        """Delete one of too many notices: one that lists nothing held. Raises `DiskLimitError`."""
        paths = list(self._notices.glob("*.bin"))
        if len(paths) < MAX_KEPT_NOTICES:
            return
        held = self.held()
        for path in paths:
            kept = _read_notice(path)
            if kept is None or held.keys().isdisjoint(kept.digests):
                path.unlink(missing_ok=True)
                return
        raise DiskLimitError(f"adapters of {MAX_KEPT_NOTICES} authors and models are held already")

    def _evict(self, held: dict[str, int], most_bytes: int) -> None:
        """Evict the first of `held` until the rest have `most_bytes` and one more has a place."""
        total = sum(held.values())
        while held and (total > most_bytes or len(held) >= MAX_HELD_ADAPTERS):
            digest = next(iter(held))
            total -= held.pop(digest)
            shutil.rmtree(self._folder / digest, ignore_errors=True)
            log.info("adapter_evicted", digest=digest)

    def _entries(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return [path for path in self._folder.iterdir() if _DIGEST_PATTERN.fullmatch(path.name)]

    def _notice_path(self, model_id: str, author: str) -> Path:
        name = hashlib.sha256(f"{model_id}\0{author}".encode()).hexdigest()[:32]
        return self._notices / f"{name}.bin"

    @contextmanager
    def _lock(self) -> Iterator[None]:
        self._folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self._folder / "store.lock", timeout=_LOCK_TIMEOUT_S):
            yield


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _read_notice(path: Path) -> KeptNotice | None:
    """A kept notice; None where there is none, or a file that was damaged."""
    try:
        with path.open("rb") as stream:
            return msgspec.msgpack.decode(stream.read(_MAX_NOTICE_FILE_BYTES), type=KeptNotice)
    except (OSError, msgspec.MsgspecError, ValueError):
        return None
