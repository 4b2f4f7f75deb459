"""API keys: made here, shown once, kept as hashes in a file that several programs may write.

Only SHA-256 of a key is kept. A slow hash (scrypt, Argon2) makes guessing expensive where people
choose the secret; a key has 256 random bits, which nobody finds by guessing however fast it goes,
and a slow hash would cost every request what it costs the thief.
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
"""How old may be what we know of the file."""
USED_S = 300.0
"""How old may be what the file says about a key's last use."""
_SECRET_BYTES = 32
_ID_CHARS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """What one key may do; None: as much as it likes."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None


class KeyStore:
    """The keys in the file at `path`.

    `clock` tells seconds since the epoch. Not for several threads at once, but for several
    processes: what another one adds or revokes is known here within `NOTICE_S`.
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
        """Whether somebody has ever made keys here. Revoking the last one leaves the file.

        Raises `ConfigError` if that cannot be known.
        """
        return self._file.exists()

    def find(self, key: str) -> StoredKey | None:
        """The key that `key` is, unless it was revoked or has expired.

        Raises `ConfigError` if the file cannot be read: then nobody is known.
        """
        self._refresh()
        digest = digest_of(key)
        # Found by the half that says nothing about the other one, which takes the same time to
        # compare whatever it is.
        stored = self._by_half.get(digest[:16])
        if stored is None or not hmac.compare_digest(stored.digest, digest):
            return None
        return None if stored.expired(self._clock()) else stored

    def by_id(self, key_id: str) -> StoredKey | None:
        """The key of that id, as `find`."""
        self._refresh()
        stored = self._by_id.get(key_id)
        return None if stored is None or stored.expired(self._clock()) else stored

    def all(self) -> tuple[StoredKey, ...]:
        """In the order in which they were made. Raises `ConfigError`."""
        keys, _ = self._file.read()
        return keys

    def add(
        self, name: str, limits: KeyLimits | None = None, expires_at: float | None = None
    ) -> tuple[StoredKey, str]:
        """Make a key. Returns what is kept, and the key itself, which is kept nowhere.

        Raises `ConfigError` if there is one of that name, or the file cannot be written.
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
        """Forget the key of this id or name, or this key itself. Raises `ConfigError`."""
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
        """Remember that the key was used now, if the file does not know about as much."""
        now = self._clock()
        if now - max(stored.used_at or 0.0, self._used_at.get(stored.id, 0.0)) < USED_S:
            return
        if len(self._used_at) >= MAX_KEYS:
            self._used_at.clear()
        self._used_at[stored.id] = self._unsaved[stored.id] = now

    def save_uses(self) -> None:
        """Write down when keys were used; in a thread of its own, if need be.

        Failure is logged, since to serve is more important.
        """
        used, self._unsaved = self._unsaved, {}
        if not used:
            return
        try:
            with self._file.change() as keys:
                for at, key in enumerate(keys):
                    if used.get(key.id, 0.0) > (key.used_at or 0.0):
                        keys[at] = key.model_copy(update={"used_at": used[key.id]})
        except ConfigError as error:
            log.warning("key_use_not_saved", reason=str(error))

    def _refresh(self) -> None:
        now = time.monotonic()
        if self._looked_at is None or now - self._looked_at >= NOTICE_S:
            self._looked_at = now
            self._look()
        if self._trouble is not None:
            raise ConfigError(self._trouble)

    def _look(self) -> None:
        """Read the file if it has changed. While it cannot be read nobody is known."""
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
            log.error("keys_unreadable", reason=trouble)
        self._trouble = trouble


def digest_of(key: str) -> bytes:
    """32 bytes. Of any text at all: what is no key is the hash of none."""
    return sha256(key.encode("utf-8", "surrogatepass")).digest()


def id_of(key: str) -> str:
    """What a key is called in logs and lists: whoever finds a key can tell which one it is."""
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
