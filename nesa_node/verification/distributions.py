"""How far apart the next-token distributions are that a head makes of several chains' outputs.

Source: the Nesa paper, section 6.2, which names "Consensus-based Distribution Verification" (CDV):
a measure of the consensus of output distributions. It gives no distance, bound or vote.

T tokens, D hidden, V vocabulary, K computations of the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

from nesa_node.verification.comparison import PairErrors

TOTAL_VARIATION = "total-variation"
"""Name of the scheme in the fitted thresholds."""
MAX_HEAD_TOKENS = 60
"""Most tokens of all computations together that the head gets at once: each has V logits."""

ComputeLogits = Callable[[torch.Tensor], torch.Tensor]
"""Logits [T, V] of the last block's outputs [T, D]. Thread-safe; it must not wait for a thread of
the event loop's, since it is called in one."""


@dataclass(frozen=True, slots=True)
class DistributionMeasure:
    """Total variation distance of next-token distributions: half the sum of their differences.

    It is the largest difference that two distributions give any set of tokens, and so the least
    probability with which two tokens differ that are drawn of them (Levin and Peres, "Markov Chains
    and Mixing Times", propositions 4.2 and 4.7). The Jensen-Shannon divergence, a smoothed relative
    of it, falls with the square of small differences, below what float32 resolves.
    """

    head: ComputeLogits

    @property
    def scheme(self) -> str:
        """See `PairMeasure`."""
        return TOTAL_VARIATION

    def errors_of_pairs(self, outputs: Sequence[torch.Tensor]) -> PairErrors:
        """Distances, 0 to 1, of each two of the K outputs [T, D] of the last block, by token.

        [T] in float64, on the CPU; infinite where a distribution is not finite. Outputs have the
        same shape. Calls the head, and blocks the thread.
        """
        pairs = list(combinations(range(len(outputs)), 2))
        chunk = max(MAX_HEAD_TOKENS // len(outputs), 1)
        found = [
            self._compare(torch.stack(parts), pairs)
            for parts in zip(*(torch.split(output_TD, chunk) for output_TD in outputs), strict=True)
        ]
        return {
            pair: torch.cat([errors_PT[at] for errors_PT in found]) for at, pair in enumerate(pairs)
        }

    def _compare(self, hidden_KTD: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> torch.Tensor:
        # All in one product: what that rounds is then the same for equal rows.
        logits_KTV = self.head(hidden_KTD.flatten(0, 1)).view(*hidden_KTD.shape[:2], -1)
        chances_KTV = logits_KTV.float().softmax(-1)
        errors_PT = torch.stack(
            [(chances_KTV[one] - chances_KTV[other]).abs().sum(-1) / 2 for one, other in pairs]
        )
        return torch.where(errors_PT.isnan(), torch.inf, errors_PT).to("cpu", torch.float64)
