"""Rates between pairs of machines, and what blocks cost by them.

Two machines may exchange values slower than the links of both allow: one in each of two buildings,
say. A value comes at the rate between its block's machine and the machine that made it. It leaves
once, at the slowest rate to those that use it. The network's inputs and outputs have no pair.

K machines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nesa_node.sharding.operation_graph import (
    BlockCost,
    Floats,
    Machine,
    OperationGraph,
    block_cost,
)


@dataclass(frozen=True, slots=True)
class ChainPlace:
    """A machine in a chain, and its rates to the ones before and after it."""

    machine: Machine
    receive_bytes_per_s: float
    send_bytes_per_s: float


@dataclass(frozen=True, slots=True, eq=False)
class PairRates:
    """Rates between pairs of machines, in the machines' order, and how slices are cut by them."""

    rates_KK: Floats
    """Bytes/s, symmetric; infinite where only the machines' own links limit."""
    weights_K: Floats
    """By how much the estimate of what slices cost takes each machine to be slower than it is."""

    @classmethod
    def of(cls, rates_KK: Floats) -> PairRates:
        return cls(rates_KK, np.ones(len(rates_KK)))


def find_places(machines: Sequence[Machine], pairs: PairRates | None) -> list[ChainPlace]:
    """Each machine's place, with the rates of its own link where no pair is slower."""
    links = [machine.link_bytes_per_s for machine in machines]
    if pairs is None:
        return list(map(ChainPlace, machines, links, links))
    between = [float(rate) for rate in pairs.rates_KK.diagonal(1)]
    return [
        ChainPlace(
            replace(
                machine,
                flop_per_s=machine.flop_per_s / weight,
                moved_bytes_per_s=machine.moved_bytes_per_s / weight,
                link_bytes_per_s=machine.link_bytes_per_s / weight,
                stream_bytes_per_s=machine.stream_bytes_per_s / weight,
            ),
            min(machine.link_bytes_per_s, before) / weight,
            min(machine.link_bytes_per_s, after) / weight,
        )
        for machine, before, after, weight in zip(
            machines, [math.inf, *between], [*between, math.inf], pairs.weights_K, strict=True
        )
    ]


def block_costs(
    graph: OperationGraph,
    blocks: Sequence[Sequence[int]],
    machines: Sequence[Machine],
    pair_rates_KK: Floats | None = None,
) -> list[BlockCost]:
    """Cost of each of K blocks, which have all operations of the graph, on its machine.

    `pair_rates_KK`: symmetric, bytes/s; None: as fast as links are.
    """
    costs = [block_cost(graph, *each) for each in zip(blocks, machines, strict=True)]
    if pair_rates_KK is None:
        return costs
    home = {operation: place for place, block in enumerate(blocks) for operation in block}
    receive_s, send_s = [0.0] * len(blocks), [0.0] * len(blocks)
    for value in graph.values:
        nbytes = graph.request_bytes(value)
        maker = None if value.producer is None else home[value.producer]
        users = {home[each] for each in value.consumers} - {maker}
        for user in users:
            rate = machines[user].link_bytes_per_s
            if maker is not None:
                rate = min(rate, float(pair_rates_KK[maker, user]))
            receive_s[user] += nbytes / rate
        if maker is not None and (users or value.is_output):
            rates = [float(pair_rates_KK[maker, user]) for user in users]
            send_s[maker] += nbytes / min([machines[maker].link_bytes_per_s, *rates])
    return [
        replace(cost, receive_s=come, send_s=go)
        for cost, come, go in zip(costs, receive_s, send_s, strict=True)
    ]
