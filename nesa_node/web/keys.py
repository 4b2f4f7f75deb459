"""Store of API keys: made here, shown once, kept as hashes in a file that processes share.

Only the SHA-256 of a key is stored. A slow hash (scrypt, Argon2) protects secrets that people
choose; a key has 256 random bits and cannot be guessed at any speed, and a slow hash would delay
every request.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from nesa_node.core.errors import ConfigError
from nesa_node.core.logging import get_logger
from nesa_node.web.key_file import KeyFile, Stamp, StoredKey

log = get_logger(__name__)

KEY_PREFIX = "nesa-"
MAX_KEYS = 1000
NOTICE_S = 1.0
"""Maximum age in seconds of the keys in memory before the file is checked again."""
USED_S = 300.0
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
    of another one are seen within `NOTICE_S`.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._file = KeyFile(path)
        self._clock = clock
        self._looked_at: float | None = None
        self._stamp: Stamp | None = None
        self._by_half: dict[bytes, StoredKey] = {}
        self._by_id: dict[str, StoredKey] = {}
        self._trouble: str | None = None
        self._used_at: dict[str, float] = {}
        self._unsaved: dict[str, float] = {}

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def exists(self) -> bool:
        """Whether there have ever been keys: revoking the last one leaves the file.

        Raises `ConfigError` if the file cannot be examined.
        """
        return self._file.exists()

    def find(self, key: str) -> StoredKey | None:
        """The stored key of the secret `key`; None if unknown, revoked or expired.

        Raises `ConfigError` if the file cannot be read.
        """
        self._refresh()
        digest = digest_of(key)
        # Lookup by half of the digest reveals nothing about the other half by its timing; the whole
        # digest is compared in constant time.
        stored = self._by_half.get(digest[:16])
        if stored is None or not hmac.compare_digest(stored.digest, digest):
            return None
        return None if stored.expired(self._clock()) else stored

    def by_id(self, key_id: str) -> StoredKey | None:
        """The stored key of this id; None and errors as for `find`."""
        self._refresh()
        stored = self._by_id.get(key_id)
        return None if stored is None or stored.expired(self._clock()) else stored

    def all(self) -> tuple[StoredKey, ...]:
        """All keys in the order of creation. Raises `ConfigError`."""
        keys, _ = self._file.read()
        return keys

    def add(
        self, name: str, limits: KeyLimits | None = None, expires_at: float | None = None
    ) -> tuple[StoredKey, str]:
        """Make a key. Returns its stored data and the secret, which is stored nowhere.

        Raises `ConfigError` if the name is taken, or the file cannot be written.
        """
        limits = limits or KeyLimits()
        with self._file.change() as keys:
            if any(key.name == name for key in keys):
                raise ConfigError(f"there is a key named {name!r}: revoke it, or choose another")
            if len(keys) >= MAX_KEYS:
                raise ConfigError(
                    f"{self.path} holds {MAX_KEYS} keys, and no more fit: revoke some"
                )
            taken = {key.id for key in keys}
            secret = _new_secret()
            while id_of(secret) in taken:
                secret = _new_secret()
            made = StoredKey(
                id=id_of(secret),
                name=name,
                sha256=digest_of(secret).hex(),
                created_at=self._clock(),
                expires_at=expires_at,
                requests_per_minute=limits.requests_per_minute,
                tokens_per_minute=limits.tokens_per_minute,
                concurrent_requests=limits.concurrent_requests,
            )
            keys.append(made)
        self._looked_at = None
        return made, secret

    def revoke(self, wanted: str) -> StoredKey:
        """Delete the key with this id, name or secret. Raises `ConfigError`."""
        with self._file.change() as keys:
            found = _named(keys, wanted)
            keys.remove(found)
        self._looked_at = None
        return found

    @property
    def has_unsaved(self) -> bool:
        """Whether `save_uses` has something to write."""
        return bool(self._unsaved)

    def note_use(self, stored: StoredKey) -> None:
        """Record that the key was used now, at most once per `USED_S`."""
        now = self._clock()
        if now - max(stored.used_at or 0.0, self._used_at.get(stored.id, 0.0)) < USED_S:
            return
        if len(self._used_at) >= MAX_KEYS:
            self._used_at.clear()
        self._used_at[stored.id] = self._unsaved[stored.id] = now

    def save_uses(self) -> None:
        """Write the recorded uses to the file. Blocks: call it in a thread. Errors are logged."""
        used, self._unsaved = self._unsaved, {}
        if not used:
            return
        try:
            with self._file.change() as keys:
                for at, key in enumerate(keys):
                    if used.get(key.id, 0.0) > (key.used_at or 0.0):
                        keys[at] = key.model_copy(update={"used_at": used[key.id]})
        except ConfigError as error:
            log.warning("key_use_save_failed", reason=str(error))

    def _refresh(self) -> None:
        now = time.monotonic()
        if self._looked_at is None or now - self._looked_at >= NOTICE_S:
            self._looked_at = now
            self._look()
        if self._trouble is not None:
            raise ConfigError(self._trouble)

    def _look(self) -> None:
        """Read the file if it has changed. While it is unreadable, no key is valid."""
        trouble = None
        try:
            if self._stamp is not None and self._file.stamp() == self._stamp:
                return
            keys, self._stamp = self._file.read()
            self._by_half = {key.digest[:16]: key for key in keys}
            self._by_id = {key.id: key for key in keys}
        except ConfigError as error:
            trouble = str(error)
            self._by_half, self._by_id, self._stamp = {}, {}, None
        if trouble is not None and trouble != self._trouble:
            log.error("key_file_read_failed", reason=trouble)
        self._trouble = trouble


def digest_of(key: str) -> bytes:
    """SHA-256 of a secret, 32 bytes; accepts any text."""
    return sha256(key.encode("utf-8", "surrogatepass")).digest()


def id_of(key: str) -> str:
    """Id of a secret in logs and lists: the first hexadecimal digits of its digest."""
    return digest_of(key).hex()[:_ID_CHARS]


def _new_secret() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def _named(keys: Sequence[StoredKey], wanted: str) -> StoredKey:
    by_id = {key.id: key for key in keys}
    by_name = {key.name: key for key in keys}
    found = by_id.get(wanted) or by_name.get(wanted) or by_id.get(id_of(wanted))
    if found is not None:
        return found
    # Not repeated: it may be a key.
    raise ConfigError(
        "no key has this id or name; `nesa-node keys list` shows those that there are"
    )
