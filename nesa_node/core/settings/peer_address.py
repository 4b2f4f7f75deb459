"""Parsing of peer addresses that users give: multiaddresses, or `host:port`."""

from __future__ import annotations

import re
from ipaddress import ip_address

from nesa_node.core.errors import ConfigError

_HOST_PORT_PATTERN = re.compile(
    r"(?:\[(?P<ip6>[0-9a-fA-F:.]+)\]|(?P<host>[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?))"
    r":(?P<port>[0-9]{1,5})"
)
_BARE_TCP_PATTERN = re.compile(
    r"/(?:ip4|ip6|dns|dns4|dns6)/(?P<host>[^/]+)/tcp/(?P<port>[0-9]{1,5})"
)
_DIALABLE_PATTERN = re.compile(
    r"/(?:ip4|ip6|(?P<dns>dns|dns4|dns6))/(?P<host>[^/]+)/(?:tcp|udp)/(?P<port>[0-9]{1,5})(?:/.*)?"
)
_MAX_PORT = 65_535
_MAX_NAME_CHARS = 253
_MAX_LABEL_CHARS = 63
"""Limits of a DNS name and of one label between its dots, in characters (RFC 1035)."""


def to_multiaddress(text: str) -> str:
    """Convert `192.0.2.7:31330` to `/ip4/192.0.2.7/tcp/31330`, `name:port` to `/dns/...`.

    IPv6 addresses are in brackets. Other text is returned unchanged.
    """
    found = _HOST_PORT_PATTERN.fullmatch(text)
    if found is None:
        return text
    host, port = found["ip6"] or found["host"], int(found["port"])
    try:
        kind = f"ip{ip_address(host).version}"
    except ValueError:
        kind = "dns"
    return f"/{kind}/{host}/tcp/{port}"


def parse_peer_address(text: str) -> str:
    """Convert as `to_multiaddress`. Raises `ConfigError` for what cannot be a peer's address."""
    address = to_multiaddress(text)
    try:
        check_dialable(address)
    except ValueError as error:
        raise ConfigError(f"the peer address {text!r} is wrong: {error}") from None
    if not has_peer_id(address) and split_tcp_address(address) is None:
        raise ConfigError(
            f"the peer address {text!r} must end in /p2p/<peer id>, or be a host and its port, "
            "like 192.0.2.7:31330"
        )
    return address


def split_tcp_address(address: str) -> tuple[str, int] | None:
    """Host and port of a TCP address without a peer id; None for any other address."""
    found = _BARE_TCP_PATTERN.fullmatch(address)
    return None if found is None else (found["host"], int(found["port"]))


def check_dialable(address: str) -> None:
    """Raise `ValueError` if the port or host name of a multiaddress cannot exist."""
    found = _DIALABLE_PATTERN.fullmatch(address)
    if found is None:
        return
    if not 1 <= int(found["port"]) <= _MAX_PORT:
        raise ValueError(f"port {found['port']} does not exist, ports are 1 to {_MAX_PORT}")
    name = found["host"].removesuffix(".")
    lengths = [len(label) for label in name.split(".")]
    if found["dns"] and (len(name) > _MAX_NAME_CHARS or not _are_valid_labels(lengths)):
        raise ValueError(
            f"{name[:_MAX_NAME_CHARS]!r} is no name of a machine: a name has at most "
            f"{_MAX_NAME_CHARS} characters, and 1 to {_MAX_LABEL_CHARS} between its dots"
        )


def _are_valid_labels(lengths: list[int]) -> bool:
    return all(1 <= length <= _MAX_LABEL_CHARS for length in lengths)


def has_peer_id(address: str) -> bool:
    return "/p2p/" in address
