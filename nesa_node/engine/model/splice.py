"""Runs layers of a decoder, and the ends of a model, whose own code does more than call modules.

Granite scales its embeddings in the decoder, Cohere its logits in the causal LM: such code runs as
transformers wrote it, in the client only. A node runs the decoder too, for its masks and positions,
but what its first layer gets is what came over the wire, and what its last layer gave is what goes.

R rows, L tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nesa_node.core.ids import Span
from nesa_node.engine.weights.families import ModelFamily
from nesa_node.engine.weights.model_tree import name_arguments


def slice_decoder(decoder: nn.Module, layers: str, local: Span) -> nn.Module:
    """Return a decoder with the layers `local` only, which shares all modules with `decoder`.

    Layers keep their absolute `layer_idx`: some models compute with it (GPT-2 can scale attention
    by it), and the cache is indexed by it. What the decoder indexes from 0 is sliced to fit.
    """
    sliced = copy.copy(decoder)
    sliced._modules = dict(decoder._modules)
    stack = decoder.get_submodule(layers)
    assert isinstance(stack, nn.ModuleList)
    sliced._modules[layers] = nn.ModuleList(list(stack)[local.start : local.end])
    config: Any = copy.deepcopy(decoder.config)
    types = getattr(config, "layer_types", None)
    config.num_hidden_layers = len(local)
    if types is not None:
        config.layer_types = list(types)[local.start : local.end]
    # Only the decoder's own config: its layers share that of the whole model.
    object.__setattr__(sliced, "config", config)
    return sliced


def run_decoder(decoder: Any, family: ModelFamily, hidden_RLD: Tensor, **inputs: Any) -> Tensor:
    """Run a node's decoder on the input of its first layer; returns its last layer's output.

    `inputs` are further arguments of transformers' decoder. In the caller's gradient mode.
    """
    if family.tree is None:
        output_RLD: Tensor = decoder(inputs_embeds=hidden_RLD, **inputs).last_hidden_state
        return output_RLD
    layers = decoder.get_submodule(family.layers_name)
    outputs: list[Tensor] = []

    def enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _replace_hidden(layer, args, kwargs, hidden_RLD)

    def leave(_: nn.Module, __: object, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    # Layers are shared by selections of a span: hooks stay no longer than the call.
    entered = layers[0].register_forward_pre_hook(enter, with_kwargs=True)
    left = layers[-1].register_forward_hook(leave)
    try:
        # A copy, since CTRL's decoder scales its input in place.
        decoder(inputs_embeds=hidden_RLD.clone(), **inputs)
    finally:
        entered.remove()
        left.remove()
    [result_RLD] = outputs
    return result_RLD


def _replace_hidden(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], hidden_RLD: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (hidden_RLD, *args[1:]), kwargs
    (name, _), *_ = name_arguments(layer, args, kwargs)
    return args, kwargs | {name: hidden_RLD}


class AbsentModule(nn.Module):
    """Stand-in for a module that runs in the client: returns its hidden states, or zero if none."""

    def __init__(self, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._hidden_size = hidden_size
        self._zero = torch.zeros((), dtype=dtype, device=device)

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        for value in (*args, *kwargs.values()):
            if (
                isinstance(value, Tensor)
                and value.ndim > 2
                and value.shape[-1] == self._hidden_size
            ):
                return value
        return self._zero


@dataclass(slots=True)
class _EndsCall:
    """One use of `ModelEnds`: what the layer gives, unless None, and what it got."""

    given_NLD: Tensor | None
    got_NLD: Tensor | None = None


_call: ContextVar[_EndsCall] = ContextVar("ends_call")


class ModelEnds:
    """Embedding and head of a causal LM, run by its own code with one layer that computes nothing.

    Thread-safe. In the caller's gradient mode. N tokens, each a sequence of its own.
    """

    def __init__(self, model: Any, family: ModelFamily) -> None:
        """`model` is changed: its layers are gone. Load what is left of it before use."""
        assert family.tree is not None
        self.model = model
        self._output_length = family.tree.output_length
        decoder = slice_decoder(model.get_submodule(family.decoder), family.layers_name, Span(0, 1))
        layer = decoder.get_submodule(family.layers_name).get_submodule("0")
        # The module remains, since decoders read attributes of their layers.
        layer.forward = self._pass_layer
        for owned in (layer._modules, layer._parameters, layer._buffers):
            owned.clear()
        model.set_submodule(family.decoder, decoder, strict=True)
        self._decoder: Any = decoder

    def embed(self, embeds_ND: Tensor, positions_N: Tensor) -> Tensor:
        """The first layer's input [N, D] of token embeddings."""
        call = _EndsCall(None)
        self._run(self._decoder, call, embeds_ND, positions_N)
        assert call.got_NLD is not None
        return call.got_NLD[:, 0]

    def norm(self, hidden_ND: Tensor) -> Tensor:
        """transformers' `last_hidden_state` [N, D] of the last layer's output."""
        output = self._run(self._decoder, _EndsCall(hidden_ND[:, None]), hidden_ND)
        normed_NLD: Tensor = output.last_hidden_state
        return normed_NLD[:, 0]

    def compute_logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits [N, V] of the last layer's output."""
        logits_NLV: Tensor = self._run(self.model, _EndsCall(hidden_ND[:, None]), hidden_ND).logits
        return logits_NLV[:, 0]

    def _run(
        self, module: Any, call: _EndsCall, embeds_ND: Tensor, positions_N: Tensor | None = None
    ) -> Any:
        if positions_N is None:
            positions_N = torch.zeros(len(embeds_ND), dtype=torch.long, device=embeds_ND.device)
        token = _call.set(call)
        try:
            return module(
                inputs_embeds=embeds_ND[:, None].clone(),
                position_ids=positions_N[:, None],
                use_cache=False,
            )
        finally:
            _call.reset(token)

    def _pass_layer(self, *args: Any, **kwargs: Any) -> Any:
        call = _call.get()
        call.got_NLD = args[0] if args else kwargs["hidden_states"]
        output_NLD = call.got_NLD if call.given_NLD is None else call.given_NLD
        if not self._output_length:
            return output_NLD
        return (output_NLD, *(None,) * (self._output_length - 1))
