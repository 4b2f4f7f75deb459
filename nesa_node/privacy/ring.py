"""Polynomials modulo X^N + 1 and a few primes, by their coefficients or their values.

The values are those at the odd powers of a root of unity, in bit-reversed order (Longa and Naehrig
2016, algorithms 1 and 2): products of polynomials are products of values. A ring's first primes are
a ring, too: a polynomial may have fewer residues than there are primes.

P primes, N degree, D digits (the primes but the last), B rotations; residues are uint32
[..., P, N], below their prime. What many products are made of lies in tiles: T neighbouring
residues of one prime, of all vectors side by side, so that memory is read in order.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from nesa_node.privacy.parameters import RingParameters

Residues = npt.NDArray[np.uint32]
TILE = 64
"""T."""
_Wide = npt.NDArray[np.uint64]


class Ring:
    """Arithmetic of polynomials with residues modulo the primes of `parameters`.

    This is the reference of `native_ring.py`, and computes where no machine code can be made.
    """

    def __init__(self, parameters: RingParameters) -> None:
        self.parameters = parameters
        self.degree = parameters.degree
        self.primes = parameters.primes
        self.primes_P1 = np.array(self.primes, np.uint64)[:, None]
        reversed_N = _bit_reversed(self.degree)
        roots = [_root_of_unity(2 * self.degree, prime) for prime in self.primes]
        pairs = list(zip(roots, self.primes, strict=True))
        powers = [_powers(root, prime, self.degree) for root, prime in pairs]
        inverses = [_powers(pow(root, -1, prime), prime, self.degree) for root, prime in pairs]
        self._twiddles_PN = np.stack(powers)[:, reversed_N]
        self._inverse_twiddles_PN = np.stack(inverses)[:, reversed_N]
        self._exponents_N = 2 * reversed_N + 1
        """Power of the root at which each value is taken."""

    def values(self, coefficients: Residues) -> Residues:
        """Values of polynomials that are given by coefficients."""
        *_, primes, degree = coefficients.shape
        modulus = self.primes_P1[:primes, :, None]
        result = coefficients.astype(np.uint64)
        groups, size = 1, degree
        while groups < degree:
            size //= 2
            pairs = result.reshape(*result.shape[:-1], groups, 2, size)
            twiddles = self._twiddles_PN[:primes, groups : 2 * groups, None]
            upper = pairs[..., 0, :].copy()
            lower = pairs[..., 1, :] * twiddles % modulus
            pairs[..., 0, :] = (upper + lower) % modulus
            pairs[..., 1, :] = (upper + modulus - lower) % modulus
            groups *= 2
        return result.astype(np.uint32)

    def coefficients(self, values: Residues) -> Residues:
        """Coefficients of polynomials that are given by values."""
        *_, primes, degree = values.shape
        modulus = self.primes_P1[:primes, :, None]
        result = values.astype(np.uint64)
        groups, size = degree, 1
        while groups > 1:
            groups //= 2
            pairs = result.reshape(*result.shape[:-1], groups, 2, size)
            twiddles = self._inverse_twiddles_PN[:primes, groups : 2 * groups, None]
            upper, lower = pairs[..., 0, :].copy(), pairs[..., 1, :].copy()
            pairs[..., 0, :] = (upper + lower) % modulus
            pairs[..., 1, :] = (upper + modulus - lower) % modulus * twiddles % modulus
            size *= 2
        inverses = [pow(self.degree, -1, prime) for prime in self.primes[:primes]]
        return self.multiply(result.astype(np.uint32), np.array(inverses, np.uint32)[:, None])

    def residues(self, integers: npt.NDArray[np.int64], primes: int) -> Residues:
        """Residues [..., primes, N] of signed integers [..., N]."""
        modulus = self.primes_P1[:primes].astype(np.int64)
        return np.mod(integers[..., None, :], modulus).astype(np.uint32)

    def add(self, first: Residues, second: Residues) -> Residues:
        """Sums [..., P, N], of one or more of the first primes."""
        modulus = self.primes_P1[: first.shape[-2]]
        return ((first.astype(np.uint64) + second) % modulus).astype(np.uint32)

    def subtract(self, first: Residues, second: Residues) -> Residues:
        """Differences [..., P, N]."""
        modulus = self.primes_P1[: first.shape[-2]]
        return ((first.astype(np.uint64) + modulus - second) % modulus).astype(np.uint32)

    def multiply(self, first: Residues, second: Residues) -> Residues:
        """Products [..., P, N] of values, or of numbers."""
        modulus = self.primes_P1[: first.shape[-2]]
        return (first.astype(np.uint64) * second % modulus).astype(np.uint32)

    def digits(self, coefficients: Residues) -> Residues:
        """Values [D, P, N] modulo all primes of the integers in (-p/2, p/2] that are the residues
        [D, N] of a polynomial.
        """
        primes = len(self.primes)
        return self.values(
            np.stack([self._lift(digit, at, primes) for at, digit in enumerate(coefficients)])
        )

    def divide_by_last(self, coefficients: Residues) -> Residues:
        """The nearest integers to the quotients by the last prime: residues of one prime fewer."""
        last = coefficients.shape[-2] - 1
        rest = self._lift(coefficients[..., last, :], last, last)
        return self.multiply(
            self.subtract(coefficients[..., :last, :], rest), self._inverses_of(last)[:, None]
        )

    def _inverses_of(self, last: int) -> Residues:
        """The prime at `last` to the power of -1, modulo those before."""
        inverses = [pow(self.primes[last], -1, prime) for prime in self.primes[:last]]
        return np.array(inverses, np.uint32)

    def _lift(self, digit: Residues, source: int, primes: int) -> Residues:
        prime, signed = self.primes[source], digit.astype(np.int64)
        return self.residues(np.where(signed > prime // 2, signed - prime, signed), primes)

    def rotate(
        self, digits_DPN: Residues, steps: int, keys_D2PN: Residues, added_PN: Residues
    ) -> Residues:
        """Rotate the slots of P times a ciphertext, whose first polynomial is `added_PN` and whose
        second one has these digits: [2, P, N].
        """
        order = self.rotation(steps)
        products = digits_DPN[:, None, :, order].astype(np.uint64) * keys_D2PN
        switched: _Wide = products.sum(0)
        switched[0] += added_PN[:, order]
        return (switched % self.primes_P1).astype(np.uint32)

    def hoisted_rotations(
        self, ciphertext: Residues, keys: Mapping[int, Residues], count: int
    ) -> Residues:
        """P times a ciphertext [2, D, N], rotated by 0 to `count` - 1: [tiles, count, 2, T]."""
        raised = self.raise_to_all_primes(ciphertext)
        digits_DPN = self.digits(self.coefficients(ciphertext[1]))
        rotated = [self.rotate(digits_DPN, at, keys[at], raised[0]) for at in range(1, count)]
        return to_tiles(np.stack([raised, *rotated]).reshape(2 * count, -1)).reshape(
            -1, count, 2, TILE
        )

    def raise_to_all_primes(self, ciphertext: Residues) -> Residues:
        """P times a ciphertext [2, D, N], P the last prime, modulo all primes."""
        last = self.primes_P1[:-1].astype(np.int64)
        factors = (self.primes[-1] % last).astype(np.uint32)
        raised = np.zeros((2, len(self.primes), self.degree), np.uint32)
        raised[:, :-1] = self.multiply(ciphertext, factors)
        return raised

    def multiply_sum(self, diagonals: Residues, vectors: Residues, sums: Residues) -> None:
        """Add to `sums` [G, 2, P, N] diagonals [tiles, count, T] times vectors [tiles, B, 2, T].

        Diagonal g B + b is multiplied with vector b, and added to sum g. B is at most 128; P may be
        fewer than all primes.
        """
        steps = vectors.shape[1]
        for group in range(len(sums)):
            taken = diagonals[:, group * steps : (group + 1) * steps, None].astype(np.uint64)
            products = taken * vectors[:, : taken.shape[1]]
            total = products.sum(1).transpose(1, 0, 2).reshape(sums[group].shape)
            sums[group] = (sums[group] + total) % self.primes_P1[: sums.shape[2]]

    def add_rotated(
        self, total: Residues, given: Residues, steps: int, keys_D2PN: Residues
    ) -> None:
        """Add P times a ciphertext [2, P, N] to `total` [2, P, N], rotated by `steps`."""
        digits_DPN = self.digits(self.divide_by_last(self.coefficients(given[1])))
        total[:] = self.add(total, self.rotate(digits_DPN, steps, keys_D2PN, given[0]))

    def rotation(self, steps: int) -> npt.NDArray[np.int32]:
        """Order [N] that values are put into where slots are rotated to the left by `steps`.

        That is the automorphism X -> X^(5^steps).
        """
        power = pow(5, steps % (self.degree // 2), 2 * self.degree)
        places_N = np.empty(2 * self.degree, np.int64)
        places_N[self._exponents_N] = np.arange(self.degree)
        return places_N[self._exponents_N * power % (2 * self.degree)].astype(np.int32)


def to_tiles(rows: Residues) -> Residues:
    """Rows [K, P N] as tiles [P N / T, K, T]."""
    return np.ascontiguousarray(rows.reshape(len(rows), -1, TILE).transpose(1, 0, 2))


def _bit_reversed(count: int) -> npt.NDArray[np.int64]:
    numbers, result = np.arange(count), np.zeros(count, np.int64)
    for _ in range(count.bit_length() - 1):
        result, numbers = result << 1 | numbers & 1, numbers >> 1
    return result


def _root_of_unity(order: int, prime: int) -> int:
    """The least primitive root of unity of `order`, a power of two that divides prime - 1."""
    for base in range(2, prime):
        root = pow(base, (prime - 1) // order, prime)
        if pow(root, order // 2, prime) == prime - 1:
            # SEAL takes the least one, too: values of its polynomials are those of ours.
            return int(_powers(root, prime, order)[1::2].min())
    raise AssertionError(f"no root of unity modulo {prime}")


def _powers(root: int, prime: int, count: int) -> _Wide:
    powers = [1]
    for _ in range(count - 1):
        powers.append(powers[-1] * root % prime)
    return np.array(powers, np.uint64)
