"""Checks of peers, their clocks and the model for `nesa-node doctor`."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from nesa_node.cli.checks import Finding
from nesa_node.cli.client_model import how_known
from nesa_node.cli.reading import SwarmReading, read_swarm
from nesa_node.core.config import ClientConfig, default_known_swarms_dir
from nesa_node.core.errors import (
    BootstrapError,
    InsufficientMemoryError,
    NesaError,
    PeerUnreachableError,
)
from nesa_node.core.ids import PeerId
from nesa_node.core.known_swarms import KnownSwarms
from nesa_node.swarm.sealing import CLOCK_SKEW_S

_MIB = 2**20
_GIB = 2**30
_CACHE_TOKENS = 8192
_DIAL_TIMEOUT_S = 10.0
_REACH_ADVICE = "check that the node runs, its address and port, and firewalls between"


def p2pd_path() -> str:
    from nesa_node.swarm.hive import P2PD_PATH

    return str(P2PD_PATH)


def check_peers(config: ClientConfig) -> Iterator[Finding]:
    """Dial each initial peer on its own, then read the swarm's records and compare clocks.

    Without initial peers a node that runs on this machine is dialled.
    """
    if not config.initial_peers:
        known = KnownSwarms(default_known_swarms_dir()).find(config.model)
        if known is None or known.source != "running":
            detail = "none given; name some with --initial-peers to test the connection"
            yield Finding("ok", "peers", detail)
            return
        yield Finding("ok", "peers", f"none given; {how_known(known)}")
        config = config.model_copy(update={"initial_peers": known.addresses})
    try:
        findings = asyncio.run(_dial_all(config.initial_peers))
    except NesaError as error:
        yield Finding("fail", "peers", str(error), _advice(error))
        return
    yield from findings
    if not any(finding.level == "ok" for finding in findings):
        return
    try:
        reading = asyncio.run(read_swarm(config))
    except NesaError as error:
        yield Finding("fail", "swarm", str(error), "check --swarm-key, and the peers themselves")
        return
    yield from compare_clocks(reading, time.time())


async def _dial_all(addresses: tuple[str, ...]) -> list[Finding]:
    from nesa_node.swarm.identity import Identity
    from nesa_node.swarm.peer_lookup import with_peer_ids
    from nesa_node.swarm.transport import open_transport

    findings = []
    addresses = await with_peer_ids(addresses)
    with tempfile.TemporaryDirectory(prefix="nesa-doctor-") as folder:
        async with open_transport(Identity.ephemeral(Path(folder)), listen=False) as transport:
            for address in addresses:
                started = time.perf_counter()
                try:
                    await transport.connect(_peer_of(address), [address], _DIAL_TIMEOUT_S)
                except PeerUnreachableError as error:
                    reason = " ".join(str(error).split())
                    findings.append(Finding("fail", "peer", f"{address}: {reason}", _REACH_ADVICE))
                else:
                    ms = (time.perf_counter() - started) * 1000
                    findings.append(Finding("ok", "peer", f"{address} connected in {ms:.0f} ms"))
    return findings


def _advice(error: NesaError) -> str:
    """Advice for when no peer could be dialled."""
    if isinstance(error, BootstrapError):
        return _REACH_ADVICE
    return "libp2p's daemon does not start on this machine: see the line p2pd above"


def _peer_of(address: str) -> PeerId:
    return PeerId(address.rpartition("/p2p/")[2])


def compare_clocks(reading: SwarmReading, now: float) -> Iterator[Finding]:
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

    from nesa_node.engine.checkpoint import open_checkpoint
    from nesa_node.engine.memory import blocks_that_fit

    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        checkpoint = open_checkpoint(
            model,
            revision=config.revision,
            token=config.token.get_secret_value() if config.token else None,
            cache_dir=config.cache_dir,
        )
        dtype = checkpoint.resolve_dtype(config.torch_dtype)
        tokens = min(checkpoint.context_length, _CACHE_TOKENS)
        fit = blocks_that_fit(checkpoint, dtype=dtype, device=device, cache_tokens=tokens)
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
        f" ({fit.bytes_per_block / _MIB:.0f} + {fit.cache_bytes_per_block / _MIB:.0f} MiB each,"
        f" {fit.free_bytes / _GIB:.1f} GiB free)",
    )
