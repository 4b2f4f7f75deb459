"""Synthetic swarms: regions, access links, nodes, and clients.

A round trip is that between the two regions' exchanges (a great circle, stretched by cable detours)
plus both access delays, short in a data centre and long at home. Every pair has noise and a few
take detours, so triangle violations are as common as in real networks.

Legend: R regions, N nodes, C clients, A and B machines each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from scipy.special import ndtri

from nesa_node.core.arrays import Bools, Floats, Ints
from nesa_node.core.ids import ModelId
from nesa_node.topology.geography import CITIES, Region, min_rtt_ms
from nesa_node.topology.links.matrix import MAX_LINKS_PER_RECORD, Links, make_symmetric
from nesa_node.topology.links.sparse import MeasuredPairs
from nesa_node.topology.simulation.devices import (
    LLAMA_70B,
    Block,
    choose_spans,
    draw_devices,
    draw_nodes,
    fit_devices,
)
from nesa_node.topology.snapshot import NodeState, Snapshot

BYTES_PER_MBIT = 125_000.0
"""Bytes/s of one Mbit/s."""

DETOUR_FRACTION = 0.02
"""Fraction of pairs that are connected by a detour."""

_ROWS_PER_CHUNK = 256


@dataclass(frozen=True, slots=True, eq=False)
class AccessLinks:
    """Access links of A machines; `rtt_ms_A` is the round trip to the region's exchange."""

    residential_A: Bools
    rtt_ms_A: Floats
    up_bytes_per_s_A: Floats
    down_bytes_per_s_A: Floats

    def __len__(self) -> int:
        return len(self.rtt_ms_A)

    def select(self, rows: Ints) -> Self:
        """Access links of the machines with these indices, in this order."""
        return type(self)(
            self.residential_A[rows],
            self.rtt_ms_A[rows],
            self.up_bytes_per_s_A[rows],
            self.down_bytes_per_s_A[rows],
        )


def draw_access(residential_A: Bools, rng: np.random.Generator) -> AccessLinks:
    """Draw access links. Medians: 9 ms, 40 Mbit/s up, 250 down at home; else 0.6 ms, 2 Gbit/s."""
    count = len(residential_A)
    spread_A = np.where(residential_A, 0.6, 0.5)
    down_A = np.where(residential_A, 250.0, 2000.0) * rng.lognormal(0.0, spread_A)
    up_A = np.where(residential_A, 40.0, 2000.0) * rng.lognormal(0.0, spread_A)
    return AccessLinks(
        residential_A,
        np.where(residential_A, 9.0, 0.6) * rng.lognormal(0.0, 0.5, count),
        np.minimum(up_A, np.where(residential_A, down_A, np.inf)) * BYTES_PER_MBIT,
        down_A * BYTES_PER_MBIT,
    )


def draw_rtts_ms(
    rtt_ms_RR: Floats,
    region_A: Ints,
    access_A: AccessLinks,
    region_B: Ints,
    access_B: AccessLinks,
    rng: np.random.Generator,
) -> Floats:
    """Draw round trips in ms, [A, B]. Noise differs by direction: see `make_symmetric`."""
    rtt_ms_AB = np.empty((len(region_A), len(region_B)))
    for start in range(0, len(region_A), _ROWS_PER_CHUNK):
        rows = slice(start, start + _ROWS_PER_CHUNK)
        part_AB = rtt_ms_RR[np.ix_(region_A[rows], region_B)]
        part_AB *= rng.lognormal(0.0, 0.04, part_AB.shape)
        detour_AB = rng.random(part_AB.shape) < DETOUR_FRACTION
        part_AB[detour_AB] *= 1.0 + rng.uniform(0.3, 1.0, int(detour_AB.sum()))
        part_AB += access_A.rtt_ms_A[rows, None]
        part_AB += access_B.rtt_ms_A[None, :]
        rtt_ms_AB[rows] = part_AB
    return rtt_ms_AB


def draw_rates(access_A: AccessLinks, access_B: AccessLinks, rng: np.random.Generator) -> Floats:
    """Draw rates in bytes/s, [A, B]: what both access links carry, less up to 30 %."""
    rate_AB: Floats = np.minimum(
        access_A.up_bytes_per_s_A[:, None], access_B.down_bytes_per_s_A[None, :]
    )
    for start in range(0, len(access_A), _ROWS_PER_CHUNK):
        part_AB = rate_AB[start : start + _ROWS_PER_CHUNK]
        part_AB *= rng.uniform(0.7, 1.0, part_AB.shape)
    return rate_AB


