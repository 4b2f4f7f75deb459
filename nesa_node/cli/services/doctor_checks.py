"""Checks of this machine, of peers and of the model. Each yields findings; none raises."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Literal

import psutil

from nesa_node import __version__
from nesa_node.cli.client_model import describe_known_swarm
from nesa_node.cli.swarm_reader import SwarmReading, read_swarm
from nesa_node.core.errors import (
    BootstrapError,
    InsufficientMemoryError,
    NesaError,
    PeerUnreachableError,
)
from nesa_node.core.ids import PeerId
from nesa_node.core.known_swarms import KnownSwarmStore
from nesa_node.core.settings.declaration import default_known_swarms_dir, secret_text
from nesa_node.core.settings.models import ClientConfig
from nesa_node.swarm.dht.sealing import CLOCK_SKEW_S

FindingLevel = Literal["ok", "warn", "fail"]
FAST_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
_GIB_BYTES = 2**30
_EARLIEST_CLOCK_S = time.mktime((2026, 1, 1, 0, 0, 0, 0, 0, 0))


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `advice` says what to do, shown unless the level is "ok"."""

    level: FindingLevel
    subject: str
    detail: str
    advice: str = ""


def check_versions(packages: Iterable[str]) -> Iterator[Finding]:
    text = f"nesa-node {__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield Finding("ok", "python", text)
    for package in packages:
        yield Finding("ok", package, metadata.version(package))


def check_p2pd(path: Path) -> Iterator[Finding]:
    """Check libp2p's daemon at `path`, where hivemind installs it."""
    advice = "reinstall hivemind; it ships the daemon for Linux on x86-64"
    if not path.is_file():
        yield Finding("fail", "p2pd", f"not found at {path}", advice)
    elif not os.access(path, os.X_OK):
        yield Finding("fail", "p2pd", f"{path} may not be executed", f"chmod +x {path}")
    else:
        yield Finding("ok", "p2pd", str(path))


