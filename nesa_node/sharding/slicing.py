"""Cuts an order of operations into blocks, one for each machine, so that the slowest is fastest.

Source: algorithm 1 of the Nesa paper, which recurses without remembering what it found, and adjusts
costs by a heuristic that it does not define. Here each prefix is solved once. Costs of slices are
not monotone, as a longer slice may cut fewer bytes: so neither the convex-hull trick that the paper
names is exact, nor is taking as much as fits. Work alone is monotone, though, and a slice whose
work exceeds a bottleneck that is known to be possible is not looked at. That leaves about N / K
starts of each slice, and N^2 comparisons instead of N^2 K.

N operations in the order, K machines, M distinct places of them, S starts of slices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nesa_node.sharding.operation_graph import Floats, Ints, Machine, OperationGraph
from nesa_node.sharding.pair_rates import ChainPlace, PairRates, block_costs, find_places

COARSE_CUTS = 512
"""Places at which a first, coarse solution may cut."""


@dataclass(frozen=True, slots=True)
class Slicing:
    """An order, cut into blocks for machines."""

    order: Ints
    """Operations [N]."""
    ends: tuple[int, ...]
    """For each machine the position behind its last operation, the same as the one before where it
    has none."""
    bottleneck_s: float
    """Cost of the slowest block."""

    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """Operations of each machine, in the order in which it runs them."""
        starts = (0, *self.ends[:-1])
        return tuple(
            tuple(self.order[start:end].tolist())
            for start, end in zip(starts, self.ends, strict=True)
        )


class SliceCosts:
    """Costs of all slices of an order of operations, those with the same end at once.

    As the end moves on by one operation, only slices that begin after the last use of what this one
    uses get a new input; so each use of a value is one addition to a range of starts. The peak of a
    slice's values is the largest, over its operations, of what the slice from there on is sent and
    what the operation makes.
    """

    def __init__(self, graph: OperationGraph, order: Ints, places: Sequence[ChainPlace]) -> None:
        """`places` are distinct ones [M]. Raises `ValueError` for an order of something else."""
        if sorted(order) != list(range(len(graph))):
            raise ValueError(f"an order of {len(order)} operations, of a graph of {len(graph)}")
        self._runs = np.array(graph.runs)[order]
        self._first_of_share = _find_first_of_shares(graph, order)
        self._graph = graph
        self._places = places
        self._order = order
        self._position = np.empty(len(order), dtype=np.int64)
        self._position[order] = np.arange(len(order))
        work_MN = np.array([place.machine.work_s(graph)[order] for place in places])
        self.work_until = np.concatenate([np.zeros((len(places), 1)), work_MN.cumsum(axis=1)], 1)
        """Seconds of all operations before a position [M, N + 1]."""
        made = np.zeros(len(order))
        self._has_pairs = any(
            {place.receive_bytes_per_s, place.send_bytes_per_s} != {place.machine.link_bytes_per_s}
            for place in places
        )
        """Without slower pairs, what the network gets and gives passes as all other values do."""
        self._uses: list[list[tuple[int, float]]] = [[] for _ in order]
        self._input_uses: list[list[tuple[int, float]]] = [[] for _ in order]
        self._last_uses: list[list[tuple[int, float]]] = [[] for _ in order]
        self._leaving = np.zeros(len(order))
        self._outputs = np.zeros(len(order))
        self._index_values(made)
        self._made = made
        self._parameter_uses: list[list[tuple[int, float]]] = [[] for _ in order]
        self._index_parameters()
        self._is_tight = any(place.machine.fast_memory_bytes < math.inf for place in places)

    def _index_values(self, made: Floats) -> None:
        for value in self._graph.values:
            first = -1 if value.producer is None else int(self._position[value.producer])
            used = np.sort(self._position[list(value.consumers)]).tolist()
            if used and used[0] <= first:
                raise ValueError("an order in which a value is used before it is made")
            if first >= 0:
                made[first] += value.size_bytes
                if value.is_output:
                    sent = self._outputs if self._has_pairs else self._leaving
                    sent[first] += value.size_bytes
                elif used:
                    self._leaving[first] += value.size_bytes
                    self._last_uses[used[-1]].append((first, value.size_bytes))
            uses = self._input_uses if self._has_pairs and first < 0 else self._uses
            for before, position in zip([first, *used], used, strict=False):
                uses[position].append((before, value.size_bytes))

    def _index_parameters(self) -> None:
        latest: dict[int, int] = {}
        for position, operation in enumerate(self._order):
            for parameter in self._graph.operations[operation].parameters:
                size = self._graph.parameter_bytes[parameter]
                self._parameter_uses[position].append((latest.get(parameter, -1), size))
                latest[parameter] = position

    def rows(self, starts: Ints, ends: Ints, bound_s: float) -> Iterator[tuple[int, Ints, Floats]]:
        """For each of `ends`, ascending: the end, those of `starts` that may begin a slice which
        ends there, and the costs of these slices [M, S], in seconds.

        Slices whose work alone takes longer than `bound_s` on all machines are left out.
        """
        received, given = np.zeros(len(self._order)), np.zeros(len(self._order))
        leaving, held = self._leaving.copy(), None
        if self._is_tight:
            held = np.zeros(len(self._order))
        is_end = np.zeros(len(self._order) + 1, dtype=bool)
        is_end[ends] = True
        first = self._first_starts(bound_s)
        for last in range(len(self._order)):
            low = max(int(first[last + 1]), int(self._first_of_share[last]))
            for before, size in self._uses[last]:
                received[max(before + 1, low) : last + 1] += size
            for before, size in self._input_uses[last]:
                given[max(before + 1, low) : last + 1] += size
            for made_at, size in self._last_uses[last]:
                leaving[made_at] -= size
            if held is not None:
                for before, size in self._parameter_uses[last]:
                    held[max(before + 1, low) : last + 1] += size
            if is_end[last + 1]:
                here = starts[np.searchsorted(starts, low) : np.searchsorted(starts, last + 1)]
                if len(here):
                    costs = self._costs(low, last + 1, received, given, leaving, held)
                    yield last + 1, here, costs[:, here - low]

    def _first_starts(self, bound_s: float) -> Ints:
        """For each end the first start that is worth a look [N + 1]: it never goes back."""
        first: Ints = np.min(
            [np.searchsorted(until, until - bound_s * (1 + 1e-9)) for until in self.work_until],
            axis=0,
        )
        return first

    def _costs(
        self,
        low: int,
        end: int,
        received: Floats,
        given: Floats,
        leaving: Floats,
        held: Floats | None,
    ) -> Floats:
        """Costs of slices from `low` on to `end` [M, end - low]. `given` is what slices get of the
        network's inputs, which without slower pairs is in `received`.
        """
        here = slice(low, end)
        received_S = received[here]
        sent_S = leaving[here][::-1].cumsum()[::-1]
        beyond_S: Floats | None = None
        if held is not None:
            used_S = received_S + given[here] + self._made[here]
            beyond_S = held[here] + np.maximum.accumulate(used_S[::-1])[::-1]
        costs = np.empty((len(self._places), end - low))
        for place, until, cost_S in zip(self._places, self.work_until, costs, strict=True):
            link = place.machine.link_bytes_per_s
            if self._has_pairs:
                np.divide(received_S, place.receive_bytes_per_s, out=cost_S)
                cost_S += sent_S / place.send_bytes_per_s
                cost_S += (given[here] + self._outputs[here][::-1].cumsum()[::-1]) / link
            else:
                np.divide(received_S + sent_S, link, out=cost_S)
            room = place.machine.fast_memory_bytes
            if beyond_S is not None and room < math.inf:
                cost_S += np.maximum(beyond_S - room, 0.0) / place.machine.stream_bytes_per_s
            if self._runs[end - 1] != 1:
                cost_S *= self._runs[end - 1]
            cost_S += until[end] - until[here]
        return costs


def _find_first_of_shares(graph: OperationGraph, order: Ints) -> Ints:
    """For each position the first one of its share [N].

    Raises `ValueError` for an order that mixes shares.
    """
    is_first_N = np.diff(np.array(graph.share_of)[order], prepend=-1) != 0
    firsts: Ints = np.flatnonzero(is_first_N)
    if len(firsts) > max(1, len(graph.shares)):
        raise ValueError("an order in which operations of a share are apart")
    first_N: Ints = firsts[is_first_N.cumsum() - 1]
    return first_N


def slice_order(
    graph: OperationGraph,
    order: Ints,
    machines: Sequence[Machine],
    *,
    max_cuts: int | None = None,
    pairs: PairRates | None = None,
) -> Slicing:
    """The slices of `order`, one for each of `machines` in turn, whose slowest is fastest.

    A machine may get no operations. `max_cuts`: with fewer places to cut than there are, which are
    those with the fewest bytes among as much work each, a good solution is found sooner; without
    it, the result is the best one. With `pairs` it is the best one as if a machine received all
    from the one before, sent all to the one after it, and was as much slower as its weight says;
    the bottleneck is what the slices take without these assumptions. Raises `ValueError` for fewer
    machines than shares, or an order of something else.
    """
    if len(machines) < (least := max(1, len(graph.shares))):
        raise ValueError(f"{len(machines) or 'no'} machines: {least} or more are needed")
    places = find_places(machines, pairs)
    distinct = list(dict.fromkeys(places))
    kinds = np.array([distinct.index(place) for place in places])
    costs = SliceCosts(graph, order, distinct)
    count = len(order)
    coarse = _choose_cuts(graph, order, costs, min(max_cuts or COARSE_CUTS, count - 1))
    found = _solve(costs, kinds, order, coarse, math.inf)
    if max_cuts is None and len(coarse) < count - 1:
        found = _solve(costs, kinds, order, np.arange(1, count), found.bottleneck_s)
    if pairs is None:
        return found
    taken = block_costs(graph, found.blocks(), machines, pairs.rates_KK)
    return replace(found, bottleneck_s=max(cost.total_s for cost in taken))


def _choose_cuts(graph: OperationGraph, order: Ints, costs: SliceCosts, most: int) -> Ints:
    """Up to `most` positions to cut at, each where the fewest bytes pass."""
    count = len(order)
    if most >= count - 1:
        return np.arange(1, count)
    passing = _passing_bytes(graph, order)[1:count]
    work = costs.work_until[0]
    part = np.minimum((work[1:count] / (work[-1] or 1.0) * most).astype(np.int64), most - 1)
    by_bytes = np.lexsort((passing, part))
    _, firsts = np.unique(part[by_bytes], return_index=True)
    between = np.flatnonzero(np.diff(np.array(graph.share_of)[order]))
    return np.union1d(by_bytes[firsts], between) + 1


def _passing_bytes(graph: OperationGraph, order: Ints) -> Floats:
    """Bytes that are needed from each position on and made before [N + 1]."""
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    change = np.zeros(len(order) + 2)
    for value in graph.values:
        if value.consumers:
            made = -1 if value.producer is None else position[value.producer]
            change[made + 1] += value.size_bytes
            change[position[list(value.consumers)].max() + 1] -= value.size_bytes
    return change.cumsum()[:-1]


def _solve(costs: SliceCosts, kinds: Ints, order: Ints, cuts: Ints, bound_s: float) -> Slicing:
    """The best slices that end at `cuts`, of those that are not slower than `bound_s`.

    `best[k, r]` is the least bottleneck of the first k machines for the first r operations.
    """
    count, machines = len(order), len(kinds)
    best = np.full((machines + 1, count + 1), math.inf)
    best[:, 0] = 0.0
    begin = np.zeros((machines + 1, count + 1), dtype=np.int64)
    starts = np.concatenate([[0], cuts])
    for end, here, cost_MS in costs.rows(starts, np.append(cuts, count), bound_s):
        # Views where there are no gaps and all places are alike: copies take a third of the time.
        has_gaps = here[-1] - here[0] >= len(here)
        before_KS = best[:-1, here if has_gaps else slice(here[0], here[-1] + 1)]
        slowest_KS = np.maximum(before_KS, cost_MS if len(cost_MS) == 1 else cost_MS[kinds])
        chosen = slowest_KS.argmin(axis=1)
        best[1:, end] = slowest_KS[np.arange(machines), chosen]
        begin[1:, end] = here[chosen]
        # A machine may have no operations.
        fewer = np.minimum.accumulate(best[:, end])
        begin[1:, end][fewer[:-1] <= best[1:, end]] = end
        best[:, end] = fewer
    ends = [count]
    for machine in range(machines, 1, -1):
        ends.append(int(begin[machine, ends[-1]]))
    return Slicing(order, tuple(reversed(ends)), float(best[-1, count]))
