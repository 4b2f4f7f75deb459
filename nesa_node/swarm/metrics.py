"""Prometheus metrics of the network, and of the nodes that serve a model."""

from __future__ import annotations

from collections.abc import Iterator

from nesa_node.compression.quality import codec_names
from nesa_node.core import metric_names as names
from nesa_node.core.ids import ModelId
from nesa_node.core.metrics import MetricSample, count_by_label
from nesa_node.swarm.directory import Directory
from nesa_node.swarm.node import Swarm

DROP_REASONS = (
    "expired", "expiry", "foreign", "full", "future", "key", "malformed", "num_blocks", "oversized",
    "signature", "stale", "subkey", "too_soon", "unwanted", "version",
)  # fmt: skip
"""Reasons for which records and notices are dropped."""
MAX_REPORTED_BLOCKS = 1024
"""Blocks of a model with a sample each: untrusted records could announce a million blocks."""
STATES = ("joining", "serving", "draining")


def swarm_samples(swarm: Swarm) -> Iterator[MetricSample]:
    """Samples of this process, independent of any model."""
    for direction, counts in (
        ("sent", swarm.link_speeds.sent_bytes),
        ("received", swarm.link_speeds.received_bytes),
    ):
        for codec in ("none", *codec_names()):
            yield MetricSample(names.WIRE_BYTES, (codec, direction), counts[codec])
    yield MetricSample(names.HOP_RTT, (), swarm.rtts.round_trips_s)
    yield MetricSample(names.UNANSWERED_PINGS, (), swarm.rtts.num_unanswered)
    yield from count_by_label(names.REFUSED_RECORDS, swarm.directory.dropped, DROP_REASONS)


def model_samples(
    directory: Directory, model_id: ModelId, num_blocks: int | None = None
) -> Iterator[MetricSample]:
    """Samples of a model's nodes, from remembered records without network access."""
    holders, states = directory.count_holders_and_states(model_id, num_blocks)
    for state in STATES:
        yield MetricSample(names.KNOWN_NODES, (model_id, state), states[state])
    for block, count in enumerate(holders[:MAX_REPORTED_BLOCKS]):
        yield MetricSample(names.BLOCK_REPLICAS, (model_id, str(block)), count)
