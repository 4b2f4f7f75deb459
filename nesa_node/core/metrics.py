"""Metrics of daemons and gateways: definitions, samples, and the sources that are scraped.

Does not depend on a Prometheus library. A source is called on each scrape and reads existing
state; `web/metrics.py` formats the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

from nesa_node.core.tally import Tally

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """Definition of a metric. Labels must have few values, none of them chosen by a peer."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""

    def tally(self) -> Tally:
        """An empty histogram with this metric's bounds."""
        assert self.kind == "histogram"
        return Tally(self.bounds)


class Sample(NamedTuple):
    """A metric's value for one combination of labels, which are in the metric's order."""

    metric: Metric
    labels: tuple[str, ...]
    value: float | Tally


Source = Callable[[], Iterable[Sample]]
"""Function that yields current samples. Called in the event loop of the metrics server; must not
block."""


class Sources:
    """Sources of samples of this process. `version` is the program's."""

    def __init__(self, version: str = "") -> None:
        self.version = version
        self._sources: list[Source] = []

    @contextmanager
    def adding(self, *sources: Source) -> Iterator[None]:
        """Register sources for the duration of the context."""
        self._sources += sources
        try:
            yield
        finally:
            for source in sources:
                self._sources.remove(source)

    def samples(self) -> list[Sample]:
        """Collect one sample for each metric and labels.

        Counters and histograms of several sources are added up; the last gauge wins.
        """
        merged: dict[tuple[str, tuple[str, ...]], Sample] = {}
        for source in tuple(self._sources):
            for sample in source():
                key = sample.metric.name, sample.labels
                merged[key] = _joined(merged.get(key), sample)
        return list(merged.values())


def _joined(before: Sample | None, sample: Sample) -> Sample:
    value = sample.value
    if isinstance(value, Tally):
        copied = value.copy()
        if before is not None and isinstance(before.value, Tally):
            copied += before.value
        return sample._replace(value=copied)
    if before is None or sample.metric.kind == "gauge" or isinstance(before.value, Tally):
        return sample
    return sample._replace(value=before.value + value)


def counted(metric: Metric, counts: Mapping[str, int], known: Iterable[str]) -> Iterator[Sample]:
    """Samples of a counter with one label: one per `known` value, and "other" for the rest.

    Zeros are included, so that rates can be computed from the first event on.
    """
    counts, known = dict(counts), tuple(known)
    for value in known:
        yield Sample(metric, (value,), counts.pop(value, 0))
    if "other" not in known:
        yield Sample(metric, ("other",), sum(counts.values()))
