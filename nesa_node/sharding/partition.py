"""A network's operations, divided among machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from nesa_node.core.errors import ConfigError
from nesa_node.sharding.lower_bound import PRECISION, lower_bound_s
from nesa_node.sharding.operation_graph import BlockCost, Floats, Machine, OperationGraph
from nesa_node.sharding.order_search import SearchProgress, search_orders
from nesa_node.sharding.pair_rates import PairRates, block_costs
from nesa_node.sharding.slicing import slice_order


@dataclass(frozen=True, slots=True)
class Piece:
    """What one machine computes of each request."""

    machine: int
    """Its index among the machines."""
    operations: tuple[int, ...]
    """In the order in which it runs them; none where more machines would only slow it down."""
    cost: BlockCost


@dataclass(frozen=True, slots=True)
class GraphPartition:
    """Pieces in an order in which values only go on, one for each machine."""

    pieces: tuple[Piece, ...]
    bottleneck_s: float
    """Seconds between two requests, if many are on their way: the slowest piece's."""
    bound_s: float
    """No partition has a faster slowest piece than this."""
    kahn_s: float
    """The slowest piece of Kahn's order, before the search."""
    generations: int
    """Of the search."""

    @property
    def gap(self) -> float:
        """By how much the slowest piece could be faster at most, as a share of the bound."""
        return self.bottleneck_s / self.bound_s - 1 if self.bound_s else 0.0


def find_partition(
    graph: OperationGraph,
    machines: Sequence[Machine],
    *,
    seed: int,
    budget_s: float,
    on_progress: Callable[[SearchProgress], None] | None = None,
    pair_rates_KK: Floats | None = None,
) -> GraphPartition:
    """The best partition that a search of at most `budget_s` seconds finds: see `search_orders`.

    Where the bound shows that no other is better, the search ends. The bound is that of the
    machines' links, however slow pairs of them are. Raises `ConfigError` for fewer machines than
    networks of a pipeline.
    """
    if len(machines) < len(graph.shares):
        raise ConfigError(
            f"{len(machines)} machines: a pipeline of {len(graph.shares)} networks needs one for "
            "each, or more"
        )
    pairs = None if pair_rates_KK is None else PairRates.of(pair_rates_KK)
    own = slice_order(graph, graph.gather(np.arange(len(graph))), machines, pairs=pairs)
    bound_s = lower_bound_s(graph, machines, own.bottleneck_s)
    found = search_orders(
        graph,
        machines,
        seed=seed,
        budget_s=budget_s,
        enough_s=bound_s * (1 + 2 * PRECISION),
        on_progress=on_progress,
        pair_rates_KK=pair_rates_KK,
    )
    places, blocks = found.machine_order, found.slicing.blocks()
    if pair_rates_KK is not None:
        pair_rates_KK = pair_rates_KK[np.ix_(places, places)]
    costs = block_costs(graph, blocks, [machines[place] for place in places], pair_rates_KK)
    pieces = tuple(map(Piece, places, blocks, costs))
    bottleneck_s = max(piece.cost.total_s for piece in pieces)
    return GraphPartition(
        pieces,
        bottleneck_s,
        bound_s,
        found.kahn_s,
        found.generations,
    )
