"""A time that no partition's slowest block can be faster than.

Each partition with an acyclic quotient is a chain of nested sets of operations, each of which
contains what its operations use: a block is the difference of two. Of a graph in which few
operations can run beside each other there are few such sets, and the best chain is found by
comparing all. Of wider graphs some operations are left out of the comparison, those that can run
beside most of the rest for their work and bytes, and are compared among themselves, and so on.
Each block costs at least what its parts in all these groups do together, if each value counts in
the group of its producer alone; so the best chains of all groups together must fit into all
machines' time.

N operations kept, V values, C closed sets, K machines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nesa_node.sharding.operation_graph import Floats, Ints, Machine, OperationGraph

MAX_SETS = 1500
"""Closed sets that are compared with each other."""
MAX_GROUPS = 8
"""Groups of operations: what is in none counts with its work."""
PRECISION = 1e-4
"""By how much less than what was compared the bound may be, as a share of it."""
_ROUNDING = 1e-9

Bools = npt.NDArray[np.bool_]


def lower_bound_s(graph: OperationGraph, machines: Sequence[Machine], known_s: float) -> float:
    """Seconds below the slowest block of each partition among `machines`.

    `known_s` is the slowest block's of one, which the bound does not exceed. Unequal machines count
    as the fastest of them in all respects, but for their work all together.
    """
    work_N, speed = _relative_work(graph, machines)
    least = max(float(work_N.sum()) / speed, _of_single_operations(graph, machines, work_N))
    least = max(least, _of_parameters(graph, machines), _of_shares(graph, machines, work_N))
    groups = _compare_groups(graph, machines, work_N, known_s)
    low, high = min(least, known_s), known_s
    if groups.are_possible(low, machines):
        return low
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        if groups.are_possible(middle, machines):
            high = middle
        else:
            low = middle
    return low


def _relative_work(graph: OperationGraph, machines: Sequence[Machine]) -> tuple[Floats, float]:
    """Seconds of each operation on the fastest machine for it, and how many machines of that speed
    all of them together are at most.
    """
    works_KN = np.array([machine.work_s(graph) for machine in machines])
    fastest_N = works_KN.min(axis=0)
    ratios_KN = np.ones_like(works_KN)
    np.divide(fastest_N, works_KN, out=ratios_KN, where=works_KN > 0)
    return fastest_N, float(ratios_KN.max(axis=1).sum())


def _of_parameters(graph: OperationGraph, machines: Sequence[Machine]) -> float:
    """Of the parameters that no memory holds, read by all machines together."""
    beyond = graph.total_parameter_bytes - sum(each.fast_memory_bytes for each in machines)
    return max(0.0, beyond) / sum(each.stream_bytes_per_s for each in machines)


def _of_shares(graph: OperationGraph, machines: Sequence[Machine], work_N: Floats) -> float:
    """Of the work of each network of a pipeline, on machines of its own, all as the fastest."""
    works = np.bincount(graph.share_of, weights=work_N)
    counts = np.ones(len(works))
    for _ in range(len(machines) - len(works)):
        counts[(works / counts).argmax()] += 1
    return float((works / counts).max())


def _of_single_operations(
    graph: OperationGraph, machines: Sequence[Machine], work_N: Floats
) -> float:
    room = max(machine.fast_memory_bytes for machine in machines)
    stream = max(machine.stream_bytes_per_s for machine in machines)
    most = 0.0
    for operation, work_s in zip(graph.operations, work_N, strict=True):
        held = sum(graph.parameter_bytes[each] for each in operation.parameters)
        most = max(most, float(work_s) + max(0.0, held - room) / stream)
    return most


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Blocks between two closed sets, and what they cost, the inner set's index first."""

    inner: Ints
    outer: Ints
    cost_s: Floats
    sets: int

    def least_total_s(self, bottleneck_s: float, machines: int) -> float:
        """Cost of all blocks of the chain that costs least, none above `bottleneck_s`."""
        fits = self.cost_s <= bottleneck_s * (1 + _ROUNDING)
        inner, outer, cost_s = self.inner[fits], self.outer[fits], self.cost_s[fits]
        total = np.full(self.sets, math.inf)
        total[0] = 0.0
        for _ in range(machines):
            following = total.copy()
            np.minimum.at(following, outer, total[inner] + cost_s)
            if (following == total).all():
                break
            total = following
        return float(total[-1])


