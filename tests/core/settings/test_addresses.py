from __future__ import annotations

import pytest

from nesa_node.core.errors import ConfigError
from nesa_node.core.settings.addresses import split_tcp_address, to_multiaddress
from nesa_node.core.settings.models import ClientConfig
from nesa_node.core.settings.sources import load_config

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
    assert to_multiaddress(text) == expected


def test_only_plain_tcp_addresses_can_be_asked_for_their_id() -> None:
    assert split_tcp_address("/ip4/192.0.2.7/tcp/31330") == ("192.0.2.7", 31330)
    assert split_tcp_address("/ip4/192.0.2.7/udp/31330/quic-v1") is None
    assert split_tcp_address(WITH_ID) is None


def test_config_takes_both_forms() -> None:
    given = {"NESA_INITIAL_PEERS": f"192.0.2.7:31330,{WITH_ID}"}
    config = load_config(ClientConfig, {}, given)
    assert config.initial_peers == ("/ip4/192.0.2.7/tcp/31330", WITH_ID)


@pytest.mark.parametrize("text", ["192.0.2.7", "host:", ":1", "a b:1", "/ip4/192.0.2.7/udp/1"])
def test_config_refuses_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match=r"or 192\.0\.2\.7:4001"):
        load_config(ClientConfig, {"initial_peers": (text,)}, {})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("127.0.0.1:99999", "port 99999 does not exist, ports are 1 to 65535"),
        ("127.0.0.1:65536", "port 65536"),
        ("127.0.0.1:0", "port 0 "),
        ("[::1]:99999", "port 99999"),
        ("/ip4/127.0.0.1/tcp/99999", "port 99999"),
        (WITH_ID.replace("tcp/1", "tcp/99999"), "port 99999"),
        ("a..b:31330", r"'a\.\.b' is no name of a machine"),
        (f"{'a' * 64}.example:31330", "is no name of a machine"),
        ("127.0.0.1:\uff13\uff13", "expected addresses like"),
        ("/ip4/127.0.0.1/tcp/\uff13\uff13", "expected addresses like"),
    ],
)
def test_config_says_which_part_of_an_address_cannot_exist(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config(ClientConfig, {"initial_peers": (text,)}, {})


@pytest.mark.parametrize("text", ["192.0.2.7:65535", f"{'a' * 63}.example:1", "[::1]:1"])
def test_config_takes_what_only_just_exists(text: str) -> None:
    config = load_config(ClientConfig, {"initial_peers": (text,)}, {})
    assert config.initial_peers == (to_multiaddress(text),)
