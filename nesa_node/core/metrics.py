"""Metrics of daemons and gateways: definitions, samples, and the sources that are scraped.

Does not depend on a Prometheus library. A source is called on each scrape and reads existing
state; `web/server.py` formats the samples. `docs/metrics.md` says which process exports what.
Names, labels and buckets of request metrics are vLLM's, with `nesa_` for `vllm:` and `model` for
`model_name`, so that dashboards are easily ported.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Histogram:
    """Histogram of values with ascending upper `bounds`, and their sum.

    Only one thread at a time may add; any thread may read.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """Values per bucket (not cumulative); the last bucket holds those above all bounds."""
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def copy(self) -> Histogram:
        """Independent copy."""
        copied = Histogram(self.bounds)
        copied.counts, copied.sum = list(self.counts), self.sum
        return copied

    def __iadd__(self, other: Histogram) -> Histogram:
        """Add all values of another histogram with the same bounds."""
        assert self.bounds == other.bounds
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum
        return self


MetricKind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """Definition of a metric. Labels must have few values, none of them chosen by a peer."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""

    def new_histogram(self) -> Histogram:
        """An empty histogram with this metric's bounds."""
        assert self.kind == "histogram"
        return Histogram(self.bounds)


class MetricSample(NamedTuple):
    """A metric's value for one combination of labels, which are in the metric's order."""

    metric: Metric
    labels: tuple[str, ...]
    value: float | Histogram


MetricSource = Callable[[], Iterable[MetricSample]]
"""Function that yields current samples. Called in the event loop of the metrics server; must not
block."""


class MetricRegistry:
    """Sources of samples of this process. `version` is the program's."""

    def __init__(self, version: str = "") -> None:
        self.version = version
        self._metric_sources: list[MetricSource] = []

    @contextmanager
    def registered(self, *sources: MetricSource) -> Iterator[None]:
        """Register sources for the duration of the context."""
        self._metric_sources += sources
        try:
            yield
        finally:
            for source in sources:
                self._metric_sources.remove(source)

    def collect(self) -> list[MetricSample]:
        """Collect one sample for each metric and labels.

        Counters and histograms of several sources are added up; the last gauge wins.
        """
        merged: dict[tuple[str, tuple[str, ...]], MetricSample] = {}
        for source in tuple(self._metric_sources):
            for sample in source():
                key = sample.metric.name, sample.labels
                merged[key] = _merge_samples(merged.get(key), sample)
        return list(merged.values())


def _merge_samples(before: MetricSample | None, sample: MetricSample) -> MetricSample:
    value = sample.value
    if isinstance(value, Histogram):
        copied = value.copy()
        if before is not None and isinstance(before.value, Histogram):
            copied += before.value
        return sample._replace(value=copied)
    if before is None or sample.metric.kind == "gauge" or isinstance(before.value, Histogram):
        return sample
    return sample._replace(value=before.value + value)


def count_by_label(
    metric: Metric, counts: Mapping[str, int], known: Iterable[str]
) -> Iterator[MetricSample]:
    """Samples of a counter with one label: one per `known` value, and "other" for the rest.

    Zeros are included, so that rates can be computed from the first event on.
    """
    counts, known = dict(counts), tuple(known)
    for value in known:
        yield MetricSample(metric, (value,), counts.pop(value, 0))
    if "other" not in known:
        yield MetricSample(metric, ("other",), sum(counts.values()))


FIRST_TOKEN_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
INTER_TOKEN_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
STEP_BUCKETS_S = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
)  # fmt: skip
RTT_BUCKETS_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
BATCH_SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

# Requests of a gateway; sessions and cache of a node.
REQUESTS_RUNNING = Metric(
    "nesa_num_requests_running",
    "gauge",
    "Requests that are decoding (gateway), open sessions that are not queued (node).",
    ("model", "role"),
)
REQUESTS_WAITING = Metric(
    "nesa_num_requests_waiting",
    "gauge",
    "Requests before their first token (gateway), sessions queued for the device (node).",
    ("model", "role"),
)
KV_CACHE_USAGE = Metric(
    "nesa_kv_cache_usage_perc", "gauge", "Fraction of the KV cache that holds tokens, 0 to 1.",
    ("model",),
)  # fmt: skip
PREFIX_QUERIES = Metric(
    "nesa_prefix_cache_queries_total", "counter",
    "Prompt tokens that sessions looked up in the prefix cache.", ("model",),
)  # fmt: skip
PREFIX_HITS = Metric(
    "nesa_prefix_cache_hits_total", "counter", "Tokens found in the prefix cache.", ("model",)
)
PROMPT_TOKENS = Metric(
    "nesa_prompt_tokens_total",
    "counter",
    "Prompt tokens, including those found in a cache.",
    ("model",),
)
GENERATION_TOKENS = Metric(
    "nesa_generation_tokens_total", "counter", "Tokens that were generated.", ("model",)
)
TIME_TO_FIRST_TOKEN = Metric(
    "nesa_time_to_first_token_seconds", "histogram", "From a request to its first token.",
    ("model",), FIRST_TOKEN_BUCKETS_S,
)  # fmt: skip
INTER_TOKEN_LATENCY = Metric(
    "nesa_inter_token_latency_seconds", "histogram", "From one token of a choice to the next.",
    ("model",), INTER_TOKEN_BUCKETS_S,
)  # fmt: skip
REQUEST_LATENCY = Metric(
    "nesa_e2e_request_latency_seconds", "histogram", "From a request to the end of its answer.",
    ("model",), REQUEST_BUCKETS_S,
)  # fmt: skip
REQUEST_SUCCESS = Metric(
    "nesa_request_success_total", "counter",
    "Choices that ended: stop, length, tool_calls, abort (the client went) or error.",
    ("model", "finished_reason"),
)  # fmt: skip

