"""How long an iteration takes, learnt from those that ran."""

from __future__ import annotations

LEARNING_RATE = 0.25
MOST_SURPRISE = 2.0
"""A time counts as at most this many times what was expected: a hiccup teaches little."""
UNKNOWN_S_PER_TOKEN = 0.02
"""Before anything ran: slow, so that the first iterations are short ones."""


class CostModel:
    """Seconds by tokens: an exponential average for each power of two, and lines between them.

    An average that was not renewed for long is corrected by two facts that hold for a batch: fewer
    tokens take no longer, and more tokens take no longer per token.
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
        """What that many tokens take. Never less for more of them."""
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
        """The largest number of tokens, up to `most`, that takes no longer than `seconds`."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.seconds(middle) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low
