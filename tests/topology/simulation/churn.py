"""Churn of a synthetic swarm: nodes leave and join, loads drift, pings vary.

Made for planners: the nodes have spans and speeds. (`benchmarks/traces.py` makes round trips alone,
for change detection.)

Legend: N nodes, M nodes that stay, C clients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nesa_node.core.ids import PeerId
from nesa_node.topology.links.matrix import Links, make_symmetric
from nesa_node.topology.simulation.devices import (
    LLAMA_70B,
    MAX_LOAD,
    Block,
    choose_spans,
    draw_devices,
    draw_nodes,
)
from nesa_node.topology.simulation.world import (
    AccessLinks,
    World,
    draw_access,
    draw_rates,
    draw_rtts_ms,
    region_coordinates,
)
from nesa_node.topology.snapshot import NodeState

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_LOAD_RENEWAL_FRACTION = 0.2
"""Fraction of a node's load that is drawn anew at each step."""


def simulate_churn(
    world: World,
    count: int,
    rng: np.random.Generator,
    *,
    leave_fraction: float = 0.03,
    jitter: float = 0.05,
    seconds: float = 60.0,
) -> Iterator[World]:
    """Yield `count` worlds, `seconds` apart, the first of them `world` itself.

    `jitter` is the standard deviation of the logarithm of a measured round trip. It is applied to
    the true round trips at each step, so it does not accumulate.
    """
    for turn in range(count):
        if turn:
            world = apply_churn(world, rng, leave_fraction=leave_fraction, seconds=seconds)
        yield with_jitter(world, rng, jitter)


def apply_churn(
    world: World,
    rng: np.random.Generator,
    *,
    leave_fraction: float = 0.03,
    expected_joins: float | None = None,
    seconds: float = 60.0,
    residential_share: float = 0.7,
    block: Block = LLAMA_70B,
) -> World:
    """`world` after `seconds`; a fraction `leave_fraction` of the nodes has left, the unreliable
    sooner.

    At least one node stays. The number of nodes that join is Poisson with mean `expected_joins` (as
    many as leave, if None); they get new ids and the spans with the fewest holders. The other nodes
    keep id, device, location and span, and their loads drift. No node joins a world made of a
    measured matrix, which has no regions.
    """
    shaky_N = 1.01 - np.array([node.reliability for node in world.snapshot.nodes])
    leaves_N = rng.random(world.num_nodes) < leave_fraction * shaky_N / shaky_N.mean()
    if leaves_N.all():
        leaves_N[int(rng.integers(world.num_nodes))] = False
    mean_joins = leave_fraction * world.num_nodes if expected_joins is None else expected_joins
    count = int(rng.poisson(mean_joins)) if world.region_rtt_ms_RR.any() else 0
    following = 1 + max(int(node.peer_id[1:]) for node in world.snapshot.nodes)
    later = _advance_time(_keep_nodes(world, np.flatnonzero(~leaves_N)), rng, seconds)
    return _add_nodes(later, count, following, residential_share, block, rng) if count else later


def with_jitter(world: World, rng: np.random.Generator, jitter: float) -> World:
    """`world` with one noisy measurement of each round trip."""
    rtt_ms_NN = world.links.rtt_ms_NN * rng.lognormal(0.0, jitter, world.links.rtt_ms_NN.shape)
    make_symmetric(rtt_ms_NN)
    links = replace(world.links, rtt_ms_NN=rtt_ms_NN)
    noise_CN = rng.lognormal(0.0, jitter, world.client_rtt_ms_CN.shape)
    return replace(
        world,
        snapshot=replace(world.snapshot, links=links),
        client_rtt_ms_CN=world.client_rtt_ms_CN * noise_CN,
    )


def _keep_nodes(world: World, rows_M: Ints) -> World:
    nodes = tuple(world.snapshot.nodes[row] for row in rows_M)
    links = world.links.select([node.peer_id for node in nodes])
    return replace(
        world,
        snapshot=replace(world.snapshot, nodes=nodes, links=links),
        region_N=world.region_N[rows_M],
        device_N=tuple(world.device_N[row] for row in rows_M),
        access_N=world.access_N.select(rows_M),
        client_rtt_ms_CN=world.client_rtt_ms_CN[:, rows_M],
        client_up_bytes_per_s_CN=world.client_up_bytes_per_s_CN[:, rows_M],
        client_down_bytes_per_s_CN=world.client_down_bytes_per_s_CN[:, rows_M],
    )


