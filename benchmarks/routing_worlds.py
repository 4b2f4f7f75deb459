"""Problems of sessions in made-up and in measured swarms, the same for the same seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.estimate import read_matrix
from benchmarks.options import Options
from nesa_node.core.arrays import Floats
from nesa_node.core.ids import Span
from nesa_node.routing.chain_request import ChainProblem, ChainRequest, build_problem
from nesa_node.topology.geography import Region
from nesa_node.topology.simulation.world import World, draw_access, make_world, populate
from nesa_node.topology.tables import load_table

BLOCKS = 80
CHUNK = 512
CLIENTS = 2


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """One client of a world: a step of its decoding, and a chunk of its prompt."""

    decode: ChainProblem
    prefill: ChainProblem


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

    def sessions(self, num_nodes: int, worlds: range) -> Iterator[Session]:
        for seed in worlds:
            world = self.world(num_nodes, seed)
            for client in range(CLIENTS):
                decode, prefill = (session_problem(world, client, tokens) for tokens in (1, CHUNK))
                yield Session(decode, prefill)


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
