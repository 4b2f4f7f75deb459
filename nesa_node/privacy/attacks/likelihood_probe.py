"""Recovery of tokens by maximum likelihood: each state as its token's embedding, mapped, and noise.

A state is modelled as an affine map of its token's embedding plus a normal rest, which stands for
the context (linear discriminant analysis, Fisher 1936, with means that depend on the embedding, so
that tokens which the attacker's text lacks have means, too). It recovers more than `RidgeProbe`,
which maps the other way and counts all directions alike.

T tokens, D hidden, E embedding, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from nesa_node.privacy.attacks.ridge_probe import RidgeProbe

PENALTY = 1e-2
"""Of the map, and of the rest's covariance, relative to its mean variance."""
_OUTLIER = 6.0
"""States this many times as far from the mean as the median state are not used: first positions."""
_ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class LikelihoodProbe:
    """`means` maps embeddings to scaled states, `whitening_DD` makes the rest's covariance one."""

    means: RidgeProbe
    center_D: Tensor
    scale_D: Tensor
    whitening_DD: Tensor

    @classmethod
    def fit(cls, states_TD: Tensor, embeddings_TE: Tensor, *, penalty: float = PENALTY) -> Self:
        """Fit in float64. Neither argument is modified."""
        states_TD = states_TD.double()
        distances_T = (states_TD - states_TD.median(0).values).norm(dim=1)
        usual_T = distances_T <= _OUTLIER * distances_T.median()
        states_TD, embeddings_TE = states_TD[usual_T], embeddings_TE[usual_T]
        center_D = states_TD.mean(0)
        scale_D = states_TD.std(0).clamp_min(torch.finfo(torch.float32).tiny)
        scaled_TD = (states_TD - center_D) / scale_D
        means = RidgeProbe.fit(embeddings_TE, scaled_TD, penalty=penalty)
        rest_TD = scaled_TD - means.predict(embeddings_TE)
        covariance_DD = rest_TD.T @ rest_TD / len(rest_TD)
        covariance_DD.diagonal().add_(penalty * covariance_DD.diagonal().mean() + 1e-9)
        whitening_DD = torch.linalg.cholesky(torch.linalg.inv(covariance_DD))
        return cls(means, center_D, scale_D, whitening_DD)

    def recover(self, states_TD: Tensor, table_VE: Tensor) -> Tensor:
        """Tokens [T] (int64): those under which the states are most likely."""
        white_TD = ((states_TD.double() - self.center_D) / self.scale_D @ self.whitening_DD).float()
        means_VD = self.means.predict(table_VE) @ self.whitening_DD.float()
        half_norms_V = means_VD.square().sum(1) / 2
        parts = torch.split(white_TD, _ROWS_AT_ONCE)
        found = [(part_TD @ means_VD.T - half_norms_V).argmax(1) for part_TD in parts]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)
