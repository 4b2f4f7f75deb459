"""Encoder-decoders as graphs that go on from earlier tokens.

A graph has no state. Keys and values of earlier tokens in the decoder's self-attention are inputs,
those of all tokens outputs, and a node that computes with them keeps them in between. What the
decoder makes of the encoder's output does not depend on its tokens, and is kept as it is.

B batch, H heads, P earlier tokens, T new tokens, W width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache

from nesa_node.core.errors import UnsupportedFeatureError
from nesa_node.sharding.capture import CapturedModel, capture, keep_states

PAST = "past"
"""The argument of what is computed for earlier tokens, and its name among the outputs."""
PREFIX = "model."
"""Of the names of weights in the graph."""
DECODER_INPUT = "decoder_input_ids"
_UNMASKED = frozenset({"fsmt"})
"""Models that, with a cache, let several new tokens see each other's future."""
_EXAMPLE_PAST = 2
"""Earlier tokens while a network is captured: of one or none torch takes the number for fixed."""


class _PastLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Self-attention's cache of one layer: what is given, then what is computed."""

    def __init__(self, keys_BHPW: Tensor, values_BHPW: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lazy_initialization(keys_BHPW, values_BHPW)
        self.keys: Tensor = keys_BHPW
        self.values: Tensor = values_BHPW

    def get_seq_length(self) -> int:
        # A symbol, while a graph is captured, of which `int` would make a fixed number.
        return self.keys.shape[-2]


class _CrossLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Cross-attention's, which is computed of the encoder's output."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


class CachedDecoding(nn.Module):
    """A model whose forward pass takes and gives the cache of its decoder."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, inputs: Mapping[str, Any], past: Mapping[str, Mapping[str, Tensor]]
    ) -> dict[str, Any]:
        """`past` has keys and values [B, H, P, W] by the number of their layer."""
        tensors = [tensor for each in past.values() for tensor in each.values()]
        for tensor in tensors:
            # Else each has a length of its own in the graph, which requests would have to name.
            torch._check(  # type: ignore[no-untyped-call]  # torch gives it no types
                tensor.shape[2] == tensors[0].shape[2]
            )
        layers = [_PastLayer(each["keys"], each["values"]) for each in past.values()]
        cache = EncoderDecoderCache(
            Cache(layers=[*layers]),
            Cache(layers=[_CrossLayer() for _ in layers]),  # type: ignore[no-untyped-call]
        )
        output = self.model(**{**inputs, "use_cache": True}, past_key_values=cache)
        made = {name: each for name, each in output.items() if name != "past_key_values"}
        return {
            "output": type(output)(**made),
            PAST: {
                name: {"keys": layer.keys, "values": layer.values}
                for name, layer in zip(past, layers, strict=True)
            },
        }


def capture_with_cache(model: PreTrainedModel, inputs: Mapping[str, Any]) -> CapturedModel:
    """The graph of an encoder-decoder that goes on from any number of earlier tokens.

    Raises `UnsupportedFeatureError` for a model that cannot be captured so.
    """
    if model.config.model_type in _UNMASKED:
        raise UnsupportedFeatureError(f"{type(model).__name__} computes one further token alone")
    try:
        past = _example_past(model, inputs)
    except Exception as error:  # models raise what they like
        raise UnsupportedFeatureError(
            f"{type(model).__name__} gives no cache of keys and values: {error}"
        ) from error
    captured = capture(CachedDecoding(model), (), {"inputs": dict(inputs), PAST: past})
    program = captured.program
    _, kwargs = pytree.tree_unflatten(
        list(program.graph_signature.user_inputs), program.call_spec.in_spec
    )
    results = [getattr(spec.arg, "name", None) for spec in program.graph_signature.output_specs]
    made = pytree.tree_unflatten(results, program.call_spec.out_spec)[PAST]
    metas = {node.name: node.meta["val"] for node in program.graph.find_nodes(op="placeholder")}
    given, states = pytree.tree_leaves(kwargs[PAST]), pytree.tree_leaves(made)
    lengths = [metas[kwargs["inputs"][DECODER_INPUT]].shape[1]]
    lengths += [metas[name].shape[2] for name in given]
    if any(isinstance(length, int) for length in lengths):
        raise UnsupportedFeatureError(
            f"{type(model).__name__} cannot be captured for any number of earlier tokens"
        )
    return keep_states(captured, dict(zip(given, states, strict=True)))


def is_generating(model: nn.Module) -> bool:
    """Whether a model is an encoder-decoder that generates tokens."""
    return (
        isinstance(model, PreTrainedModel)
        and bool(model.config.is_encoder_decoder)
        and model.can_generate()
    )


def _example_past(
    model: PreTrainedModel, inputs: Mapping[str, Any]
) -> dict[str, dict[str, Tensor]]:
    """Zeros for `CachedDecoding.forward`, of the shapes that the model has for these inputs."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        given = {
            name: mode.from_tensor(each) if isinstance(each, Tensor) else each
            for name, each in inputs.items()
        }
        made = model(**{**given, "use_cache": True})
        shapes = [
            (tuple(layer.keys.shape), tuple(layer.values.shape))
            for layer in made["past_key_values"].self_attention_cache.layers
        ]
    return {
        str(number): {
            "keys": torch.zeros(*keys[:2], _EXAMPLE_PAST, keys[3], dtype=model.dtype),
            "values": torch.zeros(*values[:2], _EXAMPLE_PAST, values[3], dtype=model.dtype),
        }
        for number, (keys, values) in enumerate(shapes)
    }
