"""A piece of a captured network as a module that runs alone, on values from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from nesa_node.core.errors import UnsupportedFeatureError
from nesa_node.sharding.capture import CapturedModel, is_size
from nesa_node.sharding.graph_plan import SpanInterface, find_interface
from nesa_node.sharding.open_sizes import Sizes, as_expression


@dataclass(frozen=True, slots=True)
class PieceProgram:
    """Code of a piece. Its tensors are on the meta device until `GraphPiece` replaces them."""

    module: fx.GraphModule
    """Takes received values, then numbers, and returns a tuple of sent values."""
    interface: SpanInterface
    """With the states that the piece uses and makes."""
    numbers: tuple[Any, ...]
    """Expressions of symbols, whose values it takes."""
    weights: Mapping[str, str]
    """Names of the network's parameters and buffers, by attribute of the module."""
    constants: Mapping[str, Tensor]
    """Other tensors, by attribute of the module."""


def build_piece(
    captured: CapturedModel, operations: Sequence[int], device: torch.device
) -> PieceProgram:
    """Make a module of `operations`, in this order. Raises `UnsupportedFeatureError`."""
    return _PieceBuilder(captured, operations, device).finish()


def find_piece_interface(captured: CapturedModel, operations: Sequence[int]) -> SpanInterface:
    """What the code of a piece takes and gives: with states, which no machine gets or sends."""
    interface = find_interface(captured.graph, operations)
    own = set(operations)
    states = {
        made for made in captured.states.values() if captured.graph.values[made].producer in own
    }
    return SpanInterface(interface.received, tuple(sorted(states.union(interface.sent))))


class _PieceBuilder:
    def __init__(
        self, captured: CapturedModel, operations: Sequence[int], device: torch.device
    ) -> None:
        self._captured = captured
        self._device = device
        self._named: dict[str, Node] = {node.name: node for node in captured.program.graph.nodes}
        self._own = [self._named[name] for each in operations for name in captured.nodes[each]]
        self._interface = find_piece_interface(captured, operations)
        self._graph = fx.Graph()
        self._made: dict[Node, Node] = {}
        self._numbers: list[Any] = []
        self._tensors: dict[str, Tensor] = {}
        self._weights: dict[str, str] = {}
        self._constants: dict[str, Tensor] = {}

    def finish(self) -> PieceProgram:
        for index in self._interface.received:
            node = self._named[self._captured.values[index]]
            self._made[node] = self._graph.placeholder(f"value_{index}")
        own = set(self._own)
        needed = self._find_constants(own)
        sizes = [node for node in needed if is_size(node)]
        for node in sizes:
            value = node.meta["val"]
            if isinstance(value, torch.SymInt):
                self._made[node] = self._graph.placeholder(f"size_{len(self._numbers)}")
                self._numbers.append(as_expression(value))
        for node in needed:
            if node.op == "placeholder":
                self._made[node] = self._add_tensor(node)
            elif node not in self._made and not is_size(node):
                self._copy(node)
        for node in self._own:
            self._copy(node)
        sent = [self._named[self._captured.values[index]] for index in self._interface.sent]
        self._graph.output(tuple(self._made[node] for node in sent))
        self._graph.lint()
        module = fx.GraphModule(self._tensors, self._graph)
        return PieceProgram(
            module, self._interface, tuple(self._numbers), self._weights, self._constants
        )

    def _find_constants(self, own: set[Node]) -> list[Node]:
        """Nodes that the piece makes anew, in the order of the program."""
        found: set[Node] = set()
        waiting = [each for node in self._own for each in node.all_input_nodes]
        while waiting:
            node = waiting.pop()
            if node in own or node in self._made or node in found:
                continue
            found.add(node)
            if not is_size(node):
                waiting += node.all_input_nodes
        return [node for node in self._captured.program.graph.nodes if node in found]

    def _add_tensor(self, node: Node) -> Node:
        """An attribute for a placeholder of the program that is no value."""
        signature = self._captured.program.graph_signature
        name = f"tensor_{len(self._tensors)}"
        weight = signature.inputs_to_parameters.get(node.name) or signature.inputs_to_buffers.get(
            node.name
        )
        constant = self._captured.program.constants.get(
            weight or signature.inputs_to_lifted_tensor_constants.get(node.name, "")
        )
        if isinstance(constant, Tensor):
            if constant.is_meta:
                raise UnsupportedFeatureError(
                    f"{node.name} is a tensor without values: the network was captured on the meta "
                    "device"
                )
            self._constants[name] = constant
        elif weight is not None:
            self._weights[name] = weight
        else:
            raise UnsupportedFeatureError(f"{node.name} is an input that is no tensor")
        self._tensors[name] = torch.empty(node.meta["val"].shape, device="meta")
        return self._graph.get_attr(name)

    def _copy(self, node: Node) -> None:
        made = self._graph.node_copy(node, self._find_made)
        made.args = self._on_device(made.args)
        made.kwargs = self._on_device(made.kwargs)
        made.meta = {}
        self._made[node] = made

    def _find_made(self, node: Node) -> Any:
        found = self._made.get(node)
        if found is not None:
            return found
        # A number that does not depend on sizes.
        value = node.meta["val"]
        if not is_size(node) or isinstance(value, torch.SymFloat | torch.SymBool):
            raise UnsupportedFeatureError(f"{node.name} is computed from sizes as no whole number")
        return value

    def _on_device(self, args: Any) -> Any:
        if isinstance(args, torch.device):
            return self._device
        if isinstance(args, tuple | list):
            return type(args)(map(self._on_device, args))
        if isinstance(args, dict):
            return {key: self._on_device(value) for key, value in args.items()}
        return args


class GraphPiece:
    """A piece with its weights, ready to run."""

    def __init__(
        self,
        captured: CapturedModel,
        program: PieceProgram,
        weights: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        """`weights` are the network's parameters and buffers, by name, on `device`."""
        self.interface = program.interface
        self._captured = captured
        self._program = program
        module = program.module
        for attribute, name in program.weights.items():
            _replace(module, attribute, weights[name])
        for attribute, constant in program.constants.items():
            _replace(module, attribute, constant.detach().to(device))

    def drop_weights(self) -> None:
        """Free the weights; the piece cannot run any more."""
        for attribute in self._program.weights:
            _replace(self._program.module, attribute, torch.empty(0, device="meta"))

    @torch.inference_mode()
    def run(self, values: Iterable[Tensor], sizes: Sizes) -> tuple[Tensor, ...]:
        """Compute `interface.sent` of `interface.received`, for these values of the symbols."""
        evaluate = self._captured.sizes.evaluate
        numbers = [evaluate(each, sizes) for each in self._program.numbers]
        made: tuple[Tensor, ...] = self._program.module(*values, *numbers)
        return made


def _replace(module: fx.GraphModule, attribute: str, tensor: Tensor) -> None:
    delattr(module, attribute)
    module.register_buffer(attribute, tensor.detach(), persistent=False)
