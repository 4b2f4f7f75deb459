"""How soon audits find a node that lies, and how often redundant nodes agree: exact arithmetic.

Source: "Secure Multiparty Generative AI", tolerance in reproducibility and figure 3. What it prints
as 99.815 % (images, majority of five verifiers) should be 99.982 %, and as 96.785, 99.938 and
99.857 % (text, supermajorities of three, five and seven) 96.795, 99.886 and 99.996 %.
"""

from __future__ import annotations

import math


def sessions_until_found(rate: float, confidence: float = 0.95) -> int:
    """Sessions within which a node that lies in each is drawn with probability `confidence`.

    `rate` is the share of its sessions that are audited. Raises `ValueError` outside (0, 1].
    """
    if not 0 < rate <= 1 or not 0 < confidence < 1:
        raise ValueError(f"rate {rate} and confidence {confidence} must be in (0, 1]")
    if rate == 1:
        return 1
    return math.ceil(math.log(1 - confidence) / math.log(1 - rate))


def probability_of_at_least(k: int, n: int, p: float) -> float:
    """P(X >= k) of a binomial X of `n` trials with probability `p`."""
    return math.fsum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(max(k, 0), n + 1))


def majority_probability(n: int, p: float) -> float:
    """Probability that more than half of `n` agree, each with probability `p`."""
    return probability_of_at_least(n // 2 + 1, n, p)


def supermajority_probability(n: int, p: float) -> float:
    """Probability that more than two thirds of `n` agree."""
    return probability_of_at_least(2 * n // 3 + 1, n, p)
