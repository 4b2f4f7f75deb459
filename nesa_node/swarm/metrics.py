"""Prometheus metrics of the network, and of the nodes that serve a model."""

from __future__ import annotations

from collections.abc import Iterator

from nesa_node.compression.quality import codec_names
from nesa_node.core import metric_names as names
from nesa_node.core.ids import ModelId
from nesa_node.core.metrics import Sample, counted
from nesa_node.swarm.directory import Directory
from nesa_node.swarm.node import Swarm

REFUSALS = (
    "expired", "expiry", "foreign", "full", "future", "key", "malformed", "num_blocks", "oversized",
    "signature", "stale", "subkey", "too_soon", "unwanted", "version",
)  # fmt: skip
"""Reasons for which records and notices are dropped."""
MAX_BLOCKS = 1024
"""Blocks of a model with a sample each: untrusted records could announce a million blocks."""
STATES = ("joining", "serving", "draining")


def swarm_samples(swarm: Swarm) -> Iterator[Sample]:
    """Samples of this process, independent of any model."""
    for direction, counts in (
        ("sent", swarm.speeds.sent_bytes),
        ("received", swarm.speeds.received_bytes),
    ):
        for codec in ("none", *codec_names()):
            yield Sample(names.WIRE, (codec, direction), counts[codec])
    yield Sample(names.ROUND_TRIP, (), swarm.distances.round_trips_s)
    yield Sample(names.UNANSWERED, (), swarm.distances.unanswered)
    yield from counted(names.REFUSED_RECORDS, swarm.directory.dropped, REFUSALS)


def model_samples(
    directory: Directory, model_id: ModelId, num_blocks: int | None = None
) -> Iterator[Sample]:
    """Samples of a model's nodes, from remembered records without network access."""
    holders, states = directory.holders(model_id, num_blocks)
    for state in STATES:
        yield Sample(names.NODES, (model_id, state), states[state])
    for block, count in enumerate(holders[:MAX_BLOCKS]):
        yield Sample(names.REPLICAS, (model_id, str(block)), count)
