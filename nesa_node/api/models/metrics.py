"""Prometheus metrics of a gateway: requests by model, responses by route."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import get_args

from nesa_node.api.generation.job import Delta, FinishReason, GenerationEvent
from nesa_node.core import metrics
from nesa_node.core.ids import ModelId
from nesa_node.core.metrics import MetricSample

FINISH_REASONS = (*get_args(FinishReason), "abort", "error")
MAX_ROUTES = 64
"""Limit on routes with counters of their own; the rest count as "other"."""
INITIAL_STATUS_CODES = ("200", "400", "401", "403", "404", "413", "429", "500", "503")
"""Status codes that each route reports from the start, with 0."""


class GatewayMetrics:
    """Metrics of one gateway, used on its event loop only; a token costs a microsecond."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._models: dict[ModelId, _ModelMetrics] = {}
        self._responses: dict[str, Counter[str]] = {}

    def add_model(self, model: ModelId) -> None:
        """Report this model from now on, also without requests."""
        self._models.setdefault(model, _ModelMetrics())

    def remove_model(self, model: ModelId) -> None:
        """Stop reporting this model: a gateway may open and close many."""
        self._models.pop(model, None)

    def add_routes(self, *routes: str) -> None:
        """Report these routes from now on: templates (`/v1/models/{id}`), not paths of requests."""
        for route in routes:
            self._responses.setdefault(route, Counter())

    def count_response(self, route: str | None, status: int) -> None:
        """Count a response. `route` is its template; None for an unknown path."""
        is_full = len(self._responses) >= MAX_ROUTES
        if route is None or (is_full and route not in self._responses):
            route = "other"
        self._responses.setdefault(route, Counter())[str(status)] += 1

    @contextmanager
    def track_request(
        self, model: ModelId, prompt_tokens: int, choices: int = 1
    ) -> Iterator[RequestMetrics]:
        """Context of one request, from before it waits for anything to its last token.

        Pass its events to `RequestMetrics.record_event`. Choices that are unfinished at the end
        count as `error` after an exception, as `abort` without one or after a cancellation.
        """
        self.add_model(model)
        watched = RequestMetrics(self._models[model], prompt_tokens, choices, self._clock)
        try:
            yield watched
        except Exception:
            watched.end("error")
            raise
        finally:
            watched.end("abort")

    def count_embedding(self, model: ModelId, prompt_tokens: int) -> None:
        """Count tokens of embeddings as prompt tokens."""
        self.add_model(model)
        self._models[model].prompt_tokens += prompt_tokens

    def samples(self) -> Iterator[MetricSample]:
        """Samples for Prometheus: a `MetricSource`."""
        for model_id, model in tuple(self._models.items()):
            yield from model.samples(model_id)
        for route, codes in tuple(self._responses.items()):
            for code in dict.fromkeys((*INITIAL_STATUS_CODES, *tuple(codes))):
                yield MetricSample(metrics.HTTP_RESPONSES, (route, code), codes[code])


class _ModelMetrics:
    def __init__(self) -> None:
        self.waiting = 0
        self.running = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.first_token_s = metrics.TIME_TO_FIRST_TOKEN.new_histogram()
        self.between_tokens_s = metrics.INTER_TOKEN_LATENCY.new_histogram()
        self.request_s = metrics.REQUEST_LATENCY.new_histogram()
        self.finished: Counter[str] = Counter()

    def samples(self, model_id: ModelId) -> Iterator[MetricSample]:
        labels = (model_id,)
        yield MetricSample(metrics.REQUESTS_RUNNING, (model_id, "gateway"), self.running)
        yield MetricSample(metrics.REQUESTS_WAITING, (model_id, "gateway"), self.waiting)
        yield MetricSample(metrics.PROMPT_TOKENS, labels, self.prompt_tokens)
        yield MetricSample(metrics.GENERATION_TOKENS, labels, self.generated_tokens)
        yield MetricSample(metrics.TIME_TO_FIRST_TOKEN, labels, self.first_token_s)
        yield MetricSample(metrics.INTER_TOKEN_LATENCY, labels, self.between_tokens_s)
        yield MetricSample(metrics.REQUEST_LATENCY, labels, self.request_s)
        for reason in FINISH_REASONS:
            yield MetricSample(metrics.REQUEST_SUCCESS, (model_id, reason), self.finished[reason])


class RequestMetrics:
    """Metrics of one request. Created by `GatewayMetrics.track_request`."""

    def __init__(
        self, model: _ModelMetrics, prompt_tokens: int, choices: int, clock: Callable[[], float]
    ) -> None:
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._clock = clock
        self._start_s = clock()
        self._last_token_s: dict[int, float] = {}
        self._open_choices = set(range(choices))
        self._is_prefilling = True
        self._ended = False
        model.waiting += 1

    def record_event(self, event: GenerationEvent) -> None:
        """Record an event of the generation; the first one ends the prefill."""
        model = self._model
        if self._is_prefilling:
            self._is_prefilling = False
            model.waiting -= 1
            model.running += 1
            model.prompt_tokens += self._prompt_tokens
        if not isinstance(event, Delta):
            return
        if event.tokens:
            self._record_tokens(event.index, len(event.tokens))
        if event.finish_reason is not None and event.index in self._open_choices:
            self._open_choices.discard(event.index)
            model.finished[event.finish_reason] += 1

    def _record_tokens(self, index: int, count: int) -> None:
        model, now = self._model, self._clock()
        last = self._last_token_s.get(index)
        if last is not None:
            # Tokens that come together share the time since the previous ones.
            model.between_tokens_s.observe((now - last) / count, count)
        elif count > 1:
            model.between_tokens_s.observe(0.0, count - 1)
        if not self._last_token_s:
            model.first_token_s.observe(now - self._start_s)
        self._last_token_s[index] = now
        model.generated_tokens += count

    def end(self, reason: str) -> None:
        """End the request; unfinished choices count as `reason`. Only the first call counts."""
        if self._ended:
            return
        self._ended = True
        model = self._model
        if self._is_prefilling:
            model.waiting -= 1
        else:
            model.running -= 1
        model.finished[reason] += len(self._open_choices)
        if not self._open_choices:
            model.request_s.observe(self._clock() - self._start_s)