WORLD_MODEL = ModelId("world@0")


@dataclass(frozen=True, slots=True, eq=False)
class World:
    """A synthetic swarm with its ground truth.

    In `snapshot` all nodes serve, and all links have just been measured. `region_N` and `region_C`
    are indices into `regions`, `device_N` names in `devices.DEVICES`. `client_up_bytes_per_s_CN`
    are rates from client to node, `client_down_bytes_per_s_CN` those back.
    """

    snapshot: Snapshot
    regions: tuple[Region, ...]
    region_rtt_ms_RR: Floats
    region_N: Ints
    device_N: tuple[str, ...]
    access_N: AccessLinks
    region_C: Ints
    access_C: AccessLinks
    client_rtt_ms_CN: Floats
    client_up_bytes_per_s_CN: Floats
    client_down_bytes_per_s_CN: Floats

    @property
    def links(self) -> Links:
        assert self.snapshot.links is not None, "a world's snapshot has links"
        return self.snapshot.links

    @property
    def num_nodes(self) -> int:
        return len(self.device_N)

    @property
    def num_clients(self) -> int:
        return len(self.region_C)


def make_world(
    num_nodes: int,
    num_blocks: int,
    rng: np.random.Generator,
    *,
    num_regions: int = 8,
    num_clients: int = 4,
    residential_share: float = 0.7,
    block: Block = LLAMA_70B,
    taken_at: float = 0.0,
) -> World:
    """Make a swarm in some of `geography.CITIES`; deterministic in its arguments.

    At least two nodes hold every block if memory allows it (`fit_devices`). `load` is 0
    to 0.95; `reliability` is 0.95 in the mean, lower for residential nodes.
    """
    if not 1 <= num_regions <= len(CITIES):
        raise ValueError(f"1 to {len(CITIES)} regions, got {num_regions}")
    chosen = np.sort(rng.choice(len(CITIES), size=num_regions, replace=False))
    regions = tuple(CITIES[int(city)] for city in chosen)
    return populate(
        regions,
        _cable_rtts_ms(regions, rng),
        num_nodes,
        num_blocks,
        rng,
        num_clients=num_clients,
        residential_share=residential_share,
        block=block,
        taken_at=taken_at,
    )


def _cable_rtts_ms(regions: Sequence[Region], rng: np.random.Generator) -> Floats:
    """Round trips between exchanges, [R, R]; cables are 1.2 to 2.5 times the great circle."""
    stretch_RR = 1.2 + rng.gamma(2.0, 0.18, (len(regions), len(regions))).clip(max=1.3)
    rtt_ms_RR = min_rtt_ms(region_coordinates(regions), region_coordinates(regions)) * stretch_RR
    make_symmetric(rtt_ms_RR)
    return rtt_ms_RR + 0.5


