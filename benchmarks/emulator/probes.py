"""What an emulated link really does, measured with plain sockets in the sites."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from benchmarks.emulator.links import Link
from benchmarks.emulator.wan import Wan

_TIMEOUT_S = 20.0
_CHUNK = bytes(262_144)
_MOST_WINDOW_BYTES = 2**26
_RAMP_ROUND_TRIPS = 14
"""In so many the window grows from 10 segments to 25 MB, which 1 Gbit/s at 200 ms takes."""
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33


def round_trips_ms(
    wan: Wan, a: str, b: str, *, count: int = 50, pause_s: float = 0.0
) -> list[float]:
    """Of single small datagrams from `a` to `b` and back, one after the other."""
    with wan.inside(b):
        server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with wan.inside(a):
        client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with server, client:
        server.bind((wan.address(b), 0))
        for end in (server, client):
            end.settimeout(_TIMEOUT_S)

        def echo() -> None:
            for _ in range(count):
                data, sender = server.recvfrom(64)
                server.sendto(data, sender)

        thread = threading.Thread(target=echo)
        thread.start()
        times = []
        for _ in range(count):
            started = time.perf_counter()
            client.sendto(b"ping", server.getsockname())
            client.recvfrom(64)
            times.append((time.perf_counter() - started) * 1000)
        thread.join()
    return times


def throughput_mbit_per_s(wan: Wan, a: str, b: str, *, seconds: float = 1.0) -> float:
    """What a TCP stream from `a` to `b` carries, its own bytes only, over `seconds` once its window
    has grown.

    The window is what fills the line and half of its queue: larger than the system's limits may be,
    and nothing overflows. What is lost would come in bursts when it has been sent again.
    """
    round_trip_s = (wan.link(a, b).latency_ms + wan.link(b, a).latency_ms) / 1000
    window = _window_bytes(wan.link(a, b), round_trip_s)
    with wan.inside(b):
        listener = socket.create_server((wan.address(b), 0))
    with wan.inside(a):
        sender = socket.socket()
    with listener, sender:
        listener.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 2 * window)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, window)
        sender.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, 2 * window)
        sender.settimeout(_TIMEOUT_S)
        sender.connect(listener.getsockname())
        receiver, _ = listener.accept()

        def send() -> None:
            # The receiver closes while this sends, and that ends it.
            with contextlib.suppress(OSError):
                while True:
                    sender.sendall(_CHUNK)

        thread = threading.Thread(target=send)
        with receiver:
            receiver.settimeout(_TIMEOUT_S)
            thread.start()
            try:
                _receive(receiver, round_trip_s * _RAMP_ROUND_TRIPS + seconds / 4)
                received, took_s = _receive(receiver, seconds)
            finally:
                sender.shutdown(socket.SHUT_RDWR)
        thread.join()
    return received * 8 / took_s / 1e6


def _window_bytes(link: Link, round_trip_s: float) -> int:
    if link.bandwidth_mbit_per_s is None:
        return _MOST_WINDOW_BYTES
    wanted = link.bytes_per_s * round_trip_s + link.queue_limit_bytes / 2
    return int(min(wanted, _MOST_WINDOW_BYTES))


def _receive(receiver: socket.socket, seconds: float) -> tuple[int, float]:
    """Bytes, and how long they took to come."""
    started = now = time.perf_counter()
    received = 0
    while now < started + seconds:
        received += len(receiver.recv(len(_CHUNK)))
        now = time.perf_counter()
    return received, now - started
