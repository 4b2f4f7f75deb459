"""Hypothetical machines that join a swarm: `rtx3090@40ms`, `a100@frankfurt`, `3xt4@us-east1`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import PeerId, Span
from nesa_node.topology.links.estimate import fill_links, fit_access_rates
from nesa_node.topology.links.matrix import Links
from nesa_node.topology.simulation.devices import (
    CACHE_MEMORY_FRACTION,
    LLAMA_70B,
    Block,
    Device,
    find_device,
)
from nesa_node.topology.simulation.swarm_file import known_regions
from nesa_node.topology.simulation.world import BYTES_PER_MBIT
from nesa_node.topology.snapshot import NodeState, Snapshot

MAX_NEWCOMERS = 1000
_PATTERN = re.compile(
    r"(?:(?P<count>\d{1,4})x)?(?P<device>[\w -]+)@(?:(?P<rtt>\d+(?:\.\d+)?)ms|(?P<region>[\w-]+))"
)


@dataclass(frozen=True, slots=True)
class Newcomer:
    """`count` machines, either `rtt_ms` from every node or at `location` (degrees)."""

    device: Device
    count: int
    rtt_ms: float | None
    location: tuple[float, float] | None


def parse_newcomer(text: str) -> Newcomer:
    """Read `[COUNTx]DEVICE@MILLISECONDSms` or `[COUNTx]DEVICE@REGION`. Raises `ConfigError`."""
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"a newcomer looks like rtx3090@40ms, a100@frankfurt or 3xt4@us-east1; got {text!r}"
        )
    kind, count = find_device(match["device"]), int(match["count"] or 1)
    if not 1 <= count <= MAX_NEWCOMERS:
        raise ConfigError(f"{text!r}: 1 to {MAX_NEWCOMERS} machines can join")
    if match["rtt"] is not None:
        rtt_ms = float(match["rtt"])
        if not 0 < rtt_ms <= 60_000:
            raise ConfigError(f"{text!r}: a round trip takes more than 0 ms and at most a minute")
        return Newcomer(kind, count, rtt_ms, None)
    region = known_regions().get(match["region"])
    if region is None:
        raise ConfigError(
            f"{text!r}: no region is called {match['region']!r}; there are"
            f" {', '.join(sorted(known_regions()))}"
        )
    return Newcomer(kind, count, None, (region.latitude, region.longitude))


def add_newcomers(
    snapshot: Snapshot,
    newcomer: Newcomer,
    rng: np.random.Generator,
    *,
    block: Block = LLAMA_70B,
    quantization: str = "none",
) -> Snapshot:
    """`snapshot` with the newcomers serving, each with an empty span, which a planner chooses.

    Round trips that `newcomer` does not give are estimated; `rng` serves pairs without a location.
    """
    taken = {node.peer_id for node in (*snapshot.nodes, *snapshot.joining)}
    fresh = [name for name in _free_names(newcomer, len(taken)) if name not in taken][
        : newcomer.count
    ]
    nodes = tuple(_newcomer_state(name, newcomer, block, quantization) for name in fresh)
    everybody = (*snapshot.nodes, *snapshot.joining, *nodes)
    peers = tuple(node.peer_id for node in everybody)
    old = Links.unknown(peers) if snapshot.links is None else snapshot.links.select(peers)
    links = _set_newcomer_links(old, newcomer, len(taken))
    links = fill_links(links, [node.location for node in everybody], rng)
    return replace(snapshot, nodes=(*snapshot.nodes, *nodes), links=links)


def _free_names(newcomer: Newcomer, taken: int) -> list[PeerId]:
    numbers = range(1, newcomer.count + taken + 1)
    return [PeerId(f"new-{newcomer.device.name}-{number}") for number in numbers]


def _newcomer_state(name: PeerId, newcomer: Newcomer, block: Block, quantization: str) -> NodeState:
    kind = newcomer.device
    cache = int(kind.memory_bytes * CACHE_MEMORY_FRACTION / block.cache_bytes)
    return NodeState(
        name,
        Span(0, 0),
        dtype="float16",
        quantization=quantization,
        prefill_tokens_per_s=kind.prefill_block_tokens_per_s(block),
        decode_tokens_per_s=1.0 / kind.decode_block_s(block, quantization),
        free_cache_tokens=cache,
        total_cache_tokens=cache,
        max_blocks=kind.max_blocks(block, quantization),
        location=newcomer.location,
    )


def _set_newcomer_links(links: Links, newcomer: Newcomer, old: int) -> Links:
    """`links` with the newcomers' rates, and their round trips if those are given."""
    rate_NN, rtt_ms_NN = links.rate_bytes_per_s_NN.copy(), links.rtt_ms_NN.copy()
    access = fit_access_rates(rate_NN)
    home = newcomer.device.residential
    up, down = (
        (40.0 * BYTES_PER_MBIT, 250.0 * BYTES_PER_MBIT)
        if home
        else (2000.0 * BYTES_PER_MBIT, 2000.0 * BYTES_PER_MBIT)
    )
    rate_NN[old:, :] = np.fmin(up, access.down_N)[None, :]
    rate_NN[:, old:] = np.fmin(access.up_N, down)[:, None]
    rate_NN[old:, old:] = min(up, down)
    confidence_NN = links.confidence_NN.copy()
    if newcomer.rtt_ms is not None:
        rtt_ms_NN[old:, :] = rtt_ms_NN[:, old:] = newcomer.rtt_ms
        confidence_NN[old:, :] = confidence_NN[:, old:] = 1.0
    np.fill_diagonal(rate_NN, np.inf)
    np.fill_diagonal(rtt_ms_NN, 0.0)
    return Links(links.peers, rtt_ms_NN, rate_NN, links.age_s_NN, confidence_NN)
