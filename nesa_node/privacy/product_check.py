"""A check that a vector is a product with known weights, without computing the product.

Freivalds' check (1977): for secret vectors v, v W is computed once; v y then has to be (v W) x,
which costs as much as reading x and y. Products of encrypted vectors have errors, so that it is
that but for a limit: a larger error e of y passes with a probability of about limit / |e| for each
vector.

T tokens, I inputs, O outputs, V vectors.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from nesa_node.privacy.encrypted_product import largest_weight_scale
from nesa_node.privacy.masked_product import Integers, quantize_rows
from nesa_node.privacy.parameters import INPUT_SCALE, SIGMA, RingParameters

Matrix = npt.NDArray[np.float64]

VECTORS = 4
"""V: errors of a hundredth of y pass by one of them less often than once in a hundred times."""
MARGIN = 12.0
"""Of what errors of encryption may be, beyond their standard deviation."""


FLOAT_ERROR = 1e-12
"""Of sums of 64-bit floats, by the sum of their terms' sizes: more than of any that are summed."""


class _SecretVectors:
    """Vectors v, and v W of the rows of W that were added: 8 V (I + O) bytes."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(secrets.randbits(256))
        self._parts: list[Matrix] = []
        self._projected: Matrix | float = 0.0

    def add_rows(self, weight_OI: npt.NDArray[np.floating]) -> None:
        vectors_VO = self._rng.normal(size=(VECTORS, len(weight_OI)))
        self._parts.append(vectors_VO)
        self._projected = self._projected + vectors_VO @ weight_OI

    @cached_property
    def vectors_OV(self) -> Matrix:
        vectors_VO = np.concatenate(self._parts, axis=1)
        self._parts.clear()
        return vectors_VO.T

    @cached_property
    def projected_IV(self) -> Matrix:
        return np.asarray(self._projected).T

    def errors(self, x_TI: npt.NDArray[Any], y_TO: npt.NDArray[Any]) -> Matrix:
        """Sizes [T, V] of v y - (v W) x."""
        return np.abs(y_TO @ self.vectors_OV - x_TI @ self.projected_IV)


class ProductCheck:
    """Whether vectors that were encrypted (CKKS) are products with one matrix."""

    def __init__(self, parameters: RingParameters, rows: Iterable[Matrix]) -> None:
        """`rows` are slices [O', I] of the weights, from the first row to the last."""
        self._vectors = _SecretVectors()
        squares, largest = 0.0, 0.0
        for weight_OI in rows:
            self._vectors.add_rows(weight_OI)
            squares += float(np.square(weight_OI).sum())
            largest = max(largest, float(np.abs(weight_OI).sum(1).max()))
        self._input_variance = squares * _input_variance(parameters)
        self._encoding_variance = (
            len(self._vectors.vectors_OV) * (largest * _encoding_error(parameters)) ** 2
        )

    def accepts(self, x_TI: Matrix, y_TO: Matrix) -> bool:
        """Whether y is W x, but for errors of encryption. Sizes in x are at most 1."""
        encoding_T = self._encoding_variance * np.square(x_TI).sum(1)
        limits_T = MARGIN * np.sqrt(self._input_variance + encoding_T)
        return bool((self._vectors.errors(x_TI, y_TO) <= limits_T[:, None]).all())


class IntegerProductCheck:
    """Whether integers are products with the integers of one matrix (`masked_product.py`)."""

    def __init__(self, rows: Iterable[Matrix]) -> None:
        """`rows` are slices [O', I] of the weights, from the first row to the last."""
        self._vectors = _SecretVectors()
        scales = []
        for weight_OI in rows:
            integers_OI, scales_O = quantize_rows(weight_OI)
            self._vectors.add_rows(integers_OI)
            scales.append(scales_O)
        self.scales_O = np.concatenate(scales)
        """What an integer 1 stands for in each row."""

    def accepts(self, x_TI: Integers, y_TO: Integers) -> bool:
        """Whether y is W x, but for what summing floats may lose."""
        vectors = self._vectors
        sizes_TV = np.abs(y_TO) @ np.abs(vectors.vectors_OV)
        sizes_TV += np.abs(x_TI) @ np.abs(vectors.projected_IV)
        return bool((vectors.errors(x_TI, y_TO) <= FLOAT_ERROR * sizes_TV).all())


def _input_variance(parameters: RingParameters) -> float:
    """Of v W e, for the error e of an encrypted and rotated vector, by the squares of W.

    Beside the error of encryption a rotated ciphertext has, of each digit, `degree` products of
    residues (uniform) and a key's errors, divided by the last prime. Each row of W meets the real
    parts of errors, and its pair's row the imaginary ones.
    """
    *digits, last = parameters.prime_bits
    keys = sum(4.0 ** (bits - last) for bits in digits) * parameters.degree / 12
    return 2 * parameters.degree / 2 * (SIGMA**2 * (1 + keys)) / INPUT_SCALE**2


def _encoding_error(parameters: RingParameters) -> float:
    """Of a weight, where the largest sum of a row is 1.

    Encoded weights are rounded to integers, results twice: an integer's error times the secret key,
    two thirds of which are not zero, summed over at most all slots.
    """
    degree = parameters.degree
    # Rows are in pairs, and scales are rounded down to a power of two.
    weight_scale = largest_weight_scale(parameters) / 4
    result_scale = weight_scale * INPUT_SCALE / parameters.primes[2]
    weights = math.sqrt(degree / 2 / 12) / weight_scale
    results = math.sqrt(degree / 2 * degree * (2 / 3) / 12 * parameters.slots) / result_scale
    return weights + results
