"""Tallies, and sources that several parts of a process add."""

from __future__ import annotations

from nesa_node.core.metrics import Histogram, Metric, MetricRegistry, MetricSample, count_by_label

COUNT = Metric("nesa_things_total", "counter", "Things.", ("kind",))
LEVEL = Metric("nesa_level", "gauge", "A level.")
TIMES = Metric("nesa_times_seconds", "histogram", "Times.", (), (1.0, 2.0))


def test_a_value_counts_in_the_bucket_that_ends_with_it() -> None:
    tally = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        tally.observe(value)
    tally.observe(3.0, 2)
    assert tally.counts == [2, 2, 3]
    assert (tally.count, tally.sum) == (7, 20.0)


def test_a_copy_does_not_change_with_what_it_was_copied_from() -> None:
    tally = Histogram((1.0,))
    copied = tally.copy()
    tally.observe(0.5)
    assert copied.counts == [0, 0]
    copied += tally
    copied += tally
    assert (copied.counts, copied.sum, tally.counts) == ([2, 0], 1.0, [1, 0])


def test_sources_that_tell_the_same_are_added_up_unless_it_is_a_level() -> None:
    sources, tally = MetricRegistry(), TIMES.new_histogram()
    tally.observe(0.5)

    def tell() -> list[MetricSample]:
        return [
            MetricSample(COUNT, ("a",), 2),
            MetricSample(LEVEL, (), 3),
            MetricSample(TIMES, (), tally),
        ]

    with sources.registered(tell), sources.registered(tell):
        told = {sample.metric: sample.value for sample in sources.collect()}
    times = told[TIMES]
    assert (told[COUNT], told[LEVEL]) == (4, 3)
    assert isinstance(times, Histogram)
    assert times.counts == [2, 0, 0]
    assert tally.counts == [1, 0, 0]
    assert sources.collect() == []


def test_unknown_labels_are_counted_as_others() -> None:
    counts = {"a": 1, "hostile": 2, "more": 3}
    told = [(sample.labels, sample.value) for sample in count_by_label(COUNT, counts, ("a", "b"))]
    assert told == [(("a",), 1), (("b",), 0), (("other",), 5)]
