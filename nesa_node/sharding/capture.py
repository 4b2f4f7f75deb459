"""Captures a torch module as a graph of operations, by `torch.export`.

What depends on no input (positions, masks made of them, transposed weights) is no operation: each
machine that uses it makes it anew. A view of a value that nothing else uses belongs to the
operation that made the value. Arithmetic is counted by torch's own formulas, and where it has none,
an operation is its memory traffic.

Source: section 2.5 of the Nesa paper.
"""

from __future__ import annotations

import hashlib
import logging
import math
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_flop_count

from nesa_node.core.errors import UnsupportedFeatureError
from nesa_node.core.logging import get_logger
from nesa_node.sharding.open_sizes import OpenSizes, Sizes, as_expression
from nesa_node.sharding.operation_graph import Operation, OperationGraph, Value

log = get_logger(__name__)

_PASSED_ON = frozenset(
    ("alias", "clone", "contiguous", "detach", "dropout", "flatten", "reshape", "to", "type_as")
)
"""Kernels which mostly give their input again, that torch does not call views."""

_MAX_SIZE_OPERATIONS = 32
"""In the expression of one size. Networks that leave all sizes open need 12 at most; Swin, which
pads to windows at each depth, needs hundreds, and sympy minutes to compare them."""


@dataclass(frozen=True, slots=True)
class CapturedModel:
    """A module's graph, and which nodes of the exported program it is made of."""

    graph: OperationGraph
    nodes: tuple[tuple[str, ...], ...]
    """Names of `program`'s nodes, for each operation, in the order in which they run."""
    values: tuple[str, ...]
    """The name of the node that is each of `graph.values`."""
    sizes: OpenSizes
    example_sizes: Sizes
    """Those that the costs are for."""
    program: torch.export.ExportedProgram
    digest: bytes
    """SHA-256 of the operations, their arguments and the shapes of all tensors."""
    states: Mapping[int, int] = field(default_factory=dict)
    """For each input that stays where it is used, the value that is this input of the next request
    of a sequence."""


def keep_states(captured: CapturedModel, states: Mapping[str, str]) -> CapturedModel:
    """The same graph, of which some inputs and outputs stay on the machine that uses them.

    `states` are names of the program's nodes. No machine gets these inputs, and these outputs are
    sent where operations of another machine use them alone.
    """
    places = {name: index for index, name in enumerate(captured.values)}
    kept = {places[given]: places[made] for given, made in states.items()}
    values = list(captured.graph.values)
    for given, made in kept.items():
        values[given] = replace(values[given], size_bytes=0.0)
        values[made] = replace(values[made], is_output=False)
    graph = replace(captured.graph, values=tuple(values))
    return replace(captured, graph=graph, states=kept)


def capture(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> CapturedModel:
    """Trace `module`, in evaluation and without gradients; costs are for these inputs.

    Sizes of inputs stay open where the module allows it: all, or the batch alone, their first
    dimension. The module and its inputs may be on the meta device, where they take no memory.
    Raises `UnsupportedFeatureError`, with torch's reason, for a module whose course depends on its
    values.
    """
    module.eval()
    inputs = args, dict(kwargs or {})
    for open_dims in (None, 1):
        try:
            return _Capture(_export(module, _with_batch(inputs), open_dims), inputs).finish()
        except Exception as error:  # as below
            log.debug("sizes_not_open", dims=open_dims, reason=_first_line(error))
    try:
        program = _export(module, inputs, 0)
    except Exception as error:  # torch raises what its tracers and the module itself raise
        raise UnsupportedFeatureError(
            f"{type(module).__name__} cannot be captured as a graph: {_first_line(error)}"
            f"{_describe_place(error)}. A graph has one course for all values: turn off options "
            "that choose by them (caches, early exits, dropping of layers), or give inputs of "
            "another shape"
        ) from error
    return _Capture(program, inputs).finish()


_Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def _silence_torch() -> None:
    """Torch prints hundreds of lines about what it cannot trace, beside its error."""
    from torch.export import _trace

    vars(_trace)["print"] = lambda *_, **__: None
    logging.getLogger("torch.fx.experimental.symbolic_shapes").setLevel(logging.ERROR)
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)


