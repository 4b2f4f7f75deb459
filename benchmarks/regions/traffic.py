"""What nodes send to each other while nobody generates."""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import mean
from typing import Any

from benchmarks.regions.swarm import Regions
from nesa_node.server.node.announcer import renew_after_s

KEYS = 2
"""Under which a record lies: its model's and that of all nodes."""
COPIES = 5
"""Members that keep what lies under a key."""
MOST_BYTES_PER_S = 1000.0

Carried = Mapping[str, tuple[int, int]]
"""Bytes that each node has sent and received so far, by site."""


def carried(regions: Regions) -> Carried:
    """Among the nodes and orchestrators alone."""
    sites = list(regions.processes)
    flows = {(a, b): regions.wan.traffic(a, b).bytes for a in sites for b in sites if a != b}
    return {
        site: (
            sum(count for (a, _), count in flows.items() if a == site),
            sum(count for (_, b), count in flows.items() if b == site),
        )
        for site in regions.world.nodes
    }


def per_second(regions: Regions, seconds: float) -> dict[str, tuple[float, float]]:
    """Bytes/s that each node sends and receives, of the next `seconds`."""
    before, began = carried(regions), time.monotonic()
    time.sleep(seconds)
    after, took = carried(regions), time.monotonic() - began
    return {
        site: (
            (after[site][0] - before[site][0]) / took,
            (after[site][1] - before[site][1]) / took,
        )
        for site in before
    }


def record_growth(packed_bytes: float, record_ttl_s: float) -> float:
    """Bytes/s that an idle node sends more since its record tells links: to each member."""
    return packed_bytes * KEYS * COPIES / renew_after_s(record_ttl_s)


def summarize(
    on: Mapping[str, tuple[float, float]],
    off: Mapping[str, tuple[float, float]],
    growth: float,
    seconds: float,
) -> dict[str, Any]:
    """Means over the nodes; what a node sends is counted there, and where it is received, too."""
    sent, sent_off = (mean(each[0] for each in rates.values()) for rates in (on, off))
    both, both_off = (mean(sum(each) for each in rates.values()) for rates in (on, off))
    more = {site: sum(on[site]) - sum(off[site]) for site in on}
    return {
        "phase": "traffic",
        "seconds": seconds,
        "sent_bytes_per_s": sent,
        "sent_without_pings_bytes_per_s": sent_off,
        "measuring_bytes_per_s": sent - sent_off,
        "measuring_both_ways_bytes_per_s": both - both_off,
        "measuring_worst_node_bytes_per_s": max(more.values()),
        "record_growth_bytes_per_s": growth,
        "passed": both - both_off < MOST_BYTES_PER_S,
        "runs": [{"on": dict(on), "off": dict(off)}],
    }
