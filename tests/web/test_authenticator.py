"""Strange pages in a browser on this machine, and names that are not ours."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from nesa_node.core.settings.addresses import HttpAddress
from nesa_node.core.settings.models import AccessConfig
from nesa_node.web.authenticator import OriginPolicy
from tests.web.tiny_gateway import bearer, browser, gate, new_key


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


async def _nothing(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"asked"})


async def ask(guard: OriginPolicy, method: str, headers: dict[str, str]) -> httpx.Response:
    transport = httpx.ASGITransport(guard)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as client:
        return await client.request(method, "/", headers=headers)


HERE = HttpAddress("127.0.0.1", 8000)


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", {}, 200),
        ("POST", {}, 200),
        ("POST", {"origin": "http://localhost:8000"}, 200),
        ("POST", {"origin": "http://LOCALHOST:8000"}, 200),
        ("GET", {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"}, 200),
        ("GET", {"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}, 200),
        ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),
        ("POST", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 403),
        ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ("GET", {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"}, 403),
        ("GET", {"origin": "https://evil.example"}, 403),
        ("POST", {"origin": "https://evil.example"}, 403),
        ("OPTIONS", {"origin": "https://evil.example"}, 403),
        ("POST", {"origin": "null"}, 403),
        ("POST", {"origin": ""}, 403),
        ("POST", {"origin": "http://localhost"}, 403),
        ("POST", {"origin": "http://localhost:3000"}, 403),
        ("POST", {"origin": "http://127.0.0.1:8000"}, 403),
        ("POST", {"origin": "chrome-extension://localhost:8000"}, 403),
        ("POST", {"origin": "http://localhost:8000.evil.example"}, 403),
        ("POST", {"origin": "https://friend.example"}, 200),
        ("POST", {"origin": "https://friend.example:444"}, 403),
        ("POST", {"host": "evil.example", "origin": "http://evil.example"}, 421),
        ("POST", {"host": "localhost:1", "origin": "http://localhost:1"}, 200),
    ],
)
async def test_only_our_own_pages_and_allowed_ones_ask(
    method: str, headers: dict[str, str], status: int
) -> None:
    guard = OriginPolicy(_nothing, HERE, ("https://friend.example",))
    response = await ask(guard, method, headers)
    assert response.status_code == status
    assert response.headers["cross-origin-resource-policy"] == "same-origin"
    assert "access-control-allow-origin" not in response.headers
    if status != 200:
        assert "error" in response.json()


async def test_two_origins_are_refused_if_one_is_strange() -> None:
    sent = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/",
        "headers": [
            (b"host", b"localhost:8000"),
            (b"origin", b"http://localhost:8000"),
            (b"origin", b"https://evil.example"),
        ],
    }

    async def receive() -> dict[str, object]:
        return {"type": "http.disconnect"}

    await OriginPolicy(_nothing, HERE)(scope, receive, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == 403


@pytest.mark.parametrize(
    ("host", "origin", "ours"),
    [
        ("gateway.lan", "http://gateway.lan", True),
        ("gateway.lan:8000", "http://gateway.lan:8000", True),
        ("GATEWAY.lan", "https://gateway.LAN", True),
        # The proxy asks under another name than the browser did.
        ("127.0.0.1:8000", "https://gateway.lan", True),
        ("127.0.0.1:8000", "https://gateway.lan:8443", False),
        ("127.0.0.1:8000", "https://other.lan", False),
        ("other.lan", "http://other.lan", False),
        ("gateway.lan.evil.example", "http://gateway.lan.evil.example", False),
    ],
)
async def test_other_names_are_ours_if_the_operator_says_so(
    host: str, origin: str, ours: bool
) -> None:
    guard = OriginPolicy(_nothing, HttpAddress("127.0.0.1", 8000, ("gateway.lan",)))
    response = await ask(guard, "POST", {"host": host, "origin": origin})
    assert (response.status_code == 200) is ours


async def test_a_page_whose_name_leads_here_reads_and_posts_nothing(path: Path) -> None:
    """DNS rebinding, against a gateway on loopback without a key."""
    async with gate(path) as (_, address), browser(address) as client:
        for host in ("evil.example", f"evil.example:{address.port}", "192.0.2.7", "0.0.0.0"):
            for method in ("GET", "POST"):
                response = await client.request(
                    method, "/v1/whoami", headers={"host": host, "origin": f"http://{host}"}
                )
                assert response.status_code == 421, host
                assert "anybody" not in response.text


async def test_with_keys_it_goes_by_any_name_and_a_strange_page_has_none(path: Path) -> None:
    """In a cluster or a LAN it is called what its operator likes."""
    key = new_key(path)
    async with gate(path) as (gateway, address), browser(address) as client:
        for host in ("gateway", "gateway.lan:8000", "evil.example"):
            page = {"host": host, "origin": f"http://{host}"}
            assert (await client.post("/v1/stream", headers=page)).status_code == 401
            response = await client.get("/v1/models", headers={"host": host, **bearer(key)})
            assert response.status_code == 200
        assert gateway.streams == 0


async def test_a_page_that_posts_by_the_way_gets_nothing_computed(path: Path) -> None:
    """A form or a fetch of text/plain needs no preflight, so nobody asks the browser's user."""
    drive_by = {"origin": "https://evil.example", "content-type": "text/plain"}
    async with gate(path) as (gateway, address), browser(address) as client:
        response = await client.post("/v1/stream", headers=drive_by, content=b"{}")
        assert response.status_code == 403
        assert gateway.streams == 0
        preflight = {**drive_by, "access-control-request-method": "POST"}
        asked = await client.options("/v1/stream", headers=preflight)
        assert asked.status_code == 403
        assert "access-control-allow-origin" not in asked.headers


