"""What a node of late blocks reads without any training: the next token, by the public head.

The final norm and the head of the model are applied to a hidden state as if the remaining blocks
were not there (nostalgebraist 2020, "interpreting GPT: the logit lens").

T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_ROWS_AT_ONCE = 256


def read_next_tokens(states_TD: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
    """The most likely token [T] after each position; `head` gives logits [., V], with the norm."""
    with torch.inference_mode():
        parts = [head(part_TD).argmax(-1) for part_TD in torch.split(states_TD, _ROWS_AT_ONCE)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
