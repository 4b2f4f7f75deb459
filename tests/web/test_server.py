"""`/metrics` over HTTP, read as Prometheus reads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from nesa_node.core.metrics import Metric, MetricRegistry, MetricSample
from nesa_node.core.settings.addresses import HttpAddress
from nesa_node.web.server import serve_metrics

COUNT = Metric("nesa_things_total", "counter", "Things.", ("kind",))
LEVEL = Metric("nesa_level", "gauge", "A level.")
TIMES = Metric("nesa_times_seconds", "histogram", "Times.", ("kind",), (1.0, 2.0))
NASTY = 'a "quoted"\nname\\'


def told() -> Iterator[MetricSample]:
    tally = TIMES.new_histogram()
    for seconds in (0.5, 1.5, 9.0):
        tally.observe(seconds)
    yield MetricSample(COUNT, (NASTY,), 3)
    yield MetricSample(COUNT, ("b",), 0)
    yield MetricSample(LEVEL, (), 0.25)
    yield MetricSample(TIMES, ("x",), tally)


@pytest.fixture
async def address() -> AsyncIterator[HttpAddress]:
    sources = MetricRegistry()
    with sources.registered(told):
        async with serve_metrics(sources, HttpAddress("127.0.0.1", 0)) as address:
            yield address


async def ask(
    address: HttpAddress, path: str = "/metrics", method: str = "GET", **headers: str
) -> tuple[HTTPResponse, str]:
    def _ask() -> tuple[HTTPResponse, str]:
        connection = HTTPConnection(address.host, address.port, timeout=10)
        try:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return response, response.read().decode()
        finally:
            connection.close()

    return await asyncio.to_thread(_ask)


async def test_the_text_says_what_the_sources_say(address: HttpAddress) -> None:
    response, body = await ask(address)
    assert response.status == 200
    assert (response.getheader("content-type") or "").startswith("text/plain; version=")
    families = {family.name: family for family in text_string_to_metric_families(body)}
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert values["nesa_things_total", NASTY] == 3
    assert values["nesa_things_total", "b"] == 0
    assert values[("nesa_level",)] == 0.25
    assert families["nesa_times_seconds"].type == "histogram"
    buckets = [values["nesa_times_seconds_bucket", "x", end] for end in ("1.0", "2.0", "+Inf")]
    assert buckets == [1, 2, 3]
    assert values["nesa_times_seconds_count", "x"] == 3
    assert values["nesa_times_seconds_sum", "x"] == 11
    assert values[("process_resident_memory_bytes",)] > 1e6
    assert ("process_cpu_seconds_total",) in values


async def test_prometheus_may_ask_for_open_metrics(address: HttpAddress) -> None:
    response, body = await ask(address, Accept="application/openmetrics-text;version=1.0.0")
    assert "openmetrics" in (response.getheader("content-type") or "")
    read: Any = openmetrics.text_string_to_metric_families
    names = {family.name for family in read(body)}
    assert {"nesa_things", "nesa_level", "nesa_times_seconds"} <= names


@pytest.mark.parametrize("kind", ["text/plain", "application/openmetrics-text"])
async def test_a_version_that_is_none_gets_the_plain_format(
    address: HttpAddress, kind: str
) -> None:
    for version in ("1.x", "2.x", "abc", "1..", "1.0.0-\xe9", "1" * 5000, "\xb2"):
        response, body = await ask(address, Accept=f"*/*, {kind}; version={version}; q=0.5")
        assert response.status == 200, version
        assert response.getheader("content-type") == "text/plain; version=0.0.4; charset=utf-8"
        assert "nesa_level 0.25" in body
    response, _ = await ask(address, Accept=f"{kind};q=1;version=1.0.0 , text/plain")
    assert "version=1.0.0" in (response.getheader("content-type") or "")


async def test_prometheus_may_scrape_by_address_and_strange_pages_may_not(
    address: HttpAddress,
) -> None:
    assert (await ask(address, Host=f"127.0.0.1:{address.port}"))[0].status == 200
    assert (await ask(address, Host="evil.example"))[0].status == 421


async def test_there_is_nothing_else(address: HttpAddress) -> None:
    for path in ("/", "/metrics/", "/docs", "//metrics"):
        assert (await ask(address, path))[0].status == 404
    assert (await ask(address, method="POST"))[0].status == 405
    head, body = await ask(address, method="HEAD")
    assert (head.status, body) == (200, "")


async def test_many_who_ask_at_once_all_get_an_answer(address: HttpAddress) -> None:
    answers = await asyncio.gather(*(ask(address) for _ in range(4)))
    assert {response.status for response, _ in answers} == {200}
