"""Sampling of the next token of one choice.

V vocabulary, K candidates.
"""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

from nesa_node.api.decoding.adjustments import Adjustments, CommonAdjustments

GREEDY_BELOW = 1e-5
"""Temperature below which the argmax is taken."""
_TRIES = (512, 8192)
"""Sizes of top-k tried for top-p before the whole vocabulary, which takes milliseconds to sort."""


class Sampler:
    """Sampler of one choice: inverse transform sampling, with one random number per token.

    The same seed, index and logits give the same tokens. `index` is the choice's index in its job.
    """

    def __init__(self, common: CommonAdjustments, index: int) -> None:
        sampling = common.sampling
        self._sampling = sampling
        self._greedy = sampling.temperature < GREEDY_BELOW
        self._adjustments = Adjustments.wanted(common)
        seed = None if sampling.seed is None else f"{sampling.seed} {index}"
        self._random = random.Random(seed)

    @property
    def takes_best(self) -> bool:
        """Whether each token is the argmax of the logits, independently of earlier tokens."""
        return self._greedy and self._adjustments is None

    def choose(self, logits_V: Tensor, allowed_V: Tensor | None = None) -> int:
        """Sample a token of the mask `allowed_V` from float32 logits, which are not modified."""
        if self._adjustments is not None:
            logits_V = self._adjustments.applied(logits_V)
        if allowed_V is not None:
            logits_V = logits_V.masked_fill(~allowed_V, -math.inf)
        best = int(logits_V.argmax())
        chosen = best if self._greedy else self._draw(logits_V, best)
        if self._adjustments is not None:
            self._adjustments.note(chosen)
        return chosen

    def _draw(self, logits_V: Tensor, best: int) -> int:
        # Relative to the largest logit, so that low temperatures do not overflow.
        scores_V = (logits_V - logits_V[best]) / self._sampling.temperature
        ids_K, scores_K = self._candidates(scores_V)
        # float64: float32 would lose the tail of a large vocabulary.
        cumulated_K = scores_K.exp().cumsum(0, dtype=torch.float64)
        drawn = self._random.random() * float(cumulated_K[-1])
        at = int(torch.searchsorted(cumulated_K, drawn, right=True))
        if not math.isfinite(drawn) or at >= len(cumulated_K):
            return best
        return at if ids_K is None else int(ids_K[at])

    def _candidates(self, scores_V: Tensor) -> tuple[Tensor | None, Tensor]:
        """Candidate ids and scores after top-k, top-p and min-p; ids None: all of V, in order."""
        sampling = self._sampling
        top_k = min(sampling.top_k, len(scores_V))
        if not top_k and sampling.top_p >= 1:
            if sampling.min_p > 0:
                scores_V = scores_V.masked_fill(scores_V < math.log(sampling.min_p), -math.inf)
            return None, scores_V
        if top_k:
            scores_K, ids_K = scores_V.topk(top_k)
            weights_K = scores_K.exp()
            total = weights_K.sum()
        else:
            scores_K, ids_K, weights_K, total = _likeliest(scores_V, sampling.top_p)
        if sampling.top_p < 1:
            before_K = weights_K.cumsum(0) - weights_K
            kept = max(int((before_K < sampling.top_p * total).sum()), 1)
            scores_K, ids_K = scores_K[:kept], ids_K[:kept]
        if sampling.min_p > 0:
            kept = max(int((scores_K >= math.log(sampling.min_p)).sum()), 1)
            scores_K, ids_K = scores_K[:kept], ids_K[:kept]
        return ids_K, scores_K


def _likeliest(scores_V: Tensor, top_p: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores, ids and weights of enough top tokens to cover `top_p` of the weight; total weight."""
    total = scores_V.exp().sum()
    for count in (*(few for few in _TRIES if few < len(scores_V)), len(scores_V)):
        scores_K, ids_K = scores_V.topk(count)
        weights_K = scores_K.exp()
        if float(weights_K.sum()) >= top_p * float(total):
            break
    return scores_K, ids_K, weights_K, total
