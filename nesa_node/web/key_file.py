"""File of API keys, shared by several processes: read often, written rarely."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nesa_node.core.errors import ConfigError
from nesa_node.core.settings.field_types import PublicName
from nesa_node.core.wait_tracking import track_wait

_MAX_FILE_BYTES = 16 * 2**20
_LOCK_TIMEOUT_S = 5.0
_LOCK_POLL_S = 0.02
_RECENT_WRITE_S = 2.0
_Limit = Annotated[int, Field(ge=1)] | None
_Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class StoredKey(BaseModel):
    """Stored data of a key. Times are seconds since the epoch; `used_at` is coarse."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
    name: PublicName
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    created_at: _Time
    expires_at: _Time | None = None
    used_at: _Time | None = None
    requests_per_minute: _Limit = None
    tokens_per_minute: _Limit = None
    concurrent_requests: _Limit = None

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.sha256)

    def has_expired(self, now: float) -> bool:
        return self.expires_at is not None and now >= self.expires_at


class _KeyDocument(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["nesa-node keys"] = "nesa-node keys"
    version: Literal[1] = 1
    keys: tuple[StoredKey, ...] = ()


FileStamp = tuple[int, int, int]
"""Inode, modification time and size of a file version."""
_NO_FILE: FileStamp = (0, 0, 0)


class KeyFile:
    """The key file at `path`, which need not exist. Every method raises `ConfigError`.

    Writers hold a lock file and replace the whole file, so that a reader sees the old or the new
    keys even if a writer is killed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()

    def exists(self) -> bool:
        return self.read_stamp() != _NO_FILE

    def read_stamp(self) -> FileStamp:
        try:
            return _make_stamp(os.stat(self.path))
        except FileNotFoundError:
            return _NO_FILE
        except OSError as error:
            raise ConfigError(f"cannot read the keys in {self.path}: {error.strerror}") from None

    def read_keys(self) -> tuple[tuple[StoredKey, ...], FileStamp | None]:
        """All keys (none without a file) and the file's stamp.

        The stamp is None for a file so recent that a later version could have the same one.
        """
        try:
            with open(self.path, "rb", opener=_open_nonblocking) as file:
                found = os.fstat(file.fileno())
                self._check_permissions(found)
                content = file.read(_MAX_FILE_BYTES + 1)
        except FileNotFoundError:
            return (), _NO_FILE
        except OSError as error:
            raise ConfigError(f"cannot read the keys in {self.path}: {error.strerror}") from None
        young = time.time() - found.st_mtime < _RECENT_WRITE_S
        try:
            keys = _KeyDocument.model_validate_json(content).keys
        except ValidationError:
            raise ConfigError(
                f"{self.path} is damaged or no file of keys: move it away and make new keys, or "
                "choose another one with --keys-path"
            ) from None
        return keys, None if young else _make_stamp(found)

    @contextmanager
    def edit_keys(self) -> Iterator[list[StoredKey]]:
        """Yield the keys as a list to edit; it is written if the context exits without an error."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _hold_lock(self.path.with_name(self.path.name + ".lock")):
                before, _ = self.read_keys()
                keys = list(before)
                yield keys
                if tuple(keys) != before:
                    _replace_file(self.path.resolve(), _KeyDocument(keys=tuple(keys)))
        except OSError as error:
            raise ConfigError(
                f"cannot write the keys in {self.path}: {error.strerror or error}"
            ) from None

    def _check_permissions(self, found: os.stat_result) -> None:
        """Refuse a file that other users may write; reading is harmless, it has only hashes."""
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{self.path} is not a regular file")
        if found.st_mode & stat.S_IWOTH:
            raise ConfigError(
                f"{self.path} can be written by other users: run `chmod 600 {self.path}`, and see "
                "with `nesa-node keys list` that all keys in it are yours"
            )


def _make_stamp(found: os.stat_result) -> FileStamp:
    return found.st_ino, found.st_mtime_ns, found.st_size


def _open_nonblocking(path: str, flags: int) -> int:
    """Open without blocking on a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


@contextmanager
def _hold_lock(path: Path) -> Iterator[None]:
    """Hold the lock file; the kernel releases it if this process dies. Raises `TimeoutError`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with track_wait("another program that changes the keys", limit_s=_LOCK_TIMEOUT_S):
            _acquire_lock(descriptor, path)
        yield
    finally:
        os.close(descriptor)


def _acquire_lock(descriptor: int, path: Path) -> None:
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"another program keeps {path} locked")
        time.sleep(_LOCK_POLL_S)


def _replace_file(path: Path, document: _KeyDocument) -> None:
    # mkstemp creates the file exclusively and with mode 0600.
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(document.model_dump_json(indent=2, exclude_none=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
