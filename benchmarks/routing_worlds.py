"""Problems of sessions in made-up and in measured swarms, the same for the same seed.

A swarm is watched for half an hour, as a client watches one, before a session begins: its nodes'
reliability is what their uptime and the failures seen say, their stability what their links said.
Then the session lasts ten minutes, and its steps take what the links and loads are meanwhile. In
made-up worlds nodes that fail more often are congested more often, too; a recorded matrix has its
own disturbances, which know nothing of failures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.estimate import read_matrix
from benchmarks.options import Options
from benchmarks.recorded_trace import load_round_trips
from nesa_node.core.arrays import Floats
from nesa_node.core.ids import Span
from nesa_node.routing.chain_request import ChainProblem, ChainRequest, build_problem
from nesa_node.routing.reputation import SESSION_HORIZON_S, clamp_uptime_s, reliability
from nesa_node.routing.tuning_scenario import TuningScenario, mean_problem
from nesa_node.topology.geography import Region
from nesa_node.topology.links.matrix import make_symmetric
from nesa_node.topology.shape.stability import (
    ConnectionHeights,
    connection_heights,
    node_stability,
)
from nesa_node.topology.simulation.devices import MAX_LOAD
from nesa_node.topology.simulation.world import World, draw_access, make_world, populate
from nesa_node.topology.tables import load_table

BLOCKS = 80
CHUNK = 512
CLIENTS = 2
LOOK_S = 60.0
WATCHED, LATER = 30, int(SESSION_HORIZON_S / LOOK_S)
"""Looks before a session, and during it."""
LEARNT_PART, UNSEEN_PART = (0.0, 2 / 3), (2 / 3, 1.0)
"""Parts of a recording, which parameters are tuned on and which they are not."""
JITTER = 0.05
"""Standard deviation of a measured round trip's logarithm."""
CONGESTED, CONGESTION_MS, RENEWAL = 0.05, 40.0, 0.2
"""Share of congested nodes, mean delay that such a node adds, share of both and of loads that is
drawn anew at each look (as in `traces.py`)."""


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """One client of a world: a step of its decoding, a chunk of its prompt, and what follows.

    `survival_N`: true chance of each node to outlive the session.
    """

    decode: ChainProblem
    prefill: ChainProblem
    scenario: TuningScenario
    survival_N: Floats


@dataclass(frozen=True, slots=True)
class Source:
    """Where worlds come from: "made up", "gcp", or the file of `--matrix`."""

    name: str
    options: Options

    def sizes(self) -> tuple[int, ...]:
        if self.name != "matrix":
            return self.options.nodes
        return (len(self._round_trips_ms()),)

    def world(self, num_nodes: int, seed: int) -> World:
        rng = np.random.default_rng((seed, num_nodes))
        if self.name == "gcp":
            table = load_table()
            return populate(
                table.regions, table.rtt_ms_RR, num_nodes, BLOCKS, rng, num_clients=CLIENTS
            )
        if self.name == "matrix":
            return world_from_round_trips(self._round_trips_ms(), BLOCKS, rng, num_clients=CLIENTS)
        return make_world(num_nodes, BLOCKS, rng, num_clients=CLIENTS)

    def _round_trips_ms(self) -> Floats:
        """Of the file, [N, N]; pairs that it has not are the median."""
        assert self.options.matrix is not None, "only then is this source used"
        rtt_ms_NN = read_matrix(self.options.matrix).rtt_ms_NN
        return np.where(np.isnan(rtt_ms_NN), np.nanmedian(rtt_ms_NN), rtt_ms_NN)

    def sessions(
        self, num_nodes: int, worlds: range, *, part: tuple[float, float] = (0.0, 1.0)
    ) -> Iterator[Session]:
        """Sessions of `CLIENTS` in each world; `part` is the part of a recording that is used."""
        for seed in worlds:
            looks = self._looks(self.world(num_nodes, seed), seed, part)
            heights: deque[ConnectionHeights] = deque(maxlen=WATCHED)
            for _ in range(WATCHED):
                now = next(looks)
                heights.append(connection_heights(now.snapshot))
            yield from _world_sessions(now, heights, list(looks), self.world(num_nodes, seed))

    def _looks(self, world: World, seed: int, part: tuple[float, float]) -> Iterator[World]:
        rng = np.random.default_rng((seed, world.num_nodes, 1))
        if self.name != "matrix":
            return watch_world(world, None, rng)
        assert self.options.matrix is not None, "only then is this source used"
        slices_TNN = load_round_trips(Path(self.options.matrix)) * 1000.0
        least, most = (int(share * len(slices_TNN)) for share in part)
        first = int(rng.integers(least, most - WATCHED - LATER + 1))
        usual_NN = np.median(slices_TNN, axis=0)
        recorded_TNN = slices_TNN[first : first + WATCHED + LATER]
        recorded_TNN = np.where(np.isfinite(recorded_TNN), recorded_TNN, usual_NN)
        return watch_world(world, recorded_TNN, rng)


def _world_sessions(
    now: World, heights: deque[ConnectionHeights], later: list[World], true: World
) -> Iterator[Session]:
    peers = [node.peer_id for node in now.snapshot.nodes]
    stability = node_stability(heights, peers)
    survival_N = np.array([node.reliability for node in true.snapshot.nodes])
    for client in range(CLIENTS):
        decode, prefill = (
            build_problem(
                now.snapshot, replace(client_request(now, client, tokens), stability=stability)
            )
            for tokens in (1, CHUNK)
        )
        outcome = mean_problem(
            decode, [session_problem(each, client, 1) for each in later], peers[0]
        )
        scenario = TuningScenario.from_outcome(decode, outcome, 1.0 - survival_N)
        yield Session(decode, prefill, scenario, survival_N)


