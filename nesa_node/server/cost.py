"""Cost model of iterations, learned from those that ran."""

from __future__ import annotations

LEARNING_RATE = 0.25
MOST_SURPRISE = 2.0
"""Most times its prediction that a measured time counts: an outlier teaches little."""
UNKNOWN_S_PER_TOKEN = 0.02
"""Prediction before anything ran: slow, so that the first iterations are short."""


class CostModel:
    """Seconds by token count: one exponential average per power of two, linear in between.

    Stale averages are corrected by two facts about a batch: fewer tokens take no longer, and more
    tokens take no longer per token.
    """

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, float]] = {}

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn that `tokens` >= 1 took `seconds`."""
        size = tokens.bit_length()
        if self._points:
            seconds = min(seconds, MOST_SURPRISE * self.seconds(tokens))
        mean_tokens, mean_s = self._points.get(size, (float(tokens), seconds))
        self._points[size] = (
            mean_tokens + LEARNING_RATE * (tokens - mean_tokens),
            mean_s + LEARNING_RATE * (seconds - mean_s),
        )

    def seconds(self, tokens: float) -> float:
        """Predicted seconds; never fewer for more tokens."""
        if not self._points:
            return tokens * UNKNOWN_S_PER_TOKEN
        points = self._points.values()
        most = min(seconds * max(tokens / known, 1.0) for known, seconds in points)
        below = max((point for point in points if point[0] <= tokens), default=None)
        above = min((point for point in points if point[0] > tokens), default=None)
        if below is None or above is None or above[1] <= below[1]:
            return most
        slope = (above[1] - below[1]) / (above[0] - below[0])
        return min(below[1] + slope * (tokens - below[0]), most)

    def tokens_within(self, seconds: float, most: int) -> int:
        """The largest number of tokens, up to `most`, predicted to take at most `seconds`."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.seconds(middle) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low
