"""Adjustments of logits before sampling: penalties, and biases of the request.

V vocabulary, K adjusted tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from nesa_node.api.decoding.job import Sampling

_FIRST_PLACES = 64


class CommonAdjustments:
    """State that the choices of a job share, since a prompt may be long.

    The prompt's tokens, if the repetition penalty needs them, and the biases.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self.sampling = sampling
        self.seen = frozenset(prompt if sampling.repetition_penalty != 1 else ())
        self.seen_ids_K = torch.tensor(tuple(self.seen), dtype=torch.int64)
        self.biased_ids_K = torch.tensor(tuple(sampling.logit_bias), dtype=torch.int64)
        self.biases_K = torch.tensor(tuple(sampling.logit_bias.values()), dtype=torch.float32)


class Adjustments:
    """Adjustments of one choice: the repetition penalty over prompt and answer, then the presence
    and frequency penalties and the biases."""

    def __init__(self, common: CommonAdjustments) -> None:
        self._common = common
        self._repetition = common.sampling.repetition_penalty
        self._presence = common.sampling.presence_penalty
        self._frequency = common.sampling.frequency_penalty
        self._counts: Counter[int] = Counter()
        self._seen = _TokenTable()
        self._added = _TokenTable()

    @classmethod
    def wanted(cls, common: CommonAdjustments) -> Adjustments | None:
        """Adjustments for a choice; None if the job's parameters adjust nothing."""
        sampling = common.sampling
        is_wanted = (
            sampling.repetition_penalty != 1
            or sampling.presence_penalty
            or sampling.frequency_penalty
            or sampling.logit_bias
        )
        return cls(common) if is_wanted else None

    def applied(self, logits_V: Tensor) -> Tensor:
        """Adjusted copy of `logits_V`, on its device."""
        logits_V, device = logits_V.clone(), logits_V.device
        answered_K, _ = self._seen.entries(device)
        for ids_K in (self._common.seen_ids_K.to(device), answered_K):
            scores_K = logits_V[ids_K]
            logits_V[ids_K] = torch.where(
                scores_K < 0, scores_K * self._repetition, scores_K / self._repetition
            )
        ids_K, values_K = self._added.entries(device)
        # These values include the biases of their tokens.
        moved_K = logits_V[ids_K] + values_K
        logits_V[self._common.biased_ids_K.to(device)] += self._common.biases_K.to(device)
        logits_V[ids_K] = moved_K
        return logits_V

    def note(self, token_id: int) -> None:
        """Add the answer's next token to the counts."""
        if self._repetition != 1 and token_id not in self._common.seen:
            self._seen.add(token_id, 0.0)
        if self._presence or self._frequency:
            first = token_id not in self._counts
            self._counts[token_id] += 1
            if first:
                self._added.add(token_id, self._common.sampling.logit_bias.get(token_id, 0.0))
            self._added.add(token_id, -self._frequency - (self._presence if first else 0.0))


class _TokenTable:
    """Map from token ids to float32 values, as tensors that double when they are full.

    Room for the longest answer is not allocated in advance, since few answers are that long.
    """

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._ids = torch.zeros(_FIRST_PLACES, dtype=torch.int64)
        self._values = torch.zeros(_FIRST_PLACES)

    def add(self, token_id: int, value: float) -> None:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids = torch.cat((self._ids, torch.zeros_like(self._ids)))
            self._values = torch.cat((self._values, torch.zeros_like(self._values)))
        self._ids[place] = token_id
        self._values[place] += value

    def entries(self, device: torch.device) -> tuple[Tensor, Tensor]:
        count = len(self._places)
        return self._ids[:count].to(device), self._values[:count].to(device)
