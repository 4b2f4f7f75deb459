"""Listening address of an HTTP server, and checks of the Host and Origin headers it accepts."""

from __future__ import annotations

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
