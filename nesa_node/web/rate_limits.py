"""Limits of callers: requests and tokens per minute, concurrent requests, wrong keys, slots.

Token buckets that hold a minute's worth: within any T minutes a caller gets at most (1 + T) times
the limit. A bucket takes two numbers per caller, where an exact sliding window needs the times of
the last N requests, and it gives the retry time directly.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv6Address, IPv6Network, ip_address

from nesa_node.web.key_store import KeyLimits
from nesa_node.web.problem import HttpProblem

MAX_IDLE_CALLERS = 4096
"""Maximum number of idle callers in memory; an evicted one starts with full buckets again."""
_MINUTE_S = 60.0
_CONCURRENCY_RETRY_S = 1.0
# Tolerance for rounding errors.
_ROUNDING_ERROR = 1e-9


@dataclass(slots=True)
class TokenBucket:
    """Bucket with `level` at `updated_at`, in seconds of any clock; it holds `per_minute`."""

    level: float
    updated_at: float

    def refill(self, per_minute: float, now: float) -> None:
        passed = max(0.0, now - self.updated_at)
        self.level = min(per_minute, self.level + passed * per_minute / _MINUTE_S)
        self.updated_at = max(self.updated_at, now)

    def wait_s(self, amount: float, per_minute: float) -> float:
        """Seconds from the last `refill` until `amount` is available; 0.0 if it is."""
        lacking = amount - self.level
        return 0.0 if lacking <= _ROUNDING_ERROR else lacking * _MINUTE_S / per_minute

    def full_in_s(self, per_minute: float) -> float:
        return max(0.0, per_minute - self.level) * _MINUTE_S / per_minute


@dataclass(slots=True)
class _CallerUsage:
    requests: TokenBucket
    tokens: TokenBucket
    running: int = 0


@dataclass(slots=True)
class Allowance:
    """An admitted request. `headers` give the remaining limits, as OpenAI's do.

    The tokens of a request are known when it has ended, so they are charged afterwards: a request
    is admitted while the bucket is not empty, and may leave it negative.
    """

    headers: Mapping[str, str]
    _tokens: TokenBucket
    _per_minute: int | None
    _clock: Callable[[], float]

    def spend_tokens(self, count: int) -> None:
        """Charge tokens to the caller; may be called several times."""
        if self._per_minute is not None:
            self._tokens.refill(self._per_minute, self._clock())
            self._tokens.level -= count


class RateLimiter:
    """Rate limits of all callers of this process. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usage: dict[str, _CallerUsage] = {}

    def __len__(self) -> int:
        return len(self._usage)

    @contextmanager
    def admit_request(self, caller: str, limits: KeyLimits) -> Iterator[Allowance]:
        """Admit one request of `caller`, which runs until the context ends.

        Raises `HttpProblem` 429 beyond a limit; a refused request costs nothing.
        """
        now = self._clock()
        account = self._refilled_usage(caller, limits, now)
        _check_limits(account, limits)
        if limits.requests_per_minute is not None:
            account.requests.level -= 1
        account.running += 1
        try:
            headers = _rate_limit_headers(account, limits)
            yield Allowance(headers, account.tokens, limits.tokens_per_minute, self._clock)
        finally:
            account.running -= 1

    def _refilled_usage(self, caller: str, limits: KeyLimits, now: float) -> _CallerUsage:
        account = self._usage.get(caller)
        if account is None:
            if len(self._usage) >= MAX_IDLE_CALLERS:
                self._usage = {n: a for n, a in self._usage.items() if a.running}
            # The first `refill` cuts the level to the capacity.
            account = _CallerUsage(TokenBucket(math.inf, now), TokenBucket(math.inf, now))
            self._usage[caller] = account
        if limits.requests_per_minute is not None:
            account.requests.refill(limits.requests_per_minute, now)
        if limits.tokens_per_minute is not None:
            account.tokens.refill(limits.tokens_per_minute, now)
        return account


def _check_limits(account: _CallerUsage, limits: KeyLimits) -> None:
    """Raise `HttpProblem` 429 for the first limit that the caller has reached."""
    most = limits.concurrent_requests
    requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
    if most is not None and account.running >= most:
        wait_s = _CONCURRENCY_RETRY_S
        reason = f"have {most} requests at once; wait until one of them ends"
    elif requests and (wait_s := account.requests.wait_s(1, requests)):
        reason = f"make {requests} requests per minute; the next one is free in {wait_s:.3g} s"
    elif tokens and (wait_s := account.tokens.wait_s(1, tokens)):
        reason = (
            f"use {tokens} tokens per minute; it has used more, which is paid off in {wait_s:.3g} s"
        )
    else:
        return
    raise HttpProblem(
        429,
        f"this key may {reason}",
        code="rate_limit_exceeded",
        retry_after_s=wait_s,
        headers=_rate_limit_headers(account, limits),
    )


