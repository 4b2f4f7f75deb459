"""Rate limits per caller: requests and tokens per minute, and concurrent requests.

Token buckets that hold a minute's worth: within any T minutes a caller gets at most (1 + T) times
the limit. A bucket takes two numbers per caller, where an exact sliding window needs the times of
the last N requests, and it gives the retry time directly.

The tokens of a request are known when it has ended, so they are charged afterwards: a request is
admitted while the bucket is not empty, and may leave it negative.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from nesa_node.web.keys import KeyLimits
from nesa_node.web.problem import Problem

MAX_IDLE = 4096
"""Maximum number of idle callers in memory; an evicted one starts with full buckets again."""
_MINUTE_S = 60.0
_NEXT = "the next one is free"
_PAID_OFF = "it has used more, which is paid off"
_AT_ONCE_RETRY_S = 1.0
# Tolerance for rounding errors.
_TINY = 1e-9


@dataclass(slots=True)
class Bucket:
    """Token bucket with `level` at time `at`, in seconds of any clock; it holds `per_minute`."""

    level: float
    at: float

    def fill(self, per_minute: float, now: float) -> None:
        passed = max(0.0, now - self.at)
        self.level = min(per_minute, self.level + passed * per_minute / _MINUTE_S)
        self.at = max(self.at, now)

    def wait_s(self, amount: float, per_minute: float) -> float:
        """Seconds from the last `fill` until `amount` is available; 0.0 if it is."""
        lacking = amount - self.level
        return 0.0 if lacking <= _TINY else lacking * _MINUTE_S / per_minute

    def full_in_s(self, per_minute: float) -> float:
        return max(0.0, per_minute - self.level) * _MINUTE_S / per_minute


@dataclass(slots=True)
class _Account:
    requests: Bucket
    tokens: Bucket
    running: int = 0


@dataclass(slots=True)
class Allowance:
    """An admitted request. `headers` give the remaining limits, as OpenAI's do."""

    headers: Mapping[str, str]
    _spend: Callable[[int], None] = field(repr=False)

    def spend_tokens(self, count: int) -> None:
        """Charge tokens to the caller; may be called several times."""
        self._spend(count)


class Limits:
    """Rate limits of all callers of this process. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    @contextmanager
    def request(self, caller: str, limits: KeyLimits) -> Iterator[Allowance]:
        """Admit one request of `caller`, which runs until the context ends.

        Raises `Problem` 429 beyond a limit; a refused request costs nothing.
        """
        now = self._clock()
        account = self._account(caller, limits, now)
        self._admit(account, limits, now)
        if limits.requests_per_minute is not None:
            account.requests.level -= 1
        account.running += 1
        try:
            yield Allowance(
                _headers(account, limits), lambda count: self._spend(account, limits, count)
            )
        finally:
            account.running -= 1

    def _account(self, caller: str, limits: KeyLimits, now: float) -> _Account:
        account = self._accounts.get(caller)
        if account is None:
            if len(self._accounts) >= MAX_IDLE:
                self._accounts = {n: a for n, a in self._accounts.items() if a.running}
            # The first `fill` cuts the level to the capacity.
            account = _Account(Bucket(math.inf, now), Bucket(math.inf, now))
            self._accounts[caller] = account
        if limits.requests_per_minute is not None:
            account.requests.fill(limits.requests_per_minute, now)
        if limits.tokens_per_minute is not None:
            account.tokens.fill(limits.tokens_per_minute, now)
        return account

    def _admit(self, account: _Account, limits: KeyLimits, now: float) -> None:
        most = limits.concurrent_requests
        if most is not None and account.running >= most:
            raise _refused(
                f"this key may have {most} requests at once; wait until one of them ends",
                _AT_ONCE_RETRY_S,
                _headers(account, limits),
            )
        for bucket, per_minute, may, then in (
            (account.requests, limits.requests_per_minute, "make {} requests", _NEXT),
            (account.tokens, limits.tokens_per_minute, "use {} tokens", _PAID_OFF),
        ):
            wait_s = bucket.wait_s(1, per_minute) if per_minute else 0.0
            if wait_s:
                raise _refused(
                    f"this key may {may.format(per_minute)} per minute; {then} in {wait_s:.3g} s",
                    wait_s,
                    _headers(account, limits),
                )

    def _spend(self, account: _Account, limits: KeyLimits, count: int) -> None:
        if limits.tokens_per_minute is not None:
            account.tokens.fill(limits.tokens_per_minute, self._clock())
            account.tokens.level -= count


def _refused(message: str, retry_after_s: float, headers: Mapping[str, str]) -> Problem:
    return Problem(
        429, message, code="rate_limit_exceeded", retry_after_s=retry_after_s, headers=headers
    )


def _headers(account: _Account, limits: KeyLimits) -> dict[str, str]:
    headers = {}
    for what, bucket, per_minute in (
        ("requests", account.requests, limits.requests_per_minute),
        ("tokens", account.tokens, limits.tokens_per_minute),
    ):
        if per_minute is not None:
            headers[f"x-ratelimit-limit-{what}"] = str(per_minute)
            headers[f"x-ratelimit-remaining-{what}"] = str(max(0, math.floor(bucket.level + _TINY)))
            headers[f"x-ratelimit-reset-{what}"] = _duration(bucket.full_in_s(per_minute))
    return headers


def _duration(seconds: float) -> str:
    """Duration in OpenAI's format: `12ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < _MINUTE_S:
        return f"{seconds:.3g}s"
    minutes, rest = divmod(math.ceil(seconds), int(_MINUTE_S))
    return f"{minutes}m{rest}s"
