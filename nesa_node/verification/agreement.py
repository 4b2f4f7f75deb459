"""Which of several computations of the same is believed: that of the largest group that agrees.

Source: "Secure Multiparty Generative AI", algorithm 2. Taken literally it wants more than
floor(n/2) *other* similar outputs, so that of three nodes one that lies stops the session; "2of3"
is what it means: most of them agree. "cdv" has whole chains compute the same, and compares the
next-token distributions of their last blocks' outputs (`distributions.py`).

T tokens, D hidden.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol

import torch

from nesa_node.verification.comparison import MIN_QUANTILE_TOKENS, PairErrors, Threshold, judge
from nesa_node.verification.distributions import TOTAL_VARIATION


@dataclass(frozen=True, slots=True)
class AgreementRule:
    """How many replicas compute the same, and how many of them must agree."""

    copies: int
    needed: int
    scheme: str
    of_chains: bool = False
    """Whether the replicas are whole chains, and not nodes of the same blocks."""

    @property
    def fewest(self) -> int:
        """Replicas without which a session does not begin. Chains that agree may be two."""
        return self.needed if self.of_chains else self.copies


RULES = {
    "2of3": AgreementRule(copies=3, needed=2, scheme="relative-l2"),
    "paper": AgreementRule(copies=3, needed=3 // 2 + 1 + 1, scheme="dhash"),
    "cdv": AgreementRule(copies=3, needed=2, scheme=TOTAL_VARIATION, of_chains=True),
}


def largest_group(members: int, agree: Callable[[int, int], bool]) -> tuple[int, ...]:
    """The largest group whose members agree with each other, the first of several as large."""
    agreeing = {pair for pair in combinations(range(members), 2) if agree(*pair)}
    for size in range(members, 1, -1):
        for group in combinations(range(members), size):
            if agreeing.issuperset(combinations(group, 2)):
                return group
    return (0,) if members else ()


class PairMeasure(Protocol):
    """A way to compare several computations of the same."""

    @property
    def scheme(self) -> str: ...

    def errors_of_pairs(self, outputs: Sequence[torch.Tensor]) -> PairErrors:
        """Errors of each two of `outputs` [T, D]. Infinite where not finite."""
        ...


class AgreementHistory:
    """Errors between replicas that compute the same blocks, of the last tokens of a session.

    Means say more than single tokens, and a decode step has one token of each row.
    """

    def __init__(self, measure: PairMeasure, allowed: Threshold) -> None:
        self._measure = measure
        self._allowed = allowed
        self._recent: dict[tuple[Hashable, Hashable], torch.Tensor] = defaultdict(
            lambda: torch.empty(0, dtype=torch.float64)
        )

    def find_group(
        self, names: Sequence[Hashable], outputs: Sequence[torch.Tensor]
    ) -> tuple[int, ...]:
        """Indices of the largest group of `names` whose outputs [T, D] agree, and did before."""
        if not len(outputs[0]):
            return tuple(range(len(names)))
        errors = self._measure.errors_of_pairs(outputs)

        def agree(one: int, other: int) -> bool:
            pair = names[one], names[other]
            window = torch.cat([self._recent[pair], errors[one, other]])
            self._recent[pair] = window[-MIN_QUANTILE_TOKENS:]
            return (
                judge(window, len(window), self._measure.scheme, self._allowed).outcome == "passed"
            )

        return largest_group(len(names), agree)
