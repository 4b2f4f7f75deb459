"""Prometheus endpoint `/metrics`, with the metrics of given sources and of the process."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import accumulate

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from nesa_node.core.metrics import Histogram, Metric, MetricRegistry, MetricSample
from nesa_node.core.settings.http_address import HttpAddress
from nesa_node.web.server import serve_app

METRICS_PATH = "/metrics"
_INVALID_VERSION = re.compile(r"version=(?![0-9]{1,9}(\.[0-9]{1,9})*\s*([,;]|$))")
"""Versions in Accept headers that are no numbers, on which prometheus_client fails."""
MetricFamily = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class MetricsPage:
    """ASGI application that collects the metrics of `sources` at each request."""

    def __init__(self, sources: MetricRegistry) -> None:
        self._sources = sources
        self._collector = _SampleCollector()
        self._registry = CollectorRegistry(auto_describe=False)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        self._registry.register(self._collector)
        self._encode_lock = asyncio.Lock()

    async def encode_metrics(self, accept: str = "") -> tuple[bytes, str]:
        """The metrics in the format that `accept` prefers, and its content type.

        Values are read in the event loop, which owns them, and encoded in a thread.
        """
        encode, content_type = choose_encoder("" if _INVALID_VERSION.search(accept) else accept)
        async with self._encode_lock:
            self._collector.samples = self._sources.collect()
            body = await asyncio.to_thread(encode, self._registry)
        return body, content_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI interface; any other path is 404."""
        if scope["type"] != "http":
            return
        response: Response
        if scope["path"] != METRICS_PATH:
            response = PlainTextResponse(f"there is {METRICS_PATH} here, and nothing else\n", 404)
        elif scope["method"] not in ("GET", "HEAD"):
            response = PlainTextResponse("only GET\n", 405, {"allow": "GET, HEAD"})
        else:
            body, content_type = await self.encode_metrics(Headers(scope=scope).get("accept", ""))
            response = Response(body, headers={"content-type": content_type})
        await response(scope, receive, send)


@asynccontextmanager
async def serve_metrics(
    sources: MetricRegistry, address: HttpAddress
) -> AsyncIterator[HttpAddress]:
    """Serve `/metrics` until the context ends; yields the address. Raises `AddressInUseError`."""
    app: ASGIApp = MetricsPage(sources)
    async with serve_app(app, address, flag="--metrics") as found:
        yield found


class _SampleCollector(Collector):
    """Collector of the samples that were read last."""

    samples: Sequence[MetricSample] = ()

    def collect(self) -> Iterator[MetricFamily]:
        families: dict[str, MetricFamily] = {}
        for sample in self.samples:
            family = families.get(sample.metric.name)
            if family is None:
                family = families[sample.metric.name] = _make_family(sample.metric)
            _add_sample(family, sample)
        yield from families.values()


def _make_family(metric: Metric) -> MetricFamily:
    if metric.kind == "histogram":
        return HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    if metric.kind == "counter":
        return CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
    return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)


def _add_sample(family: MetricFamily, sample: MetricSample) -> None:
    value = sample.value
    if isinstance(family, HistogramMetricFamily):
        assert isinstance(value, Histogram)
        bounds = [*map(floatToGoString, value.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(value.counts), strict=True))
        family.add_metric(sample.labels, buckets=buckets, sum_value=value.sum)
    else:
        assert not isinstance(value, Histogram)
        family.add_metric(sample.labels, value)
