"""Recovery of tokens from hidden states by a linear map, fitted on a text that the attacker knows.

A model's residual stream keeps each token's embedding for many blocks, so that a linear map from
hidden states to embeddings and the nearest row of the embedding table name the token (ridge
regression: Hoerl and Kennard 1970; inversion of embeddings: Song and Raghunathan 2020, section 4).

T tokens, D hidden, E embedding, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

PENALTY = 1e-3
"""Ridge penalty, relative to the mean eigenvalue of the standardized states' covariance."""
_ROWS_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class RidgeProbe:
    """Affine map of hidden states to embeddings: `(states - mean) / scale @ weight + bias`."""

    mean_D: Tensor
    scale_D: Tensor
    weight_DE: Tensor
    bias_E: Tensor

    @classmethod
    def fit(cls, states_TD: Tensor, embeddings_TE: Tensor, *, penalty: float = PENALTY) -> Self:
        """Fit by ridge regression in float64, each channel with a standard deviation of one.

        A channel that is constant gets no weight. Neither argument is modified.
        """
        states_TD, embeddings_TE = states_TD.double(), embeddings_TE.double()
        mean_D, bias_E = states_TD.mean(0), embeddings_TE.mean(0)
        scale_D = states_TD.std(0).clamp_min(torch.finfo(torch.float32).tiny)
        scaled_TD = (states_TD - mean_D) / scale_D
        covariance_DD = scaled_TD.T @ scaled_TD
        ridge = penalty * covariance_DD.diagonal().mean().clamp_min(1e-12)
        covariance_DD.diagonal().add_(ridge)
        weight_DE = torch.linalg.solve(covariance_DD, scaled_TD.T @ (embeddings_TE - bias_E))
        return cls(mean_D, scale_D, weight_DE, bias_E)

    def predict(self, states_TD: Tensor) -> Tensor:
        """Embeddings [T, E] in float32."""
        scaled_TD = (states_TD.double() - self.mean_D) / self.scale_D
        return (scaled_TD @ self.weight_DE + self.bias_E).float()

    def recover(self, states_TD: Tensor, table_VE: Tensor) -> Tensor:
        """Tokens [T] (int64): the nearest rows of the embedding table."""
        return nearest_rows(self.predict(states_TD), table_VE)


def whiten(table_VE: Tensor) -> Tensor:
    """Rows without the mean, and with covariance one, in float32: common directions, which many
    tokens have, count no more than rare ones. As targets they recover more after many blocks.
    """
    centered_VE = table_VE.double() - table_VE.double().mean(0)
    variances_E, axes_EE = torch.linalg.eigh(centered_VE.T @ centered_VE / len(centered_VE))
    smallest = 1e-9 * variances_E.max()  # a small vocabulary spans fewer dimensions
    white_VE: Tensor = centered_VE @ axes_EE / variances_E.clamp_min(smallest).sqrt()
    return white_VE.float()


def nearest_rows(vectors_TE: Tensor, table_VE: Tensor) -> Tensor:
    """Indices [T] of the rows of the table with the largest cosine to each vector."""
    rows_VE = torch.nn.functional.normalize(table_VE.float(), dim=1)
    vectors_TE = torch.nn.functional.normalize(vectors_TE.float(), dim=1)
    found = [(part_TE @ rows_VE.T).argmax(1) for part_TE in torch.split(vectors_TE, _ROWS_AT_ONCE)]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)