def _rate_limit_headers(account: _CallerUsage, limits: KeyLimits) -> dict[str, str]:
    headers = {}
    for what, bucket, per_minute in (
        ("requests", account.requests, limits.requests_per_minute),
        ("tokens", account.tokens, limits.tokens_per_minute),
    ):
        if per_minute is not None:
            headers[f"x-ratelimit-limit-{what}"] = str(per_minute)
            headers[f"x-ratelimit-remaining-{what}"] = str(
                max(0, math.floor(bucket.level + _ROUNDING_ERROR))
            )
            headers[f"x-ratelimit-reset-{what}"] = _format_duration(bucket.full_in_s(per_minute))
    return headers


def _format_duration(seconds: float) -> str:
    """Duration in OpenAI's format: `12ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < _MINUTE_S:
        return f"{seconds:.3g}s"
    minutes, rest = divmod(math.ceil(seconds), int(_MINUTE_S))
    return f"{minutes}m{rest}s"


WRONG_KEYS_PER_MINUTE = 20
"""Wrong keys per address and minute, and the burst that is allowed at once."""
MAX_TRACKED_ADDRESSES = 4096
_IPV6_CLIENT_PREFIX_BITS = 64
"""Prefix length in bits that counts as one IPv6 client: every household or server has a /64."""


class WrongKeyThrottle:
    """Token bucket of attempts per address. `clock` is monotonic, in seconds.

    A full table evicts the address with the oldest attempt: an attacker with more addresses is not
    throttled, but uses no more memory.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def wait_s(self, address: str) -> float:
        """Seconds until this address may try again; 0.0 if now."""
        bucket = self._buckets.get(address_group(address))
        if bucket is None:
            return 0.0
        bucket.refill(WRONG_KEYS_PER_MINUTE, self._clock())
        return bucket.wait_s(1, WRONG_KEYS_PER_MINUTE)

    def record_failure(self, address: str) -> None:
        """Count one wrong key from this address."""
        group = address_group(address)
        now = self._clock()
        bucket = self._buckets.pop(group, None) or TokenBucket(WRONG_KEYS_PER_MINUTE, now)
        bucket.refill(WRONG_KEYS_PER_MINUTE, now)
        bucket.level = max(0.0, bucket.level - 1)
        self._buckets[group] = bucket
        while len(self._buckets) > MAX_TRACKED_ADDRESSES:
            self._buckets.popitem(last=False)


def address_group(address: str) -> str:
    """Key of the bucket of an address: the IPv4 address or the IPv6 /64."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    if not isinstance(parsed, IPv6Address):
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(IPv6Network((parsed, _IPV6_CLIENT_PREFIX_BITS), strict=False).network_address)


SHARE_DIVISOR = 4
"""A key may hold this fraction (1 / `SHARE_DIVISOR`) of the slots, regardless of other keys."""


class FairSlots:
    """`size` slots, shared fairly by keys; `what` names their use, in the plural. Thread-safe.

    A key may hold all slots while it is the only one; beside other keys a quarter, or more while
    half of all are free. A reserve of another quarter beyond `size` is for keys that hold few, so
    that the first key cannot block the next. The caller "" (no key required) may hold `size`.
    """

    def __init__(self, num_slots: int, what: str, *, retry_after_s: float) -> None:
        self.num_slots = num_slots
        self._what = what
        self._retry_after_s = retry_after_s
        self._lock = threading.Lock()
        self._held_of: Counter[str] = Counter()

    @property
    def held(self) -> int:
        with self._lock:
            return self._held_of.total()

    def acquire(self, caller: str, count: int = 1) -> None:
        """Take `count` slots until `release`.

        Raises `HttpProblem` 429 if `caller` has its share, 503 if too few slots are free.
        """
        with self._lock:
            mine, all_of_them = self._held_of[caller] + count, self._held_of.total() + count
            if all_of_them > _max_held(self.num_slots, caller, mine, is_alone=mine == all_of_them):
                raise self._refusal(caller, mine - count, count)
            self._held_of[caller] += count

    def release(self, caller: str, count: int = 1) -> None:
        with self._lock:
            self._held_of[caller] -= count
            self._held_of += Counter()

    @contextmanager
    def hold(self, caller: str, count: int = 1) -> Iterator[None]:
        """Hold `count` slots within the context; errors as for `acquire`."""
        self.acquire(caller, count)
        try:
            yield
        finally:
            self.release(caller, count)

    def _refusal(self, caller: str, mine: int, count: int) -> HttpProblem:
        share = _fair_share(self.num_slots)
        if not caller or mine + count <= share:
            return HttpProblem(
                503,
                f"there is no room here for {count} more {self._what}: try again later",
                code="busy",
                retry_after_s=self._retry_after_s,
            )
        return HttpProblem(
            429,
            f"too many {self._what} at once: this key has {mine}, and may have "
            f"{share} beside those of other keys; wait until one of them ends",
            code="rate_limit_exceeded",
            retry_after_s=self._retry_after_s,
        )


def _max_held(size: int, caller: str, mine: int, *, is_alone: bool) -> int:
    """Maximum number of slots held by all keys if `caller` then holds `mine`."""
    share = _fair_share(size)
    if caller and mine <= _fair_share(share):
        return size + share
    return size if is_alone or mine <= share else size // 2


def _fair_share(size: int) -> int:
    return max(1, size // SHARE_DIVISOR)
