"""Addresses of peers that nobody can dial, through one that everybody can.

A relay gives out places to peers only that have found out, from others, that they need one, which
nobody does on loopback: `docs/deploy-home.md` says what was tried with real NATs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from nesa_node.core.errors import PeerUnreachableError
from nesa_node.swarm.p2p.control import pack_multiaddr
from nesa_node.swarm.p2p.hivemind_imports import Multiaddr
from nesa_node.swarm.p2p.identity import Identity, base58_decode
from nesa_node.swarm.p2p.transport import open_transport

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


async def test_a_relay_is_asked_for_a_peer_that_it_does_not_know(tmp_path: Path) -> None:
    """It understood the address: hivemind's own way to write it is refused as garbled."""
    hidden = Identity.ephemeral(tmp_path).peer_id
    async with open_transport(
        Identity.ephemeral(tmp_path), host_maddrs=LOOPBACK, relay=True
    ) as relay:
        (address,) = relay.addresses
        async with open_transport(
            Identity.ephemeral(tmp_path), initial_peers=(address,), listen=False
        ) as client:
            with pytest.raises(PeerUnreachableError, match="NO_RESERVATION"):
                await client.connect(hidden, (f"{address}/p2p-circuit/p2p/{hidden}",))


@pytest.mark.parametrize(
    "address",
    [
        "/ip4/192.0.2.7/tcp/4001",
        "/ip6/2001:db8::1/udp/4001/quic-v1",
        "/dns4/gateway.example.org/tcp/4001",
    ],
)
def test_addresses_without_a_peer_are_packed_as_ever(address: str) -> None:
    assert pack_multiaddr(address) == Multiaddr(address).to_bytes()


def test_a_peer_within_an_address_is_packed_as_its_bare_id() -> None:
    peer = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    address = f"/ip4/192.0.2.7/tcp/4001/p2p/{peer}/p2p-circuit"
    packed = pack_multiaddr(address)
    assert bytes([len(base58_decode(peer))]) + base58_decode(peer) in packed
    # What the daemon tells us of itself has that form, too.
    assert str(Multiaddr(packed)) == address
