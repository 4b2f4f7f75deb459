"""What a node tells of the peers that it was asked to reach, and to whom."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nesa_node.core.errors import PeerUnreachableError, ProtocolError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.server.dial import NOT_REACHED, _record_of, dial_successor
from nesa_node.swarm.few_addresses import MAX_DIALLED
from nesa_node.swarm.identity import Identity
from nesa_node.swarm.messages import PROTOCOL, Downstream
from nesa_node.swarm.node import Swarm, open_swarm
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
    with pytest.raises(ProtocolError) as refused:
        await dial_successor(swarm, MODEL, OPENED, Downstream(peer=peer, blocks=(2, 4)))
    return refused.value


class SlowLooks:
    """A whole look waits for members that are gone; one that answers knows `peers`."""

    def __init__(self, *peers: str) -> None:
        self.looks: list[str] = []
        self._peers = peers
        self._known: dict[str, Any] = {}

    def record(self, peer: PeerId) -> Any:
        return self._known.get(peer)

    async def glance_soon(self, _: ModelId) -> bool:
        self.looks.append("glance")
        self._known |= dict.fromkeys(self._peers, SimpleNamespace(span=(2, 4)))
        return True

    async def fetch(self, _: ModelId) -> None:
        self.looks.append("fetch")


@pytest.mark.parametrize(
    ("known", "looks"), [("peer", ["glance"]), ("another", ["glance", "fetch"])]
)
async def test_neighbours_record_comes_from_the_first_member_that_answers(
    known: str, looks: list[str]
) -> None:
    directory: Any = SlowLooks(known)
    found = await _record_of(directory, MODEL, Downstream(peer="peer", blocks=(2, 4)))
    assert (found is not None) == (known == "peer")
    assert directory.looks == looks


@pytest.mark.parametrize("was_near", [False, True])
async def test_failed_dial_says_nothing_and_accuses_only_who_was_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was_near: bool
) -> None:
    async with local_swarm(tmp_path, 1) as (node,):
        reported: list[tuple[str, str]] = []
        monkeypatch.setattr(
            node.reporter, "note", lambda _, peer, kind: reported.append((peer, kind))
        )
        peer = await leave_a_record(node, tmp_path, "/ip4/127.0.0.1/tcp/9")
        if was_near:
            node.distances.note(peer, 1.0)
        refused = await refusal(node, peer)
        assert (refused.code, str(refused)) == ("downstream_lost", NOT_REACHED)
        assert reported == ([(peer, "lost")] if was_near else [])


async def test_node_on_the_internet_dials_no_private_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with local_swarm(tmp_path, 1) as (node,):
        dialled: list[Any] = []
        transport: Any = node.transport
        transport.announced = ("/ip4/8.8.8.8/tcp/31330",)

        async def connect(_peer: PeerId, addresses: Any, _timeout_s: float = 0.0) -> None:
            dialled.extend(addresses)

        reported: list[PeerId] = []
        peer = await leave_a_record(node, tmp_path, "/ip4/127.0.0.1/tcp/9")
        node.distances.note(peer, 1.0)
        monkeypatch.setattr(node.reporter, "note", lambda _, whom, __: reported.append(whom))
        monkeypatch.setattr(transport, "connect", connect)
        assert str(await refusal(node, peer)) == NOT_REACHED
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
        transport.announced = ("/ip4/8.8.8.8/tcp/31330",) if is_public else ()

        async def connect(_peer: PeerId, addresses: Any, _timeout_s: float = 0.0) -> None:
            dialled.extend(addresses)
            raise PeerUnreachableError("far")

        monkeypatch.setattr(transport, "connect", connect)
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
        stranger = Identity.ephemeral(tmp_path).peer_id
        with pytest.raises(PeerUnreachableError):
            await transport.open_stream(stranger, PROTOCOL, [name, *private])
        assert len(dialled) == (0 if is_public else MAX_DIALLED)
