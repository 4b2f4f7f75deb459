"""transformers' own cache with keys and values in 8 bits: what ours is compared with.

B rows, H key/value heads, L tokens, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


class Int8DynamicCache(DynamicCache):
    """Rounds what a layer gives to multiples of a 127th of the largest of each token and head.

    It holds the rounded values as floats: the arithmetic of 8 bits without their storage.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        rounded = round_to_127ths(key_states), round_to_127ths(value_states)
        kept: tuple[Tensor, Tensor] = super().update(*rounded, layer_idx, *args, **kwargs)
        return kept


def round_to_127ths(values_BHLD: Tensor) -> Tensor:
    """As `Int8DynamicCache` does; the 127th itself is rounded to bfloat16."""
    largest = values_BHLD.abs().amax(-1, keepdim=True).double()
    step = (largest / 127).to(torch.bfloat16).double()
    levels = torch.where(step > 0, values_BHLD.double() / step, 0.0).round().clamp(-127, 127)
    return (levels * step).to(values_BHLD.dtype)
