"""A real Prometheus scrapes a swarm under traffic: the dashboard's queries have answers."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml  # type: ignore[import-untyped]

from tests.cli.tiny import BLOCKS, write_tiny_model
from tests.e2e.gateway import gateway_process
from tests.swarms import Daemons, daemons, thirds

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "nesa-node.json"
CONFIG = ROOT / "deploy" / "prometheus" / "prometheus.yml"
PATIENCE_S = 90.0

UNPACKED = ROOT / "build" / "tools" / "debian" / "usr" / "bin" / "prometheus"
"""Where `make tools` leaves Debian's package."""
PROMETHEUS = shutil.which("prometheus") or (str(UNPACKED) if UNPACKED.exists() else None)

needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None, reason="Debian's package prometheus is not here: `make tools` fetches it"
)


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return found


def queries() -> list[tuple[str, str]]:
    """Each panel's title with its queries."""
    return [
        (panel["title"], target["expr"])
        for panel in panels()
        for target in panel.get("targets", ())
    ]


def substituted(query: str, **variables: str) -> str:
    for name, value in variables.items():
        query = query.replace(f"${name}", value)
    assert "$" not in query, query
    return query


def test_the_dashboard_is_laid_out_without_overlaps_and_names_its_data_source() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not taken & cells, panel["title"]
        taken |= cells
        assert all(
            target["datasource"]["uid"] == "prometheus" for target in panel.get("targets", ())
        )
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids))


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    from nesa_node.core.metrics import ALL_METRICS

    known = {metric.name for metric in ALL_METRICS}
    for _, query in queries():
        for name in re.findall(r"\bnesa_\w+", query):
            assert re.sub(r"_(bucket|count|sum)$", "", name) in known or name in known, query


@contextmanager
def prometheus(folder: Path, targets: Sequence[str]) -> Iterator[str]:
    """The shipped configuration, with these targets in place of compose's names; yields its URL."""
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s"}
    (job, others) = config["scrape_configs"]
    del job["dns_sd_configs"], job["relabel_configs"]
    job["static_configs"] = [{"targets": list(targets[:-1])}]
    (folder / "targets").mkdir()
    listed = json.dumps([{"targets": list(targets[-1:])}])
    (folder / "targets" / "more.json").write_text(listed, encoding="utf-8")
    assert others["file_sd_configs"] == [{"files": ["targets/*.json"]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    assert PROMETHEUS is not None
    argv = [PROMETHEUS, f"--config.file={folder / 'prometheus.yml'}", "--log.level=warn"]
    argv += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(20)


def ask(url: str, query: str) -> list[float]:
    """The values of what a query finds now."""
    try:
        response = httpx.get(f"{url}/api/v1/query", params={"query": query}, timeout=10)
    except httpx.TransportError:
        return []
    if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:  # it is starting
        return []
    answer = response.json()
    assert answer["status"] == "success", answer
    return [float(sample["value"][1]) for sample in answer["data"]["result"]]


@contextmanager
def traffic(url: str) -> Iterator[None]:
    """Streams of answers, one after the other, until the context ends; now and then a mistake."""
    ending = threading.Event()

    def run() -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            number = 0
            while not ending.is_set():
                number += 1
                body = {"model": "tiny", "prompt": f"hello again w{number}", "max_tokens": 12}
                client.post("/v1/completions", json=body | {"seed": number})
                client.post("/v1/completions", json=body | {"suffix": "x"})

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def metrics_address(swarm: Daemons, at: int) -> str:
    found = re.search(r"url=http://(\S+?)/", swarm.log(swarm.nodes[at]))
    assert found is not None
    return found[1]


@pytest.mark.slow
@pytest.mark.timeout(300)
@needs_prometheus
def test_every_query_of_the_dashboard_has_an_answer(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    with daemons(model, tmp_path, "--metrics", "127.0.0.1:0", "--ping-every-s", "0.5") as swarm:
        swarm.start_all(thirds(BLOCKS))
        with gateway_process(model, tmp_path, swarm.addresses) as gateway:
            scraped = [metrics_address(swarm, at) for at in range(3)]
            scraped.append(gateway.url.removeprefix("http://"))
            with prometheus(tmp_path, scraped) as url, traffic(gateway.url):
                _check(url, scraped)


def _check(url: str, scraped: Sequence[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while len(ask(url, "up == 1")) < 4 and time.monotonic() < deadline:
        time.sleep(0.5)
    assert ask(url, "up") == [1] * 4
    (model,) = httpx.get(
        f"{url}/api/v1/label/model/values", params={"match[]": "nesa_block_replicas"}
    ).json()["data"]
    instances = httpx.get(
        f"{url}/api/v1/label/instance/values", params={"match[]": "nesa_info"}
    ).json()["data"]
    assert sorted(instances) == sorted(scraped)
    open_queries = {
        (title, query): substituted(
            query, __rate_interval="20s", model=f"({re.escape(model)})", instance=".*"
        ).replace("\\", "\\\\")
        for title, query in queries()
    }
    while open_queries and time.monotonic() < deadline:
        for key, query in list(open_queries.items()):
            if any(map(math.isfinite, ask(url, query))):
                del open_queries[key]
        time.sleep(1)
    assert not open_queries
    assert ask(url, "max by (block) (nesa_block_replicas)") == [1] * BLOCKS
    assert ask(url, 'sum(nesa_request_success_total{finished_reason="length"})')[0] > 0
    assert ask(url, 'sum(nesa_http_responses_total{route="/v1/completions",code="400"})')[0] > 0
