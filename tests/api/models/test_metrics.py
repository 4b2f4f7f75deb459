"""What a gateway counts: every request once, whatever way it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from nesa_node.api.generation.job import Delta, FinishReason, PrefillDone, SequenceToken
from nesa_node.api.models.metrics import (
    FINISH_REASONS,
    INITIAL_STATUS_CODES,
    MAX_ROUTES,
    GatewayMetrics,
)
from nesa_node.core.ids import ModelId
from nesa_node.core.metrics import (
    GENERATION_TOKENS,
    HTTP_RESPONSES,
    INTER_TOKEN_LATENCY,
    PROMPT_TOKENS,
    REQUEST_LATENCY,
    REQUEST_SUCCESS,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    TIME_TO_FIRST_TOKEN,
    Histogram,
    Metric,
)

MODEL = ModelId("tiny@0123")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def value(metrics: GatewayMetrics, metric: Metric, *labels: str) -> float:
    (found,) = (
        sample.value
        for sample in metrics.samples()
        if sample.metric is metric and sample.labels == labels
    )
    assert not isinstance(found, Histogram)
    return found


def tally(metrics: GatewayMetrics, metric: Metric) -> Histogram:
    (found,) = (sample.value for sample in metrics.samples() if sample.metric is metric)
    assert isinstance(found, Histogram)
    return found


def delta(tokens: int, reason: FinishReason | None = None, index: int = 0) -> Delta:
    chosen = tuple(SequenceToken(number, b"", 0.0) for number in range(tokens))
    return Delta(index=index, tokens=chosen, finish_reason=reason)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> Iterator[GatewayMetrics]:
    metrics = GatewayMetrics(clock)
    metrics.add_model(MODEL)
    yield metrics
    for metric in (REQUESTS_RUNNING, REQUESTS_WAITING):
        assert value(metrics, metric, MODEL, "gateway") == 0


def test_a_request_waits_runs_and_ends(metrics: GatewayMetrics, clock: Clock) -> None:
    with metrics.track_request(MODEL, 7) as watched:
        assert value(metrics, REQUESTS_WAITING, MODEL, "gateway") == 1
        clock.now += 2.0
        watched.record_event(PrefillDone())
        assert value(metrics, REQUESTS_WAITING, MODEL, "gateway") == 0
        assert value(metrics, REQUESTS_RUNNING, MODEL, "gateway") == 1
        watched.record_event(delta(1))
        clock.now += 0.3
        watched.record_event(delta(3))
        watched.record_event(delta(0, "stop"))
    assert value(metrics, PROMPT_TOKENS, MODEL) == 7
    assert value(metrics, GENERATION_TOKENS, MODEL) == 4
    assert value(metrics, REQUEST_SUCCESS, MODEL, "stop") == 1
    assert tally(metrics, TIME_TO_FIRST_TOKEN).sum == pytest.approx(2.0)
    between = tally(metrics, INTER_TOKEN_LATENCY)
    assert between.count == 3
    assert between.sum == pytest.approx(0.3)
    assert tally(metrics, REQUEST_LATENCY).sum == pytest.approx(2.3)


def test_choices_are_counted_one_by_one(metrics: GatewayMetrics, clock: Clock) -> None:
    with metrics.track_request(MODEL, 7, 2) as watched:
        watched.record_event(PrefillDone())
        for index in (0, 1):
            watched.record_event(delta(1, index=index))
        clock.now += 0.1
        watched.record_event(delta(1, "stop", 0))
        watched.record_event(delta(1, "length", 1))
    assert value(metrics, REQUEST_SUCCESS, MODEL, "stop") == 1
    assert value(metrics, REQUEST_SUCCESS, MODEL, "length") == 1
    assert value(metrics, PROMPT_TOKENS, MODEL) == 7
    assert tally(metrics, TIME_TO_FIRST_TOKEN).count == 1
    assert tally(metrics, INTER_TOKEN_LATENCY).count == 2
    assert tally(metrics, REQUEST_LATENCY).count == 1


def test_failures_and_clients_that_go_are_told_apart(metrics: GatewayMetrics) -> None:
    with pytest.raises(ValueError, match="mistake"), metrics.track_request(MODEL, 7):
        raise ValueError("a mistake")
    with pytest.raises(asyncio.CancelledError), metrics.track_request(MODEL, 7):
        raise asyncio.CancelledError
    with metrics.track_request(MODEL, 7) as watched:
        watched.record_event(delta(1))
    counts = {reason: value(metrics, REQUEST_SUCCESS, MODEL, reason) for reason in FINISH_REASONS}
    assert counts == {"stop": 0, "length": 0, "tool_calls": 0, "abort": 2, "error": 1}
    assert tally(metrics, REQUEST_LATENCY).count == 0


def test_what_never_happened_is_zero_not_missing(metrics: GatewayMetrics) -> None:
    metrics.add_routes("/v1/models")
    for reason in FINISH_REASONS:
        assert value(metrics, REQUEST_SUCCESS, MODEL, reason) == 0
    for code in INITIAL_STATUS_CODES:
        assert value(metrics, HTTP_RESPONSES, "/v1/models", code) == 0


def test_whoever_asks_for_nonsense_makes_no_new_labels(metrics: GatewayMetrics) -> None:
    metrics.add_routes("/v1/models")
    metrics.count_response("/v1/models", 200)
    for _ in range(3):
        metrics.count_response(None, 404)
    for number in range(5 * MAX_ROUTES):
        metrics.count_response(f"/v1/models/{number}", 418)
    assert value(metrics, HTTP_RESPONSES, "/v1/models", "200") == 1
    assert value(metrics, HTTP_RESPONSES, "other", "404") == 3
    routes = {s.labels[0] for s in metrics.samples() if s.metric is HTTP_RESPONSES}
    assert len(routes) <= MAX_ROUTES + 1
