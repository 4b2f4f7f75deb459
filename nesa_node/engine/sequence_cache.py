"""The keys and values of one sequence in one span.

H heads, L tokens of this step, T tokens cached, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nesa_node.core.span import Span
from nesa_node.engine.families import CacheHeads

CHUNK_TOKENS = 256


class SequenceCache:
    """Grows by chunks of `CHUNK_TOKENS`; a step writes in place and reads views.

    Also what transformers' models ask of a cache (`update`, `get_seq_length`, `get_mask_sizes`,
    `get_query_offset`) for a batch of one. Windowed layers keep all tokens, the model's mask leaves
    the old ones out: any rollback is a change of length. `length` moves only when a whole step is
    done, so a step that raised can be repeated. Not thread-safe.
    """

    def __init__(
        self,
        span: Span,
        heads: CacheHeads,
        *,
        dtype: torch.dtype,
        device: torch.device,
        capacity: int = 0,
    ) -> None:
        self.span = span
        self.length = 0
        self._heads = heads
        self._dtype = dtype
        self._device = device
        self._capacity = 0
        self._keys_1HTD: list[Tensor] = []
        self._values_1HTD: list[Tensor] = []
        if capacity:
            self.reserve(capacity)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self._keys_1HTD, *self._values_1HTD))

    def reserve(self, tokens: int) -> None:
        """Have room for `tokens` in total. Copies what is cached if it must grow."""
        if tokens <= self._capacity:
            return
        self._capacity = -(-tokens // CHUNK_TOKENS) * CHUNK_TOKENS
        self._keys_1HTD = self._grown(self._keys_1HTD)
        self._values_1HTD = self._grown(self._values_1HTD)

    def advance(self, tokens: int) -> None:
        """Keep what the last step wrote."""
        assert self.length + tokens <= self._capacity
        self.length += tokens

    def truncate(self, length: int) -> None:
        """Forget all tokens from `length` on. Raises `ValueError` beyond what is cached."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll back to {length} of {self.length} cached tokens")
        self.length = length

    def update(
        self, keys_1HLD: Tensor, values_1HLD: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write this step's keys and values of a layer; return views of all up to its end."""
        layer = layer_idx - self.span.start
        end = self.length + keys_1HLD.shape[2]
        repeats = self._heads.repeats
        if repeats > 1:
            keys_1HLD, values_1HLD = keys_1HLD[:, ::repeats], values_1HLD[:, ::repeats]
        keys = self._keys_1HTD[layer][:, :, :end]
        values = self._values_1HTD[layer][:, :, :end]
        keys[:, :, self.length :].copy_(keys_1HLD)
        values[:, :, self.length :].copy_(values_1HLD)
        if repeats > 1:
            return keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.length + query_length, 0

    def _grown(self, old_1HTD: list[Tensor]) -> list[Tensor]:
        shape = (1, self._heads.count, self._capacity, self._heads.dim)
        grown = []
        for layer in range(len(self.span)):
            tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
            if old_1HTD and self.length:
                tensor[:, :, : self.length].copy_(old_1HTD[layer][:, :, : self.length])
            if old_1HTD:
                # Frees each layer's old memory before the next one grows.
                old_1HTD[layer] = tensor
            grown.append(tensor)
        return grown
