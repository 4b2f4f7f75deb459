"""Whole `generate` calls with the time of every token.

L columns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from benchmarks.figures import gaps, percentile


@dataclass(frozen=True, slots=True)
class Generation:
    """One greedy `generate` of one row."""

    tokens: tuple[int, ...]
    """The new ones."""
    started: float
    """`time.perf_counter()`, as all times here."""
    token_times: tuple[float, ...]
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.started

    @property
    def tokens_per_s(self) -> float:
        return len(self.tokens) / self.seconds

    @property
    def first_token_s(self) -> float:
        return self.token_times[0] - self.started

    @property
    def gaps_s(self) -> list[float]:
        return gaps(self.token_times)

    def as_json(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "first_token_s": self.first_token_s,
            "gap_p50_s": percentile(self.gaps_s, 50),
            "gap_p99_s": percentile(self.gaps_s, 99),
        }


class TokenTimes(BaseStreamer):
    """Notes when each token comes. `on_token` is told how many there are."""

    def __init__(self, on_token: Callable[[int], None] | None = None) -> None:
        self.times: list[float] = []
        self._on_token = on_token
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        """The first call brings the prompt."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.times.append(time.perf_counter())
        if self._on_token is not None:
            self._on_token(len(self.times))

    def end(self) -> None:
        pass


class StopWhen(StoppingCriteria):
    def __init__(self, done: Callable[[], bool]) -> None:
        self._done = done

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.full((len(input_ids),), self._done(), dtype=torch.bool)


def generate(
    model: Any,
    prompt_1L: Tensor,
    new_tokens: int,
    *,
    stop_when: Callable[[], bool] | None = None,
    times: TokenTimes | None = None,
    **options: Any,
) -> Generation:
    """Exactly `new_tokens` greedy tokens, or fewer once `stop_when` says so."""
    streamer = times or TokenTimes()
    if stop_when is not None:
        options["stopping_criteria"] = StoppingCriteriaList([StopWhen(stop_when)])
    started = time.perf_counter()
    ids_1L: Tensor = model.generate(
        prompt_1L,
        attention_mask=torch.ones_like(prompt_1L),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        streamer=streamer,
        **options,
    )
    ended = time.perf_counter()
    tokens = tuple(ids_1L[0, prompt_1L.shape[1] :].tolist())
    return Generation(tokens, started, tuple(streamer.times), ended)
