"""Rows of the leakage table: what attacks on one mode recovered, with intervals, and its cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nesa_node.evaluation.leakage_claims import AttackName

CONFIDENCE_Z = 1.959964
"""Of 95% intervals."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """What one attack recovered: `hits` of `tokens`."""

    attack: AttackName
    hits: int
    tokens: int
    detail: str = ""
    chance_percent: float | None = None
    """Where other tokens are scored than those of the row's other attacks: hits of a guess."""

    @property
    def percent(self) -> float:
        return 100 * self.hits / self.tokens

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval in percent (Wilson 1927)."""
        n, z = self.tokens, CONFIDENCE_Z
        share, spread = self.hits / n, z * z / n
        middle = (share + spread / 2) / (1 + spread)
        half = z * math.sqrt(share * (1 - share) / n + spread / (4 * n)) / (1 + spread)
        return 100 * max(middle - half, 0.0), 100 * min(middle + half, 1.0)


@dataclass(frozen=True, slots=True)
class LeakageRow:
    """One mode, as it was measured. None: not measured, or without meaning."""

    mode: str
    """Of `CLAIMS`."""
    setting: str
    recovered: tuple[Recovered, ...]
    chance_percent: float
    """Hits of naming the most frequent token of the attacker's text, where an attack has no other.
    """
    perplexity: float | None = None
    epsilon_token: float | None = None
    epsilon_text: float | None = None
    """Of all tokens of the attacked text together, composed."""
    tokens_per_s: float | None = None
    mb_per_token: float | None = None
    """What nodes received for each token that was decoded."""
