"""Which addresses of a stranger are dialled."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import pytest

from nesa_node.swarm.p2p.dial_addresses import (
    MAX_NAME_LOOKUPS,
    choose_dial_addresses,
    is_public_node,
    resolve_names,
)
from tests.swarm.local_swarm import eventually

HOST, NEAR, LINK, FAR, FAR_6, NAME = (
    f"{where}/tcp/1/p2p/a"
    for where in (
        "/ip4/127.0.0.1",
        "/ip4/192.168.1.7",
        "/ip4/169.254.169.254",
        "/ip4/8.8.8.8",
        "/ip6/2001:4860:4860::8888",
        "/dns4/node.example.org",
    )
)

HELD = frozenset({"127.0.0.1", "192.168.1.7", "169.254.169.254", "8.8.8.8", "2001:4860:4860::8888"})


@pytest.mark.parametrize(
    ("addresses", "own", "dialled"),
    [
        ([HOST, NEAR, FAR_6, FAR], [HOST, FAR], [FAR, FAR_6]),
        ([HOST, NEAR, NAME], [FAR], [NAME]),
        ([HOST, NEAR, FAR_6, FAR], [HOST, NEAR], [FAR, NEAR]),
        ([HOST, NEAR, LINK], [FAR], []),
        ([HOST, NEAR], [HOST, NEAR], [NEAR]),
        ([HOST], [HOST], [HOST]),
        ([HOST, LINK, NEAR], [NEAR], [NEAR]),
        ([LINK], [LINK], [LINK]),
        ([HOST, NEAR], [], [NEAR]),
        ([FAR] * 16, [FAR], [FAR, FAR]),
        ([NEAR] * 16, [NEAR], [NEAR, NEAR]),
        (["/", "nonsense", "/ip4/8", "/unix/tmp/socket", "/ip6zone/lo/ip6/::1"], [HOST], []),
        ([], [FAR], []),
    ],
)
def test_few_addresses_are_dialled(
    addresses: list[str], own: list[str], dialled: list[str]
) -> None:
    public = is_public_node(own, (), HELD)
    assert list(choose_dial_addresses(addresses, own, public_only=public)) == dialled


@pytest.mark.parametrize(
    ("own", "announced", "public"),
    [
        ([HOST, NEAR, FAR], [], True),
        ([HOST, NEAR, "/ip4/8.8.4.4/tcp/1"], [], False),  # its router's
        ([HOST, NEAR, FAR_6], [], False),
        ([HOST, FAR_6], [], True),
        ([NAME], [NAME], True),
        (["/dns4/node-1/tcp/1"], ["/dns4/node-1/tcp/1"], False),
        ([NEAR], [NEAR, FAR], True),
        ([HOST], [], False),
        ([], [], False),
    ],
)
def test_node_is_on_the_internet_by_its_own_addresses(
    own: list[str], announced: list[str], public: bool
) -> None:
    assert is_public_node(own, announced, HELD) is public


@pytest.mark.parametrize(
    "disguised",
    [
        "/ip6/::ffff:127.0.0.1/tcp/1",
        "/ip6/::ffff:10.0.0.1/tcp/1",
        "/ip6/64:ff9b::7f00:1/tcp/1",
        "/ip6/2002:7f00:1::/tcp/1",
        "/ip6/fe80::1/tcp/1",
        "/ip6/fd00::1/tcp/1",
        "/ip4/0.0.0.0/tcp/1",
        "/ip4/224.0.0.1/tcp/1",
        "/ip4/100.64.0.1/tcp/1",
        "/ip4/127.0.0.1/tcp/1/p2p/relay/p2p-circuit",
        "/dns4/localhost/tcp/1",
        "/dns4/printer.local/tcp/1",
        "/dns4/metadata.google.internal/tcp/1",
    ],
)
def test_private_address_in_disguise_is_no_public_one(disguised: str) -> None:
    assert choose_dial_addresses([disguised], [FAR], public_only=True) == ()


def _answers(name: str) -> list[Any]:
    numbers = {"inside.example.org": "10.0.0.1", "node.example.org": "8.8.8.8"}
    if name not in numbers:
        raise socket.gaierror("no such name")
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (numbers[name], 0))]


async def test_name_that_stands_for_a_private_address_is_not_dialled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *_: _answers(name))
    inside, unknown = (NAME.replace("node.", other) for other in ("inside.", "nowhere."))
    assert await resolve_names([inside, NAME, unknown]) == ("/ip4/8.8.8.8/tcp/1/p2p/a",)


async def test_names_without_an_answer_hold_few_threads_and_none_of_other_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over, asked = threading.Event(), []

    def look_up(name: str, *_: object) -> list[Any]:
        asked.append(name)
        if name.endswith("evil.example"):
            over.wait()
        return _answers(name)

    async def is_found() -> bool:
        return await resolve_names([NAME]) == ("/ip4/8.8.8.8/tcp/1/p2p/a",)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr("nesa_node.swarm.p2p.dial_addresses.RESOLVE_TIMEOUT_S", 0.2)
    slow = [f"/dns4/{number}.evil.example/tcp/1/p2p/a" for number in range(64)]
    try:
        assert set(await asyncio.gather(*(resolve_names([name]) for name in slow))) == {()}
        assert await asyncio.wait_for(asyncio.to_thread(len, slow), 10) == 64
        assert not await is_found()
        assert len(asked) == MAX_NAME_LOOKUPS
    finally:
        over.set()
    monkeypatch.setattr("nesa_node.swarm.p2p.dial_addresses.RESOLVE_TIMEOUT_S", 10.0)
    await eventually(is_found)


async def test_more_names_than_threads_are_looked_up_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As those of a chain's hops are, which are dialled together."""

    def look_up(name: str, *_: object) -> list[Any]:
        time.sleep(0.05)
        return _answers("node.example.org")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    names = [f"/dns4/{number}.example.org/tcp/1/p2p/a" for number in range(3 * MAX_NAME_LOOKUPS)]
    found = await asyncio.gather(*(resolve_names([name]) for name in names))
    assert set(found) == {("/ip4/8.8.8.8/tcp/1/p2p/a",)}


async def test_name_that_cannot_be_one_ends_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await resolve_names(["/dns4/a\0.example.org/tcp/1/p2p/a"] * 2 * MAX_NAME_LOOKUPS) == ()
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *_: _answers(name))
    assert await resolve_names([NAME]) == ("/ip4/8.8.8.8/tcp/1/p2p/a",)
