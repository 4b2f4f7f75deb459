"""Throttle of wrong API keys, per client address."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address

from nesa_node.web.limits import Bucket

PER_MINUTE = 20
"""Wrong keys per address and minute, and the burst that is allowed at once."""
MAX_ADDRESSES = 4096
_IPV6_OF_ONE = 64
"""Prefix length in bits that counts as one IPv6 client: every household or server has a /64."""


class WrongKeys:
    """Token bucket of attempts per address. `clock` is monotonic, in seconds.

    A full table evicts the address with the oldest attempt: an attacker with more addresses is not
    throttled, but uses no more memory.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def wait_s(self, address: str) -> float:
        """Seconds until this address may try again; 0.0 if now."""
        bucket = self._buckets.get(address_group(address))
        if bucket is None:
            return 0.0
        bucket.fill(PER_MINUTE, self._clock())
        return bucket.wait_s(1, PER_MINUTE)

    def note(self, address: str) -> None:
        """Count one wrong key from this address."""
        group = address_group(address)
        now = self._clock()
        bucket = self._buckets.pop(group, None) or Bucket(PER_MINUTE, now)
        bucket.fill(PER_MINUTE, now)
        bucket.level = max(0.0, bucket.level - 1)
        self._buckets[group] = bucket
        while len(self._buckets) > MAX_ADDRESSES:
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
    return str(IPv6Address(int(parsed) >> (128 - _IPV6_OF_ONE) << (128 - _IPV6_OF_ONE)))
