"""What a node tells of the peers that it was asked to reach, and to whom."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nesa_node.core.errors import PeerUnreachableError, ProtocolError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.server.session import neighbours as dial
from nesa_node.server.session.neighbours import (
    NOT_REACHED_MESSAGE,
    NeighbourLookup,
    dial_successor,
)
from nesa_node.swarm.node import Swarm, open_swarm
from nesa_node.swarm.p2p.dial_addresses import MAX_DIALLED_ADDRESSES
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.protocol.messages import PROTOCOL, Downstream
from tests.swarm.local_swarm import LOOPBACK, local_swarm
from tests.swarm.record_fields import MODEL_ID, make_status

MODEL = ModelId(MODEL_ID)
OPENED: Any = SimpleNamespace(session=b"i" * 16, secret=b"s" * 32)


async def leave_a_record(near: Swarm, directory: Path, address: str) -> PeerId:
    """A peer that announces `address` and is gone."""
    identity = Identity.ephemeral(directory)
    async with open_swarm(
        identity, host_maddrs=LOOPBACK, initial_peers=near.transport.addresses
    ) as gone:
        transport: Any = gone.transport
        addresses = (f"{address}/p2p/{identity.peer_id}",)
        transport.addresses = addresses

        async def keep() -> tuple[str, ...]:
            return addresses

        transport.refresh_addresses = keep
        await gone.directory.publish(make_status(span=(2, 4)))
        await near.directory.fetch(MODEL)
    return identity.peer_id


async def refusal(swarm: Swarm, peer: PeerId) -> ProtocolError:
    lookup = NeighbourLookup(swarm, MODEL)
    with pytest.raises(ProtocolError) as refused:
        await dial_successor(lookup, OPENED, Downstream(peer=peer, blocks=(2, 4)))
    return refused.value


class SlowLooks:
    """A whole look waits for members that are gone; one that answers knows `peer`, in the end."""

    def __init__(self, peer: str, *, in_vain: int = 0, look_s: float = 0.0) -> None:
        self.looks: list[tuple[str, float]] = []
        self._peer = peer
        self._in_vain = in_vain
        self._look_s = look_s
        self.whole_look_began = asyncio.Event()

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.looks]

    def record(self, peer: PeerId) -> Any:
        found = peer == self._peer and len(self.looks) > self._in_vain
        return SimpleNamespace(span=(2, 4)) if found else None

    async def try_fetch_one(self, _: ModelId) -> bool:
        self.looks.append(("glance", time.monotonic()))
        await asyncio.sleep(0)
        return True

    async def fetch(self, _: ModelId) -> None:
        self.looks.append(("fetch", time.monotonic()))
        self.whole_look_began.set()
        await asyncio.sleep(self._look_s)


@pytest.mark.parametrize(
    ("known", "looks"), [("peer", ["glance"]), ("another", ["glance", "fetch"])]
)
async def test_neighbours_record_comes_from_the_first_member_that_answers(
    known: str, looks: list[str]
) -> None:
    directory = SlowLooks(known)
    found = await lookup_in(directory).find_record(Downstream(peer="peer", blocks=(2, 4)))
    assert (found is not None) == (known == "peer")
    assert directory.kinds == looks


def lookup_in(directory: SlowLooks) -> NeighbourLookup:
    swarm: Any = SimpleNamespace(directory=directory)
    return NeighbourLookup(swarm, MODEL)


async def test_peers_that_there_are_not_cause_one_look_however_many_are_named() -> None:
    directory = SlowLooks("peer")
    lookup = lookup_in(directory)
    unknown = [Downstream(peer=f"stranger-{i}", blocks=(2, 4)) for i in range(64)]
    assert set(await asyncio.gather(*map(lookup.find_record, unknown))) == {None}
    assert directory.kinds == ["glance", "fetch"]


async def test_looks_in_vain_are_apart_and_a_neighbour_is_found_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dial, "QUICK_LOOKUP_INTERVAL_S", 0.2)
    monkeypatch.setattr(dial, "FULL_LOOKUP_INTERVAL_S", 0.4)
    directory = SlowLooks("peer", in_vain=3)
    lookup = lookup_in(directory)
    assert await lookup.find_record(Downstream(peer="stranger", blocks=(2, 4))) is None
    assert await lookup.find_record(Downstream(peer="peer", blocks=(2, 4))) is not None
    assert directory.kinds == ["glance", "fetch", "glance", "fetch"]
    first_glance, first_look, second_glance, second_look = (at for _, at in directory.looks)
    assert second_glance - first_glance >= 0.2
    assert second_look - first_look >= 0.4


async def test_a_look_goes_on_for_others_when_the_session_that_began_it_ends() -> None:
    directory = SlowLooks("peer", in_vain=1, look_s=0.5)
    lookup = lookup_in(directory)
    ending, waiting = (
        asyncio.create_task(lookup.find_record(Downstream(peer=peer, blocks=(2, 4))))
        for peer in ("stranger", "peer")
    )
    await asyncio.wait_for(directory.whole_look_began.wait(), 10)
    await asyncio.sleep(0.2)
    ending.cancel()
    assert await waiting is not None
    assert directory.kinds == ["glance", "fetch"]


async def test_after_a_look_that_found_its_peer_the_next_follows_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dial, "QUICK_LOOKUP_INTERVAL_S", 30.0)
    directory = SlowLooks("peer")
    lookup = lookup_in(directory)
    async with asyncio.timeout(10):
        for _ in range(3):
            assert await lookup.find_record(Downstream(peer="peer", blocks=(2, 4))) is not None
            directory.looks.clear()


@pytest.mark.parametrize("was_near", [False, True])
async def test_failed_dial_says_nothing_and_accuses_only_who_was_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was_near: bool
) -> None:
    async with local_swarm(tmp_path, 1) as (node,):
        reported: list[tuple[str, str]] = []
        monkeypatch.setattr(
            node.failure_reporter,
            "record_failure",
            lambda _, peer, kind: reported.append((peer, kind)),
        )
        peer = await leave_a_record(node, tmp_path, "/ip4/127.0.0.1/tcp/9")
        if was_near:
            node.rtts.record_ping(peer, 1.0)
        refused = await refusal(node, peer)
        assert (refused.code, str(refused)) == ("downstream_lost", NOT_REACHED_MESSAGE)
        assert reported == ([(peer, "lost")] if was_near else [])


async def test_node_on_the_internet_dials_no_private_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with local_swarm(tmp_path, 1) as (node,):
        dialled: list[Any] = []
        transport: Any = node.transport
        transport.announce_addresses = ("/ip4/8.8.8.8/tcp/31330",)

        async def connect(_peer: PeerId, addresses: Any, _timeout_s: float = 0.0) -> None:
            dialled.extend(addresses)

        reported: list[PeerId] = []
        peer = await leave_a_record(node, tmp_path, "/ip4/127.0.0.1/tcp/9")
        node.rtts.record_ping(peer, 1.0)
        monkeypatch.setattr(
            node.failure_reporter, "record_failure", lambda _, whom, __: reported.append(whom)
        )
        monkeypatch.setattr(transport, "connect", connect)
        assert str(await refusal(node, peer)) == NOT_REACHED_MESSAGE
        assert dialled == []
        assert reported == [], "nobody knows whether it is lost"


@pytest.mark.parametrize("is_public", [False, True])
async def test_few_of_a_strangers_addresses_are_dialled_and_names_only_as_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_public: bool
) -> None:
    """A name may lead into the operator's network: what is looked at is what is dialled."""
    name = "/dns4/inside.example.org/tcp/31330"
    private = [f"/ip4/10.0.0.{host}/tcp/31330" for host in range(1, 16)]

    async def look_up(*_: object, **__: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 0))]

    async with local_swarm(tmp_path, 1) as (node,):
        dialled: list[str] = []
        transport: Any = node.transport
        transport.announce_addresses = ("/ip4/8.8.8.8/tcp/31330",) if is_public else ()

        async def connect(_peer: PeerId, addresses: Any, _timeout_s: float = 0.0) -> None:
            dialled.extend(addresses)
            raise PeerUnreachableError("far")

        monkeypatch.setattr(transport, "connect", connect)
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
        stranger = Identity.ephemeral(tmp_path).peer_id
        with pytest.raises(PeerUnreachableError):
            await transport.open_stream(stranger, PROTOCOL, [name, *private])
        assert len(dialled) == (0 if is_public else MAX_DIALLED_ADDRESSES)
