"""TUN devices: network interfaces whose packets a process reads and writes."""

from __future__ import annotations

import fcntl
import os
import struct
from typing import NamedTuple

DEVICE = "/dev/net/tun"
HEADER_BYTES = 10
"""Before each packet: `struct virtio_net_hdr`, which names checksums and cuts still to be made."""
READ_BYTES = HEADER_BYTES + 65_536

_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_CHECKSUM, _TCP_V4 = 0x01, 0x02
_HEADER = struct.Struct("=BBHHHH")


class Burst(NamedTuple):
    """TCP segments that the kernel has not cut yet, or a single packet."""

    destination: bytes
    """An IPv4 address."""
    size_bytes: int
    """On the wire: each segment has headers of its own there."""
    packets: int


def open_tun(name: str) -> int:
    """Create the interface `name` in this thread's network namespace; it lasts as long as the
    returned file descriptor, which does not block. Raises `OSError`."""
    fd = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode("ascii"), flags))
        set_bursts(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def set_bursts(fd: int, allowed: bool) -> None:
    """Whether the kernel may hand over up to 64 KiB of a TCP stream at once.

    That is a tenth of the work, and the streams are the same: window and segments are counted as
    the interface's MTU says.
    """
    fcntl.ioctl(fd, _TUNSETOFFLOAD, _CHECKSUM | _TCP_V4 if allowed else 0)


def parse(frame: bytes) -> Burst | None:
    """What was read from a device. None: not IPv4."""
    if len(frame) < HEADER_BYTES + 20 or frame[HEADER_BYTES] >> 4 != 4:
        return None
    _, gso_type, _, segment_bytes, transport_at, _ = _HEADER.unpack_from(frame)
    size = len(frame) - HEADER_BYTES
    destination = frame[HEADER_BYTES + 16 : HEADER_BYTES + 20]
    if not gso_type or not segment_bytes:
        return Burst(destination, size, 1)
    headers = transport_at + (frame[HEADER_BYTES + transport_at + 12] >> 4) * 4
    packets = max(-(-(size - headers) // segment_bytes), 1)
    return Burst(destination, size + (packets - 1) * headers, packets)
