"""KV cache of one row, for models with attention outside transformers' interface.

H heads, L tokens of this step, T tokens cached, D head size.
"""

from __future__ import annotations

from torch import Tensor

from nesa_node.engine.attention import Run


class RowCache:
    """Cache interface of transformers' models for a batch of one, backed by a row's pages.

    Where `CacheHeads.repeats` > 1 the model repeats every head that many times; one copy is stored.
    """

    def __init__(self, run: Run) -> None:
        self._pool = run.table.pool
        self._length = run.table.length
        end = self._length + run.count
        self._new = run.table.slots(self._length, end)
        self._all = run.table.slots(0, end)

    def update(
        self, keys_1HLD: Tensor, values_1HLD: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's keys and values of this step; return all up to its end [1, H, T, D]."""
        layer = layer_idx - self._pool.span.start
        return (
            self._put(self._pool.keys_SHD[layer], keys_1HLD),
            self._put(self._pool.values_SHD[layer], values_1HLD),
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._length + query_length, 0

    def _put(self, side_SHD: Tensor, new_1HLD: Tensor) -> Tensor:
        repeats = self._pool.heads.repeats
        side_SHD[self._new] = new_1HLD[0, ::repeats].transpose(0, 1)
        kept_1HTD = side_SHD[self._all].transpose(0, 1).unsqueeze(0)
        return kept_1HTD.repeat_interleave(repeats, 1) if repeats > 1 else kept_1HTD
