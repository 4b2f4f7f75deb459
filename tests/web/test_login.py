"""A browser's way in: one key shown once, a cookie that holds none, and whose requests it pays."""

from __future__ import annotations

import asyncio
import http.cookies
import re
from base64 import b64encode
from contextlib import AsyncExitStack
from hashlib import sha256
from html.parser import HTMLParser
from http.cookies import SimpleCookie
from pathlib import Path

import httpx
import pytest

from nesa_node.core.settings.addresses import HttpAddress
from nesa_node.web import authenticator as browsers_module
from nesa_node.web.authenticator import (
    MAX_TOKENS,
    MAX_TOKENS_PER_KEY,
    TOKEN_LIFETIME_S,
    BrowserTokens,
    cookie_token,
)
from nesa_node.web.key_store import RELOAD_INTERVAL_S, KeyStore
from tests.web.tiny_gateway import bearer, browser, gate, new_key


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def page_of(address: HttpAddress) -> dict[str, str]:
    """What a browser sends along when our own page asks."""
    return {"origin": f"http://{address}", "sec-fetch-site": "same-origin"}


async def log_in(client: httpx.AsyncClient, key: str) -> httpx.Response:
    return await client.post("/login", data={"key": key}, headers={"accept": "text/html"})


async def test_a_person_is_led_to_the_page_that_asks_and_from_there_home(path: Path) -> None:
    key = new_key(path)
    async with gate(path) as (_, address), browser(address) as client:
        home = await client.get("/", headers={"accept": "text/html,*/*;q=0.8"})
        assert (home.status_code, home.headers["location"]) == (303, "/login")
        page = await client.get("/login")
        assert page.status_code == 200
        assert "text/html" in page.headers["content-type"]
        wrong = await log_in(client, "nesa-wrong")
        assert wrong.status_code == 401
        assert '<p role="alert">the API key is wrong' in wrong.text
        assert not client.cookies
        done = await log_in(client, f" {key}\n")
        assert (done.status_code, done.headers["location"]) == (303, "/")
        assert (await client.get("/")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 200
        told = (await client.get("/v1/whoami")).json()
        assert (told["name"], told["cookie"]) == ("alice", True)


async def test_the_cookie_holds_no_key_and_no_script_or_other_site_gets_it(path: Path) -> None:
    key = new_key(path)
    async with gate(path) as (_, address), browser(address) as client:
        done = await client.post("/login", json={"key": key})
        assert done.status_code == 204
        (cookie,) = SimpleCookie(done.headers["set-cookie"]).values()
        assert cookie.key == f"nesa_node_{address.port}"
        assert len(cookie.value) == 43
        assert cookie.value not in key
        assert key not in cookie.value
        assert cookie["httponly"]
        assert cookie["samesite"] == "strict"
        assert cookie["path"] == "/"
        assert cookie["max-age"] == str(TOKEN_LIFETIME_S)
        assert not cookie["secure"]
        assert not cookie["domain"]
        client.cookies.clear()
        as_key = await client.get("/v1/models", headers=bearer(cookie.value))
        assert as_key.status_code == 401


async def test_behind_a_trusted_proxy_with_tls_the_cookie_is_secure(path: Path) -> None:
    key = new_key(path)
    proxied = {"x-forwarded-proto": "https", "x-forwarded-for": "203.0.113.9"}
    for trusted, secure in ((("127.0.0.0/8",), True), ((), False)):
        async with (
            gate(path, trusted_proxies=trusted) as (_, address),
            browser(address, headers=proxied) as client,
        ):
            done = await client.post("/login", json={"key": key})
            assert ("secure" in done.headers["set-cookie"].lower()) is secure


async def test_wrong_keys_count_by_the_address_that_a_trusted_proxy_tells(path: Path) -> None:
    new_key(path)
    async with (
        gate(path, trusted_proxies=("127.0.0.1",)) as (_, address),
        browser(address) as client,
    ):
        for number in range(21):
            last = await client.get(
                "/v1/models", headers={**bearer(f"x{number}"), "x-forwarded-for": "203.0.113.9"}
            )
        assert last.status_code == 429
        other = await client.get(
            "/v1/models", headers={**bearer("x"), "x-forwarded-for": "203.0.113.10"}
        )
        assert other.status_code == 401


async def test_cookies_are_not_unquoted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes quadratic time, of a text that needs no key."""
    new_key(path)

    def unquote(text: str) -> str:
        raise AssertionError(f"unquoted {text}")

    monkeypatch.setattr(http.cookies, "_unquote", unquote)
    async with gate(path) as (_, address), browser(address) as client:
        quoted = {"cookie": f'a="b"; nesa_node_{address.port}="\\"\\""; c="d"'}
        assert (await client.get("/v1/models", headers=quoted)).status_code == 401
        assert (await client.post("/logout", headers=quoted)).status_code == 303


@pytest.mark.parametrize(
    ("headers", "token"),
    [
        ([], None),
        ([b"nesa_node_80=x; nesa_node_8000x=y; nesa_node_8000"], ""),
        ([b"a=1;nesa_node_8000=x-_y; b=2"], "x-_y"),
        ([b"a=1; nesa_node_8000 = x=y ", b"b=2"], "x=y"),
        ([b"nesa_node_8000=x; nesa_node_8000=y"], "y"),
        ([b"nesa_node_8000=x", b"nesa_node_8000=y", b"nesa_node_=z"], "y"),
        ([b'nesa_node_8000="x"'], '"x"'),
    ],
)
def test_the_cookie_of_this_port_is_found_among_others(
    headers: list[bytes], token: str | None
) -> None:
    scope = {
        "type": "http",
        "server": ("127.0.0.1", 8000),
        "headers": [(b"cookie", value) for value in headers],
    }
    assert cookie_token(scope) == token


async def test_a_cookie_pays_only_for_what_our_own_page_posts(path: Path) -> None:
    key = new_key(path)
    async with (
        gate(path, cors_origins=("https://app.example.org",)) as (_, address),
        browser(address) as client,
    ):
        await client.post("/login", json={"key": key})
        for ours in (
            page_of(address),
            {"origin": f"http://{address}"},
            {"sec-fetch-site": "same-origin"},
        ):
            assert (await client.post("/v1/echo", headers=ours)).status_code == 200, ours
        for strange in (
            {},
            {"origin": "null"},
            {"origin": "https://evil.example"},
            {"origin": f"http://127.0.0.1:{address.port + 1}"},
            {"origin": f"http://localhost:{address.port}"},
            {"origin": "https://app.example.org"},
            {"sec-fetch-site": "none"},
            {"sec-fetch-site": "same-site"},
            {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
        ):
            response = await client.post("/v1/echo", headers=strange)
            assert response.status_code == 403, strange
            assert response.json()["error"]["code"] == "origin_not_allowed"
        # A key in a header says that whoever asks knows it.
        from_app = {"origin": "https://app.example.org", **bearer(key)}
        assert (await client.post("/v1/echo", headers=from_app)).status_code == 200


async def test_logging_out_ends_it_here_and_only_here(path: Path) -> None:
    key = new_key(path)
    async with (
        gate(path) as (_, address),
        browser(address) as one,
        browser(address) as other,
    ):
        for client in (one, other):
            await client.post("/login", json={"key": key})
        cookies = dict(one.cookies)
        done = await one.post("/logout", headers=page_of(address))
        assert (done.status_code, done.headers["location"]) == (303, "/login")
        assert not one.cookies
        one.cookies.update(cookies)
        again = await one.get("/v1/models")
        assert again.status_code == 401
        assert (await other.get("/v1/models")).status_code == 200


async def test_a_revoked_key_ends_its_browsers(path: Path) -> None:
    key = new_key(path)
    async with gate(path) as (_, address), browser(address) as client:
        await client.post("/login", json={"key": key})
        assert (await client.get("/v1/models")).status_code == 200
        KeyStore(path).revoke("alice")
        await asyncio.sleep(RELOAD_INTERVAL_S)
        assert (await client.get("/v1/models")).status_code == 401


async def test_what_a_page_reads_is_not_counted_and_what_it_posts_is(path: Path) -> None:
    key = new_key(path, requests_per_minute=1, concurrent_requests=1)
    async with gate(path) as (gateway, address), browser(address) as client:
        await client.post("/login", json={"key": key})
        async with client.stream("GET", "/v1/stream") as feed:
            assert await anext(feed.aiter_lines()) == "begin"
            assert gateway.streams == 1
            for _ in range(3):
                assert (await client.get("/v1/models")).status_code == 200
            posted = [
                (await client.post("/v1/echo", headers=page_of(address))).status_code for _ in "ab"
            ]
            assert posted == [200, 429]


async def test_without_keys_nothing_is_asked(path: Path) -> None:
    async with gate(path) as (_, address), browser(address) as client:
        assert (await client.get("/", headers={"accept": "text/html"})).status_code == 200
        page = await client.get("/login")
        assert (page.status_code, page.headers["location"]) == (303, "/")
        assert (await client.post("/login", json={"key": "x"})).status_code == 204
        assert not client.cookies


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/json", b""),
        ("application/json", b"[]"),
        ("application/json", b'{"key": 3}'),
        ("application/json", b'{"key": ""}'),
        ("application/json", b'{"key": null}'),
        ("application/json", b"[" * 8000),
        ("application/json", b"\xff"),
        ("application/x-www-form-urlencoded", b""),
        ("application/x-www-form-urlencoded", b"key="),
        ("application/x-www-form-urlencoded", b"key&" * 100),
        ("application/x-www-form-urlencoded", b"\xff=\xff"),
        ("multipart/form-data; boundary=x", b"--x--"),
        ("text/plain", b"{}"),
    ],
)
async def test_what_holds_no_key_is_a_400(path: Path, kind: str, body: bytes) -> None:
    new_key(path)
    async with gate(path) as (_, address), browser(address) as client:
        response = await client.post("/login", content=body, headers={"content-type": kind})
        assert response.status_code == 400
        assert "set-cookie" not in response.headers


async def test_other_methods_and_large_bodies_are_refused(path: Path) -> None:
    new_key(path)
    async with gate(path) as (_, address), browser(address) as client:
        assert (await client.put("/login")).status_code == 405
        assert (await client.get("/logout")).status_code == 405
        assert (await client.head("/login")).status_code == 200
        large = await client.post("/login", content=b"key=" + b"x" * 10_000)
        assert large.status_code == 413


async def test_guesses_by_the_page_are_held_up_too(path: Path) -> None:
    new_key(path)
    async with gate(path) as (_, address), browser(address) as client:
        said = [(await client.post("/login", json={"key": f"guess {n}"})) for n in range(22)]
        assert [response.status_code for response in said[:20]] == [401] * 20
        assert said[-1].status_code == 429
        page = await log_in(client, "guess")
        assert page.status_code == 429
        assert int(page.headers["retry-after"]) >= 1
        assert "too many wrong API keys" in page.text


async def test_nobody_is_led_elsewhere(path: Path) -> None:
    key = new_key(path)
    async with gate(path) as (_, address), browser(address) as client:
        for query in ("?next=https://evil.example", "?next=//evil.example", "?r=/\\evil.example"):
            done = await client.post(f"/login{query}", data={"key": key})
            assert done.headers["location"] == "/"


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.style = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "style" and not self.style:
            self.style = data


async def test_the_page_has_no_script_labels_its_field_and_keeps_to_its_policy(path: Path) -> None:
    new_key(path)
    async with gate(path) as (_, address), browser(address) as client:
        response = await client.get("/login")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "form-action 'self'" in policy
    assert "unsafe" not in policy
    page = _Page()
    page.feed(response.text)
    allowed = re.findall(r"'sha256-([^']+)'", policy)
    assert allowed == [b64encode(sha256(page.style.encode()).digest()).decode()]
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "img", "iframe"}
    # An icon of its own, empty, so that no browser asks for one without a key.
    assert [a for tag, a in page.tags if tag == "link"] == [{"rel": "icon", "href": "data:,"}]
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag
    fields = [attributes for tag, attributes in page.tags if tag == "input"]
    (field,) = [attributes for attributes in fields if "hidden" not in attributes]
    assert {"for": field["id"]} in [attributes for tag, attributes in page.tags if tag == "label"]
    assert ("html", {"lang": "en"}) in page.tags
    assert "prefers-color-scheme: dark" in page.style


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_stay_ends_by_time_and_by_leaving() -> None:
    clock = Clock()
    browsers = BrowserTokens(clock)
    token = browsers.issue("k")
    other = browsers.issue("k")
    assert browsers.key_id(token) == "k"
    assert browsers.key_id(token[:-1]) is None
    assert browsers.key_id("\ud800") is None
    browsers.revoke(other)
    browsers.revoke("never seen")
    assert browsers.key_id(other) is None
    clock.now += TOKEN_LIFETIME_S
    assert browsers.key_id(token) is None
    browsers.issue("k")
    assert len(browsers) == 1


def test_tokens_are_kept_as_hashes() -> None:
    browsers = BrowserTokens(Clock())
    token = browsers.issue("k")
    assert token not in repr(vars(browsers))
    assert list(browsers._tokens) == [sha256(token.encode()).digest()]


def test_browsers_are_bounded_in_all_and_for_each_key(monkeypatch: pytest.MonkeyPatch) -> None:
    browsers = BrowserTokens(Clock())
    first = browsers.issue("greedy")
    other = browsers.issue("other")
    for _ in range(MAX_TOKENS_PER_KEY):
        last = browsers.issue("greedy")
    assert len(browsers) == MAX_TOKENS_PER_KEY + 1
    assert browsers.key_id(first) is None
    assert browsers.key_id(other) == "other"
    assert browsers.key_id(last) == "greedy"
    for number in range(MAX_TOKENS + 10):
        browsers.issue(f"k{number}")
    assert len(browsers) == MAX_TOKENS
    browsers.revoke_key("k50")
    assert len(browsers) == MAX_TOKENS - 1
    assert browsers_module.TOKEN_LIFETIME_S > 0


async def test_many_who_send_half_a_key_keep_nobody_from_signing_in(path: Path) -> None:
    key = new_key(path)
    async with gate(path) as (_, address), AsyncExitStack() as stack:
        head = f"POST /login HTTP/1.1\r\nHost: {address}\r\nContent-Length: 8192\r\n\r\n"
        for _ in range(20):
            _, writer = await asyncio.open_connection(address.host, address.port)
            stack.callback(writer.close)
            writer.write(head.encode() + b"x" * 8191)
        client = await stack.enter_async_context(browser(address))
        assert (await client.post("/login", json={"key": key})).status_code == 204
