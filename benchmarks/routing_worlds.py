"""Problems of sessions in made-up and in measured swarms, the same for the same seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.estimate import read_matrix
from benchmarks.options import Options
from nesa_node.core.span import Span
from nesa_node.routing.chain_request import ChainRequest, build_problem
from nesa_node.routing.problem import ChainProblem, Floats
from nesa_node.topology.simulation.world import (
    World,
    make_world,
    world_from_round_trips,
    world_from_table,
)
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
            return world_from_table(load_table(), num_nodes, BLOCKS, rng, num_clients=CLIENTS)
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
    request = ChainRequest(
        span=Span(0, BLOCKS),
        tokens=tokens,
        entry_rtt_ms=world.client_rtt_ms_CN[client],
        entry_bytes_per_s=world.client_up_bytes_per_s_CN[client],
        exit_bytes_per_s=world.client_down_bytes_per_s_CN[client],
    )
    return build_problem(world.snapshot, request)
