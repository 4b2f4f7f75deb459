"""A diffusers pipeline's networks as one module: each has inputs and outputs of its own.

So one graph, one plan and one swarm have them all, and a request runs one network's pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from nesa_node.engine.weights.pipeline_folder import DENOISERS
from nesa_node.sharding.capture import CapturedModel
from nesa_node.sharding.operation_graph import Share

TYPICAL_STEPS = 40
"""How often a picture's denoiser runs, for each run of its other networks."""
HIDDEN_STATES = 2
"""Last hidden states of a text encoder that are given: pipelines use the last one, or the one
before."""


class PipelineNetworks(nn.Module):
    """Networks by name."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Run each network with its inputs."""
        return {name: _run(self.get_submodule(name), given) for name, given in parts.items()}


def _run(network: Any, given: Mapping[str, Any]) -> Any:
    if isinstance(network, PreTrainedModel):
        output = network(**given, output_hidden_states=True)
        states = output["hidden_states"]
        left_out = len(states) - HIDDEN_STATES
        output["hidden_states"] = (None,) * left_out + tuple(states[left_out:])
        return output
    if "latents" in given:
        return network.decode(given["latents"], return_dict=False)
    return network(**given, return_dict=False)


def divide_graph(captured: CapturedModel, parts: Sequence[str]) -> CapturedModel:
    """The graph of `PipelineNetworks`, with a share for each network."""
    program, graph = captured.program, captured.graph
    given = list(program.graph_signature.user_inputs)
    _, kwargs = pytree.tree_unflatten(given, program.call_spec.in_spec)
    part_of_node = {
        node: part for part in parts for node in pytree.tree_leaves(kwargs["parts"][part])
    }
    part_of = [part_of_node.get(node, "") for node in captured.values]
    operations: dict[str, list[int]] = {part: [] for part in parts}
    for operation, (inputs, outputs) in enumerate(zip(graph.inputs, graph.outputs, strict=True)):
        part = part_of[inputs[0]]
        operations[part].append(operation)
        for index in outputs:
            part_of[index] = part
    shares = tuple(
        Share(tuple(each), TYPICAL_STEPS if part in DENOISERS else 1, part)
        for part, each in operations.items()
    )
    return replace(captured, graph=replace(graph, shares=shares))