def populate(
    regions: tuple[Region, ...],
    region_rtt_ms_RR: Floats,
    num_nodes: int,
    num_blocks: int,
    rng: np.random.Generator,
    *,
    num_clients: int = 4,
    residential_share: float = 0.7,
    block: Block = LLAMA_70B,
    taken_at: float = 0.0,
) -> World:
    """Make a swarm in regions with the given round trips in ms, [R, R]."""
    drawn = _draw_swarm(regions, num_nodes, num_blocks, rng, num_clients, residential_share, block)
    nodes, access_N, access_C = drawn.nodes, drawn.access_N, drawn.access_C
    region_N, region_C = drawn.region_N, drawn.region_C
    rtt_ms_NN = draw_rtts_ms(region_rtt_ms_RR, region_N, access_N, region_N, access_N, rng)
    make_symmetric(rtt_ms_NN)
    rate_NN = draw_rates(access_N, access_N, rng)
    np.fill_diagonal(rate_NN, np.inf)
    just_now_NN = np.broadcast_to(0.0, rtt_ms_NN.shape)
    sure_NN = np.broadcast_to(1.0, rtt_ms_NN.shape)
    peers = tuple(node.peer_id for node in nodes)
    links = Links(peers, rtt_ms_NN, rate_NN, just_now_NN, sure_NN)
    return World(
        snapshot=Snapshot(WORLD_MODEL, num_blocks, nodes, taken_at, links=links),
        regions=regions,
        region_rtt_ms_RR=region_rtt_ms_RR,
        region_N=region_N,
        device_N=drawn.device_N,
        access_N=access_N,
        region_C=region_C,
        access_C=access_C,
        client_rtt_ms_CN=draw_rtts_ms(
            region_rtt_ms_RR, region_C, access_C, region_N, access_N, rng
        ),
        client_up_bytes_per_s_CN=draw_rates(access_C, access_N, rng),
        client_down_bytes_per_s_CN=draw_rates(access_N, access_C, rng).T,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _DrawnSwarm:
    """Nodes and clients, before their links are drawn."""

    nodes: tuple[NodeState, ...]
    device_N: tuple[str, ...]
    region_N: Ints
    access_N: AccessLinks
    region_C: Ints
    access_C: AccessLinks


def _draw_swarm(
    regions: tuple[Region, ...],
    num_nodes: int,
    num_blocks: int,
    rng: np.random.Generator,
    num_clients: int,
    residential_share: float,
    block: Block,
) -> _DrawnSwarm:
    if num_nodes < 1 or num_blocks < 1:
        raise ValueError(f"a world needs nodes and blocks, got {num_nodes} and {num_blocks}")
    share_R = rng.dirichlet(np.full(len(regions), 2.0))
    region_N = rng.choice(len(regions), size=num_nodes, p=share_R)
    region_C = rng.choice(len(regions), size=num_clients, p=share_R)
    devices, quantization = fit_devices(
        draw_devices(num_nodes, residential_share, rng), num_blocks, block
    )
    access_N = draw_access(np.array([device.residential for device in devices]), rng)
    access_C = draw_access(np.ones(num_clients, dtype=bool), rng)
    max_blocks_N = np.array([device.max_blocks(block, quantization) for device in devices])
    nodes = draw_nodes(
        devices,
        quantization,
        choose_spans(max_blocks_N, num_blocks, rng),
        region_coordinates(regions)[region_N],
        block,
        rng,
    )
    return _DrawnSwarm(
        nodes, tuple(device.name for device in devices), region_N, access_N, region_C, access_C
    )


MEASURED_PER_NODE = MAX_LINKS_PER_RECORD // 2
"""Pairs that each node of a large world measures; with those that are measured from the other end
it is what records carry."""
CLIENT_PINGS = 48


@dataclass(frozen=True, slots=True, eq=False)
class LargeWorld:
    """A synthetic swarm of many thousand nodes, whose true links are computed on demand.

    They follow the same distributions as those of `World`; the noise of a pair is a hash of both
    indices and `seed`. `snapshot` has no links: `measured` is what nodes have measured.
    `client_rtt_ms_CN` is the truth, and `client_pings_CA` the nodes that clients have measured.
    """

    snapshot: Snapshot
    regions: tuple[Region, ...]
    region_rtt_ms_RR: Floats
    region_N: Ints
    access_N: AccessLinks
    region_C: Ints
    measured: MeasuredPairs
    client_rtt_ms_CN: Floats
    client_pings_CA: Ints
    seed: int

    @property
    def num_clients(self) -> int:
        return len(self.region_C)

    def true_rtt_ms(self, first: Ints, second: Ints) -> Floats:
        """Round trips in ms between nodes, of two arrays of indices that broadcast."""
        return _pair_rtts_ms(
            self.region_rtt_ms_RR, self.region_N, self.access_N, first, second, self.seed
        )

    def true_bytes_per_s(self, first: Ints, second: Ints) -> Floats:
        """Rates from `first` to `second`, of two arrays of indices that broadcast."""
        return _pair_rates(self.access_N, first, second, self.seed)


def make_large_world(
    num_nodes: int,
    num_blocks: int,
    seed: int,
    *,
    num_regions: int = 8,
    num_clients: int = 4,
    residential_share: float = 0.7,
    block: Block = LLAMA_70B,
    taken_at: float = 0.0,
) -> LargeWorld:
    """Make a swarm as `make_world` does, without a matrix of all pairs: memory grows with N.

    Each node has measured `MEASURED_PER_NODE` pairs, half of them in its own region.
    """
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.choice(len(CITIES), size=num_regions, replace=False))
    regions = tuple(CITIES[int(city)] for city in chosen)
    region_rtt_ms_RR = _cable_rtts_ms(regions, rng)
    drawn = _draw_swarm(regions, num_nodes, num_blocks, rng, num_clients, residential_share, block)
    access_N, region_N = drawn.access_N, drawn.region_N
    first_E, second_E = _draw_measured_pairs(region_N, rng)
    measured = MeasuredPairs(
        first_E,
        second_E,
        _pair_rtts_ms(region_rtt_ms_RR, region_N, access_N, first_E, second_E, seed),
        _pair_rates(access_N, first_E, second_E, seed),
        _pair_rates(access_N, second_E, first_E, seed),
    )
    return LargeWorld(
        snapshot=Snapshot(WORLD_MODEL, num_blocks, drawn.nodes, taken_at),
        regions=regions,
        region_rtt_ms_RR=region_rtt_ms_RR,
        region_N=region_N,
        access_N=access_N,
        region_C=drawn.region_C,
        measured=measured,
        client_rtt_ms_CN=draw_rtts_ms(
            region_rtt_ms_RR, drawn.region_C, drawn.access_C, region_N, access_N, rng
        ),
        client_pings_CA=rng.integers(num_nodes, size=(num_clients, CLIENT_PINGS)),
        seed=seed,
    )


