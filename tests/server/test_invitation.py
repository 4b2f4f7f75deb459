"""Which address others are told."""

import pytest

from nesa_node.server.invitation import most_reachable

LOOPBACK, LAN = "/ip4/127.0.0.1/tcp/1/p2p/x", "/ip4/192.168.1.7/tcp/1/p2p/x"
PUBLIC, V6, NAME = "/ip4/8.8.8.8/tcp/1/p2p/x", "/ip6/fd00::2/tcp/1/p2p/x", "/dns4/a.b/tcp/1/p2p/x"


@pytest.mark.parametrize(
    ("addresses", "best"),
    [
        ((LOOPBACK, LAN, V6), LAN),
        ((LOOPBACK, "/ip6/::1/tcp/1/p2p/x", V6), V6),
        ((LAN, PUBLIC), PUBLIC),
        ((PUBLIC, NAME), NAME),
        ((LOOPBACK,), LOOPBACK),
        ((), None),
    ],
)
def test_others_are_told_the_address_that_most_can_use(
    addresses: tuple[str, ...], best: str | None
) -> None:
    assert most_reachable(addresses) == best
