"""Random rooms for the tests of placements, without triangle inequality or other favours."""

from __future__ import annotations

import numpy as np

from nesa_node.core.ids import PeerId
from nesa_node.routing.chain_request import ChainProblem
from nesa_node.routing.placement.placement_problem import PlacementProblem


def random_room(
    rng: np.random.Generator,
    num_nodes: int,
    num_blocks: int,
    *,
    most: int | None = None,
    replicas: int = 1,
) -> PlacementProblem:
    """Nodes of very different speeds in five places; whether they hold the model is left open."""
    place_N2 = rng.random((5, 2))[rng.integers(5, size=num_nodes)] * 0.1
    access_s_N = rng.gamma(2.0, 0.003, num_nodes)
    transfer_s_NN = np.linalg.norm(place_N2[:, None] - place_N2, axis=2) + access_s_N
    transfer_s_NN = (transfer_s_NN + access_s_N[:, None]) * rng.lognormal(
        0.0, 0.3, (num_nodes, num_nodes)
    )
    np.fill_diagonal(transfer_s_NN, 0.0)
    ends_s_N = np.linalg.norm(place_N2 - rng.random(2) * 0.1, axis=1) + access_s_N
    problem = ChainProblem(
        peers=tuple(PeerId(f"n{node}") for node in range(num_nodes)),
        num_blocks=num_blocks,
        starts_N=np.zeros(num_nodes, dtype=np.int64),
        ends_N=np.zeros(num_nodes, dtype=np.int64),
        block_s_N=rng.choice([0.001, 0.003, 0.01], num_nodes) * rng.lognormal(0.0, 0.2, num_nodes),
        visit_s_N=np.full(num_nodes, 0.001),
        load_N=rng.random(num_nodes) * 0.5,
        spare_N=np.ones(num_nodes),
        cache_N=np.ones(num_nodes),
        pressure_N=np.zeros(num_nodes),
        reliability_N=1.0 - 0.2 * rng.random(num_nodes),
        stability_N=np.ones(num_nodes),
        entry_s_N=ends_s_N,
        exit_s_N=ends_s_N * 1.1,
        transfer_s_NN=transfer_s_NN,
    )
    most_N = rng.integers(1, (most or num_blocks) + 1, size=num_nodes)
    return PlacementProblem(problem, most_N, replicas)
