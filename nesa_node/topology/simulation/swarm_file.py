"""Swarm description files, for simulating swarms that do not exist (yet).

    {
      "num_blocks": 80,
      "nodes": [
        {"name": "attic", "device": "rtx3090", "region": "frankfurt", "span": "0:20"},
        {"name": "lab", "device": "a100", "count": 3, "region": "london", "datacenter": true},
        {"name": "old", "tokens_per_s": 40, "max_blocks": 8, "location": [48.1, 11.6]}
      ],
      "round_trips_ms": {"attic": {"old": 18}},
      "client": {"region": "paris"}
    }

A node's speed and capacity follow from its `device` (`devices.DEVICES`), or from `tokens_per_s`
(decoding through one block) with `max_blocks` or `memory_gb`. Its place is a `region` (a city of
`geography.CITIES` or a region of a table), a `location` in degrees, or follows from its round trips
to other nodes. Missing round trips are estimated as in a live swarm (`estimate.fill`).

Legend: N nodes, A and B places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from nesa_node.core.arrays import Floats
from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.topology.geography import CITIES, Region, locations_array, min_rtt_ms
from nesa_node.topology.links.estimate import estimate_rtt_ms
from nesa_node.topology.links.expected_rtt import CABLE_STRETCH
from nesa_node.topology.links.matrix import Links
from nesa_node.topology.simulation.devices import (
    BYTES_PER_PARAMETER,
    CACHE_MEMORY_FRACTION,
    GB,
    LLAMA_70B,
    Block,
    Device,
    find_device,
)
from nesa_node.topology.simulation.world import BYTES_PER_MBIT
from nesa_node.topology.snapshot import NodeState, Snapshot
from nesa_node.topology.tables import TABLE_NAMES, load_table

STATED_CONFIDENCE = 1.0
ESTIMATED_CONFIDENCE = 0.2
"""Confidence of round trips that the file states, and of those computed from places."""
WITHIN_REGION_MS = 0.5


@dataclass(frozen=True, slots=True)
class NodeSite:
    """Location and access link of a machine; `access_ms` is its round trip to the exchange."""

    region: str | None
    location: tuple[float, float] | None
    access_ms: float
    up_bytes_per_s: float
    down_bytes_per_s: float


def links_from_sites(
    peers: Sequence[PeerId],
    sites: Sequence[NodeSite],
    known_ms: Mapping[tuple[PeerId, PeerId], float],
    rng: np.random.Generator,
) -> Links:
    """Links among `peers`: the stated round trip, else one from places, else an estimate."""
    row_of = {peer: row for row, peer in enumerate(peers)}
    rtt_ms_NN = site_rtts_ms(sites, sites)
    rtt_ms_NN = np.fmin(rtt_ms_NN, rtt_ms_NN.T)  # symmetric to the last bit
    confidence_NN = np.full_like(rtt_ms_NN, ESTIMATED_CONFIDENCE)
    for (one, other), rtt_ms in known_ms.items():
        for pair in ((row_of[one], row_of[other]), (row_of[other], row_of[one])):
            rtt_ms_NN[pair] = rtt_ms
            confidence_NN[pair] = STATED_CONFIDENCE
    np.fill_diagonal(rtt_ms_NN, 0.0)
    np.fill_diagonal(confidence_NN, 1.0)
    confidence_NN[np.isnan(rtt_ms_NN)] = 0.0
    if np.isnan(rtt_ms_NN).any():
        places_N2 = locations_array([place.location for place in sites])
        rtt_ms_NN = estimate_rtt_ms(rtt_ms_NN, places_N2, rng)
    up_N = np.array([place.up_bytes_per_s for place in sites])
    down_N = np.array([place.down_bytes_per_s for place in sites])
    rate_NN = np.minimum(up_N[:, None], down_N[None, :])
    np.fill_diagonal(rate_NN, np.inf)
    age_s_NN = np.where(confidence_NN == STATED_CONFIDENCE, 0.0, np.nan)
    return Links(tuple(peers), rtt_ms_NN, rate_NN, age_s_NN, confidence_NN)


def site_rtts_ms(first_A: Sequence[NodeSite], second_B: Sequence[NodeSite]) -> Floats:
    """Round trips between places in ms, [A, B]; NaN where a location is unknown.

    Taken from a table of measurements if it has both regions, else from the great circle.
    """
    here_A2 = locations_array([place.location for place in first_A])
    there_B2 = locations_array([place.location for place in second_B])
    rtt_ms_AB = np.maximum(min_rtt_ms(here_A2, there_B2) * CABLE_STRETCH, WITHIN_REGION_MS)
    for name in TABLE_NAMES:
        table = load_table(name)
        row_of: Mapping[str | None, int]
        row_of = {region.name: row for row, region in enumerate(table.regions)}
        row_A = np.array([row_of.get(place.region, -1) for place in first_A], dtype=np.int64)
        row_B = np.array([row_of.get(place.region, -1) for place in second_B], dtype=np.int64)
        both_AB = (row_A >= 0)[:, None] & (row_B >= 0)[None, :]
        rtt_ms_AB[both_AB] = table.rtt_ms_RR[np.ix_(row_A, row_B)][both_AB]
    rtt_ms_AB += np.array([place.access_ms for place in first_A])[:, None]
    rtt_ms_AB += np.array([place.access_ms for place in second_B])[None, :]
    return rtt_ms_AB


MAX_SWARM_FILE_BYTES = 16 << 20
MAX_NODES = 5_000

_Name = Annotated[str, Meta(min_length=1, max_length=64)]
_Positive = Annotated[float, Meta(gt=0.0, le=1e9)]
_Blocks = Annotated[int, Meta(ge=1, le=10_000)]
_Share = Annotated[float, Meta(ge=0.0, le=1.0)]
_Degrees = tuple[
    Annotated[float, Meta(ge=-90.0, le=90.0)], Annotated[float, Meta(ge=-180.0, le=180.0)]
]
_Millis = Annotated[float, Meta(gt=0.0, le=60_000.0)]


class _FilePart(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _FileLocation(_FilePart):
    region: _Name | None = None
    location: _Degrees | None = None
    access_ms: _Millis | None = None
    up_mbit: _Positive | None = None
    down_mbit: _Positive | None = None
    datacenter: bool | None = None


class _FileNode(_FileLocation):
    name: _Name = ""
    count: Annotated[int, Meta(ge=1, le=MAX_NODES)] = 1
    device: _Name | None = None
    tokens_per_s: _Positive | None = None
    prefill_tokens_per_s: _Positive | None = None
    memory_gb: _Positive | None = None
    max_blocks: _Blocks | None = None
    span: str | None = None
    load: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    reliability: _Share = 1.0
    operator: _Name | None = None
    price: Annotated[float, Meta(ge=0.0, le=1e9)] = 1.0


class _FileBlock(_FilePart):
    parameters: Annotated[int, Meta(ge=1, le=10**12)]
    cache_bytes: Annotated[int, Meta(ge=1, le=10**9)] = LLAMA_70B.cache_bytes
    hidden_bytes: Annotated[int, Meta(ge=1, le=10**9)] = LLAMA_70B.hidden_bytes


class _FileSwarm(_FilePart):
    nodes: Annotated[list[_FileNode], Meta(min_length=1, max_length=MAX_NODES)]
    num_blocks: _Blocks = 80
    model: _Name = "swarm"
    quantization: str = "none"
    block: _FileBlock | None = None
    round_trips_ms: dict[str, dict[str, _Millis]] = {}
    client: _FileLocation | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SwarmFile:
    """Content of a swarm file. `client_rtt_ms` is None if the file has no client.

    Nodes without a span get the empty one, and a planner chooses. `sites` are those of
    `snapshot.nodes`, in their order. Speeds and memory are computed for `block`. `prices` are per
    token and block, in whatever unit the file has.
    """

    snapshot: Snapshot
    sites: tuple[NodeSite, ...]
    block: Block
    quantization: str
    client_rtt_ms: Mapping[PeerId, float] | None
    prices: Mapping[PeerId, float]


def parse_swarm_file(
    text: bytes | str, rng: np.random.Generator, *, where: str = "swarm.json"
) -> SwarmFile:
    """Read a swarm file. Raises `ConfigError` with the place, the error and the remedy.

    `rng` serves the estimates of round trips between nodes without a location.
    """
    if len(text) > MAX_SWARM_FILE_BYTES:
        raise ConfigError(f"{where} has {len(text)} bytes; at most {MAX_SWARM_FILE_BYTES} are read")
    try:
        swarm = msgspec.json.decode(text, type=_FileSwarm)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        hint = "docs/swarm-file.md has an example"
        raise ConfigError(f"{where} cannot be read: {error}; {hint}") from error
    block = LLAMA_70B
    if swarm.block is not None:
        block = Block(swarm.block.parameters, swarm.block.cache_bytes, swarm.block.hidden_bytes)
    nodes: list[NodeState] = []
    places: list[NodeSite] = []
    prices: dict[PeerId, float] = {}
    for number, node in enumerate(swarm.nodes):
        at = f"{where}: nodes[{number}]" + (f" ({node.name})" if node.name else "")
        place = _parse_site(node, at)
        for name in _node_names(node, number):
            state = _node_state(node, PeerId(name), place, swarm, block, at)
            nodes.append(state)
            places.append(place)
            prices[state.peer_id] = node.price
    _check_names([node.peer_id for node in nodes], where)
    known = _stated_rtts_ms(swarm.round_trips_ms, {node.peer_id for node in nodes}, where)
    links = links_from_sites([node.peer_id for node in nodes], places, known, rng)
    client_rtt_ms = None
    if swarm.client is not None:
        client = _parse_site(swarm.client, f"{where}: client")
        rtt_ms_N = site_rtts_ms([client], places)[0]
        client_rtt_ms = {
            node.peer_id: float(rtt) for node, rtt in zip(nodes, rtt_ms_N, strict=True)
        }
    snapshot = Snapshot(ModelId(f"{swarm.model}@0"), swarm.num_blocks, tuple(nodes), 0.0, (), links)
    return SwarmFile(snapshot, tuple(places), block, swarm.quantization, client_rtt_ms, prices)


def _node_names(node: _FileNode, number: int) -> list[str]:
    name = node.name or f"node{number}"
    return [name] if node.count == 1 else [f"{name}-{copy}" for copy in range(1, node.count + 1)]


def _check_names(names: Sequence[str], where: str) -> None:
    if len(names) > MAX_NODES:
        raise ConfigError(f"{where} has {len(names)} nodes; at most {MAX_NODES} are simulated")
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigError(f"{where}: two nodes are called {name!r}; give each its own name")
        seen.add(name)


def _node_state(
    node: _FileNode, peer: PeerId, place: NodeSite, swarm: _FileSwarm, block: Block, at: str
) -> NodeState:
    kind = None if node.device is None else _parse_device(node.device, at)
    try:
        weight_bytes = block.weight_bytes(swarm.quantization)
    except KeyError:
        raise ConfigError(
            f"{at}: quantization {swarm.quantization!r} is none of {', '.join(BYTES_PER_PARAMETER)}"
        ) from None
    if kind is None and node.tokens_per_s is None:
        raise ConfigError(f"{at} needs a device or tokens_per_s, so that its speed is known")
    memory = node.memory_gb * GB if node.memory_gb else kind.memory_bytes if kind else None
    if node.max_blocks is None and memory is None:
        raise ConfigError(
            f"{at} needs max_blocks, memory_gb or a device, so that its room is known"
        )
    max_blocks = node.max_blocks or int((memory or 0) * (1 - CACHE_MEMORY_FRACTION) // weight_bytes)
    if max_blocks < 1:
        raise ConfigError(
            f"{at} has no room for a block of {weight_bytes / GB:.2f} GB; give it more memory_gb,"
            " max_blocks, or the swarm a quantization of int8 or nf4"
        )
    span = Span(0, 0) if node.span is None else _parse_span(node.span, swarm.num_blocks, at)
    if len(span) > max_blocks:
        raise ConfigError(f"{at}: span {span} is longer than the {max_blocks} blocks that fit")
    decode = node.tokens_per_s or (
        1 / kind.decode_block_s(block, swarm.quantization) if kind else 0
    )
    prefill = kind.prefill_block_tokens_per_s(block) if kind else 8.0 * decode
    length = max(1, len(span))
    cache = int(
        (memory or weight_bytes * max_blocks) * CACHE_MEMORY_FRACTION / (block.cache_bytes * length)
    )
    return NodeState(
        peer,
        span,
        dtype="float16",
        quantization=swarm.quantization,
        prefill_tokens_per_s=(node.prefill_tokens_per_s or prefill) / length,
        decode_tokens_per_s=decode / length,
        free_cache_tokens=cache,
        total_cache_tokens=cache,
        load=node.load,
        max_blocks=max_blocks,
        reliability=node.reliability,
        location=place.location,
        operator=node.operator,
    )


def _parse_device(name: str, at: str) -> Device:
    try:
        return find_device(name)
    except ConfigError as error:
        raise ConfigError(f"{at}: {error}") from None


def _parse_span(text: str, num_blocks: int, at: str) -> Span:
    try:
        span = Span.parse(text)
    except ConfigError as error:
        raise ConfigError(f"{at}: {error}") from None
    if span.end > num_blocks:
        raise ConfigError(f"{at}: span {span} goes beyond the model's {num_blocks} blocks")
    return span


def _parse_site(part: _FileLocation, at: str) -> NodeSite:
    if part.region is not None and part.location is not None:
        raise ConfigError(f"{at} has a region and a location; leave one of them out")
    location = part.location
    if part.region is not None:
        region = known_regions().get(part.region)
        if region is None:
            raise ConfigError(
                f"{at}: no region is called {part.region!r}; there are"
                f" {', '.join(sorted(known_regions()))}, or give a location in degrees"
            )
        location = (region.latitude, region.longitude)
    datacenter = part.datacenter
    if datacenter is None and isinstance(part, _FileNode) and part.device is not None:
        datacenter = not _parse_device(part.device, at).residential
    home = not datacenter
    return NodeSite(
        part.region,
        location,
        part.access_ms or (9.0 if home else 0.6),
        (part.up_mbit or (40.0 if home else 2000.0)) * BYTES_PER_MBIT,
        (part.down_mbit or (250.0 if home else 2000.0)) * BYTES_PER_MBIT,
    )


def known_regions() -> dict[str, Region]:
    tables = {region.name: region for name in TABLE_NAMES for region in load_table(name).regions}
    return {**tables, **{city.name: city for city in CITIES}}


def _stated_rtts_ms(
    given: Mapping[str, Mapping[str, float]], names: set[PeerId], where: str
) -> dict[tuple[PeerId, PeerId], float]:
    known: dict[tuple[PeerId, PeerId], float] = {}
    for one, row in given.items():
        for other, rtt_ms in row.items():
            at = f"{where}: round_trips_ms.{one}.{other}"
            for name in (one, other):
                if name not in names:
                    raise ConfigError(f"{at}: no node is called {name!r}")
            if one == other:
                raise ConfigError(f"{at}: a node has no round trip to itself")
            before = known.get((PeerId(other), PeerId(one)), rtt_ms)
            if before != rtt_ms:
                raise ConfigError(f"{at} is {rtt_ms} ms, the other way round {before}; keep one")
            known[PeerId(one), PeerId(other)] = rtt_ms
    return known
