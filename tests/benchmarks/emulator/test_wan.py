"""Real namespaces and a real router; skipped where they cannot be had."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from benchmarks.emulator import namespaces, wan
from benchmarks.emulator.links import Link
from benchmarks.emulator.probes import round_trips_ms, throughput_mbit_per_s
from benchmarks.emulator.wan import EmulatorError, open_wan
from benchmarks.figures import percentile

REASON = namespaces.why_unavailable()
needs_wan = pytest.mark.skipif(REASON is not None, reason=REASON or "")
ROOT = Path(__file__).parents[3]
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@needs_wan
@pytest.mark.parametrize("round_trip_ms", [0, 10, 50])
def test_round_trip_takes_what_was_asked(round_trip_ms: float) -> None:
    with open_wan(["a", "b"]) as net:
        net.set_link("a", "b", Link(latency_ms=round_trip_ms / 2))
        times = round_trips_ms(net, "a", "b", count=20)
    # What is more is sleeps that end late, and ends that wait for a busy machine's processors.
    assert round_trip_ms <= min(times) < round_trip_ms + 2
    assert percentile(times, 25) < round_trip_ms + 3


@needs_wan
@pytest.mark.slow
@pytest.mark.parametrize("latency_ms", [0, 10])
@pytest.mark.parametrize("mbit_per_s", [10, 100])
def test_stream_gets_the_bandwidth_that_was_asked(mbit_per_s: float, latency_ms: float) -> None:
    with open_wan(["a", "b"]) as net:
        net.set_all(Link(bandwidth_mbit_per_s=mbit_per_s, latency_ms=latency_ms))
        reached = throughput_mbit_per_s(net, "a", "b", seconds=2)
    assert 0.85 * mbit_per_s < reached < 1.02 * mbit_per_s


@needs_wan
def test_each_pair_and_direction_has_a_link_of_its_own_that_changes_live() -> None:
    with open_wan(["a", "b", "c"]) as net:
        net.set_link("a", "b", Link(latency_ms=20), back=Link(latency_ms=10))
        assert 30 <= min(round_trips_ms(net, "a", "b", count=5)) < 32
        assert min(round_trips_ms(net, "a", "c", count=5)) < 2
        net.set_link("a", "b", Link())
        assert min(round_trips_ms(net, "a", "b", count=5)) < 2
        assert net.traffic("a", "b").packets == net.traffic("b", "a").packets == 10
        assert net.traffic("b", "c").packets == 0


@needs_wan
def test_lost_are_as_many_as_was_asked() -> None:
    with open_wan(["a", "b"], seed=3) as net:
        net.set_link("a", "b", Link(loss=0.2))
        with net.inside("a"), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for n in range(1000):
                sender.sendto(b"x", (net.address("b"), 9))
                if n % 50 == 0:
                    time.sleep(0.002)
        wait_for(lambda: sum(counts(net)) == 1000)
        assert 150 < counts(net)[1] < 250


@needs_wan
def test_stream_survives_loss() -> None:
    with open_wan(["a", "b"]) as net:
        net.set_all(Link(loss=0.01))
        assert throughput_mbit_per_s(net, "a", "b", seconds=0.5) > 1
        assert net.traffic("a", "b").lost > 0


@needs_wan
def test_partition_separates_until_it_is_healed() -> None:
    with open_wan(["a", "b", "c"]) as net:
        net.set_all(Link(latency_ms=1))
        net.partition(["a", "b"])
        assert reaches(net, "a", "b")
        assert not reaches(net, "a", "c")
        assert not reaches(net, "c", "b")
        net.heal()
        assert reaches(net, "a", "c")
        assert net.link("a", "c") == Link(latency_ms=1)


@needs_wan
def test_nothing_is_left_behind_even_after_an_error() -> None:
    before = open_files()
    processes = []

    def fail() -> None:
        with open_wan(["a", "b"]) as net:
            processes.append(net.popen("a", SLEEP))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert processes[0].returncode == -9
    assert open_files() == before
    assert not psutil.Process().children()


@needs_wan
def test_processes_see_their_site_only() -> None:
    show = "import psutil, json; print(json.dumps(psutil.net_if_addrs()))"
    with open_wan(["a", "b"]) as net:
        process = net.popen("b", [sys.executable, "-c", show], stdout=subprocess.PIPE)
        found = json.loads(process.communicate(timeout=30)[0])
        assert set(found) == {"lo", "wan0"}
        assert net.address("b") in [one[1] for one in found["wan0"]]


@needs_wan
def test_congestion_control_is_that_which_was_asked() -> None:
    with open_wan(["a", "b"], congestion_control="reno") as net:
        with net.inside("a"):
            listener = socket.create_server((net.address("a"), 0))
        with net.inside("b"):
            client = socket.socket()
        with listener, client:
            client.connect(listener.getsockname())
            with listener.accept()[0] as accepted:
                for end in (client, accepted):
                    name = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                    assert name.rstrip(b"\0") == b"reno"


@needs_wan
def test_sysctls_are_the_sites_own() -> None:
    setting = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")
    before = setting.read_text(encoding="ascii")
    name = "net.ipv4.tcp_slow_start_after_idle"
    with open_wan(["a"], sysctls={name: "0"}) as net, net.inside("a"):
        assert setting.read_text(encoding="ascii") == "0\n"
    assert setting.read_text(encoding="ascii") == before


@needs_wan
def test_everything_goes_when_its_owner_is_killed() -> None:
    script = (
        "import sys, os, time\n"
        "from benchmarks.emulator.wan import open_wan\n"
        "with open_wan(['a', 'b']) as wan:\n"
        f"    wan.popen('a', {SLEEP!r})\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(600)\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        children = psutil.Process(owner.pid).children(recursive=True)
        assert len(children) == 2, "the router and what runs in a site"
        owner.kill()
    assert not psutil.wait_procs(children, timeout=10)[1]


@needs_wan
def test_router_that_dies_is_an_error_and_takes_nothing_else_along() -> None:
    with open_wan(["a", "b"]) as net:
        (router,) = psutil.Process().children()
        process = net.popen("a", SLEEP)
        router.kill()
        with pytest.raises(EmulatorError, match="router is gone"):
            net.traffic("a", "b")
    assert process.returncode == -9


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wan, "why_unavailable", lambda: "ip is missing: install iproute2")
    with pytest.raises(EmulatorError, match="install iproute2"), open_wan(["a"]):
        pass


def counts(net: wan.Wan) -> tuple[int, int]:
    traffic = net.traffic("a", "b")
    return traffic.packets, traffic.lost


def reaches(net: wan.Wan, a: str, b: str) -> bool:
    with net.inside(b):
        listener = socket.create_server((net.address(b), 0))
    with net.inside(a):
        client = socket.socket()
    with listener, client:
        client.settimeout(0.3)
        try:
            client.connect(listener.getsockname())
        except TimeoutError:
            return False
    return True


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def open_files() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))