async def test_a_name_of_the_lan_is_answered_to(path: Path) -> None:
    async with (
        gate(path, host_names=("Gateway.LAN",)) as (_, address),
        browser(address) as client,
    ):
        for host, status in (("gateway.lan:80", 200), ("gateway.lan", 200), ("other.lan", 421)):
            response = await client.get("/v1/models", headers={"host": host})
            assert response.status_code == status, host


async def test_pages_of_allowed_origins_ask_with_a_key_and_read_why_not(path: Path) -> None:
    key = new_key(path, requests_per_minute=1)
    page = {"origin": "https://app.example.org"}
    async with (
        gate(path, cors_origins=("https://app.example.org",)) as (_, address),
        browser(address) as client,
    ):
        preflight = {
            **page,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-stainless-os",
        }
        leave = await client.options("/v1/echo", headers=preflight)
        assert leave.status_code == 200
        assert leave.headers["access-control-allow-origin"] == "https://app.example.org"
        assert "authorization" in leave.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in leave.headers
        strange = await client.options(
            "/v1/echo", headers={**preflight, "origin": "https://evil.example"}
        )
        assert strange.status_code == 403
        said = [
            await client.post("/v1/echo", headers={**page, **headers})
            for headers in ({}, bearer(key), bearer(key))
        ]
        assert [response.status_code for response in said] == [401, 200, 429]
        for response in said:
            assert response.headers["access-control-allow-origin"] == "https://app.example.org"
            assert "Origin" in response.headers["vary"]
            assert "retry-after" in response.headers["access-control-expose-headers"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"cors_origins": ("*",)},
        {"cors_origins": ("app.example.org",)},
        {"cors_origins": ("https://app.example.org/",)},
        {"cors_origins": ("https://*.example.org",)},
        {"host_names": ("gateway.lan:8000",)},
        {"host_names": ("http://gateway.lan",)},
        {"host_names": ("*",)},
        {"host_names": ("a" * 300,)},
        {"trusted_proxies": ("proxy.lan",)},
        {"trusted_proxies": ("*",)},
        {"requests_per_minute": 0},
        {"concurrent_requests": True},
        {"max_request_bytes": 0},
        {"api_key": "short"},
        {"api_key": "two words"},
        {"api_key": "naïve-key"},
        {"api_key": "x" * 513},
        {"api_key": ""},
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        AccessConfig.model_validate(wrong)


def test_settings_come_as_text_too() -> None:
    config = AccessConfig.model_validate(
        {
            "cors_origins": "https://a.example, vscode-webview://b",
            "host_names": "Gateway.LAN box",
            "trusted_proxies": "10.1.2.3/8 ::1",
            "requests_per_minute": "5",
        }
    )
    assert config.cors_origins == ("https://a.example", "vscode-webview://b")
    assert config.host_names == ("gateway.lan", "box")
    assert config.trusted_proxies == ("10.0.0.0/8", "::1/128")
    assert config.requests_per_minute == 5
