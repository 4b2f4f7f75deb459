"""The page's files over HTTP, and what browsers may do with them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from nesa_node.core.settings.addresses import HttpAddress
from nesa_node.dashboard.app import STATIC_FOLDER, Dashboard, make_app
from nesa_node.web.server import serve_app
from tests.dashboard.records import MODEL, record

STATIC = "/dashboard/static"


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    dashboard = Dashboard()
    dashboard.state.update_records([record("a", public_name="</script>")], 1000)
    async with (
        serve_app(make_app(dashboard), HttpAddress("127.0.0.1", 0)) as address,
        httpx.AsyncClient(base_url=f"http://{address}", timeout=10) as client,
    ):
        yield client


async def test_page_may_run_and_ask_only_what_is_our_own(client: httpx.AsyncClient) -> None:
    page = await client.get("/")
    policy = page.headers["content-security-policy"]
    assert "unsafe" not in policy
    directives = dict(part.strip().partition(" ")[::2] for part in policy.split(";"))
    assert directives["default-src"] == directives["frame-ancestors"] == "'none'"
    assert directives["script-src"] == directives["connect-src"] == "'self'"
    assert page.headers["x-content-type-options"] == "nosniff"
    # Nothing that this policy would forbid.
    assert not re.search(r"<style|style=|<script>|\son\w+=", page.text)


async def test_all_that_the_page_names_is_there(client: httpx.AsyncClient) -> None:
    page = await client.get("/")
    wanted = set(re.findall(rf'"({STATIC}/[^"]+)"', page.text))
    for path in STATIC_FOLDER.glob("*.js"):
        imports = re.findall(r'from "\./([^"]+)"', path.read_text(encoding="utf-8"))
        wanted |= {f"{STATIC}/{name}" for name in imports}
    assert len(wanted) > 15
    for path in sorted(wanted):
        answer = await client.get(path)
        assert answer.status_code == 200, path
        if path.endswith("js"):
            assert answer.headers["content-type"].startswith("text/javascript"), path


async def test_files_come_packed_and_only_once(client: httpx.AsyncClient) -> None:
    path = f"{STATIC}/app.js"
    packed = await client.get(path)
    assert packed.headers["content-encoding"] == "gzip"
    plain = await client.get(path, headers={"accept-encoding": "identity"})
    assert plain.content == packed.content == (STATIC_FOLDER / "app.js").read_bytes()
    again = await client.get(path, headers={"if-none-match": packed.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path", ["/x", f"{STATIC}/", f"{STATIC}/../app.py", f"{STATIC}/..%2fapp.py", f"{STATIC}//etc"]
)
async def test_nothing_else_is_served(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(path)).status_code == 404


async def test_nothing_can_be_changed(client: httpx.AsyncClient) -> None:
    for path in ("/", "/dashboard/events", "/dashboard/state.json", "/topology.json"):
        assert (await client.post(path)).status_code == 405


async def test_state_is_there_for_programs_and_names_are_json(client: httpx.AsyncClient) -> None:
    state = await client.get("/dashboard/state.json")
    assert state.headers["content-type"] == "application/json"
    assert state.json()["sections"]["nodes"]["a"]["name"] == "</script>"
    assert (await client.head("/dashboard/state.json")).status_code == 200
    assert (await client.get("/topology.json")).json()["starting"] is True
    assert (await client.get("/topology.json?model=other")).status_code == 404


async def test_topology_of_a_model_that_is_shown_but_not_measured_yet_is_starting(
    client: httpx.AsyncClient,
) -> None:
    answer = await client.get("/topology.json", params={"model": MODEL})
    assert (answer.status_code, answer.json()["starting"]) == (200, True)


def test_the_libraries_licences_are_shipped_and_named() -> None:
    vendor = STATIC_FOLDER / "vendor"
    notice = (Path(__file__).parents[2] / "NOTICE").read_text(encoding="utf-8")
    versions = (vendor / "VERSIONS").read_text(encoding="utf-8")
    for name, title in (("cytoscape", "Cytoscape.js"), ("uplot", "uPlot")):
        assert "Permission is hereby granted" in (vendor / name / "LICENSE").read_text("utf-8")
        assert title in notice
        assert re.search(rf"^{name} \d+\.\d+\.\d+ ", versions, re.MULTILINE)
