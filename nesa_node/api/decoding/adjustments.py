"""What moves logits before anything is chosen: penalties, and the biases that a request names.

V vocabulary, K tokens that are moved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from nesa_node.api.decoding.job import Sampling


class Adjustments:
    """First the repetition penalty, over prompt and answer, then what is added for each token."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], *, most_tokens: int) -> None:
        self._repetition = sampling.repetition_penalty
        self._presence = sampling.presence_penalty
        self._frequency = sampling.frequency_penalty
        self._counts: Counter[int] = Counter()
        self._seen = _TokenTable(len(prompt) + most_tokens)
        if self._repetition != 1:
            for token in dict.fromkeys(prompt):
                self._seen.add(token, 0.0)
        self._added = _TokenTable(len(sampling.logit_bias) + most_tokens)
        for token, bias in sampling.logit_bias.items():
            self._added.add(token, bias)

    @classmethod
    def wanted(
        cls, sampling: Sampling, prompt: Sequence[int], *, most_tokens: int
    ) -> Adjustments | None:
        """None where nothing is to be moved."""
        is_wanted = (
            sampling.repetition_penalty != 1
            or sampling.presence_penalty
            or sampling.frequency_penalty
            or sampling.logit_bias
        )
        return cls(sampling, prompt, most_tokens=most_tokens) if is_wanted else None

    def applied(self, logits_V: Tensor) -> Tensor:
        """A copy of `logits_V`, moved."""
        logits_V = logits_V.clone()
        ids_K, values_K = self._seen.entries(logits_V.device)
        if len(ids_K):
            scores_K = logits_V[ids_K]
            logits_V[ids_K] = torch.where(
                scores_K < 0, scores_K * self._repetition, scores_K / self._repetition
            )
        ids_K, values_K = self._added.entries(logits_V.device)
        if len(ids_K):
            logits_V[ids_K] += values_K
        return logits_V

    def note(self, token_id: int) -> None:
        """The answer goes on with this token."""
        if self._repetition != 1:
            self._seen.add(token_id, 0.0)
        if self._presence or self._frequency:
            first = token_id not in self._counts
            self._counts[token_id] += 1
            self._added.add(token_id, -self._frequency - (self._presence if first else 0.0))


class _TokenTable:
    """Token ids, each once, with a number; at most `size` of them."""

    def __init__(self, size: int) -> None:
        self._places: dict[int, int] = {}
        self._ids = torch.zeros(size, dtype=torch.int64)
        self._values = torch.zeros(size)

    def add(self, token_id: int, value: float) -> None:
        place = self._places.setdefault(token_id, len(self._places))
        self._ids[place] = token_id
        self._values[place] += value

    def entries(self, device: torch.device) -> tuple[Tensor, Tensor]:
        count = len(self._places)
        return self._ids[:count].to(device), self._values[:count].to(device)
