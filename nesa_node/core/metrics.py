"""What daemons and gateways tell Prometheus: the names, and who reads the values.

Nothing here knows Prometheus' library. A source is called when somebody scrapes and reads what
there is anyway; `web/metrics.py` writes down what the sources of a process say.
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
    """One name. `labels` have few values, and never such that a peer chooses."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    """Of a histogram: the upper ends of its buckets."""

    def tally(self) -> Tally:
        """An empty one for this histogram."""
        assert self.kind == "histogram"
        return Tally(self.bounds)


class Sample(NamedTuple):
    """A value of a metric; `labels` are in the metric's order."""

    metric: Metric
    labels: tuple[str, ...]
    value: float | Tally


Source = Callable[[], Iterable[Sample]]
"""Called in the event loop that serves the metrics; must not block."""


class Sources:
    """All that a process has to tell now. `version` is the program's."""

    def __init__(self, version: str = "") -> None:
        self.version = version
        self._sources: list[Source] = []

    @contextmanager
    def adding(self, *sources: Source) -> Iterator[None]:
        """Ask these, too, as long as the context lasts."""
        self._sources += sources
        try:
            yield
        finally:
            for source in sources:
                self._sources.remove(source)

    def samples(self) -> list[Sample]:
        """One for each metric and its labels.

        Where several sources name the same, counters and histograms are added up; of gauges the
        last counts.
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
    """A counter by its last label: each of the `known` values, also at zero; the rest as "other".

    What is zero is told so that rates can be made of it from the first event on. For metrics with
    one label.
    """
    counts, known = dict(counts), tuple(known)
    for value in known:
        yield Sample(metric, (value,), counts.pop(value, 0))
    if "other" not in known:
        yield Sample(metric, ("other",), sum(counts.values()))