def _export(
    module: torch.nn.Module, inputs: _Inputs, open_dims: int | None
) -> torch.export.ExportedProgram:
    """Trace `module` with the first `open_dims` dimensions of its inputs open; None: all."""
    args, kwargs = inputs
    _silence_torch()

    def open_sizes(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        return dict.fromkeys(range(value.ndim)[:open_dims], torch.export.Dim.AUTO)

    names = list(signature(module.forward).parameters)
    by_name = {**dict(zip(names, args, strict=False)), **kwargs}
    spec = pytree.tree_map(open_sizes, by_name if kwargs else args) if open_dims != 0 else None
    with torch.no_grad(), warnings.catch_warnings():
        # Of torch about itself, and of models about being traced.
        warnings.simplefilter("ignore")
        with _LimitedSizes():  # type: ignore[no-untyped-call]
            program = torch.export.export(module, args, kwargs, dynamic_shapes=spec, strict=False)
        if any(_is_mutating(node) for node in program.graph.nodes):
            program = program.run_decompositions({})
    return program


class _LimitedSizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises `UnsupportedFeatureError` where sizes become long expressions of the open ones."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in pytree.tree_leaves(result):
            for size in each.shape if isinstance(each, torch.Tensor) else ():
                expression = as_expression(size)
                if isinstance(expression, int):
                    continue
                if expression.count_ops() > _MAX_SIZE_OPERATIONS:
                    raise UnsupportedFeatureError(f"a size follows of others by {expression}")
        return result


def _with_batch(inputs: _Inputs) -> _Inputs:
    """`inputs` with at least two items in a batch: torch takes a size of one for a constant."""

    def double(value: Any) -> Any:
        is_single = isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == 1
        return torch.cat([value, value]) if is_single else value

    doubled: _Inputs = pytree.tree_map(double, inputs)
    return doubled


def _is_mutating(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")


def _describe_place(error: Exception) -> str:
    """The line of the module's code that failed, to follow the reason."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.line and frame.filename != __file__ and "torch" not in Path(frame.filename).parts
    ]
    if not frames:
        return ""
    at = frames[-1]
    return f', at "{at.line}" ({Path(at.filename).name}, line {at.lineno})'


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
    def __init__(self, program: torch.export.ExportedProgram, inputs: _Inputs) -> None:
        """Costs are those of `inputs`. Raises `UnsupportedFeatureError` where they do not fit."""
        self._program = program
        self._parameter_bytes: list[float] = []
        self._constants: dict[Node, tuple[int, ...]] = {}
        """The parameters that each node without inputs is made of."""
        self._made_by: dict[Node, _Making | None] = {}
        """By which operation a value is made, None for inputs."""
        self._operations: list[_Making] = []
        self._read_placeholders()
        self._open = OpenSizes(list(self._made_by))
        tensors = [each for each in pytree.tree_leaves(inputs) if isinstance(each, torch.Tensor)]
        self._sizes = self._open.bind([each.shape for each in tensors])

    def finish(self) -> CapturedModel:
        needed = self._find_needed()
        for node in self._program.graph.nodes:
            if node.op == "call_function" and node in needed:
                self._add(node)
        places = {id(each): index for index, each in enumerate(self._operations)}
        results = self._results()
        consumers: dict[Node, list[int]] = {}
        for index, making in enumerate(self._operations):
            for each in dict.fromkeys(making.inputs):
                consumers.setdefault(each, []).append(index)
        values, names = [], []
        for node, maker in self._made_by.items():
            if maker is not None and node not in maker.outputs:
                continue
            if node not in consumers and node not in results:
                continue
            producer = None if maker is None else places[id(maker)]
            used = tuple(consumers.get(node, ()))
            values.append(Value(self._size_bytes(node), producer, used, node in results))
            names.append(node.name)
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
        digest = _compute_digest(node for node in self._program.graph.nodes if node in needed)
        return CapturedModel(
            graph, nodes, tuple(names), self._open, self._sizes, self._program, digest
        )

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
                self._parameter_bytes.append(float(_nbytes(node.meta["val"])))
            self._constants[node] = (indices[key],)

    def _find_needed(self) -> set[Node]:
        """The nodes that the results depend on; sizes are not computed from tensors."""
        (output,) = self._program.graph.find_nodes(op="output")
        needed: set[Node] = set()
        waiting = [*output.all_input_nodes, *self._made_by, *self._constants]
        while waiting:
            node = waiting.pop()
            if node not in needed:
                needed.add(node)
                waiting += () if is_size(node) else node.all_input_nodes
        return needed

    def _results(self) -> set[Node]:
        (output,) = self._program.graph.find_nodes(op="output")
        return {each for each in output.all_input_nodes if each in self._made_by}

    def _add(self, node: Node) -> None:
        if is_size(node):
            self._constants[node] = ()
            return
        used = list(dict.fromkeys(node.all_input_nodes))
        inputs = [each for each in used if each not in self._constants]
        constants = {index for each in used for index in self._constants.get(each, ())}
        if not inputs:
            self._constants[node] = tuple(sorted(constants))
            return
        if self._extend(node, inputs, constants):
            return
        making = _Making(
            [node],
            inputs,
            self._count_flop(node),
            self._moved_bytes(node, used),
            tuple(sorted(constants)),
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

    def _concrete(self, value: Any) -> Any:
        """`value` of a node's meta, with all sizes as numbers."""

        def fix(each: Any) -> Any:
            if isinstance(each, torch.Tensor):
                shape = self._open.evaluate_all(tuple(map(as_expression, each.shape)), self._sizes)
                return torch.empty(shape, dtype=each.dtype, device="meta")
            if isinstance(each, torch.SymInt):
                return self._open.evaluate(as_expression(each), self._sizes)
            return each

        return pytree.tree_map(fix, value)

    def _size_bytes(self, node: Node) -> float:
        return float(_nbytes(self._concrete(node.meta.get("val"))))

    def _moved_bytes(self, node: Node, used: Sequence[Node]) -> float:
        if _is_view(node):
            return 0.0
        return sum(map(self._size_bytes, used)) + self._size_bytes(node)

    def _count_flop(self, node: Node) -> float:
        """Additions and multiplications."""
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            return 0.0

        def fix(each: Any) -> Any:
            return self._concrete(each.meta["val"]) if isinstance(each, Node) else each

        args: list[Any] = [fix(each) for each in node.args]
        result: Any = self._concrete(node.meta["val"])
        name = target.overloadpacket.__name__
        if name in ("linear", "matmul"):
            return 2.0 * float(math.prod(result.shape) * args[0].shape[-1])
        if name in ("conv1d", "conv2d", "conv3d"):
            return float(conv_flop_count(args[0].shape, args[1].shape, result.shape))
        if name == "scaled_dot_product_attention":
            count = sdpa_flop_count(  # type: ignore[no-untyped-call]
                *(each.shape for each in args[:3])
            )
            return float(count)
        formula = flop_registry.get(target.overloadpacket)
        return float(formula(*args, **node.kwargs, out_val=result)) if formula else 0.0


def is_size(node: Node) -> bool:
    """Whether a node is a number that follows of the inputs' sizes, not a tensor."""
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float)


def _compute_digest(nodes: Iterable[Node]) -> bytes:
    made = hashlib.sha256()
    for node in nodes:
        value = node.meta.get("val")
        tensors = [each for each in pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]
        shown = [(str(each.dtype), [str(size) for size in each.shape]) for each in tensors]
        device = pytree.tree_map(
            lambda each: None if isinstance(each, torch.device) else each, (node.args, node.kwargs)
        )
        made.update(f"{node.op} {node.name} {node.target} {device} {shown}\n".encode())
    return made.digest()


def _is_view(node: Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return bool(target.is_view) or target.overloadpacket.__name__ in _PASSED_ON


def _nbytes(value: Any) -> int:
    """Of all tensors in a node's `value`, whose sizes are numbers."""
    tensors = [each for each in pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]
    return sum(each.numel() * each.element_size() for each in tensors)
