"""What decides how many tokens are drafted: how often drafts are right, and what a token costs.

Pure: no clock, no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from nesa_node.client.speculation.drafts import CONFIDENCE_LEVELS, DraftKind, DraftSource

MAX_DRAFT_TOKENS = 7
"""Most tokens drafted for a row: a node takes a step of eight for a decode step."""
MAX_STEP_TOKENS = 16
"""Most tokens of one step, all rows together, drafts included."""
MAX_DRAFT_BY_SESSIONS: Final[Mapping[int, int]] = {0: 7, 1: 7, 2: 3, 3: 1}
"""Most tokens drafted for a row, by how many sessions decode at the busiest node: where more do,
drafts would take the time of other sessions."""

_LOOKUP_PRIORS = (0.2, 0.2, 0.35, 0.6, 0.75, 0.85, 0.9)
"""Chance that a token is right whose match has a length with that many bits."""
_PRIOR_TOKENS = 4.0
"""How many tokens the prior counts for."""
_MEMORY = 0.99
"""Weight of what is known of a kind, after each further token of it."""


class AcceptanceTable:
    """Chance that a drafted token is right, given that those before it are, by its kind."""

    def __init__(self) -> None:
        self._counts: dict[DraftKind | DraftSource, tuple[float, float]] = {}
        """Accepted tokens, and all, of a kind and of all kinds of a source."""

    def chance(self, kind: DraftKind) -> float:
        right, total = self._counts.get(kind, (0.0, 0.0))
        return (right + _PRIOR_TOKENS * _prior(kind)) / (total + _PRIOR_TOKENS)

    def mean_chance(self, source: DraftSource) -> float:
        """Chance of a source's tokens, of whatever kind."""
        right, total = self._counts.get(source, (0.0, 0.0))
        return (right + _PRIOR_TOKENS / 2) / (total + _PRIOR_TOKENS)

    def record(self, kind: DraftKind, is_right: bool) -> None:
        for key in (kind, kind.source):
            right, total = self._counts.get(key, (0.0, 0.0))
            self._counts[key] = (_MEMORY * right + is_right, _MEMORY * total + 1)


def _prior(kind: DraftKind) -> float:
    if kind.source == "lookup":
        return _LOOKUP_PRIORS[min(kind.level, len(_LOOKUP_PRIORS) - 1)]
    return (kind.level + 0.5) / CONFIDENCE_LEVELS


_SHARE = 0.1
"""Weight of each further step in the means of `StepTimes`."""
_PRIOR_SLOPE = 0.05
"""Assumed time of a further token, as a share of a step of one, until it was measured."""
_PRIOR_VARIANCE = 0.5
"""How much the slope so far counts beside the last steps, in squared tokens."""
_SLOPE_SHARE = 0.25
"""How far the slope follows each fit."""
_LEAST_SLOPE = 0.01
"""Least slope, as a share of a step's time for each of its tokens."""
_MAX_OUTLIER = 3.0
"""A step counts for at most this many times the mean: a failover tells nothing of drafts."""


class StepTimes:
    """Time of a step by its number of tokens: a line, fitted to the last steps."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._variance = self._covariance = 0.0
        self._token_s: float | None = None
        self.slope_s = 0.0
        """Seconds that a further token adds to a step."""

    @property
    def is_known(self) -> bool:
        """Whether a step was recorded."""
        return self._token_s is not None

    @property
    def token_s(self) -> float:
        """Seconds for each generated token, of all rows together; 0 before the first step."""
        return self._token_s or 0.0

    def single_s(self, tokens: int) -> float:
        """Expected seconds of a step of `tokens` tokens, which all are generated ones."""
        return max(self._seconds + self.slope_s * (tokens - self._tokens), 0.2 * self._seconds)

    def record(self, sent: int, generated: int, seconds: float, draft_s: float = 0.0) -> None:
        """Record a step of `sent` tokens, drafted in `draft_s`, that generated `generated`."""
        token_s = (seconds + draft_s) / max(generated, 1)
        if self._token_s is None:
            self._tokens, self._seconds, self._token_s = float(sent), seconds, token_s
            self.slope_s = _PRIOR_SLOPE * seconds / sent
            return
        seconds = min(seconds, _MAX_OUTLIER * self._seconds)
        more, later = sent - self._tokens, seconds - self._seconds
        self._tokens += _SHARE * more
        self._seconds += _SHARE * later
        self._variance = (1 - _SHARE) * (self._variance + _SHARE * more * more)
        self._covariance = (1 - _SHARE) * (self._covariance + _SHARE * more * later)
        token_s = min(token_s, _MAX_OUTLIER * self._token_s)
        self._token_s += _SHARE * (token_s - self._token_s)
        self._fit_slope()

    def _fit_slope(self) -> None:
        """Least squares over the last steps, as far as their numbers of tokens differ."""
        known = _PRIOR_VARIANCE
        fitted_s = (self._covariance + known * self.slope_s) / (self._variance + known)
        mean_s = self._seconds / self._tokens
        fitted_s = min(max(fitted_s, _LEAST_SLOPE * mean_s), self._seconds)
        self.slope_s += _SLOPE_SHARE * (fitted_s - self.slope_s)
