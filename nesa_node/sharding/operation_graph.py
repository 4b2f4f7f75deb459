"""A network as a graph of operations, and what each of them costs a machine.

Source: section 2.5 of the Nesa paper. Its operations have an execution time, parameters and an
output; here an operation has arithmetic and memory traffic, of which each machine makes a time of
its own, and any number of outputs, each a value with consumers.

N operations, V values, Q parameters, K machines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a kernel."""

    name: str
    """Unique in its graph."""
    kind: str
    """The kernel, an operator of torch with its overload."""
    flop: float
    moved_bytes: float
    """What it reads and writes: inputs, parameters and outputs."""
    parameters: tuple[int, ...] = ()
    """Distinct indices into `OperationGraph.parameter_bytes`."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that passes between operations."""

    size_bytes: float
    producer: int | None
    """Index of an operation; None of what the network is given."""
    consumers: tuple[int, ...]
    """Distinct indices of operations, ascending."""
    is_output: bool = False
    """Whether the network gives it."""

    @property
    def operations(self) -> tuple[int, ...]:
        """Those that make or use it, ascending."""
        return self.consumers if self.producer is None else (self.producer, *self.consumers)


@dataclass(frozen=True, slots=True)
class Share:
    """Operations that exchange no value with the rest of a graph: a network of a pipeline."""

    operations: tuple[int, ...]
    """Ascending indices."""
    runs: int
    """How often a request runs them."""
    name: str = ""


@dataclass(frozen=True, slots=True)
class OperationGraph:
    """Operations in an order in which they can run, and the values between them.

    Raises `ValueError` where a value is used before it is there, an index is out of range, an
    amount is negative, or shares do not divide the operations.
    """

    operations: tuple[Operation, ...]
    values: tuple[Value, ...]
    parameter_bytes: tuple[float, ...] = ()
    shares: tuple[Share, ...] = ()
    """No block has operations of two of them. Without any, all operations are one that runs once
    for a request."""
    inputs: tuple[tuple[int, ...], ...] = field(init=False, repr=False)
    """For each operation, indices of the values that it uses."""
    outputs: tuple[tuple[int, ...], ...] = field(init=False, repr=False)
    """For each operation, indices of the values that it makes."""
    share_of: tuple[int, ...] = field(init=False, repr=False)
    """For each operation, the index of its share; 0 without shares."""
    runs: tuple[int, ...] = field(init=False, repr=False)
    """For each operation, how often a request runs it."""

    def __post_init__(self) -> None:
        inputs: list[list[int]] = [[] for _ in self.operations]
        outputs: list[list[int]] = [[] for _ in self.operations]
        if not self.operations:
            raise ValueError("a graph without operations")
        for index, value in enumerate(self.values):
            earliest = -1 if value.producer is None else value.producer
            used = (earliest, *value.consumers)
            if list(used) != sorted(set(used)) or used[-1] >= len(self.operations):
                raise ValueError(
                    f"value {index}: producer {value.producer} and consumers {value.consumers} are "
                    f"not ascending indices of {len(self.operations)} operations"
                )
            if value.producer is not None:
                outputs[value.producer].append(index)
            for consumer in value.consumers:
                inputs[consumer].append(index)
        for operation in self.operations:
            if not all(0 <= each < len(self.parameter_bytes) for each in operation.parameters):
                raise ValueError(
                    f"{operation.name}: parameters {operation.parameters} do not exist"
                )
        amounts = [
            *self.parameter_bytes,
            *(value.size_bytes for value in self.values),
            *(each for one in self.operations for each in (one.flop, one.moved_bytes)),
        ]
        if not all(0 <= each < math.inf for each in amounts):
            raise ValueError("sizes and work must be finite and not negative")
        object.__setattr__(self, "inputs", tuple(map(tuple, inputs)))
        object.__setattr__(self, "outputs", tuple(map(tuple, outputs)))
        self._set_shares()

    def _set_shares(self) -> None:
        shares = self.shares or (Share(tuple(range(len(self.operations))), 1),)
        share_of = {each: index for index, share in enumerate(shares) for each in share.operations}
        count = sum(len(share.operations) for share in shares)
        if not count == len(share_of) == len(self.operations) > max(share_of):
            raise ValueError(f"shares do not have each of {len(self.operations)} operations once")
        for value in self.values:
            if len({share_of[each] for each in value.operations}) > 1:
                raise ValueError("a value is in two shares")
        numbers = tuple(share_of[index] for index in range(len(self.operations)))
        object.__setattr__(self, "share_of", numbers)
        object.__setattr__(self, "runs", tuple(shares[number].runs for number in numbers))

    def count_parameter_bytes(self, operations: Iterable[int]) -> float:
        """Bytes of the parameters that these operations use, each once."""
        used = {each for one in operations for each in self.operations[one].parameters}
        return sum(self.parameter_bytes[each] for each in used)

    def __len__(self) -> int:
        return len(self.operations)

    def gather(self, order: Ints) -> Ints:
        """The order [N] with the operations of each share together."""
        gathered: Ints = order[np.argsort(np.array(self.share_of)[order], kind="stable")]
        return gathered

    def request_bytes(self, value: Value) -> float:
        """Bytes of all that a value is during a request."""
        operations = value.operations
        return value.size_bytes * (self.runs[operations[0]] if operations else 1)

    @property
    def total_flop(self) -> float:
        """Of a request."""
        return sum(each.flop * runs for each, runs in zip(self.operations, self.runs, strict=True))

    @property
    def total_parameter_bytes(self) -> float:
        used = {each for operation in self.operations for each in operation.parameters}
        return sum(self.parameter_bytes[each] for each in used)


