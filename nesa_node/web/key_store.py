"""Store of API keys: made here, shown once, kept as hashes in a file that processes share.

Only the SHA-256 of a key is stored. A slow hash (scrypt, Argon2) protects secrets that people
choose; a key has 256 random bits and cannot be guessed at any speed, and a slow hash would delay
every request.
"""

from __future__ import annotations

import fcntl
import hmac
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nesa_node.core.errors import ConfigError
from nesa_node.core.logging import get_logger
from nesa_node.core.settings.declaration import PublicName
from nesa_node.core.wait_tracking import track_wait

log = get_logger(__name__)

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


KEY_PREFIX = "nesa-"
MAX_KEYS = 1000
RELOAD_INTERVAL_S = 1.0
"""Maximum age in seconds of the keys in memory before the file is checked again."""
USE_SAVE_INTERVAL_S = 300.0
"""Interval in seconds at which a key's last use is written to the file."""
_SECRET_BYTES = 32
_ID_CHARS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """Rate limits of one key; None is unlimited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None


class KeyStore:
    """The keys in the file at `path`.

    `clock` gives seconds since the epoch. Not thread-safe, but safe for several processes: changes
    of another one are seen within `RELOAD_INTERVAL_S`.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._file = KeyFile(path)
        self._clock = clock
        self._checked_at: float | None = None
        self._stamp: FileStamp | None = None
        self._by_digest_prefix: dict[bytes, StoredKey] = {}
        self._by_id: dict[str, StoredKey] = {}
        self._read_error: str | None = None
        self._used_at: dict[str, float] = {}
        self._unsaved_uses: dict[str, float] = {}

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def has_had_keys(self) -> bool:
        """Whether there have ever been keys: revoking the last one leaves the file.

        Raises `ConfigError` if the file cannot be examined.
        """
        return self._file.read_stamp() != _NO_FILE

    def find(self, key: str) -> StoredKey | None:
        """The stored key of the secret `key`; None if unknown, revoked or expired.

        Raises `ConfigError` if the file cannot be read.
        """
        self._refresh()
        digest = key_digest(key)
        # Lookup by half of the digest reveals nothing about the other half by its timing; the whole
        # digest is compared in constant time.
        stored = self._by_digest_prefix.get(digest[:16])
        if stored is None or not hmac.compare_digest(stored.digest, digest):
            return None
        return None if stored.has_expired(self._clock()) else stored

    def find_by_id(self, key_id: str) -> StoredKey | None:
        """The stored key of this id; None and errors as for `find`."""
        self._refresh()
        stored = self._by_id.get(key_id)
        return None if stored is None or stored.has_expired(self._clock()) else stored

    def read_all(self) -> tuple[StoredKey, ...]:
        """All keys in the order of creation. Raises `ConfigError`."""
        return self._file.read_keys()[0]

    def add(
        self, name: str, limits: KeyLimits | None = None, expires_at: float | None = None
    ) -> tuple[StoredKey, str]:
        """Make a key. Returns its stored data and the secret, which is stored nowhere.

        Raises `ConfigError` if the name is taken, or the file cannot be written.
        """
        limits = limits or KeyLimits()
        with self._file.edit_keys() as keys:
            if any(key.name == name for key in keys):
                raise ConfigError(f"there is a key named {name!r}: revoke it, or choose another")
            if len(keys) >= MAX_KEYS:
                raise ConfigError(
                    f"{self.path} holds {MAX_KEYS} keys, and no more fit: revoke some"
                )
            taken = {key.id for key in keys}
            secret = _new_secret()
            while derive_key_id(secret) in taken:
                secret = _new_secret()
            made = StoredKey(
                id=derive_key_id(secret),
                name=name,
                sha256=key_digest(secret).hex(),
                created_at=self._clock(),
                expires_at=expires_at,
                requests_per_minute=limits.requests_per_minute,
                tokens_per_minute=limits.tokens_per_minute,
                concurrent_requests=limits.concurrent_requests,
            )
            keys.append(made)
        self._checked_at = None
        return made, secret

    def revoke(self, name_or_id: str) -> StoredKey:
        """Delete the key with this id, name or secret. Raises `ConfigError`."""
        with self._file.edit_keys() as keys:
            by_id = {key.id: key for key in keys}
            by_name = {key.name: key for key in keys}
            found = by_id.get(name_or_id) or by_name.get(name_or_id)
            found = found or by_id.get(derive_key_id(name_or_id))
            if found is None:
                # The message does not repeat the argument: it may be a key.
                raise ConfigError(
                    "no key has this id or name; `nesa-node keys list` shows those that there are"
                )
            keys.remove(found)
        self._checked_at = None
        return found

    @property
    def has_unsaved_uses(self) -> bool:
        """Whether `save_uses` has something to write."""
        return bool(self._unsaved_uses)

    def record_use(self, stored: StoredKey) -> None:
        """Record that the key was used now, at most once per `USE_SAVE_INTERVAL_S`."""
        now = self._clock()
        used_at = max(stored.used_at or 0.0, self._used_at.get(stored.id, 0.0))
        if now - used_at < USE_SAVE_INTERVAL_S:
            return
        if len(self._used_at) >= MAX_KEYS:
            self._used_at.clear()
        self._used_at[stored.id] = self._unsaved_uses[stored.id] = now

    def save_uses(self) -> None:
        """Write the recorded uses to the file. Blocks: call it in a thread. Errors are logged."""
        used, self._unsaved_uses = self._unsaved_uses, {}
        if not used:
            return
        try:
            with self._file.edit_keys() as keys:
                for at, key in enumerate(keys):
                    if used.get(key.id, 0.0) > (key.used_at or 0.0):
                        keys[at] = key.model_copy(update={"used_at": used[key.id]})
        except ConfigError as error:
            log.warning("key_use_save_failed", reason=str(error))

    def _refresh(self) -> None:
        now = time.monotonic()
        if self._checked_at is None or now - self._checked_at >= RELOAD_INTERVAL_S:
            self._checked_at = now
            self._reload()
        if self._read_error is not None:
            raise ConfigError(self._read_error)

    def _reload(self) -> None:
        """Read the file if it has changed. While it is unreadable, no key is valid."""
        trouble = None
        try:
            if self._stamp is not None and self._file.read_stamp() == self._stamp:
                return
            keys, self._stamp = self._file.read_keys()
            self._by_digest_prefix = {key.digest[:16]: key for key in keys}
            self._by_id = {key.id: key for key in keys}
        except ConfigError as error:
            trouble = str(error)
            self._by_digest_prefix, self._by_id, self._stamp = {}, {}, None
        if trouble is not None and trouble != self._read_error:
            log.error("key_file_read_failed", reason=trouble)
        self._read_error = trouble


def key_digest(key: str) -> bytes:
    """SHA-256 of a secret, 32 bytes; accepts any text."""
    return sha256(key.encode("utf-8", "surrogatepass")).digest()


def derive_key_id(key: str) -> str:
    """Id of a secret in logs and lists: the first hexadecimal digits of its digest."""
    return key_digest(key).hex()[:_ID_CHARS]


def _new_secret() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
