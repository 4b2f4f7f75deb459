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


def _gauge(name: str, text: str, labels: tuple[str, ...] = ("model",)) -> Metric:
    return Metric(name, "gauge", text, labels)


def _counter(name: str, text: str, labels: tuple[str, ...] = ("model",)) -> Metric:
    return Metric(name, "counter", text, labels)


def _histogram(
    name: str, text: str, bounds: tuple[float, ...], labels: tuple[str, ...] = ("model",)
) -> Metric:
    return Metric(name, "histogram", text, labels, bounds)


# Requests of a gateway; sessions and cache of a node.
REQUESTS_RUNNING = _gauge(
    "nesa_num_requests_running",
    "Requests that are decoding (gateway), open sessions that are not queued (node).",
    labels=("model", "role"),
)
REQUESTS_WAITING = _gauge(
    "nesa_num_requests_waiting",
    "Requests before their first token (gateway), sessions queued for the device (node).",
    labels=("model", "role"),
)
KV_CACHE_USAGE = _gauge(
    "nesa_kv_cache_usage_perc", "Fraction of the KV cache that holds tokens, 0 to 1."
)
PREFIX_QUERIES = _counter(
    "nesa_prefix_cache_queries_total", "Prompt tokens that sessions looked up in the prefix cache."
)
PREFIX_HITS = _counter("nesa_prefix_cache_hits_total", "Tokens found in the prefix cache.")
PROMPT_TOKENS = _counter(
    "nesa_prompt_tokens_total", "Prompt tokens, including those found in a cache."
)
GENERATION_TOKENS = _counter("nesa_generation_tokens_total", "Tokens that were generated.")
TIME_TO_FIRST_TOKEN = _histogram(
    "nesa_time_to_first_token_seconds", "From a request to its first token.", FIRST_TOKEN_BUCKETS_S
)
INTER_TOKEN_LATENCY = _histogram(
    "nesa_inter_token_latency_seconds",
    "From one token of a choice to the next.",
    INTER_TOKEN_BUCKETS_S,
)
REQUEST_LATENCY = _histogram(
    "nesa_e2e_request_latency_seconds",
    "From a request to the end of its answer.",
    REQUEST_BUCKETS_S,
)
REQUEST_SUCCESS = _counter(
    "nesa_request_success_total",
    "Choices that ended: stop, length, tool_calls, abort (the client went) or error.",
    labels=("model", "finished_reason"),
)

# A gateway's HTTP, and its sessions.
HTTP_RESPONSES = _counter(
    "nesa_http_responses_total", "Answers by route and status code.", labels=("route", "code")
)
OPEN_SESSIONS = _gauge("nesa_sessions", "Sessions that this process has open.")
STEP_LATENCY = _histogram(
    "nesa_step_seconds", "A decode step, through all hops and back.", STEP_BUCKETS_S
)
FAILOVERS = _counter(
    "nesa_failovers_total",
    "Failovers of sessions: a node failed, left, or was too slow.",
    labels=("model", "reason"),
)
RECOVERY_TIME = _histogram(
    "nesa_recovery_seconds", "From a failure to the repaired chain.", STEP_BUCKETS_S
)
SUSPICIONS = _counter(
    "nesa_suspicions_total",
    "Nodes that did not answer a session in time: raised, then withdrawn or confirmed.",
    labels=("model", "event"),
)
AUDITS = _counter(
    "nesa_audits_total",
    "Audits of nodes' work by outcome: passed, failed, unclear, disputed, outvoted, uncalibrated, "
    "not audited.",
    labels=("model", "outcome"),
)
DRAFT_TOKENS = _counter(
    "nesa_draft_tokens_total",
    "Tokens drafted for speculative steps, by source (lookup, model): accepted or rejected.",
    labels=("model", "source", "outcome"),
)
SPECULATION_SAVED = _gauge(
    "nesa_speculation_saved_seconds",
    "Time that speculative steps saved so far, by the measured times of steps.",
)

# A node's device.
KV_CACHE_RESERVED = _gauge(
    "nesa_kv_cache_promised_perc", "Fraction of the KV cache that is reserved, 0 to 1."
)
KV_CACHE_CAPACITY = _gauge("nesa_kv_cache_tokens", "Capacity of the KV cache in tokens.")
NODE_STEPS = _counter("nesa_node_steps_total", "Steps that were computed.")
NODE_FAILURES = _counter("nesa_node_step_failures_total", "Steps that could not be computed.")
NODE_TOKENS = _counter(
    "nesa_node_tokens_total",
    "Tokens that went through the node's blocks.",
    labels=("model", "phase"),
)
BATCH_SIZE = _histogram(
    "nesa_node_batch_size", "Sessions that an iteration computed together.", BATCH_SIZE_BUCKETS
)
ITERATION_TIME = _histogram(
    "nesa_node_iteration_seconds", "Compute time of an iteration.", STEP_BUCKETS_S
)
NODE_STEP_LATENCY = _histogram(
    "nesa_node_step_seconds", "From a step's arrival to its result.", STEP_BUCKETS_S
)
NODE_LOAD = _gauge("nesa_node_load", "Fraction of the last 30 s spent computing, plus the queue.")
NODE_STATE = _gauge(
    "nesa_node_state",
    "1 for the node's state: joining, serving or draining.",
    labels=("model", "state"),
)
SPAN_START = _gauge("nesa_node_span_start", "First block of the node.")
SPAN_END = _gauge("nesa_node_span_end", "Block after the node's last one.")
WEIGHT_BYTES = _gauge("nesa_node_weight_bytes", "Memory of the node's weights.")
MEASURED_THROUGHPUT = _gauge(
    "nesa_node_measured_tokens_per_second",
    "Last measured throughput: measured after loading, and when the machine's speed changed.",
    labels=("model", "phase"),
)
MOVE_REQUESTS = _counter(
    "nesa_moves_total", "Requests to move the node to another span, by outcome.", labels=("answer",)
)
REFUSED_STREAMS = _counter(
    "nesa_refused_streams_total",
    "Sessions, pushes and hand-overs refused or ended.",
    labels=("code",),
)
REFUSED_MESSAGES = _counter(
    "nesa_refused_messages_total", "Messages refused in open sessions.", labels=("code",)
)

# The swarm, as a daemon or gateway sees it.
PROCESS_INFO = _gauge("nesa_info", "Always 1.", labels=("role", "version", "peer_id"))
WIRE_BYTES = _counter(
    "nesa_wire_bytes_total",
    "Bytes of hidden states on the wire, by codec.",
    labels=("codec", "direction"),
)
KEPT_MASKS = _gauge(
    "nesa_kept_masks", "Tokens for which masks of private sessions are kept.", labels=()
)
HOP_RTT = _histogram(
    "nesa_hop_round_trip_seconds",
    "Round-trip time of a ping to another node.",
    RTT_BUCKETS_S,
    labels=(),
)
UNANSWERED_PINGS = _counter(
    "nesa_pings_unanswered_total", "Nodes that did not answer a ping.", labels=()
)
REFUSED_RECORDS = _counter(
    "nesa_refused_records_total",
    "Records and notices of the DHT that were rejected.",
    labels=("reason",),
)
KNOWN_NODES = _gauge("nesa_nodes", "Known nodes of a model.", labels=("model", "state"))
BLOCK_REPLICAS = _gauge(
    "nesa_block_replicas", "Nodes that serve a block. 0: a hole.", labels=("model", "block")
)
ORCHESTRATOR_LEADS = _gauge("nesa_orchestrator_leads", "1 while it holds the lease.")

ALL_METRICS = tuple(value for value in globals().values() if isinstance(value, Metric))