def _draw_measured_pairs(region_N: Ints, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Pairs of nodes, each once; half of a node's are within its region."""
    size = len(region_N)
    by_region = np.argsort(region_N, kind="stable")
    counts_R = np.bincount(region_N)
    starts_R = np.cumsum(counts_R) - counts_R
    near = MEASURED_PER_NODE // 2
    place = rng.integers(counts_R[region_N][:, None], size=(size, near))
    near_NA = by_region[starts_R[region_N][:, None] + place]
    far_NA = rng.integers(size, size=(size, MEASURED_PER_NODE - near))
    one = np.repeat(np.arange(size), MEASURED_PER_NODE)
    other = np.concatenate((near_NA, far_NA), axis=1).ravel()
    keys = np.unique(np.minimum(one, other) * size + np.maximum(one, other))
    first_E, second_E = np.divmod(keys, size)
    apart = first_E != second_E
    return first_E[apart], second_E[apart]


def _pair_rtts_ms(
    rtt_ms_RR: Floats, region_N: Ints, access_N: AccessLinks, first: Ints, second: Ints, seed: int
) -> Floats:
    """As `draw_rtts_ms` draws them, but the same whenever they are asked for, and symmetric."""
    low, high = np.minimum(first, second), np.maximum(first, second)
    rtt_ms = rtt_ms_RR[region_N[low], region_N[high]]
    rtt_ms *= np.exp(0.04 * ndtri(_pair_uniform(low, high, seed, 0)))
    detour = _pair_uniform(low, high, seed, 1) < DETOUR_FRACTION
    rtt_ms[detour] *= 1.3 + 0.7 * _pair_uniform(low, high, seed, 2)[detour]
    rtt_ms += access_N.rtt_ms_A[first] + access_N.rtt_ms_A[second]
    rtt_ms[low == high] = 0.0
    return rtt_ms


def _pair_rates(access_N: AccessLinks, first: Ints, second: Ints, seed: int) -> Floats:
    rate = np.minimum(access_N.up_bytes_per_s_A[first], access_N.down_bytes_per_s_A[second])
    rate *= 0.7 + 0.3 * _pair_uniform(first, second, seed, 3)
    rate[np.equal(first, second)] = np.inf
    return rate


def _pair_uniform(first: Ints, second: Ints, seed: int, salt: int) -> Floats:
    """Pseudorandom numbers above 0 and below 1 (SplitMix64 of both indices)."""
    mixed = first.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + second.astype(np.uint64)
    mixed += np.uint64((seed * 4 + salt + 1) * 0xD1B54A32D192ED03 % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return np.asarray(((mixed >> np.uint64(11)).astype(np.float64) + 0.5) / 2**53)


def region_coordinates(regions: Sequence[Region]) -> Floats:
    """Latitude and longitude of regions in degrees, [R, 2]."""
    return np.array([(region.latitude, region.longitude) for region in regions])