@dataclass(frozen=True, slots=True)
class _Groups:
    """Blocks of each group of operations."""

    pairs: list[_Pairs]
    left_out_s: float
    """Work of operations in no group."""

    def are_possible(self, bottleneck_s: float, machines: Sequence[Machine]) -> bool:
        """Whether the least chains with blocks up to `bottleneck_s` fit into all machines' time."""
        totals = (pairs.least_total_s(bottleneck_s, len(machines)) for pairs in self.pairs)
        total_s = sum(totals, self.left_out_s)
        if len(set(machines)) > 1:
            # A slow machine's time is not what these costs are.
            return total_s < math.inf
        return total_s <= bottleneck_s * len(machines) * (1 + _ROUNDING)


def _compare_groups(
    graph: OperationGraph, machines: Sequence[Machine], work_N: Floats, known_s: float
) -> _Groups:
    reaches = _reachable(graph)
    left = np.arange(len(graph))
    # What several groups use counts in one of them.
    free = _Unclaimed(set(range(len(graph.values))), set(range(len(graph.parameter_bytes))))
    pairs: list[_Pairs] = []
    link = max(machine.link_bytes_per_s for machine in machines)
    sizes = [
        sum(graph.request_bytes(graph.values[each]) for each in made) for made in graph.outputs
    ]
    weight_N = work_N + np.array(sizes) / link
    while len(left) and len(pairs) < MAX_GROUPS:
        kept, sets = _choose_operations(reaches, weight_N, left)
        pairs.append(_compare_closed_sets(graph, machines, work_N, known_s, kept, sets, free))
        left = np.setdiff1d(left, kept)
    return _Groups(pairs, float(work_N[left].sum()))


@dataclass(frozen=True, slots=True)
class _Unclaimed:
    """Values and parameters that are in no group yet."""

    values: set[int]
    parameters: set[int]


