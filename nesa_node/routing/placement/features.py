"""Named features of a placement problem, from which the choice of a schema is learnt.

N nodes. Times are relative to the whole model's compute time on the median node, so that models and
steps of different size are comparable.
"""

from __future__ import annotations

import numpy as np

from nesa_node.routing.placement.room import Room
from nesa_node.routing.problem import Floats
from nesa_node.topology.homology.features import features_of
from nesa_node.topology.homology.filtration import make_filtration
from nesa_node.topology.homology.shape import shape_of

_SHARES = (0.1, 0.5, 0.9)
_TINY = 1e-9


def plain_features(room: Room) -> dict[str, float]:
    """Features of sizes, speeds, memory and transfer times, partly as quantiles.

    Times are relative to the whole model's compute time on the median node, so that models and
    steps of different size are comparable.
    """
    problem = room.problem
    blocks = problem.num_blocks
    most_N = np.maximum(room.most_N, 0)
    block_s_N = problem.busy_block_s_N
    unit_s = max(float(np.median(block_s_N)) * blocks, _TINY)
    largest_first = np.cumsum(np.sort(most_N)[::-1])
    rate_N = np.sort(room.blocks_per_s_N)[::-1]
    tenth = max(1, len(rate_N) // 10)
    away = ~np.eye(problem.num_nodes, dtype=bool)
    transfer_s = problem.transfer_s_NN[away] if problem.num_nodes > 1 else np.zeros(1)
    ends_s_CN = np.array([each.entry_s_N + each.exit_s_N for each in room.clients])
    found = {
        "log_nodes": np.log(problem.num_nodes),
        "copies": most_N.sum() / blocks,
        "depth": float(np.searchsorted(largest_first, blocks) + 1),
        "alone": float((most_N >= blocks).mean()),
        "fast_share": rate_N[:tenth].sum() / max(rate_N.sum(), _TINY),
        "spread": float(np.std(np.log(block_s_N + _TINY))),
        "size_and_speed": _correlation(most_N.astype(np.float64), room.blocks_per_s_N),
        "clients": float(len(room.clients)),
        "clients_apart": float(np.median(ends_s_CN, axis=1).std() / unit_s),
    }
    for share in _SHARES:
        name = f"{share:.0%}"
        found[f"most@{name}"] = np.quantile(most_N, share) / blocks
        found[f"block@{name}"] = np.quantile(block_s_N, share) * blocks / unit_s
        found[f"transfer@{name}"] = np.log(np.quantile(transfer_s, share) / unit_s + _TINY)
        found[f"ends@{name}"] = np.log(np.quantile(ends_s_CN, share) / unit_s + _TINY)
    return {name: float(value) for name, value in found.items()}


def shape_features(room: Room) -> dict[str, float]:
    """Statistics of the persistent homology of the round trips.

    Persistence images are left out: they have more pixels than a library has snapshots.
    """
    both_ways_NN = room.problem.transfer_s_NN + room.problem.transfer_s_NN.T
    shape = shape_of(make_filtration(both_ways_NN), most_loops=0)
    named = features_of(shape).as_dict()
    return {name: value for name, value in named.items() if ".image." not in name}


def _correlation(one_N: Floats, other_N: Floats) -> float:
    if len(one_N) < 2 or one_N.std() == 0 or other_N.std() == 0:
        return 0.0
    return float(np.corrcoef(one_N, other_N)[0, 1])
