"""The process between the sites: reads packets of each site's TUN device, delivers them when due.

    python -m benchmarks.emulator.router FD SETTINGS

It makes the namespaces and devices, sends the namespaces over the socket FD, and then answers the
requests that `Wan` makes there. The devices live as long as this process does. It ends when the
other end of the socket is closed, by whatever death, and kills whoever is left in the namespaces.

It runs with real-time priority where it may: on a busy machine it would be late otherwise.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.emulator.links import Line, Link
from benchmarks.emulator.namespaces import elsewhere, kill_within, new_namespace
from benchmarks.emulator.tun import READ_BYTES, open_tun, parse, set_bursts

INTERFACE = "wan0"
PREFIX_BITS = 16
REQUEST_BYTES = 65_536
_PACKETS_AT_ONCE = 16
_LONGEST_WAIT_S = 1.0
_PRIORITY = 10
_QUEUED_PACKETS = 10_000
"""Between the kernel and this process."""


class Router:
    """Forwards between `devices` (file descriptors), which have `addresses`, in the same order."""

    def __init__(self, devices: Sequence[int], addresses: Sequence[str], seed: int) -> None:
        self._devices = list(devices)
        self._numbers = {IPv4Address(address).packed: n for n, address in enumerate(addresses)}
        sites = range(len(devices))
        self._lines = {
            (a, b): Line(Link(), Random(f"{seed}:{a}:{b}")) for a in sites for b in sites
        }
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._sent = 0

    def serve(self, control: socket.socket) -> None:
        """Forward packets and answer requests until the other end of `control` is closed."""
        sources = {fd: number for number, fd in enumerate(self._devices)}
        watched = [control.fileno(), *self._devices]
        while True:
            wait_s = self._deliver()
            # Unlike poll and epoll, select takes microseconds.
            for fd in select.select(watched, (), (), wait_s)[0]:
                if fd in sources:
                    self._read(sources[fd], fd)
                    continue
                request = control.recv(REQUEST_BYTES)
                if not request:
                    return
                control.send(json.dumps(self.answer(json.loads(request))).encode())

    def answer(self, request: Mapping[str, Any]) -> Any:
        match request:
            case {"link": link, "from": a, "to": b}:
                self._lines[a, b].link = Link(**link)
                # What is lost is to be lost packet by packet.
                bursts = not any(line.link.loss for line in self._lines.values())
                for fd in self._devices:
                    set_bursts(fd, bursts)
                return None
            case {"traffic": [a, b]}:
                line = self._lines[a, b]
                counted = ("packets", "bytes", "overflowed", "lost")
                return {name: getattr(line, name) for name in counted}
        raise ValueError(f"unknown request: {request}")

    def _deliver(self) -> float:
        """Deliver what is due; returns how long the next packet takes still."""
        under_way = self._under_way
        while under_way:
            wait_s = under_way[0][0] - time.monotonic()
            if wait_s > 0:
                return min(wait_s, _LONGEST_WAIT_S)
            _, _, number, frame = heapq.heappop(under_way)
            # A site may have shut its own interface.
            with contextlib.suppress(OSError):
                os.write(self._devices[number], frame)
        return _LONGEST_WAIT_S

    def _read(self, source: int, fd: int) -> None:
        for _ in range(_PACKETS_AT_ONCE):
            try:
                frame = os.read(fd, READ_BYTES)
            except OSError:
                return
            now = time.monotonic()
            burst = parse(frame)
            number = None if burst is None else self._numbers.get(burst.destination)
            if burst is None or number is None:
                continue
            due = self._lines[source, number].send(now, burst.size_bytes, burst.packets)
            if due is not None:
                self._sent += 1
                heapq.heappush(self._under_way, (due, self._sent, number, frame))


def make_sites(
    addresses: Sequence[str],
    *,
    mtu: int,
    congestion_control: str | None,
    sysctls: Mapping[str, str],
) -> tuple[list[int], list[int]]:
    """File descriptors of a new namespace and of its device for each address."""
    namespaces, devices = [], []
    with elsewhere():
        for address in addresses:
            namespaces.append(new_namespace())
            # Only IPv4 is routed; without this the kernel sends neighbour discovery.
            with contextlib.suppress(OSError):
                set_sysctl("net.ipv6.conf.default.disable_ipv6", "1")
            for name, value in sysctls.items():
                set_sysctl(name, value)
            devices.append(open_tun(INTERFACE))
            run_ip("link", "set", "lo", "up")
            run_ip("address", "add", f"{address}/{PREFIX_BITS}", "dev", INTERFACE)
            length = ("txqueuelen", str(_QUEUED_PACKETS))
            run_ip("link", "set", INTERFACE, "mtu", str(mtu), *length, "up")
            if congestion_control is not None:
                # A namespace's own default may be `reno` or what the machine's is, nothing else.
                network = str(IPv4Interface(f"{address}/{PREFIX_BITS}").network)
                chosen = ("congctl", congestion_control)
                run_ip("route", "replace", network, "dev", INTERFACE, "src", address, *chosen)
    return namespaces, devices


def set_sysctl(name: str, value: str) -> None:
    """In the namespace that this process is in. Raises `OSError`."""
    Path("/proc/sys", *name.split(".")).write_text(value, encoding="ascii")


def run_ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def take_priority() -> bool:
    """Whether this process now goes before others."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    except OSError:
        return False
    return True


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(sys.argv[2])
    namespaces: list[int] = []
    try:
        try:
            namespaces, devices = make_sites(**settings["sites"])
        except OSError as error:
            control.send(json.dumps({"error": str(error)}).encode())
            return
        ready = json.dumps({"real_time": take_priority()}).encode()
        socket.send_fds(control, [ready], namespaces)
        # Nothing here makes cycles, and a collection would delay packets.
        gc.disable()
        addresses = settings["sites"]["addresses"]
        Router(devices, addresses, settings["seed"]).serve(control)
    finally:
        kill_within(namespaces)


if __name__ == "__main__":
    main()
