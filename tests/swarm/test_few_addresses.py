"""Which addresses of a stranger are dialled."""

from __future__ import annotations

import pytest

from nesa_node.swarm.few_addresses import few_addresses

HOST, NEAR, FAR, FAR_6, NAME = (
    f"{where}/tcp/1/p2p/a"
    for where in (
        "/ip4/127.0.0.1",
        "/ip4/192.168.1.7",
        "/ip4/8.8.8.8",
        "/ip6/2001:4860:4860::8888",
        "/dns4/node.example.org",
    )
)


@pytest.mark.parametrize(
    ("addresses", "own", "dialled"),
    [
        ([HOST, NEAR, FAR_6, FAR], [HOST, FAR], [FAR, FAR_6]),
        ([HOST, NEAR, NAME], [FAR], [NAME]),
        ([HOST, NEAR, FAR_6, FAR], [HOST, NEAR], [FAR, NEAR]),
        ([HOST, NEAR], [FAR], [NEAR, HOST]),
        ([HOST], [HOST], [HOST]),
        ([FAR] * 16, [FAR], [FAR, FAR]),
        ([NEAR] * 16, [NEAR], [NEAR, NEAR]),
        (["/", "nonsense", "/ip4/8"], [HOST], ["/", "nonsense"]),
        ([], [FAR], []),
    ],
)
def test_few_addresses_are_dialled(
    addresses: list[str], own: list[str], dialled: list[str]
) -> None:
    assert list(few_addresses(addresses, own)) == dialled