@dataclass(frozen=True, slots=True)
class Machine:
    """What one machine does in a second, and how much it holds.

    Raises `ValueError` for a rate that is not positive.
    """

    flop_per_s: float
    moved_bytes_per_s: float
    """Between its processor and its fast memory."""
    link_bytes_per_s: float
    """To and from the other machines, in each direction."""
    fast_memory_bytes: float = math.inf
    """For parameters and values. Parameters that do not fit are read again in each run."""
    stream_bytes_per_s: float = 1e9
    """At which these are read."""

    def __post_init__(self) -> None:
        rates = (self.flop_per_s, self.moved_bytes_per_s, self.link_bytes_per_s)
        if not all(rate > 0 for rate in (*rates, self.stream_bytes_per_s)):
            raise ValueError(f"rates of a machine must be positive: {self}")
        if self.fast_memory_bytes < 0:
            raise ValueError(f"memory of {self.fast_memory_bytes} bytes")

    def work_s(self, graph: OperationGraph) -> Floats:
        """Seconds of a request's runs of each operation [N]."""
        flop_N = np.array([each.flop for each in graph.operations])
        moved_N = np.array([each.moved_bytes for each in graph.operations])
        once_N = np.maximum(flop_N / self.flop_per_s, moved_N / self.moved_bytes_per_s)
        works_N: Floats = once_N * np.array(graph.runs)
        return works_N

    def operation_s(self, operation: Operation) -> float:
        """Seconds of one run: of its arithmetic or of its traffic, the longer."""
        return max(operation.flop / self.flop_per_s, operation.moved_bytes / self.moved_bytes_per_s)


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Seconds that a request takes of one machine. Source: equations 8 to 10 of the Nesa paper."""

    receive_s: float = 0.0
    work_s: float = 0.0
    overflow_s: float = 0.0
    send_s: float = 0.0
    parameter_bytes: float = 0.0
    peak_bytes: float = 0.0
    """The most that values take up at once."""

    @property
    def total_s(self) -> float:
        return self.receive_s + self.work_s + self.overflow_s + self.send_s


def block_cost(graph: OperationGraph, operations: Sequence[int], machine: Machine) -> BlockCost:
    """Cost of a block: `operations` of one share, in the order in which `machine` runs them.

    As meant by equations 8 to 10, in three points not as printed. A block is sent each value that
    it needs once, however many of its operations use it, and sends each value that is needed
    elsewhere once, as a node of a star does. Equation 9 adds bytes to seconds: here all bytes
    beyond the fast memory are divided by the rate at which they are read, and where all fit it is
    nothing. Values are in memory from when they come or are made until they were last used in the
    block. The network's inputs come, and its outputs leave, as other values do. All of this takes
    place in each run of a request.
    """
    place = {operation: position for position, operation in enumerate(operations)}
    received = sent = 0.0
    alive = np.zeros(len(operations) + 1)
    near = (index for each in operations for index in (*graph.inputs[each], *graph.outputs[each]))
    for value in (graph.values[index] for index in dict.fromkeys(near)):
        inside = [place[each] for each in value.consumers if each in place]
        made_here = value.producer in place
        if made_here:
            if value.is_output or len(inside) < len(value.consumers):
                sent += value.size_bytes
        else:
            received += value.size_bytes
        first = 0 if value.producer is None else place.get(value.producer, 0)
        alive[first] += value.size_bytes
        alive[max(inside, default=first) + 1] -= value.size_bytes
    parameter_bytes = graph.count_parameter_bytes(operations)
    peak_bytes = float(np.cumsum(alive).max(initial=0.0))
    beyond = max(0.0, parameter_bytes + peak_bytes - machine.fast_memory_bytes)
    runs = graph.runs[operations[0]] if operations else 1
    return BlockCost(
        received / machine.link_bytes_per_s * runs,
        math.fsum(machine.operation_s(graph.operations[each]) for each in operations) * runs,
        beyond / machine.stream_bytes_per_s * runs,
        sent / machine.link_bytes_per_s * runs,
        parameter_bytes,
        peak_bytes,
    )