# A gateway's HTTP, and its sessions.
HTTP_RESPONSES = Metric(
    "nesa_http_responses_total", "counter", "Answers by route and status code.", ("route", "code")
)
OPEN_SESSIONS = Metric("nesa_sessions", "gauge", "Sessions that this process has open.", ("model",))
STEP_LATENCY = Metric(
    "nesa_step_seconds", "histogram", "A decode step, through all hops and back.", ("model",),
    STEP_BUCKETS_S,
)  # fmt: skip
FAILOVERS = Metric(
    "nesa_failovers_total", "counter",
    "Failovers of sessions: a node failed, left, or was too slow.",
    ("model", "reason"),
)  # fmt: skip
RECOVERY_TIME = Metric(
    "nesa_recovery_seconds", "histogram", "From a failure to the repaired chain.",
    ("model",), STEP_BUCKETS_S,
)  # fmt: skip

SUSPICIONS = Metric(
    "nesa_suspicions_total", "counter",
    "Nodes that did not answer a session in time: raised, then withdrawn or confirmed.",
    ("model", "event"),
)  # fmt: skip

# A node's device.
KV_CACHE_RESERVED = Metric(
    "nesa_kv_cache_promised_perc", "gauge", "Fraction of the KV cache that is reserved, 0 to 1.",
    ("model",),
)  # fmt: skip
KV_CACHE_CAPACITY = Metric(
    "nesa_kv_cache_tokens", "gauge", "Capacity of the KV cache in tokens.", ("model",)
)
NODE_STEPS = Metric("nesa_node_steps_total", "counter", "Steps that were computed.", ("model",))
NODE_FAILURES = Metric(
    "nesa_node_step_failures_total", "counter", "Steps that could not be computed.", ("model",)
)
NODE_TOKENS = Metric(
    "nesa_node_tokens_total", "counter", "Tokens that went through the node's blocks.",
    ("model", "phase"),
)  # fmt: skip
BATCH_SIZE = Metric(
    "nesa_node_batch_size", "histogram", "Sessions that an iteration computed together.",
    ("model",), BATCH_SIZE_BUCKETS,
)  # fmt: skip
ITERATION_TIME = Metric(
    "nesa_node_iteration_seconds", "histogram", "Compute time of an iteration.", ("model",),
    STEP_BUCKETS_S,
)  # fmt: skip
NODE_STEP_LATENCY = Metric(
    "nesa_node_step_seconds", "histogram", "From a step's arrival to its result.", ("model",),
    STEP_BUCKETS_S,
)  # fmt: skip
NODE_LOAD = Metric(
    "nesa_node_load", "gauge", "Fraction of the last 30 s spent computing, plus the queue.",
    ("model",),
)  # fmt: skip
NODE_STATE = Metric(
    "nesa_node_state", "gauge", "1 for the node's state: joining, serving or draining.",
    ("model", "state"),
)  # fmt: skip
SPAN_START = Metric("nesa_node_span_start", "gauge", "First block of the node.", ("model",))
SPAN_END = Metric("nesa_node_span_end", "gauge", "Block after the node's last one.", ("model",))
WEIGHT_BYTES = Metric(
    "nesa_node_weight_bytes", "gauge", "Memory of the node's weights.", ("model",)
)
MEASURED_THROUGHPUT = Metric(
    "nesa_node_measured_tokens_per_second", "gauge",
    "Last measured throughput: measured after loading, and when the machine's speed changed.",
    ("model", "phase"),
)  # fmt: skip
MOVE_REQUESTS = Metric(
    "nesa_moves_total", "counter", "Requests to move the node to another span, by outcome.",
    ("answer",),
)  # fmt: skip
REFUSED_STREAMS = Metric(
    "nesa_refused_streams_total", "counter", "Sessions, pushes and hand-overs refused or ended.",
    ("code",),
)  # fmt: skip
REFUSED_MESSAGES = Metric(
    "nesa_refused_messages_total", "counter", "Messages refused in open sessions.", ("code",)
)

# The swarm, as a daemon or gateway sees it.
PROCESS_INFO = Metric("nesa_info", "gauge", "Always 1.", ("role", "version", "peer_id"))
WIRE_BYTES = Metric(
    "nesa_wire_bytes_total", "counter", "Bytes of hidden states on the wire, by codec.",
    ("codec", "direction"),
)  # fmt: skip
HOP_RTT = Metric(
    "nesa_hop_round_trip_seconds", "histogram", "Round-trip time of a ping to another node.", (),
    RTT_BUCKETS_S,
)  # fmt: skip
UNANSWERED_PINGS = Metric(
    "nesa_pings_unanswered_total", "counter", "Nodes that did not answer a ping."
)
REFUSED_RECORDS = Metric(
    "nesa_refused_records_total", "counter",
    "Records and notices of the DHT that were rejected.", ("reason",),
)  # fmt: skip
KNOWN_NODES = Metric("nesa_nodes", "gauge", "Known nodes of a model.", ("model", "state"))
BLOCK_REPLICAS = Metric(
    "nesa_block_replicas", "gauge", "Nodes that serve a block. 0: a hole.", ("model", "block")
)
ORCHESTRATOR_LEADS = Metric(
    "nesa_orchestrator_leads", "gauge", "1 while it holds the lease.", ("model",)
)

ALL_METRICS = tuple(value for value in globals().values() if isinstance(value, Metric))
