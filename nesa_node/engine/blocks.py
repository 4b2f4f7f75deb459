"""A span of a model's blocks, ready to run.

L tokens of this step, D hidden.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from nesa_node.core.errors import ContextLengthError
from nesa_node.core.span import Span
from nesa_node.engine.families import CacheHeads
from nesa_node.engine.sequence_cache import SequenceCache


class Blocks:
    """Runs steps of sequences whose keys and values lie in caches of their own.

    Not thread-safe: one executor thread owns it. Where it keeps no state between steps, sessions do
    not see each other.
    """

    def __init__(
        self,
        decoder: nn.Module,
        layers: str,
        span: Span,
        *,
        heads: CacheHeads,
        hidden_size: int,
        context_length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`decoder` runs `span` on `inputs_embeds` and returns the last block's output as it is."""
        self.span = span
        self.hidden_size = hidden_size
        self.context_length = context_length
        self.dtype = dtype
        self.device = device
        self.weight_bytes = sum(weight.nbytes for weight in decoder.parameters())
        self._decoder: Any = decoder
        self._layers = layers
        self._heads = heads
        self._parts: dict[Span, Blocks] = {}

    @property
    def cache_bytes_per_token(self) -> int:
        """2 x head_dim x n_kv_heads x blocks of the span x bytes.

        Nesa paper, eq. 4, corrected: it counts query heads and the whole model's blocks.
        """
        per_block = 2 * self._heads.dim * self._heads.count * self.dtype.itemsize
        return per_block * len(self.span)

    def part(self, span: Span) -> Blocks:
        """Return blocks of this span that share its weights. Raises `ValueError` for others."""
        if span == self.span:
            return self
        if not len(span) or not self.span.covers(span):
            raise ValueError(f"blocks {span} are not within {self.span}")
        if span not in self._parts:
            start = span.start - self.span.start
            self._parts[span] = Blocks(
                sliced_decoder(self._decoder, self._layers, Span(start, start + len(span))),
                self._layers,
                span,
                heads=self._heads,
                hidden_size=self.hidden_size,
                context_length=self.context_length,
                dtype=self.dtype,
                device=self.device,
            )
        return self._parts[span]

    def new_cache(self, capacity: int = 0) -> SequenceCache:
        """Return an empty cache for one sequence, with room for `capacity` tokens at once."""
        return SequenceCache(
            self.span, self._heads, dtype=self.dtype, device=self.device, capacity=capacity
        )

    @torch.inference_mode()
    def forward(self, hidden_LD: Tensor, cache: SequenceCache) -> Tensor:
        """Run L >= 1 tokens at positions `cache.length`... and append them to the cache.

        `hidden_LD` may be of any floating dtype and on any device, and is not changed. The result
        has this span's dtype and device. If it raises, the cache is as it was before.
        Raises `ContextLengthError`, and `ValueError` for a wrong shape or another span's cache.
        """
        if hidden_LD.ndim != 2 or hidden_LD.shape[1] != self.hidden_size or not len(hidden_LD):
            raise ValueError(f"expected [tokens, {self.hidden_size}], got {list(hidden_LD.shape)}")
        if cache.span != self.span:
            raise ValueError(f"a cache of blocks {cache.span} cannot serve blocks {self.span}")
        tokens = len(hidden_LD)
        end = cache.length + tokens
        if end > self.context_length:
            raise ContextLengthError(f"{end} tokens; the model holds {self.context_length}")
        cache.reserve(end)
        output = self._decoder(
            inputs_embeds=hidden_LD.to(device=self.device, dtype=self.dtype)[None],
            position_ids=torch.arange(cache.length, end, device=self.device)[None],
            past_key_values=cache,
            use_cache=True,
        )
        cache.advance(tokens)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden


def sliced_decoder(decoder: nn.Module, layers: str, local: Span) -> nn.Module:
    """Return a decoder that shares everything with `decoder` but runs these of its layers only.

    The layers keep their absolute `layer_idx`, which some models compute with (GPT-2 can scale
    attention by it) and which the cache counts by; what the decoder indexes from 0 is cut to fit.
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
    # Only the decoder's own: its layers share the whole model's config.
    object.__setattr__(sliced, "config", config)
    return sliced
