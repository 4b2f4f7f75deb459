"""How much of the daemons is in use, as their metrics say."""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.gateway.process import get

RUNNING = "nesa_num_requests_running"
CACHE = "nesa_kv_cache_usage_perc"


def occupancy(ports: Sequence[int]) -> tuple[int, float]:
    """Sessions of all daemons together, and the largest share of a cache that is promised."""
    sessions, cache = 0.0, 0.0
    for port in ports:
        for family in text_string_to_metric_families(get(port, "/metrics").decode()):
            for sample in family.samples:
                if sample.name == RUNNING:
                    sessions += sample.value
                elif sample.name == CACHE:
                    cache = max(cache, sample.value)
    return int(sessions), cache


def wait_until_free(ports: Sequence[int], timeout_s: float) -> float:
    """Seconds until nobody has a session and no page of a cache is promised.

    Raises `TimeoutError`.
    """
    started = time.perf_counter()
    while (used := occupancy(ports)) != (0, 0.0):
        if time.perf_counter() - started > timeout_s:
            raise TimeoutError(
                f"after {timeout_s:g} s {used[0]} sessions, {used[1]:.1%} of a cache"
            )
        time.sleep(0.02)
    return time.perf_counter() - started
