"""Requests made up from the gateway's own description: none may be answered with a 5xx."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.live import live_gateway
from tests.cli.tiny import BLOCKS
from tests.swarms import in_process_swarm, thirds

REQUESTS = 2000
RELEASE = "schemathesis==4.32.5"
VENV = Path(__file__).resolve().parents[2] / "build" / "venv-schemathesis"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)


@pytest.fixture(scope="module")
def schemathesis() -> Path:
    """Installed in an environment of its own: it pins what the project uses, too."""
    program = VENV / "bin" / "schemathesis"
    if not program.exists():
        made = [sys.executable, "-m", "venv", str(VENV)]
        installed = [str(VENV / "bin" / "pip"), "install", "-q", RELEASE]
        for command in (made, installed):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"{RELEASE} cannot be installed here: {done.stderr[-300:]}")
    return program


@pytest.fixture(scope="module")
def url(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("schema")
    with (
        in_process_swarm(small_model, thirds(BLOCKS), folder) as addresses,
        live_gateway(addresses, folder, small_model, max_new_tokens=2) as found,
    ):
        yield found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_made_up_requests_find_no_server_error(
    schemathesis: Path, url: str, tmp_path: Path
) -> None:
    spec, report = tmp_path / "openapi.json", tmp_path / "report.ndjson"
    spec.write_text(json.dumps(_with_model(httpx.get(f"{url}/openapi.json").json())))
    done = subprocess.run(
        [
            *(str(schemathesis), "run", str(spec), "--url", url, "--seed", "6"),
            *("--phases", "examples,coverage,fuzzing", "--max-examples", "60"),
            *("--checks", ",".join(CHECKS), "--continue-on-failure", "--no-shrink"),
            *("--generation-database", "none", "--request-timeout", "120", "--no-color"),
            *("--suppress-health-check", "all", "--report", "ndjson"),
            *("--report-ndjson-path", str(report)),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=1700,
        check=False,
    )
    statuses = _statuses(report)
    print(f"{sum(statuses.values())} requests: {dict(sorted(statuses.items()))}")
    assert not [status for status in statuses if status >= 500], done.stdout[-6000:]
    assert sum(statuses.values()) >= REQUESTS, done.stdout[-3000:]
    assert statuses[200] >= REQUESTS / 20
    assert done.returncode == 0, done.stdout[-6000:]


def _with_model(spec: Any) -> Any:
    """Almost no made-up text would be the model's name."""
    for schema in spec["components"]["schemas"].values():
        if "model" in schema.get("properties", {}) and schema.get("additionalProperties") is False:
            optional = "model" not in schema.get("required", [])
            schema["properties"]["model"] = {"enum": ["small", None] if optional else ["small"]}
    return spec


def _statuses(report: Path) -> Counter[int]:
    found: Counter[int] = Counter()
    for line in report.read_text(encoding="utf-8").splitlines():
        found.update(_statuses_in(json.loads(line)))
    return found


def _statuses_in(value: Any) -> Iterator[int]:
    if isinstance(value, dict):
        if isinstance(value.get("status_code"), int):
            yield value["status_code"]
        for part in value.values():
            yield from _statuses_in(part)
    elif isinstance(value, list):
        for part in value:
            yield from _statuses_in(part)