def _compare_closed_sets(
    graph: OperationGraph,
    machines: Sequence[Machine],
    work_N: Floats,
    known_s: float,
    kept: Ints,
    sets: Sequence[int],
    free: _Unclaimed,
) -> _Pairs:
    member_CN = np.zeros((len(sets), len(kept)), dtype=bool)
    for row, each in enumerate(sets):
        bits = np.frombuffer(each.to_bytes(-(-len(kept) // 8), "little"), dtype=np.uint8)
        member_CN[row] = np.unpackbits(bits, bitorder="little")[: len(kept)]
    inside = _Inside(graph, kept, member_CN, free)
    link = max(machine.link_bytes_per_s for machine in machines)
    room = max(machine.fast_memory_bytes for machine in machines)
    stream = max(machine.stream_bytes_per_s for machine in machines)
    work_C = member_CN @ work_N[kept]
    words_CW = np.packbits(member_CN, axis=1)
    inner_parts, outer_parts, cost_parts = [], [], []
    for outer in range(1, len(sets)):
        work_s = work_C[outer] - work_C[:outer]
        near = np.flatnonzero(work_s <= known_s * (1 + _ROUNDING))
        near = near[~(words_CW[near] & ~words_CW[outer]).any(axis=1)]
        moved = inside.moved_bytes(outer, near)
        beyond = np.maximum(inside.parameter_bytes(outer, near) - room, 0.0)
        inner_parts.append(near)
        outer_parts.append(np.full(len(near), outer))
        cost_parts.append(work_s[near] + moved / link + beyond / stream)
    return _Pairs(
        np.concatenate(inner_parts),
        np.concatenate(outer_parts),
        np.concatenate(cost_parts),
        len(sets),
    )


class _Inside:
    """What of each value's and each parameter's uses lies in each closed set."""

    def __init__(
        self, graph: OperationGraph, kept: Ints, member_CN: Bools, free: _Unclaimed
    ) -> None:
        """What is counted here is taken from `free`."""
        place = {int(operation): index for index, operation in enumerate(kept)}
        sizes, made, users, is_output = [], [], [], []
        for index in sorted(free.values):
            value = graph.values[index]
            consumers = [place[each] for each in value.consumers if each in place]
            is_kept = value.producer is None or value.producer in place
            if is_kept and (consumers or (value.is_output and value.producer is not None)):
                free.values.remove(index)
                sizes.append(graph.request_bytes(value))
                made.append(None if value.producer is None else place[value.producer])
                users.append(consumers)
                is_output.append(value.is_output)
        self._size_V = np.array(sizes)
        rows = len(member_CN)
        self._made_CV = np.ones((rows, len(sizes)), dtype=bool)
        self._is_input_V = np.array([each is None for each in made], dtype=bool)
        self._users_CV = np.zeros((rows, len(sizes)), dtype=np.int16)
        for index, (producer, consumers) in enumerate(zip(made, users, strict=True)):
            if producer is not None:
                self._made_CV[:, index] = member_CN[:, producer]
            self._users_CV[:, index] = member_CN[:, consumers].sum(axis=1)
        every_V = np.array([len(each) for each in users])
        self._leaves_CV = (self._users_CV < every_V) | np.array(is_output, dtype=bool)
        used = {each for one in kept for each in graph.operations[one].parameters}
        held = sorted(used & free.parameters)
        free.parameters.difference_update(held)
        self._held_Q = np.array([graph.parameter_bytes[each] for each in held])
        self._held_CQ = np.zeros((rows, len(held)), dtype=np.int16)
        column = {parameter: index for index, parameter in enumerate(held)}
        for index, operation in enumerate(kept):
            for parameter in column.keys() & set(graph.operations[operation].parameters):
                self._held_CQ[:, column[parameter]] += member_CN[:, index]

    def moved_bytes(self, outer: int, inner: Ints) -> Floats:
        """What the blocks between `inner` sets and the `outer` one receive and send."""
        used = self._users_CV[outer] > self._users_CV[inner]
        received = (used & self._made_CV[inner]) @ self._size_V
        leaving_V = self._made_CV[outer] & self._leaves_CV[outer] & ~self._is_input_V
        sent = (~self._made_CV[inner] & leaving_V) @ self._size_V
        moved: Floats = received + sent
        return moved

    def parameter_bytes(self, outer: int, inner: Ints) -> Floats:
        """Parameters of these blocks."""
        held: Floats = (self._held_CQ[outer] > self._held_CQ[inner]) @ self._held_Q
        return held


def _choose_operations(reaches: Bools, weight_N: Floats, left: Ints) -> tuple[Ints, list[int]]:
    """Operations of `left` that are compared, and their closed sets, at most `MAX_SETS`, smaller
    ones first.

    Weights are seconds of work and of sending what they make. First come heavy operations of which
    no two can run beside each other, such as those of one of two towers, then those that few of the
    rest can run beside, for their weight. Sets are bits of the operations' places among those
    compared.
    """
    if len(left) > MAX_SETS:
        left = left[np.argsort(-weight_N[left], kind="stable")[:MAX_SETS]]
    among = reaches[np.ix_(left, left)]
    follows = among | among.T
    share = weight_N[left] / (weight_N[left].sum() or 1.0) + 1.0 / len(left)
    rank = (~follows).sum(axis=1) / share
    follows_all = np.ones(len(left), dtype=bool)
    for index in np.argsort(-weight_N[left], kind="stable"):
        if follows_all[index]:
            rank[index] = -1.0
            follows_all &= follows[index]
    first = left[np.argsort(rank, kind="stable")]
    fewest, most, tried = 0, len(first) + 1, len(first)
    kept, sets = first[:0], [0]
    while not fewest or most - fewest > max(1, len(left) // 100):
        chosen = np.sort(first[:tried])
        found = _closed_sets(reaches, chosen)
        if found is None:
            most = tried
        else:
            fewest, kept, sets = tried, chosen, found
        tried = (fewest + most) // 2
    return kept, sets


def _reachable(graph: OperationGraph) -> Bools:
    """For each operation, those that use what it makes, or what these make; and itself."""
    count = len(graph)
    reaches = np.zeros((count, count), dtype=bool)
    for operation in reversed(range(count)):
        reaches[operation, operation] = True
        for index in graph.outputs[operation]:
            for consumer in graph.values[index].consumers:
                reaches[operation] |= reaches[consumer]
    return reaches


def _closed_sets(reaches: Bools, kept: Ints) -> list[int] | None:
    """Sets of `kept` operations, as bits, with all that reach theirs; None for too many."""
    among = reaches[np.ix_(kept, kept)] & ~np.eye(len(kept), dtype=bool)
    # Of what an operation needs, what nothing else that it needs is made of.
    direct = among & ~(among.astype(np.float32) @ among.astype(np.float32) > 0)
    after = [np.flatnonzero(row).tolist() for row in direct]
    needs = [_as_bits(column) for column in among.T]
    layer = {0: _as_bits(np.logical_not(among).all(axis=0))}
    found = {0}
    while layer:
        following: dict[int, int] = {}
        for done, ready in layer.items():
            left = ready
            while left:
                index = (left & -left).bit_length() - 1
                left &= left - 1
                grown = done | 1 << index
                if grown not in following:
                    now = ready & ~(1 << index)
                    for each in after[index]:
                        if needs[each] & ~grown == 0:
                            now |= 1 << each
                    following[grown] = now
            if len(found) + len(following) > MAX_SETS:
                return None
        found |= following.keys()
        layer = following
    return sorted(found, key=lambda each: (each.bit_count(), each))


def _as_bits(chosen: npt.ArrayLike) -> int:
    return int.from_bytes(np.packbits(np.asarray(chosen), bitorder="little").tobytes(), "little")