def check_devices() -> Iterator[Finding]:
    import torch

    flags = sorted(_cpu_flags() & set(FAST_CPU_FLAGS))
    words = f"{psutil.cpu_count(logical=False) or '?'} cores, {psutil.cpu_count()} threads, "
    words += f"torch uses {torch.get_num_threads()}"
    if flags:
        yield Finding("ok", "cpu", f"{words}; {', '.join(flags)}")
    else:
        advice = "matrix products will be slow; let the virtual machine use the host's CPU features"
        yield Finding("warn", "cpu", f"{words}; no wide vector instructions found", advice)
    if not torch.cuda.is_available():
        yield Finding("ok", "gpu", "none found (CUDA); blocks run on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        text = f"cuda:{index} {name}, {free / _GIB_BYTES:.1f} of {total / _GIB_BYTES:.1f} GiB free"
        yield Finding("ok", "gpu", text)


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return set()
    flags = [line for line in lines if line.lower().startswith(("flags", "features"))]
    return set(flags[0].partition(":")[2].split()) if flags else set()


def check_memory_and_disk(cache_dir: Path) -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    text = f"{memory.available / _GIB_BYTES:.1f} of {memory.total / _GIB_BYTES:.1f} GiB available"
    level: FindingLevel = "ok" if memory.available > 2 * _GIB_BYTES else "warn"
    yield Finding(level, "memory", text, "close other programs, or serve few blocks")
    folder = next(path for path in (cache_dir, *cache_dir.parents) if path.exists())
    if not os.access(folder, os.W_OK):
        advice = "choose another folder with --cache-dir"
        yield Finding("fail", "disk", f"{cache_dir} cannot be written", advice)
        return
    free = shutil.disk_usage(folder).free
    text = f"{free / _GIB_BYTES:.1f} GiB free for {cache_dir}"
    level = "ok" if free > 5 * _GIB_BYTES else "warn"
    yield Finding(level, "disk", text, "free some space, or set --cache-dir, --max-disk-gib")


def check_clock() -> Iterator[Finding]:
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    level: FindingLevel = "ok" if time.time() > _EARLIEST_CLOCK_S else "fail"
    yield Finding(level, "clock", now, "set the clock: records with a wrong time are dropped")


def check_listen_ports() -> Iterator[Finding]:
    """Check that a port can be opened on all interfaces, for IPv4 and IPv6."""
    families = (("ipv4", socket.AF_INET, "0.0.0.0"), ("ipv6", socket.AF_INET6, "::"))
    for name, family, address in families:
        try:
            with socket.create_server((address, 0), family=family):
                yield Finding("ok", name, "can listen")
        except OSError as error:
            advice = f"leave {name} out of --host-maddrs if this machine has none"
            yield Finding("warn", name, f"cannot listen: {error.strerror}", advice)


def worst_level(findings: Sequence[Finding]) -> FindingLevel:
    levels = {finding.level for finding in findings}
    return "fail" if "fail" in levels else "warn" if "warn" in levels else "ok"


_MIB_BYTES = 2**20
_ASSUMED_CACHE_TOKENS = 8192
_DIAL_TIMEOUT_S = 10.0
_REACH_ADVICE = "check that the node runs, its address and port, and firewalls between"


def check_peers(config: ClientConfig) -> Iterator[Finding]:
    """Dial each initial peer on its own, then read the swarm's records and compare clocks.

    Without initial peers a node that runs on this machine is dialled.
    """
    if not config.initial_peers:
        known = KnownSwarmStore(default_known_swarms_dir()).find(config.model)
        if known is None or known.source != "running":
            detail = "none given; name some with --initial-peers to test the connection"
            yield Finding("ok", "peers", detail)
            return
        yield Finding("ok", "peers", f"none given; {describe_known_swarm(known)}")
        config = config.model_copy(update={"initial_peers": known.addresses})
    try:
        findings = asyncio.run(_dial_all(config.initial_peers))
    except NesaError as error:
        daemon_advice = "libp2p's daemon does not start on this machine: see the line p2pd above"
        advice = _REACH_ADVICE if isinstance(error, BootstrapError) else daemon_advice
        yield Finding("fail", "peers", str(error), advice)
        return
    yield from findings
    if not any(finding.level == "ok" for finding in findings):
        return
    try:
        reading = asyncio.run(read_swarm(config))
    except NesaError as error:
        yield Finding("fail", "swarm", str(error), "check --swarm-key, and the peers themselves")
        return
    yield from check_clock_skew(reading, time.time())


async def _dial_all(addresses: tuple[str, ...]) -> list[Finding]:
    from nesa_node.swarm.p2p.dial_addresses import resolve_peer_ids
    from nesa_node.swarm.p2p.identity import Identity
    from nesa_node.swarm.p2p.transport import open_transport

    findings = []
    addresses = await resolve_peer_ids(addresses)
    with tempfile.TemporaryDirectory(prefix="nesa-doctor-") as folder:
        async with open_transport(Identity.ephemeral(Path(folder)), listen=False) as transport:
            for address in addresses:
                peer = PeerId(address.rpartition("/p2p/")[2])
                started = time.perf_counter()
                try:
                    await transport.connect(peer, [address], _DIAL_TIMEOUT_S)
                except PeerUnreachableError as error:
                    reason = " ".join(str(error).split())
                    findings.append(Finding("fail", "peer", f"{address}: {reason}", _REACH_ADVICE))
                else:
                    ms = (time.perf_counter() - started) * 1000
                    findings.append(Finding("ok", "peer", f"{address} connected in {ms:.0f} ms"))
    return findings


def check_clock_skew(reading: SwarmReading, now: float) -> Iterator[Finding]:
    """Compare `now`, in Unix seconds, with the times in signed records.

    If clocks agree, no record is from the future or expired. If all records are, the clocks differ.
    """
    records = reading.records
    if not records and reading.dropped.get("future"):
        detail = f"the swarm's records are more than {CLOCK_SKEW_S:.0f} s ahead of this machine"
        yield Finding("fail", "clock", detail, "set this machine's clock")
    elif not records and reading.dropped.get("expired"):
        advice = "set this machine's clock, unless the swarm has just died"
        yield Finding("fail", "clock", "all records that were found have expired", advice)
    elif not records:
        yield Finding("warn", "swarm", "reached, but no node has announced itself", "start a node")
    else:
        yield Finding("ok", "swarm", f"{len(records)} nodes announced")
        ahead = median(record.issued_at for record in records) - now
        if ahead > CLOCK_SKEW_S / 2:
            detail = f"the swarm's clocks are {ahead:.0f} s ahead"
            yield Finding("warn", "clock", detail, "set this machine's clock")
        else:
            yield Finding("ok", "clock", "agrees with the swarm's records")


def check_model(config: ClientConfig, model: str) -> Iterator[Finding]:
    """Check that the model can be served, and how many of its blocks fit on this machine."""
    import torch

    from nesa_node.engine.model.devices import fit_blocks
    from nesa_node.engine.weights.hub import open_checkpoint

    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        checkpoint = open_checkpoint(
            model,
            revision=config.revision,
            token=secret_text(config.token),
            cache_dir=config.cache_dir,
        )
        dtype = checkpoint.resolve_dtype(config.torch_dtype)
        tokens = min(checkpoint.context_length, _ASSUMED_CACHE_TOKENS)
        fit = fit_blocks(checkpoint, dtype=dtype, device=device, cache_tokens=tokens)
    except InsufficientMemoryError as error:
        yield Finding("fail", "span", str(error), "free memory, or use a smaller --torch-dtype")
        return
    except NesaError as error:
        yield Finding("fail", "model", str(error), "give a folder or a hub name that can be served")
        return
    yield Finding(
        "ok",
        "span",
        f"{fit.blocks} of {checkpoint.num_blocks} blocks of {checkpoint.name} would fit on {device}"
        f" in {str(dtype).removeprefix('torch.')} beside {tokens} tokens of cache"
        f" ({fit.bytes_per_block / _MIB_BYTES:.0f} + "
        f"{fit.cache_bytes_per_block / _MIB_BYTES:.0f} MiB each,"
        f" {fit.free_bytes / _GIB_BYTES:.1f} GiB free)",
    )
