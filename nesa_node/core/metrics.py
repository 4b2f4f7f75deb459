"""Metrics of daemons and gateways: definitions, samples, and the sources that are scraped.

Does not depend on a Prometheus library. A source is called on each scrape and reads existing
state; `web/server.py` formats the samples.

Histogram without locks, for hot paths where a microsecond matters.
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
