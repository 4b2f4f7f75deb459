from __future__ import annotations

import pytest

from nesa_node.core.config import ClientConfig
from nesa_node.core.config_sources import load_config
from nesa_node.core.errors import ConfigError
from nesa_node.core.peer_address import as_multiaddress, host_and_port

WITH_ID = "/ip4/192.0.2.7/tcp/1/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("192.0.2.7:31330", "/ip4/192.0.2.7/tcp/31330"),
        ("[::1]:31330", "/ip6/::1/tcp/31330"),
        ("localhost:31330", "/dns/localhost/tcp/31330"),
        ("node.example.org:1", "/dns/node.example.org/tcp/1"),
        (WITH_ID, WITH_ID),
        ("192.0.2.7", "192.0.2.7"),
        ("a/b:1", "a/b:1"),
    ],
)
def test_host_and_port_become_a_multiaddress(text: str, expected: str) -> None:
    assert as_multiaddress(text) == expected


def test_only_plain_tcp_addresses_can_be_asked_for_their_id() -> None:
    assert host_and_port("/ip4/192.0.2.7/tcp/31330") == ("192.0.2.7", 31330)
    assert host_and_port("/ip4/192.0.2.7/udp/31330/quic-v1") is None
    assert host_and_port(WITH_ID) is None


def test_config_takes_both_forms() -> None:
    given = {"NESA_INITIAL_PEERS": f"192.0.2.7:31330,{WITH_ID}"}
    config = load_config(ClientConfig, {}, given)
    assert config.initial_peers == ("/ip4/192.0.2.7/tcp/31330", WITH_ID)


@pytest.mark.parametrize("text", ["192.0.2.7", "host:", ":1", "a b:1", "/ip4/192.0.2.7/udp/1"])
def test_config_refuses_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match=r"or 192\.0\.2\.7:4001"):
        load_config(ClientConfig, {"initial_peers": (text,)}, {})
