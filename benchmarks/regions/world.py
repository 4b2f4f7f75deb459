"""Three regions, who is where in them, and how far apart everybody is.

A region's nodes hold halves of the model. `LOST` is the region that is cut off: it holds most of
the upper half's replicas, so that what is left has to move.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from benchmarks.emulator.links import Link
from benchmarks.emulator.wan import Wan
from nesa_node.core.ids import PeerId, Span
from nesa_node.routing.chain_request import ChainRequest
from nesa_node.topology.links.matrix import Links
from nesa_node.topology.snapshot import Snapshot

REGIONS = ("a", "b", "c")
LOST = "c"
APART_MS: Mapping[frozenset[str], float] = {
    frozenset("ab"): 60.0,
    frozenset("ac"): 90.0,
    frozenset("bc"): 140.0,
}
"""Round trips."""
WITHIN_MS = (2.0, 5.0)
ACCESS_MBIT = (20.0, 200.0)
JITTER_MS = (0.1, 1.0)
"""Within a region, and between two: what a packet may be late."""
MORE_JITTER = 3.0
"""How many times as much there is where nothing but jitter happens."""

BOSS, SECOND_BOSS = "a-boss", "c-boss"
CLIENTS = ("a-client", "b-client")
LIAR, STRANGER = "a-liar", "b-stranger"
OTHERS = (BOSS, SECOND_BOSS, *CLIENTS, LIAR, STRANGER)


@dataclass(frozen=True, slots=True)
class World:
    """`spans`: what each node holds at first, by its site."""

    spans: Mapping[str, Span]
    num_blocks: int
    replicas: int
    """Wanted of every block: there before the loss, not after it, and within what is left."""

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(self.spans)

    @property
    def sites(self) -> tuple[str, ...]:
        return (*self.nodes, *OTHERS)

    def in_regions(self, *regions: str) -> list[str]:
        return [site for site in self.sites if region(site) in regions]


def region(site: str) -> str:
    return site[0]


def make_world(num_blocks: int, nodes_per_region: int) -> World:
    """Every region holds both halves; what it has beyond is the lower, in `LOST` the upper one."""
    if num_blocks % 2 or nodes_per_region < 2:
        raise ValueError(f"no halves of {num_blocks} blocks on {nodes_per_region} nodes")
    lower, upper = Span(0, num_blocks // 2), Span(num_blocks // 2, num_blocks)
    spans: dict[str, Span] = {}
    for name in REGIONS:
        rest = upper if name == LOST else lower
        held = [lower, upper, *[rest] * (nodes_per_region - 2)]
        spans.update({f"{name}{number}": span for number, span in enumerate(held, start=1)})
    return World(spans, num_blocks, nodes_per_region)


def connect(wan: Wan, world: World, seed: int) -> None:
    """Give every pair of sites its link, drawn from `seed`."""
    rng = random.Random(seed)
    access = {site: rng.uniform(*ACCESS_MBIT) for site in world.sites}
    for a, b in combinations(world.sites, 2):
        if region(a) == region(b):
            rtt_ms, jitter_ms = rng.uniform(*WITHIN_MS), JITTER_MS[0]
        else:
            rtt_ms = APART_MS[frozenset((region(a), region(b)))] * rng.uniform(0.97, 1.03)
            jitter_ms = JITTER_MS[1]
        if LIAR in (a, b) and region(a) == region(b):
            rtt_ms = WITHIN_MS[0]
        link = Link(
            latency_ms=rtt_ms / 2,
            jitter_ms=jitter_ms,
            bandwidth_mbit_per_s=min(access[a], access[b]),
        )
        wan.set_link(a, b, link)


def shake(wan: Wan, factor: float) -> None:
    """Multiply the jitter of every link."""
    for a, b in combinations(wan.sites, 2):
        link = wan.link(a, b)
        wan.set_link(a, b, replace(link, jitter_ms=link.jitter_ms * factor))


def rtt_ms(wan: Wan, a: str, b: str) -> float:
    """The mean round trip of a small packet."""
    if a == b:
        return 0.0
    there, back = wan.link(a, b), wan.link(b, a)
    return there.latency_ms + back.latency_ms + (there.jitter_ms + back.jitter_ms) / 2


def true_snapshot(snapshot: Snapshot, wan: Wan, site_of: Mapping[PeerId, str]) -> Snapshot:
    """`snapshot` with the emulator's own links, and those alone that serve."""
    peers = tuple(node.peer_id for node in snapshot.nodes)
    sites = [site_of[peer] for peer in peers]
    rtt_ms_NN = np.array([[rtt_ms(wan, a, b) for b in sites] for a in sites])
    rate_NN = np.array([[_rate(wan, a, b) for b in sites] for a in sites])
    known_NN = np.ones((len(peers), len(peers)))
    links = Links(peers, rtt_ms_NN, rate_NN, 0 * known_NN, known_NN)
    return replace(snapshot, links=links, joining=())


def true_request(
    snapshot: Snapshot,
    wan: Wan,
    client: str,
    site_of: Mapping[PeerId, str],
    *,
    hidden_bytes: float,
) -> ChainRequest:
    """One token of a session of the client at that site."""
    peers: Sequence[PeerId] = [node.peer_id for node in snapshot.nodes]
    return ChainRequest(
        span=Span(0, snapshot.num_blocks),
        bytes_per_token=hidden_bytes,
        entry_rtt_ms={peer: rtt_ms(wan, client, site_of[peer]) for peer in peers},
        entry_bytes_per_s={peer: _rate(wan, client, site_of[peer]) for peer in peers},
        exit_bytes_per_s={peer: _rate(wan, site_of[peer], client) for peer in peers},
    )


def _rate(wan: Wan, a: str, b: str) -> float:
    return float("inf") if a == b else wan.link(a, b).bytes_per_s
