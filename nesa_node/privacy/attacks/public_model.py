"""The public model as an attacker runs it: its first blocks for many candidates of one position.

C candidates, D hidden, L tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from nesa_node.core.ids import Span
from nesa_node.engine.model.splice import slice_decoder


class PublicModel:
    """A causal language model of transformers, and its first `blocks` blocks by themselves.

    For models whose decoder has `layers` and a final `norm`, as Llama's. Answers about prefixes
    that grow by one token from call to call are computed with a cache.
    """

    def __init__(self, model: Any, blocks: int) -> None:
        self._model = model
        decoder: Any = slice_decoder(model.base_model, "layers", Span(0, blocks))
        decoder._modules["norm"] = nn.Identity()
        self._blocks = decoder
        self._prefixes: dict[str, tuple[list[int], DynamicCache, Any]] = {}

    @torch.inference_mode()
    def text_states(self, ids_L: Tensor) -> Tensor:
        """States [L, D] after the first blocks, of a whole text."""
        states: Tensor = self._blocks(input_ids=ids_L[None]).last_hidden_state
        return states[0]

    @torch.inference_mode()
    def states(self, prefix: Sequence[int], candidates: Tensor) -> Tensor:
        """States [C, D] of the position after `prefix`, one for each of `candidates` [C]."""
        cache: Any = copy.deepcopy(self._extend("blocks", self._blocks, prefix)[0])
        if prefix:
            cache.batch_repeat_interleave(len(candidates))
        places_C1 = torch.full((len(candidates), 1), len(prefix))
        output = self._blocks(
            input_ids=candidates[:, None],
            position_ids=places_C1,
            past_key_values=cache,
            use_cache=True,
        )
        states: Tensor = output.last_hidden_state[:, -1]
        return states

    @torch.inference_mode()
    def likely_tokens(self, prefix: Sequence[int]) -> Tensor:
        """All tokens [V], most likely first; in the order of their ids without a prefix."""
        if not prefix:
            return torch.arange(self._model.config.vocab_size)
        _, output = self._extend("model", self._model, prefix)
        order: Tensor = output.logits[0, -1].argsort(descending=True)
        return order

    def _extend(self, name: str, part: Any, prefix: Sequence[int]) -> tuple[DynamicCache, Any]:
        """The cache of `prefix`, and what `part` gave for its last tokens."""
        known, cache, output = self._prefixes.get(name, ([], DynamicCache(), None))
        if known != list(prefix[: len(known)]):
            known, cache, output = [], DynamicCache(), None
        if len(known) < len(prefix):
            new_1L = torch.tensor([prefix[len(known) :]])
            places_1L = torch.arange(len(known), len(prefix))[None]
            output = part(
                input_ids=new_1L, position_ids=places_1L, past_key_values=cache, use_cache=True
            )
        self._prefixes[name] = (list(prefix), cache, output)
        return cache, output
