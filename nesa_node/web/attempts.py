"""Who has given too many wrong keys lately."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address

from nesa_node.web.limits import Bucket

PER_MINUTE = 20
"""Wrong keys from one address; as many are free at once before it has to wait."""
MAX_ADDRESSES = 4096
_IPV6_OF_ONE = 64
"""Bits. A household or a server gets at least that many addresses: counted as one."""


class WrongKeys:
    """A bucket of attempts per address. `clock` tells seconds and never goes back.

    When the table is full, the address that has been quiet for the longest time is forgotten. So
    somebody with more addresses than that is not held up, but fills no memory either.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def wait_s(self, address: str) -> float:
        """Seconds until this address may try again; 0: now."""
        bucket = self._buckets.get(address_group(address))
        if bucket is None:
            return 0.0
        bucket.fill(PER_MINUTE, self._clock())
        return bucket.wait_s(1, PER_MINUTE)

    def note(self, address: str) -> None:
        """One more wrong key from there."""
        group = address_group(address)
        now = self._clock()
        bucket = self._buckets.pop(group, None) or Bucket(PER_MINUTE, now)
        bucket.fill(PER_MINUTE, now)
        bucket.level = max(0.0, bucket.level - 1)
        self._buckets[group] = bucket
        while len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)


def address_group(address: str) -> str:
    """What counts as one address."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    if not isinstance(parsed, IPv6Address):
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(IPv6Address(int(parsed) >> (128 - _IPV6_OF_ONE) << (128 - _IPV6_OF_ONE)))
