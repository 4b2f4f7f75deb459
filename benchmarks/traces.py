"""Synthetic traces of round trips, with churn and one optional event.

Regions lie on a sphere, nodes behind access links. Every snapshot measures all pairs, with drifting
links, temporarily congested nodes, ping jitter and spikes. The same generator gives the same trace.

Legend: N nodes, R regions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nesa_node.core.arrays import Floats, Ints
from nesa_node.topology.shape.merge_tree import geographic_filtration

TraceEventKind = Literal["partition", "regional loss", "detour", "bad pair"]
# Signals in fibre, on routes that are no great circles: 100 km per ms of round trip, times 1.5.
_MS_PER_KM = 0.015


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """A change of the network in `region`, from snapshot `at` on.

    partition : no node of the region reaches another region.
    regional loss : the region's nodes are gone, and no node joins there.
    detour : every round trip between the region and another takes `added_s` longer.
    bad pair : only round trips between the region and the next one take longer.
    """

    kind: TraceEventKind
    at: int
    region: int = 0
    added_s: float = 0.080


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSettings:
    """Parameters of a trace.

    churn : probability of each node to leave at each snapshot; as many join at the next one.
    jitter : standard deviation of a ping's logarithm; a measurement is the median of `pings`.
    noise_s : mean queueing delay of a ping.
    spike_share : fraction of measurements that are `spike_factor` times as long.
    drift : standard deviation of the logarithm of two regions' round trip over time; the fraction
        `renewal_fraction` of it is drawn anew per snapshot.
    congestion_s : mean delay that a congested node adds; `congested` is the fraction of nodes.
    frailty : standard deviation of the logarithm of a node's relative risk of congestion.
    """

    nodes: int = 48
    regions: int = 6
    churn: float = 0.03
    jitter: float = 0.10
    pings: int = 3
    noise_s: float = 0.001
    spike_share: float = 0.01
    spike_factor: float = 5.0
    drift: float = 0.05
    congested: float = 0.05
    congestion_s: float = 0.02
    renewal_fraction: float = 0.2
    frailty: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class TraceStep:
    """One fully measured snapshot.

    peers : names; a node that joins has a new one.
    region_N : [N] int64.
    fixed_N : [N] bool, the first node of each region, which does not leave by churn.
    frailty_N, congestion_s_N : [N] float64, hidden variables, for benchmarks.
    measured_s_NN : [N, N] float64, symmetric, inf where nothing answers.
    true_s_NN : the same without drift, congestion, jitter, noise and spikes.
    """

    at: int
    peers: tuple[str, ...]
    region_N: Ints
    fixed_N: NDArray[np.bool_]
    measured_s_NN: Floats
    true_s_NN: Floats
    frailty_N: Floats
    congestion_s_N: Floats


@dataclass(frozen=True, slots=True, eq=False)
class _TraceNodes:
    serial_N: Ints
    region_N: Ints
    access_s_N: Floats
    congestion_s_N: Floats
    frailty_N: Floats

    def concat(self, other: _TraceNodes) -> _TraceNodes:
        pairs = ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return _TraceNodes(*(np.append(ours, theirs) for ours, theirs in pairs))

    def select(self, mask_N: NDArray[np.bool_]) -> _TraceNodes:
        return _TraceNodes(*(getattr(self, field.name)[mask_N] for field in fields(self)))


def generate_trace(
    world: TraceSettings,
    snapshots: int,
    rng: np.random.Generator,
    event: TraceEvent | None = None,
    *,
    apart_s_RR: Floats | None = None,
) -> Iterator[TraceStep]:
    """Yield `snapshots` steps. `apart_s_RR`: seconds between regions; None for random ones."""
    if world.nodes < world.regions:
        raise ValueError(f"{world.nodes} nodes are too few for {world.regions} regions")
    base_s_RR = random_region_rtts_s(world.regions, rng) if apart_s_RR is None else apart_s_RR
    drift_RR = np.zeros_like(base_s_RR)
    nodes = _draw_nodes(world, np.arange(world.nodes) % world.regions, 0, rng)
    serial, missing = world.nodes, 0
    for at in range(snapshots):
        if at > 0:
            places = _draw_regions(world, event, at, missing, rng)
            nodes = nodes.concat(_draw_nodes(world, places, serial, rng))
            serial += missing
            stays_N = (rng.random(len(nodes.serial_N)) >= world.churn) | _permanent_nodes(
                nodes, world
            )
            missing = int((~stays_N).sum())
            nodes = nodes.select(stays_N)
        if event and event.kind == "regional loss" and at == event.at:
            nodes = nodes.select(nodes.region_N != event.region)
        nodes = replace(nodes, congestion_s_N=_draw_congestion(nodes, world, rng))
        drift_RR = (1 - world.renewal_fraction) * drift_RR + _draw_drift(rng, world)
        yield _measure_step(at, nodes, base_s_RR, drift_RR, world, event, rng)


def random_region_rtts_s(regions: int, rng: np.random.Generator) -> Floats:
    """Round trips in seconds, [R, R], between random regions from 60 degrees south to north."""
    latitude_R = np.degrees(np.arcsin(rng.uniform(-0.866, 0.866, regions)))
    apart = geographic_filtration(latitude_R, rng.uniform(-180.0, 180.0, regions))
    seconds_RR: Floats = apart.weight_NN * _MS_PER_KM / 1e3
    return seconds_RR


def _measure_step(
    at: int,
    nodes: _TraceNodes,
    base_s_RR: Floats,
    drift_RR: Floats,
    world: TraceSettings,
    event: TraceEvent | None,
    rng: np.random.Generator,
) -> TraceStep:
    place = np.ix_(nodes.region_N, nodes.region_N)
    added_s_RR = _event_delays_s(len(base_s_RR), at, event)
    access_NN = nodes.access_s_N[:, None] + nodes.access_s_N
    congestion_NN = nodes.congestion_s_N[:, None] + nodes.congestion_s_N
    true_NN = (base_s_RR + added_s_RR)[place] + access_NN
    usual_NN = (base_s_RR * np.exp(drift_RR) + added_s_RR)[place] + access_NN + congestion_NN
    shape = (world.pings, *true_NN.shape)
    pings = rng.lognormal(0.0, world.jitter, shape) * np.where(np.isinf(usual_NN), 1, usual_NN)
    seconds_NN = np.median(pings + rng.exponential(world.noise_s, shape), axis=0)
    seconds_NN *= np.where(rng.random(true_NN.shape) < world.spike_share, world.spike_factor, 1.0)
    seconds_NN[np.isinf(usual_NN)] = np.inf
    upper_NN = np.triu(np.ones_like(true_NN, dtype=bool), 1)
    seconds_NN = np.where(upper_NN, seconds_NN, seconds_NN.T)
    np.fill_diagonal(seconds_NN, 0.0)
    np.fill_diagonal(true_NN, 0.0)
    names = zip(nodes.region_N.tolist(), nodes.serial_N.tolist(), strict=True)
    return TraceStep(
        at,
        tuple(f"r{region}-{serial}" for region, serial in names),
        nodes.region_N,
        _permanent_nodes(nodes, world),
        seconds_NN,
        true_NN,
        nodes.frailty_N,
        nodes.congestion_s_N,
    )


def _event_delays_s(regions: int, at: int, event: TraceEvent | None) -> Floats:
    """[R, R] float64: seconds that the event adds between regions."""
    added_s_RR = np.zeros((regions, regions))
    if event is None or at < event.at or event.kind == "regional loss":
        return added_s_RR
    others = [other for other in range(regions) if other != event.region]
    if event.kind == "bad pair":
        others = [(event.region + 1) % regions]
    seconds = np.inf if event.kind == "partition" else event.added_s
    added_s_RR[event.region, others] = added_s_RR[others, event.region] = seconds
    return added_s_RR


def _draw_nodes(
    world: TraceSettings, region_N: Ints, serial: int, rng: np.random.Generator
) -> _TraceNodes:
    count = len(region_N)
    return _TraceNodes(
        np.arange(serial, serial + count),
        region_N,
        rng.lognormal(np.log(0.004), 0.6, count),
        np.zeros(count),
        rng.lognormal(-(world.frailty**2) / 2, world.frailty, count),
    )


def _draw_regions(
    world: TraceSettings, event: TraceEvent | None, at: int, count: int, rng: np.random.Generator
) -> Ints:
    """Random regions of `count` joining nodes, among those that are not lost."""
    lost = {event.region} if event and event.kind == "regional loss" and at >= event.at else set()
    there = [region for region in range(world.regions) if region not in lost]
    return rng.choice(there, count)


def _permanent_nodes(nodes: _TraceNodes, world: TraceSettings) -> NDArray[np.bool_]:
    fixed_N: NDArray[np.bool_] = nodes.serial_N < world.regions
    return fixed_N


def _draw_congestion(nodes: _TraceNodes, world: TraceSettings, rng: np.random.Generator) -> Floats:
    """Congestion of each node in seconds, [N]; ends with probability `renewal_fraction` per
    snapshot.

    It begins at a rate that keeps the fraction of congested nodes constant.
    """
    count = len(nodes.serial_N)
    stays_N = (nodes.congestion_s_N > 0) & (rng.random(count) >= world.renewal_fraction)
    begins_N = rng.random(count) < world.congested * world.renewal_fraction * nodes.frailty_N
    fresh_s_N = np.where(begins_N, rng.exponential(world.congestion_s, count), 0.0)
    congestion_s_N: Floats = np.where(stays_N, nodes.congestion_s_N, fresh_s_N)
    return congestion_s_N


def _draw_drift(rng: np.random.Generator, world: TraceSettings) -> Floats:
    """[R, R] float64: this snapshot's part of a drift with standard deviation `world.drift`."""
    step = world.drift * np.sqrt(1 - (1 - world.renewal_fraction) ** 2)
    upper_RR = np.triu(rng.normal(0.0, step, (world.regions, world.regions)), 1)
    return upper_RR + upper_RR.T
