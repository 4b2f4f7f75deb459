"""Generation of tokens by encoder-decoders whose forward pass runs in a swarm.

transformers' `generate` chooses the tokens. The encoder's pieces run once, and the decoder's for
each token, of which nodes keep keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from nesa_node.client.graphs.decoder_sequence import DecoderSequence, SequenceLostError
from nesa_node.client.graphs.remote_network import RemoteNetwork
from nesa_node.core.errors import ConfigError, UnsupportedModelError
from nesa_node.core.logging import get_logger
from nesa_node.engine.graphs.decoder_cache import DECODER_INPUT

log = get_logger(__name__)


class _EncoderInput(BaseModelOutput):
    """What stands for the encoder's output: its input, so that `generate` repeats it for beams."""

    sequence: DecoderSequence


class _Encoder(nn.Module):
    """Passes its input on to the forward pass, which runs the encoder's pieces."""

    def __init__(self, main: str) -> None:
        super().__init__()
        self._main = main

    def forward(self, **kwargs: Any) -> _EncoderInput:
        given = kwargs[self._main]
        made = _EncoderInput(last_hidden_state=given[..., None] if given.ndim == 2 else given)
        made.sequence = DecoderSequence()
        return made


def make_generator(network: RemoteNetwork) -> PreTrainedModel:
    """The network's model, without weights, of which `forward` and `generate` run in the swarm.

    Raises `UnsupportedModelError` for a model that generates without an encoder.
    """
    model = network.connection.network.model
    assert isinstance(model, PreTrainedModel)
    if not (model.can_generate() and model.config.is_encoder_decoder):
        raise UnsupportedModelError(
            f"{network.checkpoint.name} is a {type(model).__name__}, which has no encoder and "
            "decoder to generate with"
        )
    folder = network.checkpoint.folder
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.generation_config.use_cache = False
    main = model.main_input_name
    encoder = _Encoder(main)

    def forward(
        encoder_outputs: Any = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **inputs: Any,
    ) -> Any:
        if past_key_values is not None:
            raise ConfigError("nodes keep what they computed themselves: leave out use_cache=True")
        if decoder_attention_mask is not None and not bool(torch.all(decoder_attention_mask)):
            raise ConfigError("padding in decoder_input_ids is not supported in a swarm")
        if not isinstance(encoder_outputs, _EncoderInput) or decoder_input_ids is None:
            return network.run({**inputs, DECODER_INPUT: decoder_input_ids})
        given: Any = encoder_outputs.last_hidden_state
        sequence = encoder_outputs.sequence
        if network.connection.network.states:
            others = [each for each in inputs.values() if isinstance(each, Tensor)]
            sequence.go_on(decoder_input_ids, [given, *others])
        inputs[main] = given[..., 0] if given.ndim == 3 and main == "input_ids" else given
        return _run_decoder(network, inputs, decoder_input_ids, sequence)

    stand_in: Any = model
    stand_in.forward = forward
    stand_in.get_encoder = lambda *_, **__: encoder
    return model


def _run_decoder(
    network: RemoteNetwork, inputs: Mapping[str, Any], tokens_BT: Tensor, sequence: DecoderSequence
) -> Any:
    """The output for those of `tokens_BT` that nodes have not computed yet."""
    while True:
        try:
            new_BT = tokens_BT[:, sequence.position :]
            output = network.run({**inputs, DECODER_INPUT: new_BT}, sequence)
        except SequenceLostError as error:
            log.info("sequence_lost", position=sequence.position, reason=str(error))
            sequence.record_loss()
            continue
        sequence.record(tokens_BT)
        return output
