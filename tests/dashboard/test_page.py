"""The page over HTTP: what it says, and whom it does not answer."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
from collections.abc import AsyncIterator
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import pytest

from nesa_node.core.errors import AddressInUseError, ConfigError
from nesa_node.core.ids import ModelId
from nesa_node.core.settings.addresses import HttpAddress
from nesa_node.core.settings.models import NodeConfig, OrchestratorConfig
from nesa_node.dashboard.app import Dashboard, make_app
from nesa_node.dashboard.observer import ModelTopologies
from nesa_node.web.server import serve_app

ANY_PORT = HttpAddress("127.0.0.1", 0)
HOSTILE = "</script><script>alert(1)</script>"


class Scripted:
    def __init__(self) -> None:
        self.version = 1
        self.made = 0

    def document(self) -> dict[str, Any]:
        self.made += 1
        return {"model": HOSTILE, "version": self.version}


@pytest.fixture
async def page() -> AsyncIterator[tuple[ModelTopologies, HttpAddress]]:
    dashboard = Dashboard()
    async with serve_app(make_app(dashboard), ANY_PORT) as address:
        yield dashboard.topologies, address


async def ask(
    address: HttpAddress, path: str, *, method: str = "GET", **headers: str
) -> tuple[HTTPResponse, bytes]:
    return await asyncio.to_thread(_ask, address, path, method, headers)


def _ask(
    address: HttpAddress, path: str, method: str, headers: dict[str, str]
) -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection(address.host, address.port, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


async def test_document_is_json_and_made_once_per_version(
    page: tuple[ModelTopologies, HttpAddress],
) -> None:
    shown, address = page
    response, body = await ask(address, "/topology.json")
    assert response.status == 200
    assert json.loads(body)["starting"] is True
    source = Scripted()
    shown.set_source(ModelId("tiny"), source)
    for _ in range(3):
        response, body = await ask(address, "/topology.json")
        assert json.loads(body) == {"model": HOSTILE, "version": 1}
    assert source.made == 1
    source.version = 2
    _, body = await ask(address, "/topology.json")
    assert json.loads(body)["version"] == 2
    assert response.getheader("content-type") == "application/json"
    assert response.getheader("x-content-type-options") == "nosniff"
    assert response.getheader("cache-control") == "no-store"
    assert response.getheader("access-control-allow-origin") is None
    assert "default-src 'none'" in (response.getheader("content-security-policy") or "")


async def test_health_and_nothing_else(page: tuple[ModelTopologies, HttpAddress]) -> None:
    _, address = page
    response, body = await ask(address, "/healthz")
    assert (response.status, json.loads(body)) == (200, {"status": "ok"})
    for path in ("/docs", "/openapi.json", "/topology", "/../etc/passwd"):
        assert (await ask(address, path))[0].status == 404
    assert (await ask(address, "/topology.json", method="POST"))[0].status == 405


async def test_names_of_others_are_not_answered_to(
    page: tuple[ModelTopologies, HttpAddress],
) -> None:
    _, address = page
    for host in ("evil.example", f"evil.example:{address.port}", "127.0.0.1.evil.example", ""):
        response, body = await ask(address, "/topology.json", Host=host)
        assert (response.status, b"model" in body) == (421, False), host
        assert response.getheader("x-content-type-options") == "nosniff"
    for host in ("localhost:9", f"127.0.0.1:{address.port}", "[::1]:80", "LOCALHOST"):
        assert (await ask(address, "/healthz", Host=host))[0].status == 200, host


async def test_signals_stay_the_daemons_and_the_port_is_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    async with serve_app(make_app(Dashboard()), ANY_PORT) as address:
        assert signal.getsignal(signal.SIGTERM) is before
        assert threading.current_thread() is threading.main_thread()
        with pytest.raises(AddressInUseError, match="another port with --listen"):
            async with serve_app(make_app(Dashboard()), address):
                pass
        with socket.create_connection((address.host, address.port)):
            pass  # somebody who says nothing
    with pytest.raises(ConnectionRefusedError):
        await ask(address, "/healthz")


async def test_somebody_who_stays_connected_does_not_keep_it_from_ending() -> None:
    async with asyncio.timeout(10):
        async with serve_app(make_app(Dashboard()), ANY_PORT) as address:
            _, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localh")
            await writer.drain()
        writer.close()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("127.0.0.1:80", "127.0.0.1:80"),
        ("[::1]:0", "[::1]:0"),
        ("localhost:8080", "127.0.0.1:8080"),
    ],
)
def test_addresses_are_read(text: str, shown: str) -> None:
    assert str(HttpAddress.parse(text)) == shown
    assert HttpAddress.parse(shown).is_loopback


@pytest.mark.parametrize(
    "text", ["", "80", "example.org:80", "127.0.0.1", "127.0.0.1:99999", "127.0.0.1:-1", ":80"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:8080"):
        HttpAddress.parse(text)


@pytest.mark.parametrize(
    ("host", "here", "anywhere"),
    [
        ("localhost", True, True),
        ("127.0.0.2:80", True, True),
        ("::1", True, True),
        ("192.0.2.7:80", False, True),
        ("[2001:db8::1]:80", False, True),
        ("example.org", False, False),
        ("example.org:80", False, False),
        ("localhost.example.org", False, False),
        ("localhost:x", False, False),
        ("[::1]]", False, False),
        ("fe80::1%eth0", False, False),
        ("", False, False),
    ],
)
def test_a_name_that_could_be_anybodys_is_not_ours(host: str, here: bool, anywhere: bool) -> None:
    assert HttpAddress("127.0.0.1", 80).accepts_host(host) is here
    assert HttpAddress("0.0.0.0", 80).accepts_host(host) is anywhere


def test_a_page_stays_on_this_machine_unless_it_is_told_otherwise() -> None:
    assert OrchestratorConfig(http="localhost:80").http == "127.0.0.1:80"
    for address in ("0.0.0.0:80", "[::]:80", "192.0.2.7:80"):
        with pytest.raises(ValueError, match="http_beyond_loopback"):
            OrchestratorConfig(http=address)
        assert OrchestratorConfig(http=address, http_beyond_loopback=True).http == address
    with pytest.raises(ValueError, match="orchestrator"):
        NodeConfig(model="m", http="127.0.0.1:80")
    assert NodeConfig(model="m", http="127.0.0.1:80", orchestrator=True).http is not None
