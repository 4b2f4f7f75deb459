"""Sites with a network of their own each, and links between them that may change at any time.

with open_wan(["a", "b"]) as wan:
    wan.set_link("a", "b", Link(latency_ms=25, bandwidth_mbit_per_s=100))
    with wan.inside("a"):
        listener = socket.create_server((wan.address("a"), 0))
    process = wan.popen("b", [sys.executable, "-m", ...])
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.emulator.links import Link
from benchmarks.emulator.namespaces import inside, kill_within, why_unavailable
from benchmarks.emulator.router import REQUEST_BYTES

MTU = 1500
MOST_SITES = 200
_ROOT = Path(__file__).parents[2]
_START_S = 20.0
_ANSWER_S = 10.0


class EmulatorError(RuntimeError):
    """No emulated network can be had here, or its router is gone; the message says why."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one direction of a link has carried since its start; bursts count as their packets."""

    packets: int
    bytes: int
    overflowed: int
    lost: int


class Wan:
    """Made by `open_wan`. Any thread may use it."""

    def __init__(
        self,
        sites: Sequence[str],
        control: socket.socket,
        namespaces: Sequence[int],
        real_time: bool,
    ) -> None:
        self.sites = tuple(sites)
        self.real_time = real_time
        """Whether the router goes before other processes; if not, it may be late."""
        self._numbers = {site: number for number, site in enumerate(sites)}
        self._control = control
        self._namespaces = list(namespaces)
        self._links = {(a, b): Link() for a in sites for b in sites if a != b}
        self._processes: list[subprocess.Popen[Any]] = []
        self._guard = threading.Lock()

    def address(self, site: str) -> str:
        """The IPv4 address that the other sites reach it at."""
        return _address(self._numbers[site])

    def inside(self, site: str) -> AbstractContextManager[None]:
        """Have this thread in a site: sockets made meanwhile stay there, so do new processes."""
        return inside(self._namespaces[self._numbers[site]])

    def popen(self, site: str, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """`subprocess.Popen(command, **options)` in a site; killed at the end if it still runs."""
        with self.inside(site):
            process = subprocess.Popen(command, **options)
        self._processes.append(process)
        return process

    def link(self, a: str, b: str) -> Link:
        """The direction from `a` to `b`."""
        return self._links[a, b]

    def set_link(self, a: str, b: str, link: Link, *, back: Link | None = None) -> None:
        """Both directions from now on; `back` is the one from `b` to `a`, if it is not alike.

        What is under way arrives as it would have, and before anything that is sent later.
        """
        self._set(a, b, link)
        self._set(b, a, back or link)

    def set_all(self, link: Link) -> None:
        """Every direction of every pair."""
        for a, b in combinations(self.sites, 2):
            self.set_link(a, b, link)

    def partition(self, *groups: Iterable[str]) -> None:
        """Let sites reach each other only within a group; who is in none is cut off from all.

        Links keep everything else. Replaces the partition before.
        """
        of = {site: number for number, group in enumerate(groups) for site in group}
        for (a, b), link in self._links.items():
            together = a in of and b in of and of[a] == of[b]
            if link.up != together:
                self._set(a, b, replace(link, up=together))

    def heal(self) -> None:
        """Bring all links up."""
        self.partition(self.sites)

    def traffic(self, a: str, b: str) -> Traffic:
        """What went from `a` to `b` so far."""
        return Traffic(**self._ask({"traffic": [self._numbers[a], self._numbers[b]]}))

    def close(self) -> None:
        """End everything in the sites, then the sites."""
        kill_within(self._namespaces)
        for process in self._processes:
            process.wait()
        self._control.close()
        for namespace in self._namespaces:
            os.close(namespace)

    def _set(self, a: str, b: str, link: Link) -> None:
        self._ask({"link": asdict(link), "from": self._numbers[a], "to": self._numbers[b]})
        self._links[a, b] = link

    def _ask(self, request: dict[str, Any]) -> Any:
        with self._guard:
            try:
                self._control.send(json.dumps(request).encode())
                answer = self._control.recv(REQUEST_BYTES)
            except OSError as error:
                # A late answer would be taken for that to another request.
                self._control.close()
                raise EmulatorError(f"the emulated network's router is gone: {error}") from error
        if not answer:
            raise EmulatorError("the emulated network's router is gone")
        return json.loads(answer)


@contextmanager
def open_wan(
    sites: Sequence[str],
    *,
    seed: int = 0,
    mtu: int = MTU,
    congestion_control: str | None = None,
    sysctls: Mapping[str, str] | None = None,
) -> Iterator[Wan]:
    """Make `sites`, joined by links without delay or limit; all is gone at the end.

    `seed` is that of loss and jitter, `congestion_control` what TCP uses in the sites: None stands
    for what this machine uses. `sysctls` are set in each site (`net.ipv4.tcp_sack`: `0`, say); what
    they do not name is as in a new namespace. Raises `EmulatorError` where that cannot be had.
    """
    if (reason := why_unavailable()) is not None:
        raise EmulatorError(f"no emulated network here: {reason}")
    if not 0 < len(sites) <= MOST_SITES or len(set(sites)) != len(sites):
        raise ValueError(f"1 to {MOST_SITES} sites, each with a name of its own")
    settings = {
        "sites": {
            "addresses": [_address(number) for number in range(len(sites))],
            "mtu": mtu,
            "congestion_control": congestion_control,
            "sysctls": dict(sysctls or {}),
        },
        "seed": seed,
    }
    with ExitStack() as stack:
        control = stack.enter_context(_start_router(stack, settings))
        answer, namespaces, _, _ = socket.recv_fds(control, REQUEST_BYTES, len(sites))
        ready = json.loads(answer or '{"error": "its router ended at once"}')
        if "error" in ready:
            raise EmulatorError(f"no emulated network here: {ready['error']}")
        control.settimeout(_ANSWER_S)
        wan = Wan(sites, control, namespaces, ready["real_time"])
        stack.callback(wan.close)
        yield wan


def _start_router(stack: ExitStack, settings: dict[str, Any]) -> socket.socket:
    """Our end of the socket to a new router, which ends once that is closed."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.settimeout(_START_S)
    command = [sys.executable, "-m", "benchmarks.emulator.router", str(theirs.fileno())]
    try:
        process = subprocess.Popen(
            [*command, json.dumps(settings)],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            cwd=_ROOT,
            # An interrupt from the terminal is for us, who close it in order.
            start_new_session=True,
        )
    except BaseException:
        control.close()
        raise
    finally:
        theirs.close()
    stack.callback(process.wait)
    return control


def _address(number: int) -> str:
    return f"10.77.0.{number + 1}"
