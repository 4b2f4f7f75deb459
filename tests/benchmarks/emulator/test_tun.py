from __future__ import annotations

import struct

from benchmarks.emulator.tun import Burst, parse

HEADER = struct.Struct("=BBHHHH")
TO = bytes([10, 77, 0, 2])


def frame(payload_bytes: int, *, segment_bytes: int = 0, tcp_options: int = 12) -> bytes:
    """As a device hands it over: 20 bytes of IP, 20 and options of TCP, the rest."""
    tcp_bytes = 20 + tcp_options
    total = 20 + tcp_bytes + payload_bytes
    ip = struct.pack("!BBHIBBHI4s", 0x45, 0, total, 0, 64, 6, 0, 0, TO)
    tcp = bytes(12) + bytes([tcp_bytes // 4 << 4]) + bytes(tcp_bytes - 13)
    gso_type = 1 if segment_bytes else 0
    header = HEADER.pack(1, gso_type, total, segment_bytes, 20, 16)
    return header + ip + tcp + bytes(payload_bytes)


def test_single_packet_is_as_long_as_it_is() -> None:
    assert parse(frame(100)) == Burst(TO, 152, 1)


def test_burst_counts_the_headers_that_each_of_its_segments_will_have() -> None:
    assert parse(frame(1448, segment_bytes=1448)) == Burst(TO, 1500, 1)
    assert parse(frame(2 * 1448 + 1, segment_bytes=1448)) == Burst(TO, 3 * 52 + 2 * 1448 + 1, 3)


def test_what_is_not_ipv4_is_nobodys() -> None:
    assert parse(HEADER.pack(0, 0, 0, 0, 0, 0) + bytes([0x60]) + bytes(60)) is None
    assert parse(frame(100)[:20]) is None
