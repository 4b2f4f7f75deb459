"""Secret matrices folded into weights (sve), and how their key is recovered.

The owner of a model gives a node A^-1 W B in place of W (y = x W), and sends x A; the node returns
x W B, of which the owner takes B off. This is what "sequential vector encryption" of the Nesa paper
(section 6.3) comes to for linear layers. A is any invertible matrix, one for all layers with the
same input; each layer has an orthogonal B of its own. It needs no cryptography to undo:

- Public weights. S' = W' W'^T = A^-1 W W^T A^-T has no B in it. Two layers with the same input give
  two such matrices, whose generalized eigenvectors are A^T times those of the public weights, up to
  signs. A third layer gives the signs; so do a few known inputs, such as those of a chat template.
- Known plaintext. D linearly independent inputs x of a text that the attacker knows give A at once,
  as the solution of a linear system (Hill cipher, 1929).

D inputs, O outputs, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import scipy.linalg

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FoldingKey:
    """A [D, D] of the input that some layers share, and B [O, O] of each of their outputs."""

    input_DD: Matrix
    outputs: tuple[Matrix, ...]

    @classmethod
    def random(cls, inputs: int, outputs: Sequence[int], rng: np.random.Generator) -> Self:
        """A of normal numbers, orthogonal matrices B."""
        turned = (np.linalg.qr(rng.normal(size=(each, each)))[0] for each in outputs)
        return cls(rng.normal(size=(inputs, inputs)), tuple(turned))

    def fold(self, weights: Sequence[Matrix]) -> list[Matrix]:
        """A^-1 W B of each layer W [D, O]: what the node is given."""
        return [
            np.asarray(np.linalg.solve(self.input_DD, weight @ output), np.float64)
            for weight, output in zip(weights, self.outputs, strict=True)
        ]

    def hide(self, inputs_TD: Matrix) -> Matrix:
        """x A: what the node receives."""
        return inputs_TD @ self.input_DD


def recover_key_from_weights(
    public: Sequence[Matrix],
    folded: Sequence[Matrix],
    known: tuple[Matrix, Matrix] | None = None,
) -> Matrix:
    """A [D, D] of layers W [D, O] with the same input, and A^-1 W B.

    Of three layers, up to the sign of A; or of two, and `known` inputs [T, D] with what was
    received in their place. The first two layers need O >= D and full rank. Raises
    numpy's error of linear algebra otherwise.
    """
    grams, given = ([weight @ weight.T for weight in each] for each in (public, folded))
    # P v = l M v with v^T M v = 1; for the folded ones v' = A^T v and the same l.
    _, vectors_DD = scipy.linalg.eigh(grams[0], grams[1])
    _, hidden_DD = scipy.linalg.eigh(given[0], given[1])
    if known is None:
        signs_D = _find_signs(
            vectors_DD.T @ grams[2] @ vectors_DD, hidden_DD.T @ given[2] @ hidden_DD
        )
    else:
        # y^T = A^T x^T = V' signs V^-1 x^T
        own_DT = np.linalg.solve(vectors_DD, known[0].T)
        seen_DT = np.linalg.solve(hidden_DD, known[1].T)
        signs_D = np.where((own_DT * seen_DT).sum(1) < 0, -1.0, 1.0)
    found_DD = np.linalg.solve(vectors_DD.T, (hidden_DD * signs_D).T)
    return np.asarray(found_DD, np.float64)


def _find_signs(known_DD: Matrix, given_DD: Matrix) -> Matrix:
    """Signs d with given_ij = d_i d_j known_ij: those of the products' leading eigenvector."""
    products_DD = known_DD * given_DD
    sizes_D = np.sqrt(np.abs(products_DD.diagonal())).clip(1e-300)
    _, vector_D1 = scipy.linalg.eigh(
        products_DD / np.outer(sizes_D, sizes_D),
        subset_by_index=[len(sizes_D) - 1, len(sizes_D) - 1],
    )
    signs: Matrix = np.where(vector_D1[:, 0] < 0, -1.0, 1.0)
    return signs


def recover_key_from_text(known_TD: Matrix, received_TD: Matrix) -> Matrix:
    """A [D, D] by least squares, of the inputs of a text that is known and what a node received.

    Raises `ValueError` where the inputs do not span all D dimensions.
    """
    key, _, rank, _ = np.linalg.lstsq(known_TD, received_TD)
    if rank < known_TD.shape[1]:
        raise ValueError(f"{len(known_TD)} inputs span {rank} of {known_TD.shape[1]} dimensions")
    return np.asarray(key, np.float64)
