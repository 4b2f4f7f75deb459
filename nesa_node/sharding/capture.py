"""Captures a torch module as a graph of operations, by `torch.export`.

What depends on no input (positions, masks made of them, transposed weights) is no operation: each
machine that uses it makes it anew. A view of a value that nothing else uses belongs to the
operation that made the value. Arithmetic is counted by torch's own formulas, and where it has none,
an operation is its memory traffic.

Source: section 2.5 of the Nesa paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_flop_count

from nesa_node.core.errors import UnsupportedFeatureError
from nesa_node.sharding.operation_graph import Operation, OperationGraph, Value

_PASSED_ON = frozenset(
    ("alias", "clone", "contiguous", "detach", "dropout", "flatten", "reshape", "to", "type_as")
)
"""Kernels which mostly give their input again, that torch does not call views."""


@dataclass(frozen=True, slots=True)
class CapturedModel:
    """A module's graph, and which nodes of the exported program each operation is."""

    graph: OperationGraph
    nodes: tuple[tuple[str, ...], ...]
    """Names of `program`'s nodes, for each operation, in the order in which they run."""
    program: torch.export.ExportedProgram


def capture(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> CapturedModel:
    """Trace `module`, in evaluation and without gradients, for inputs of these shapes and dtypes.

    The module and its inputs may be on the meta device, where they take no memory. Raises
    `UnsupportedFeatureError`, with torch's reason, for a module whose course depends on its values.
    """
    module.eval()
    try:
        with torch.no_grad():
            program = torch.export.export(module, args, dict(kwargs or {}), strict=False)
    except Exception as error:  # torch raises what its tracers and the module itself raise
        raise UnsupportedFeatureError(
            f"{type(module).__name__} cannot be captured as a graph: {_first_line(error)}. A graph "
            "has one course for all values: turn off options that choose by them (caches, early "
            "exits, dropping of layers), or give inputs of another shape"
        ) from error
    return _Capture(program).finish()


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")


@dataclass(slots=True)
class _Making:
    """An operation that may still get views."""

    nodes: list[Node]
    inputs: list[Node]
    flop: float
    moved_bytes: float
    parameters: tuple[int, ...]
    outputs: list[Node] = field(default_factory=list)


class _Capture:
    def __init__(self, program: torch.export.ExportedProgram) -> None:
        self._program = program
        self._parameter_bytes: list[float] = []
        self._constants: dict[Node, tuple[int, ...]] = {}
        """The parameters that each node without inputs is made of."""
        self._made_by: dict[Node, _Making | None] = {}
        """By which operation a value is made, None for inputs."""
        self._operations: list[_Making] = []

    def finish(self) -> CapturedModel:
        self._read_placeholders()
        for node in self._program.graph.nodes:
            if node.op == "call_function":
                self._add(node)
        places = {id(each): index for index, each in enumerate(self._operations)}
        results = self._results()
        consumers: dict[Node, list[int]] = {}
        for index, making in enumerate(self._operations):
            for each in dict.fromkeys(making.inputs):
                consumers.setdefault(each, []).append(index)
        values = []
        for node, maker in self._made_by.items():
            if maker is not None and node not in maker.outputs:
                continue
            if node not in consumers and node not in results:
                continue
            producer = None if maker is None else places[id(maker)]
            used = tuple(consumers.get(node, ()))
            values.append(Value(_size_bytes(node), producer, used, node in results))
        operations = tuple(
            Operation(
                each.nodes[0].name,
                str(each.nodes[0].target),
                each.flop,
                each.moved_bytes,
                each.parameters,
            )
            for each in self._operations
        )
        nodes = tuple(tuple(node.name for node in each.nodes) for each in self._operations)
        graph = OperationGraph(operations, tuple(values), tuple(self._parameter_bytes))
        return CapturedModel(graph, nodes, self._program)

    def _read_placeholders(self) -> None:
        signature = self._program.graph_signature
        given = set(signature.user_inputs)
        indices: dict[int | str, int] = {}
        for node in self._program.graph.nodes:
            if node.op != "placeholder":
                continue
            if node.name in given:
                if isinstance(node.meta.get("val"), torch.Tensor):
                    self._made_by[node] = None
                else:
                    self._constants[node] = ()
                continue
            name = signature.inputs_to_parameters.get(node.name)
            # Tied weights are one tensor under several names.
            key = id(self._program.state_dict[name]) if name else node.name
            if key not in indices:
                indices[key] = len(self._parameter_bytes)
                self._parameter_bytes.append(_size_bytes(node))
            self._constants[node] = (indices[key],)

    def _results(self) -> set[Node]:
        (output,) = self._program.graph.find_nodes(op="output")
        return {each for each in output.all_input_nodes if each in self._made_by}

    def _add(self, node: Node) -> None:
        used = list(dict.fromkeys(node.all_input_nodes))
        inputs = [each for each in used if each not in self._constants]
        constants = {index for each in used for index in self._constants.get(each, ())}
        if not inputs:
            self._constants[node] = tuple(sorted(constants))
            return
        if self._extend(node, inputs, constants):
            return
        making = _Making(
            [node], inputs, _count_flop(node), _moved_bytes(node, used), tuple(sorted(constants))
        )
        making.outputs.append(node)
        self._operations.append(making)
        self._made_by[node] = making

    def _extend(self, node: Node, inputs: Sequence[Node], constants: set[int]) -> bool:
        """Whether `node` is no operation, but a part or a view of what one made."""
        source = inputs[0]
        maker = self._made_by[source]
        if len(inputs) > 1 or constants or maker is None:
            return False
        is_part = not isinstance(source.meta.get("val"), torch.Tensor)
        is_view = _is_view(node) and len(source.users) == 1
        if not is_part and not is_view:
            return False
        if source in maker.outputs:
            maker.outputs.remove(source)
        maker.nodes.append(node)
        maker.outputs.append(node)
        self._made_by[node] = maker
        return True


def _is_view(node: Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return bool(target.is_view) or target.overloadpacket.__name__ in _PASSED_ON


def _tensors(node: Node) -> Iterable[torch.Tensor]:
    value = node.meta.get("val")
    each = value if isinstance(value, tuple | list) else (value,)
    return [tensor for tensor in each if isinstance(tensor, torch.Tensor)]


def _size_bytes(node: Node) -> float:
    return float(sum(each.numel() * each.element_size() for each in _tensors(node)))


def _moved_bytes(node: Node, used: Sequence[Node]) -> float:
    if _is_view(node):
        return 0.0
    return sum(map(_size_bytes, used)) + _size_bytes(node)


def _count_flop(node: Node) -> float:
    """Additions and multiplications."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return 0.0
    args: list[Any] = [each.meta["val"] if isinstance(each, Node) else each for each in node.args]
    result: Any = node.meta["val"]
    name = target.overloadpacket.__name__
    if name in ("linear", "matmul"):
        return 2.0 * float(math.prod(result.shape) * args[0].shape[-1])
    if name in ("conv1d", "conv2d", "conv3d"):
        return float(conv_flop_count(args[0].shape, args[1].shape, result.shape))
    if name == "scaled_dot_product_attention":
        count = sdpa_flop_count(*(each.shape for each in args[:3]))  # type: ignore[no-untyped-call]
        return float(count)
    formula = flop_registry.get(target.overloadpacket)
    return float(formula(*args, **node.kwargs, out_val=result)) if formula else 0.0