def watch_world(
    world: World, recorded_ms_TNN: Floats | None, rng: np.random.Generator
) -> Iterator[World]:
    """`world` as it is measured at each look: links, loads, uptimes and reliability by these.

    A node restarts at a look with the chance that its true reliability gives for a session, spread
    over its looks. Without `recorded_ms_TNN` links vary by jitter and congested nodes.
    """
    nodes, count = world.snapshot.nodes, world.num_nodes
    survival_N = np.array([node.reliability for node in nodes])
    frailty_N = (1.0 - survival_N) / np.mean(1.0 - survival_N)
    fails_N = 1.0 - survival_N ** (1.0 / LATER)
    load_N = np.array([node.load for node in nodes])
    uptime_N = np.array([node.uptime_s for node in nodes])
    failures_N, delay_ms_N = np.zeros(count), np.zeros(count)
    for look in range(WATCHED + LATER):
        failed_N = rng.random(count) < fails_N
        failures_N += failed_N
        uptime_N = np.where(failed_N, 0.0, uptime_N + LOOK_S)
        fresh_N = MAX_LOAD * rng.beta(1.2, 2.5, count)
        load_N = (1.0 - RENEWAL) * load_N + RENEWAL * fresh_N
        stays_N = (delay_ms_N > 0.0) & (rng.random(count) >= RENEWAL)
        begins_N = rng.random(count) < CONGESTED * RENEWAL * frailty_N
        delay_ms_N = np.where(
            stays_N, delay_ms_N, np.where(begins_N, rng.exponential(CONGESTION_MS, count), 0.0)
        )
        known_s = LOOK_S * (look + 1)
        states = tuple(
            replace(
                node,
                load=float(load_N[row]),
                uptime_s=float(uptime_N[row]),
                reliability=reliability(
                    clamp_uptime_s(float(uptime_N[row]), known_s), float(failures_N[row]), 0.0
                ),
            )
            for row, node in enumerate(nodes)
        )
        seen = replace(world.snapshot, nodes=states, taken_at=world.snapshot.taken_at + known_s)
        if recorded_ms_TNN is None:
            yield _congested(replace(world, snapshot=seen), delay_ms_N, rng)
        else:
            yield _with_recorded(replace(world, snapshot=seen), recorded_ms_TNN[look])


def _congested(world: World, delay_ms_N: Floats, rng: np.random.Generator) -> World:
    rtt_ms_NN = world.links.rtt_ms_NN * rng.lognormal(0.0, JITTER, world.links.rtt_ms_NN.shape)
    rtt_ms_NN += delay_ms_N[:, None] + delay_ms_N
    make_symmetric(rtt_ms_NN)
    np.fill_diagonal(rtt_ms_NN, 0.0)
    links = replace(world.links, rtt_ms_NN=rtt_ms_NN)
    noise_CN = rng.lognormal(0.0, JITTER, world.client_rtt_ms_CN.shape)
    return replace(
        world,
        snapshot=replace(world.snapshot, links=links),
        client_rtt_ms_CN=world.client_rtt_ms_CN * noise_CN + delay_ms_N,
    )


def _with_recorded(world: World, rtt_ms_NN: Floats) -> World:
    """`world` with one slice of a recording; clients stay beside the nodes nearest to them."""
    near_C = world.client_rtt_ms_CN.argmin(axis=1)
    access_ms_C = world.client_rtt_ms_CN.min(axis=1)
    links = replace(world.links, rtt_ms_NN=rtt_ms_NN)
    return replace(
        world,
        snapshot=replace(world.snapshot, links=links),
        client_rtt_ms_CN=rtt_ms_NN[near_C] + access_ms_C[:, None],
    )


def sources(options: Options) -> list[Source]:
    names = ["made up", "gcp"] + (["matrix"] if options.matrix else [])
    return [Source(name, options) for name in names]


def session_problem(world: World, client: int, tokens: int) -> ChainProblem:
    return build_problem(world.snapshot, client_request(world, client, tokens))


def client_request(world: World, client: int, tokens: int = 1) -> ChainRequest:
    """The whole model, from one of the world's clients and back."""
    return ChainRequest(
        span=Span(0, world.snapshot.num_blocks),
        tokens=tokens,
        entry_rtt_ms=world.client_rtt_ms_CN[client],
        entry_bytes_per_s=world.client_up_bytes_per_s_CN[client],
        exit_bytes_per_s=world.client_down_bytes_per_s_CN[client],
    )


def world_from_round_trips(
    rtt_ms_NN: Floats,
    num_blocks: int,
    rng: np.random.Generator,
    *,
    num_clients: int = 4,
) -> World:
    """Make a swarm with a measured matrix of round trips; its nodes are residential, unlocated.

    `rtt_ms_NN` must be symmetric and complete (`links.mirror` and `fill_links`). Clients
    stand one access link behind random nodes.
    """
    nowhere = (Region("nowhere", 0.0, 0.0),)
    world = populate(
        nowhere,
        np.zeros((1, 1)),
        len(rtt_ms_NN),
        num_blocks,
        rng,
        num_clients=num_clients,
        residential_share=1.0,
    )
    links = replace(world.links, rtt_ms_NN=rtt_ms_NN)
    nodes = tuple(replace(node, location=None) for node in world.snapshot.nodes)
    near_C = rng.integers(len(rtt_ms_NN), size=num_clients)
    access_ms_C = draw_access(np.ones(num_clients, dtype=bool), rng).rtt_ms_A
    return replace(
        world,
        snapshot=replace(world.snapshot, nodes=nodes, links=links),
        client_rtt_ms_CN=rtt_ms_NN[near_C] + access_ms_C[:, None],
    )
