"""A network of a checkpoint, captured as a graph: its inputs and outputs, and pieces of it."""

from __future__ import annotations

import importlib.metadata
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nesa_node.compression.tensors import DTYPE_NAMES
from nesa_node.core.errors import UnsupportedFeatureError, is_installed
from nesa_node.core.ids import ModelId
from nesa_node.engine.graphs.decoder_cache import DECODER_INPUT, PAST, PREFIX
from nesa_node.engine.graphs.model_graph import RequestSizes, capture_network, make_model
from nesa_node.engine.graphs.piece import PieceProgram, build_piece
from nesa_node.engine.weights.checkpoint import Checkpoint, compute_model_id
from nesa_node.engine.weights.files import Progress
from nesa_node.engine.weights.skeleton import ModelTensors
from nesa_node.sharding.capture import CapturedModel
from nesa_node.sharding.dependence import find_fixed_values
from nesa_node.sharding.graph_plan import (
    GraphPlan,
    SpanInterface,
    check_plan,
    cut_evenly,
    find_interface,
    measure_work,
)
from nesa_node.sharding.open_sizes import Sizes, as_expression


@dataclass(frozen=True, slots=True)
class TensorShape:
    """What a value is at certain sizes."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Network:
    """A model whose forward pass is a graph. Its weights are not in memory."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, sizes: RequestSizes) -> None:
        """Capture the model for requests of `sizes`. Blocks the thread.

        Raises as `make_model` and `capture` do.
        """
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.sizes = sizes
        self.model: nn.Module = make_model(checkpoint.folder, name=checkpoint.name, dtype=dtype)
        self.captured: CapturedModel = capture_network(self.model, sizes)

    @property
    def input_names(self) -> tuple[str, ...]:
        """Arguments of the model that are tensors."""
        return tuple(name for name in self._inputs if name not in self._state_names)

    @cached_property
    def _inputs(self) -> dict[str, int | None]:
        """For each argument that is a tensor, the value that it is; None if nothing uses it."""
        return {name: self._places.get(node) for name, node in self._input_nodes.items()}

    @cached_property
    def _state_names(self) -> frozenset[str]:
        """Arguments that nodes keep between requests of a sequence."""
        return frozenset(name for name in self._inputs if name.startswith(f"{PAST}."))

    @property
    def states(self) -> Mapping[int, int]:
        """For each value that nodes keep, the one that takes its place in the next request."""
        return self.captured.states

    @cached_property
    def _example_shapes(self) -> dict[str, tuple[int, ...]]:
        sizes, open_sizes = self.captured.example_sizes, self.captured.sizes
        metas = {name: self._metas[node] for name, node in self._input_nodes.items()}
        return {
            name: open_sizes.evaluate_all(tuple(map(as_expression, meta.shape)), sizes)
            for name, meta in metas.items()
        }

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.captured.values)}

    @cached_property
    def _input_nodes(self) -> dict[str, str]:
        """For each argument of the captured call that is a tensor, the placeholder's name."""
        program = self.captured.program
        given = program.graph_signature.user_inputs
        _, kwargs = pytree.tree_unflatten(list(given), program.call_spec.in_spec)
        if self.parts:
            kwargs = kwargs["parts"]
        elif self.states:
            kwargs = {**kwargs["inputs"], PAST: kwargs[PAST]}
        paths, _ = pytree.tree_flatten_with_path(kwargs)
        return {
            ".".join(key.key for key in path): node  # type: ignore[attr-defined]  # all are dicts
            for path, node in paths
            if isinstance(node, str) and isinstance(self._metas.get(node), torch.Tensor)
        }

    @cached_property
    def _metas(self) -> dict[str, Any]:
        return {node.name: node.meta.get("val") for node in self.captured.program.graph.nodes}

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the networks of a pipeline, which share no value; none of a single network."""
        return tuple(share.name for share in self.captured.graph.shares)

    def bind(
        self, inputs: Mapping[str, Tensor], part: str | None = None, position: int = 0
    ) -> tuple[dict[int, Tensor], Sizes]:
        """The values that a request's inputs are, and its sizes.

        Of a pipeline the inputs of one `part`, whose names begin with it and a dot. Of a decoder
        the tokens from `position` on. Raises `UnsupportedFeatureError` for other inputs than the
        graph has, or of other shapes.
        """
        expected_names = [
            name
            for name in self._inputs
            if name not in self._state_names and (part is None or name.startswith(f"{part}."))
        ]
        if inputs.keys() != set(expected_names):
            raise UnsupportedFeatureError(
                f"{type(self.model).__name__} was captured with {', '.join(expected_names)}, and "
                f"is given {', '.join(inputs)}"
            )
        sizes = self._bind({name: tuple(each.shape) for name, each in inputs.items()}, position)
        values = {}
        for name, index in self._inputs.items():
            if index is not None and name in inputs:
                expected = self.find_shape(index, sizes).dtype
                values[index] = inputs[name].to(expected)
        return values, sizes

    def _bind(self, given: Mapping[str, tuple[int, ...]], position: int) -> Sizes:
        # Sizes of other parts are as good as any.
        shapes = {**self._example_shapes, **given}
        for name in self._state_names:
            _, heads, _, width = shapes[name]
            shapes[name] = shapes[DECODER_INPUT][0], heads, position, width
        return self.captured.sizes.bind(list(shapes.values()))

    def find_position(self, sizes: Sizes) -> int:
        """How many tokens of a sequence were computed by earlier requests."""
        return self.find_shape(next(iter(self.states)), sizes).shape[2] if self.states else 0

    @cached_property
    def position_sizes(self) -> frozenset[int]:
        """Which of a request's sizes are numbers of earlier tokens, which may be none."""
        lengths = {
            as_expression(self._metas[self.captured.values[each]].shape[2]) for each in self.states
        }
        symbols = self.captured.sizes.symbols
        return frozenset(index for index, symbol in enumerate(symbols) if symbol in lengths)

    def find_shape(self, value: int, sizes: Sizes) -> TensorShape:
        """Dtype and shape of one of the graph's values."""
        meta = self._metas[self.captured.values[value]]
        open_sizes = self.captured.sizes
        shape = open_sizes.evaluate_all(tuple(map(as_expression, meta.shape)), sizes)
        return TensorShape(meta.dtype, shape)

    @cached_property
    def example_sizes(self) -> Sizes:
        """Sizes of the requests that the network was captured for."""
        return self._bind({}, 0)

    def find_interface(self, operations: Sequence[int]) -> SpanInterface:
        """The values that a piece gets and gives, where nothing is computed yet."""
        found = find_interface(self.captured.graph, operations)
        received = tuple(index for index in found.received if index not in self.states)
        return SpanInterface(received, found.sent)

    def find_step_interface(self, operations: Sequence[int]) -> SpanInterface:
        """Those for further tokens of a sequence, of which nodes keep what does not change."""
        found = self.find_interface(self.split(operations)[1])
        received = tuple(index for index in found.received if index not in self.fixed_values)
        return SpanInterface(received, found.sent)

    def split(self, operations: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The operations that are the same for all tokens of a sequence, and the other ones.

        The latter use what the former make, and never the other way round.
        """
        outputs = self.captured.graph.outputs
        fixed = tuple(each for each in operations if self.fixed_values.issuperset(outputs[each]))
        changing = set(operations).difference(fixed)
        return fixed, tuple(each for each in operations if each in changing)

    @cached_property
    def fixed_values(self) -> frozenset[int]:
        """The values that are the same for all tokens that a decoder generates."""
        changing = [self._input_nodes[name] for name in (DECODER_INPUT, *self._state_names)]
        return find_fixed_values(self.captured, changing)

    def make_output(self, values: Mapping[int, Tensor]) -> Any:
        """What the model returns, of the graph's output values.

        None for those that are not given.
        """
        program = self.captured.program
        specs = program.graph_signature.output_specs
        leaves = [getattr(spec.arg, "value", None) for spec in specs]
        for index, spec in enumerate(specs):
            place = self._places.get(spec.arg.name) if hasattr(spec.arg, "name") else None
            if place is not None:
                leaves[index] = values.get(place)
        made = pytree.tree_unflatten(leaves, program.call_spec.out_spec)
        return made["output"] if self.states else made

    def outputs(self, part: str | None = None) -> tuple[int, ...]:
        """The values that the model returns, or one part of a pipeline."""
        graph = self.captured.graph
        outputs = (index for index, value in enumerate(graph.values) if value.is_output)
        if part is None:
            return tuple(outputs)
        share = self.parts.index(part)
        return tuple(
            index for index in outputs if graph.share_of[graph.values[index].operations[0]] == share
        )

    def make_plan(self, count: int) -> GraphPlan:
        """A plan of `count` pieces for equal machines. Raises `ConfigError`."""
        pieces = cut_evenly(self.captured.graph, count)
        return make_plan(self.captured, pieces, self.dtype, self.sizes)

    def check_plan(self, plan: GraphPlan) -> None:
        """Raise `UnsupportedFeatureError` for a plan of another graph."""
        check_plan(plan, self.captured.graph, self.captured.digest, library_versions())

    def build_piece(self, operations: Sequence[int], device: torch.device) -> PieceProgram:
        """The code of a piece, without weights. Raises `UnsupportedFeatureError`."""
        program = build_piece(self.captured, operations, device)
        if not self.states:
            return program
        names = {each: name.removeprefix(PREFIX) for each, name in program.weights.items()}
        return replace(program, weights=names)

    def count_weight_bytes(self, operations: Iterable[int]) -> int:
        """Bytes of the weights that these operations use."""
        return int(self.captured.graph.count_parameter_bytes(operations))

    def count_peak_bytes(
        self, operations: Sequence[int], sizes: Sizes, lasting: Collection[int]
    ) -> int:
        """Most bytes that the values of these operations take at once, run in this order.

        The `lasting` ones are held to the end, the remaining ones until they were last used.
        """
        graph = self.captured.graph
        place = {operation: position for position, operation in enumerate(operations)}
        change = [0] * (len(operations) + 1)
        seen: set[int] = set()
        for operation in operations:
            for index in (*graph.inputs[operation], *graph.outputs[operation]):
                if index in seen:
                    continue
                seen.add(index)
                value = graph.values[index]
                nbytes = self.find_shape(index, sizes).nbytes
                first = 0 if value.producer is None else place.get(value.producer, 0)
                inside = [place[each] for each in value.consumers if each in place]
                change[first] += nbytes
                if index not in lasting:
                    change[max(inside, default=first) + 1] -= nbytes
        return max(itertools.accumulate(change), default=0)

    def load_weights(
        self, program: PieceProgram, device: torch.device, progress: Progress | None = None
    ) -> dict[str, Tensor]:
        """Read the weights of a piece alone. Blocks the thread.

        Raises `CorruptCheckpointError` and what `Checkpoint.fetch` raises.
        """
        names = sorted(set(program.weights.values()))
        tensors = ModelTensors(self.checkpoint, self.model)
        tensors.load(names, dtype=None, device=device, task="loading weights", progress=progress)
        return tensors.take(names)


def make_plan(
    captured: CapturedModel,
    pieces: Sequence[Sequence[int]],
    dtype: torch.dtype,
    sizes: RequestSizes,
) -> GraphPlan:
    """A plan with these pieces of a network that was captured so."""
    return GraphPlan(
        graph=captured.digest.hex(),
        dtype=DTYPE_NAMES[dtype],  # type: ignore[arg-type]
        batch=sizes.batch,
        tokens=sizes.tokens,
        image_size=sizes.image_size,
        made_with=library_versions(),
        pieces=tuple(map(tuple, pieces)),
        work=tuple(measure_work(captured.graph, piece) for piece in pieces),
    )


def open_plan_network(checkpoint: Checkpoint, plan: GraphPlan) -> Network:
    """Capture a checkpoint's network as `plan` was made for. Blocks the thread.

    Raises as `Network` does, and `UnsupportedFeatureError` for a plan of another graph.
    """
    sizes = RequestSizes(plan.batch, plan.tokens, plan.image_size)
    network = Network(checkpoint, getattr(torch, plan.dtype), sizes)
    network.check_plan(plan)
    return network


def compute_plan_id(checkpoint: Checkpoint, plan: GraphPlan) -> ModelId:
    """Return `name@digest.plan`: nodes of one swarm have the same weights and the same plan."""
    return ModelId(f"{compute_model_id(checkpoint)}.{plan.digest}")


def library_versions() -> dict[str, str]:
    """Versions of the libraries that decide what a graph looks like."""
    names = ["torch", "transformers", *(["diffusers"] if is_installed("diffusers") else [])]
    return {name: importlib.metadata.version(name) for name in names}