def _advance_time(world: World, rng: np.random.Generator, seconds: float) -> World:
    fresh_N = MAX_LOAD * rng.beta(1.2, 2.5, world.num_nodes)
    nodes = tuple(
        replace(
            node,
            load=(1 - _LOAD_RENEWAL_FRACTION) * node.load + _LOAD_RENEWAL_FRACTION * float(fresh),
            uptime_s=node.uptime_s + seconds,
            seq=node.seq + 1,
        )
        for node, fresh in zip(world.snapshot.nodes, fresh_N, strict=True)
    )
    taken_at = world.snapshot.taken_at + seconds
    return replace(world, snapshot=replace(world.snapshot, nodes=nodes, taken_at=taken_at))


def _add_nodes(
    world: World,
    count: int,
    following: int,
    residential_share: float,
    block: Block,
    rng: np.random.Generator,
) -> World:
    snapshot = world.snapshot
    quantization = snapshot.nodes[0].quantization
    devices = draw_devices(count, residential_share, rng)
    region_new = rng.choice(world.region_N, count)  # in proportion to the present nodes
    max_blocks = np.array([device.max_blocks(block, quantization) for device in devices])
    holders_B = np.array(snapshot.coverage(), dtype=np.int64)
    spans = choose_spans(max_blocks, snapshot.num_blocks, rng, holders_B)
    drawn = draw_nodes(
        devices, quantization, spans, region_coordinates(world.regions)[region_new], block, rng
    )
    fresh = tuple(
        replace(node, peer_id=PeerId(f"n{following + number:04d}"), uptime_s=0.0)
        for number, node in enumerate(drawn)
    )
    access_new = draw_access(np.array([device.residential for device in devices]), rng)
    access_C = world.access_C
    base_RR = world.region_rtt_ms_RR
    to_all = (np.append(world.region_N, region_new), _concat_access(world.access_N, access_new))
    rtt_new = draw_rtts_ms(base_RR, region_new, access_new, *to_all, rng)
    rtt_C = draw_rtts_ms(base_RR, world.region_C, access_C, region_new, access_new, rng)
    up_C, down_C = draw_rates(access_C, access_new, rng), draw_rates(access_new, access_C, rng).T
    return replace(
        world,
        snapshot=replace(
            snapshot,
            nodes=(*snapshot.nodes, *fresh),
            links=_extend_links(world.links, fresh, rtt_new, to_all[1], access_new, rng),
        ),
        region_N=to_all[0],
        device_N=(*world.device_N, *(device.name for device in devices)),
        access_N=to_all[1],
        client_rtt_ms_CN=np.hstack((world.client_rtt_ms_CN, rtt_C)),
        client_up_bytes_per_s_CN=np.hstack((world.client_up_bytes_per_s_CN, up_C)),
        client_down_bytes_per_s_CN=np.hstack((world.client_down_bytes_per_s_CN, down_C)),
    )


def _extend_links(
    links: Links,
    fresh: tuple[NodeState, ...],
    rtt_new: Floats,
    access_N: AccessLinks,
    access_new: AccessLinks,
    rng: np.random.Generator,
) -> Links:
    """`links` extended by the rows and columns of the fresh nodes, which come last."""
    old = len(links.peers)
    size = old + len(fresh)
    rtt_ms_NN, rate_NN = np.empty((size, size)), np.empty((size, size))
    rtt_ms_NN[:old, :old] = links.rtt_ms_NN
    rtt_ms_NN[:, old:] = rtt_new.T
    make_symmetric(rtt_ms_NN)
    rate_NN[:old, :old] = links.rate_bytes_per_s_NN
    rate_NN[old:, :] = draw_rates(access_new, access_N, rng)
    rate_NN[:, old:] = draw_rates(access_N, access_new, rng)
    np.fill_diagonal(rate_NN, np.inf)
    peers = (*links.peers, *(node.peer_id for node in fresh))
    just_now_NN = np.broadcast_to(0.0, (size, size))
    return Links(peers, rtt_ms_NN, rate_NN, just_now_NN, np.broadcast_to(1.0, (size, size)))


def _concat_access(one: AccessLinks, other: AccessLinks) -> AccessLinks:
    return AccessLinks(
        np.append(one.residential_A, other.residential_A),
        np.append(one.rtt_ms_A, other.rtt_ms_A),
        np.append(one.up_bytes_per_s_A, other.up_bytes_per_s_A),
        np.append(one.down_bytes_per_s_A, other.down_bytes_per_s_A),
    )
