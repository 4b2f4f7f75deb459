"""Distance of a token from the one that a sampler draws, in logits.

Token-DiFR ("DiFR: Inference verification despite nondeterminism", section 3) subtracts the claimed
token's score from the largest one, with the seed's Gumbel noise added to all. Our sampler has one
random number for each token (inverse transform sampling) in place of one for each token of the
vocabulary. Its counterpart is the smallest difference between changes of two logits with which the
sampler would have drawn the token: for greedy answers the same as the paper's margin.

V vocabulary, K candidates by descending score.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from nesa_node.api.generation.job import SamplingParams
from nesa_node.api.generation.sampler import Draw

_MAX_SCORE_GAP = 1e5
_STEPS = 50
"""Halvings of an interval: more than float32 has bits."""


class DrawGaps:
    """Distances of tokens from what one draw gave."""

    def __init__(self, draw: Draw, sampling: SamplingParams) -> None:
        self._draw = draw
        self._sampling = sampling
        self._best = float(draw.logits_V.max())
        self._intervals: _InOrder | _ByScore | None = None

    def gap(self, token_id: int) -> float:
        """Smallest change of differences of logits with which the draw may give `token_id`.

        0 if it does, or may by rounding alone; infinite for a token that the grammar forbids. With
        top-k, top-p or min-p it is a lower bound: a change that large need not suffice.
        """
        if self._draw.token_id == token_id:
            return 0.0
        logit = float(self._draw.logits_V[token_id])
        if not math.isfinite(logit):
            return math.inf
        if self._draw.uniform is None:
            return self._best - logit
        if self._intervals is None:
            self._intervals = self._make_intervals(self._draw.uniform)
        return self._intervals.gap(token_id) * self._sampling.temperature

    def _make_intervals(self, uniform: float) -> _InOrder | _ByScore:
        logits_V = self._draw.logits_V.double().cpu()
        scores_V = (logits_V - self._best) / self._sampling.temperature
        if self._sampling.top_k or self._sampling.top_p < 1:
            return _ByScore(scores_V, self._sampling, uniform)
        return _InOrder(scores_V, self._sampling.min_p, uniform)


def _smallest(is_possible: Callable[[float], bool]) -> float:
    """The smallest gap that is possible, by bisection."""
    low, high = 0.0, 1e-6
    while not is_possible(high):
        low, high = high, 2 * high
        if high > _MAX_SCORE_GAP:
            return math.inf
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_possible(middle) else (middle, high)
    return high


class _InOrder:
    """Tokens lie in the unit interval by their ids."""

    def __init__(self, scores_V: Tensor, min_p: float, uniform: float) -> None:
        self._scores_V = scores_V
        self._weights_V = scores_V.exp()
        self._floor = math.log(min_p) if min_p > 0 else -math.inf
        self._drawn = _logit(uniform)
        self._before_V = self._weights_V.cumsum(0) - self._weights_V
        self._total = float(self._weights_V.sum())

    def gap(self, token_id: int) -> float:
        """Smallest change of differences of scores that may give the token."""
        if self._floor > -math.inf:
            return _smallest(lambda gap: self._is_possible(token_id, gap))
        before, own = float(self._before_V[token_id]), float(self._weights_V[token_id])
        below = _log_odds(before, self._total - before) - self._drawn
        above = self._drawn - _log_odds(before + own, self._total - before - own)
        return max(below, above, 0.0)

    def _is_possible(self, token_id: int, gap: float) -> bool:
        if float(self._scores_V[token_id]) < self._floor - gap:
            return False
        own = float(self._weights_V[token_id])
        sure_V = self._weights_V.where(self._scores_V >= self._floor + gap, 0.0)
        possible_V = self._weights_V.where(self._scores_V >= self._floor - gap, 0.0)
        return _may_contain(
            self._drawn,
            gap,
            fewest_before=float(sure_V[:token_id].sum()),
            most_rest=own + float(possible_V[token_id + 1 :].sum()),
            most_until=own + float(possible_V[:token_id].sum()),
            fewest_after=float(sure_V[token_id + 1 :].sum()),
        )


class _ByScore:
    """Candidates lie in the unit interval by their scores, the best first.

    Tokens whose scores differ by less than the change may stand in either order.
    """

    def __init__(self, scores_V: Tensor, sampling: SamplingParams, uniform: float) -> None:
        scores_K = scores_V.sort(descending=True).values
        self._scores_V = scores_V
        self._ascending_K = -scores_K
        self._sums_K = torch.cat([torch.zeros(1, dtype=scores_K.dtype), scores_K.exp().cumsum(0)])
        """Of the weights of the first k, from none to all."""
        self._sampling = sampling
        self._drawn = _logit(uniform)

    def gap(self, token_id: int) -> float:
        """Smallest change of differences of scores that may give the token."""
        score = float(self._scores_V[token_id])
        return _smallest(lambda gap: self._is_possible(score, gap))

    def _is_possible(self, score: float, gap: float) -> bool:
        surely_before = self._count(score + gap, inclusive=False)
        kept_at_most = self._kept(gap)
        if surely_before >= kept_at_most:
            return False
        fewest_before = float(self._sums_K[surely_before])
        most_until = float(self._sums_K[self._count(score - gap, inclusive=True)])
        return _may_contain(
            self._drawn,
            gap,
            fewest_before=fewest_before,
            most_rest=float(self._sums_K[kept_at_most]) - fewest_before,
            most_until=most_until,
            fewest_after=float(self._sums_K[self._kept(-gap)]) - most_until,
        )

    def _count(self, score: float, *, inclusive: bool) -> int:
        """Tokens with a larger score, or also with this one."""
        return int(torch.searchsorted(self._ascending_K, -score, right=inclusive))

    def _kept(self, gap: float) -> int:
        """Most tokens that the filters keep; for a negative gap the fewest."""
        sampling, size = self._sampling, len(self._ascending_K)
        kept = min(sampling.top_k or size, size)
        if sampling.top_p < 1:
            total = float(self._sums_K[kept])
            # A token is kept if what lies before it has less than top-p of the whole.
            odds = math.exp(min(_logit(sampling.top_p) + gap, 700.0))
            most = torch.tensor(total * odds / (1 + odds), dtype=self._sums_K.dtype)
            kept = int(torch.searchsorted(self._sums_K[:kept], most))
        if sampling.min_p > 0:
            kept = min(kept, self._count(math.log(sampling.min_p) - gap, inclusive=True))
        return max(kept, 1)


def _may_contain(
    drawn: float,
    gap: float,
    *,
    fewest_before: float,
    most_rest: float,
    most_until: float,
    fewest_after: float,
) -> bool:
    """Whether the token's part of the unit interval may contain what was drawn, given by its log
    odds: changes whose differences are at most `gap` move those of each bound by that at most.
    """
    return (
        _log_odds(fewest_before, most_rest) - gap <= drawn
        and drawn <= _log_odds(most_until, fewest_after) + gap
    )


def _logit(probability: float) -> float:
    return _log_odds(probability, 1 - probability)


def _log_odds(part: float, rest: float) -> float:
    if rest <= 0:
        return math.inf
    return -math.inf if part <= 0 else math.log(part) - math.log(rest)
