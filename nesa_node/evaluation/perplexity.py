"""Perplexity of a text, with each token predicted once from a window of the tokens before it.

N scored tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.errors import ConfigError
from nesa_node.evaluation.paired_tests import mean_and_error
from nesa_node.evaluation.scoring import ScoringQuery, score_queries

BLOCK_TOKENS = 64
"""Tokens per block for the standard error: losses of neighbouring tokens are correlated, those of
such blocks hardly."""
MIN_TOKENS = 2 * BLOCK_TOKENS + 1


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp(m) of the mean negative log-likelihood m over all scored tokens.

    Standard error: the tokens are cut into consecutive blocks of about `BLOCK_TOKENS`; with s the
    standard deviation of the k block means, the error of m is s / sqrt(k), and that of exp(m) is
    exp(m) s / sqrt(k) (delta method). It refers to other texts of this kind and length, and is too
    small if blocks are correlated.
    """

    tokens: int
    block_nll: tuple[float, ...]
    mean_nll: float

    @classmethod
    def from_nll(cls, nll_N: Tensor) -> Perplexity:
        """From negative log-likelihoods [N] in text order; `ValueError` below two blocks."""
        tokens = len(nll_N)
        blocks = tokens // BLOCK_TOKENS
        if blocks < 2:
            raise ValueError(f"{tokens} tokens are fewer than two blocks of {BLOCK_TOKENS}")
        cuts = [tokens * block // blocks for block in range(blocks + 1)]
        means = tuple(float(nll_N[start:end].mean()) for start, end in pairwise(cuts))
        return cls(tokens, means, float(nll_N.mean()))

    @property
    def value(self) -> float:
        return math.exp(self.mean_nll)

    @property
    def standard_error(self) -> float:
        return self.value * mean_and_error(self.block_nll)[1]


def window_queries(ids: Sequence[int], *, context: int, stride: int) -> list[ScoringQuery]:
    """Cut `ids` into overlapping windows of `context` tokens, `stride` apart.

    The first window scores all its tokens but the first, which has no context; each later window
    its last `stride` (the last one possibly fewer), given at least `context - stride` tokens.
    Raises `ConfigError` for a stride that skips tokens.
    """
    if not 1 <= stride < context:
        raise ConfigError(f"--stride {stride} must be at least 1 and below --context {context}")
    queries, done = [], 1
    while done < len(ids):
        end = min(context if done == 1 else done + stride, len(ids))
        queries.append(ScoringQuery(ids[max(0, end - context) : end], end - done))
        done = end
    return queries


def measure_perplexity(
    model: DistributedModelForCausalLM, ids: Sequence[int], *, context: int, stride: int
) -> Perplexity:
    """Perplexity of at least `MIN_TOKENS` ids; raises as `window_queries`, `score_queries` do."""
    scores = score_queries(model, window_queries(ids, context=context, stride=stride))
    return Perplexity.from_nll(-torch.cat([one.log_likelihoods_S for one in scores]))


def rolling_queries(ids: Sequence[int], *, prefix_token: int, context: int) -> list[ScoringQuery]:
    """Queries that score each of `ids` once in disjoint windows, as lm-evaluation-harness does.

    The first window begins with the token `prefix_token`; each later one with the last token before
    it. The last window is extended to the left, so that it too feeds `context` tokens.
    """
    told = [prefix_token, *ids]
    queries, done = [], 1
    while done < len(told):
        end = min(done + context, len(told))
        queries.append(ScoringQuery(told[max(0, end - context - 1) : end], end - done))
        done = end
    return queries
