"""Addresses that users give: of HTTP servers, and of peers (multiaddress or `host:port`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address

from nesa_node.core.errors import ConfigError

_LOCALHOST = "localhost"


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """Address of an HTTP server. `host` is an IP address, not a name; port 0 is any free port.

    `host_names` are further host names that requests may use, in lower case: a proxy's or a LAN's.
    """

    host: str
    port: int
    host_names: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> HttpAddress:
        """Parse `127.0.0.1:8080`, `[::1]:8080` or `localhost:8080`. Raises `ConfigError`."""
        host, _, port = text.rpartition(":")
        host = strip_brackets(host)
        host = "127.0.0.1" if host == _LOCALHOST else host
        if not _is_ip(host) or not (port.isascii() and port.isdigit()) or int(port) > 65535:
            raise ConfigError(f"{text!r} is no address like 127.0.0.1:8080 or [::1]:8080")
        return cls(host, int(port))

    @property
    def is_loopback(self) -> bool:
        return ip_address(self.host).is_loopback

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def accepts_host(self, host_header: str) -> bool:
        """Whether a request with this Host header is meant for this server.

        In DNS rebinding a foreign page's name resolves to this machine, and the browser sends that
        name. Therefore only localhost, `host_names` and IP addresses are accepted; on loopback only
        loopback addresses. The port is not compared: it may be a tunnel's.
        """
        host = _parse_host_header(host_header)
        if host is None:
            return False
        if host == _LOCALHOST or host in self.host_names:
            return True
        return _is_ip(host) and (not self.is_loopback or ip_address(host).is_loopback)

    def accepts_origin(self, origin: str, host_header: str) -> bool:
        """Whether `origin` is this server, for a request with `host_header`.

        Browsers send the same host and port in both. Where a proxy rewrote Host, the origin is one
        of `host_names` with its scheme's default port.
        """
        scheme, _, host = origin.lower().partition("://")
        if scheme not in ("http", "https"):
            return False
        return host == host_header.strip().lower() or host in self.host_names


def _parse_host_header(host_header: str) -> str | None:
    """Host without port and brackets, in lower case; None if the header is malformed."""
    host = host_header.strip()
    if not host.endswith("]"):
        name, colon, port = host.rpartition(":")
        if colon and (":" not in name or name.endswith("]")):
            if not (port.isascii() and port.isdigit()):
                return None
            host = name
    return strip_brackets(host).lower()


def strip_brackets(host: str) -> str:
    """`host` without the brackets around an IPv6 address."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return "%" not in host


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
