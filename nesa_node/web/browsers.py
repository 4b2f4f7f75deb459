"""Login tokens of browsers, the values of their cookies; kept in memory only."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

MAX_BROWSERS = 1000
MAX_PER_KEY = 50
STAY_S = 7 * 24 * 3600
_TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class _Stay:
    key_id: str
    ends_at: float


class Browsers:
    """Tokens by their hashes, the oldest first. `clock` is monotonic, in seconds.

    A token is valid in this process only. The caller must check each time whether its key is still
    valid.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stays: OrderedDict[bytes, _Stay] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stays)

    def remember(self, key_id: str) -> str:
        """Issue a token for a key; beyond the limits, the oldest tokens are dropped."""
        self._forget_ended()
        of_key = [name for name, stay in self._stays.items() if stay.key_id == key_id]
        for name in of_key[: max(0, len(of_key) - MAX_PER_KEY + 1)]:
            del self._stays[name]
        while len(self._stays) >= MAX_BROWSERS:
            self._stays.popitem(last=False)
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        self._stays[_name(token)] = _Stay(key_id, self._clock() + STAY_S)
        return token

    def key_id(self, token: str) -> str | None:
        """Id of the key that the token was issued for; None if unknown or expired."""
        stay = self._stays.get(_name(token))
        return None if stay is None or self._clock() >= stay.ends_at else stay.key_id

    def forget(self, token: str) -> None:
        self._stays.pop(_name(token), None)

    def forget_key(self, key_id: str) -> None:
        """Forget all tokens of this key."""
        for name in [name for name, stay in self._stays.items() if stay.key_id == key_id]:
            del self._stays[name]

    def _forget_ended(self) -> None:
        now = self._clock()
        while self._stays and next(iter(self._stays.values())).ends_at <= now:
            self._stays.popitem(last=False)


def _name(token: str) -> bytes:
    """Hash by which a token is stored, so that the timing of a lookup reveals nothing useful."""
    return sha256(token.encode("utf-8", "surrogatepass")).digest()
