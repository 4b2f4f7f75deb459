"""A diffusers pipeline's networks as one module: each has inputs and outputs of its own.

So one graph, one plan and one swarm have them all, and a request runs one network's pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

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
