"""Browsers that showed a key once: what their cookies stand for, in memory only."""

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
    """Tokens by their hashes, the oldest first. `clock` tells seconds and never goes back.

    A token is a cookie's, means nothing anywhere else and ends with this process. Whether its key
    still holds is for the caller to see each time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stays: OrderedDict[bytes, _Stay] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stays)

    def remember(self, key_id: str) -> str:
        """A new token for somebody who showed that key. Where there are too many the oldest go."""
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
        """Of the key that was shown for this token; None if it is unknown or has ended."""
        stay = self._stays.get(_name(token))
        return None if stay is None or self._clock() >= stay.ends_at else stay.key_id

    def forget(self, token: str) -> None:
        self._stays.pop(_name(token), None)

    def forget_key(self, key_id: str) -> None:
        """All browsers that showed this key."""
        for name in [name for name, stay in self._stays.items() if stay.key_id == key_id]:
            del self._stays[name]

    def _forget_ended(self) -> None:
        now = self._clock()
        while self._stays and next(iter(self._stays.values())).ends_at <= now:
            self._stays.popitem(last=False)


def _name(token: str) -> bytes:
    """What a token is kept by: whoever times the search learns about a hash that he cannot aim."""
    return sha256(token.encode("utf-8", "surrogatepass")).digest()
