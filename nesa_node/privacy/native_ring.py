"""`Ring` in machine code (`engine/kernels/native/ring_ops.py`).

P primes, N degree, D digits, B rotations, T residues of a tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import numpy.typing as npt

from nesa_node.engine.kernels.machine_code import NativeFunction, compile_functions
from nesa_node.privacy.parameters import RingParameters
from nesa_node.privacy.ring import TILE, Residues, Ring

_TABLE_HEADER = 16


def make_ring(parameters: RingParameters, threads: int = 1) -> Ring:
    """A ring in machine code for this processor, or the reference where that cannot be made."""
    degree = parameters.degree
    functions = compile_functions(
        ("ring_values", degree),
        ("ring_coefficients", degree),
        ("ring_lift", degree),
        ("ring_divide", degree),
        ("ring_rotate", degree, 0),
        ("ring_rotate", degree, 1),
        ("ring_multiply_sum", degree),
    )
    return Ring(parameters) if functions is None else NativeRing(parameters, functions, threads)


class NativeRing(Ring):
    """Arithmetic on `threads` of torch's threads."""

    def __init__(
        self, parameters: RingParameters, functions: list[NativeFunction], threads: int
    ) -> None:
        super().__init__(parameters)
        self._threads = threads
        (
            self._to_values,
            self._to_coefficients,
            self._lift_digits,
            self._divide,
            self._rotate,
            self._add_rotated,
            self._multiply_sum,
        ) = functions
        self._tables = np.stack([self._table(at) for at in range(len(self.primes))])
        self._orders: dict[int, npt.NDArray[np.int32]] = {}

    def _table(self, at: int) -> Residues:
        """See `ring_ops.py`."""
        prime, word = self.primes[at], 1 << 32
        inverse, rest = pow(self.degree, -1, prime), word % prime
        header = [prime, word // prime, inverse, inverse * word // prime]
        header += [rest, rest * word // prime, -pow(prime, -1, word) % word]
        header += [0] * (_TABLE_HEADER - len(header))
        rows = [np.array(header, np.uint32)]
        for factors in (self._twiddles_PN[at], self._inverse_twiddles_PN[at]):
            rows += [factors.astype(np.uint32), _quotients(factors, prime)]
        return np.concatenate(rows)

    @cached_property
    def _last_inverses(self) -> dict[int, Residues]:
        """For each prime but the first two w and w' of its inverse modulo those before."""
        found = {}
        for last in range(2, len(self.primes)):
            inverses = self._inverses_of(last)
            quotients = [
                _quotients(each, prime)
                for each, prime in zip(inverses.astype(np.uint64), self.primes, strict=False)
            ]
            found[last] = np.ascontiguousarray(np.stack([inverses, np.stack(quotients)], 1))
        return found

    def values(self, coefficients: Residues) -> Residues:
        return self._transform(self._to_values, coefficients)

    def coefficients(self, values: Residues) -> Residues:
        return self._transform(self._to_coefficients, values)

    def _transform(self, function: NativeFunction, given: Residues) -> Residues:
        rows = np.array(given, np.uint32, order="C")
        *_, primes, degree = rows.shape
        count = rows.size // degree
        function(_at(rows), count, primes, _at(self._tables), threads=min(self._threads, count))
        return rows

    def digits(self, coefficients: Residues) -> Residues:
        given = np.ascontiguousarray(coefficients)
        lifted = np.empty((len(given), len(self.primes), self.degree), np.uint32)
        fields = _at(given), len(given), _at(lifted), len(self.primes), _at(self._tables)
        self._lift_digits(*fields, threads=self._threads)
        count = len(given) * len(self.primes)
        self._to_values(
            _at(lifted), count, len(self.primes), _at(self._tables), threads=self._threads
        )
        return lifted

    def divide_by_last(self, coefficients: Residues) -> Residues:
        given = np.ascontiguousarray(coefficients)
        *more, primes, degree = given.shape
        out = np.empty((*more, primes - 1, degree), np.uint32)
        inverses, count = self._last_inverses[primes - 1], given.size // (primes * degree)
        fields = _at(given), count, _at(out), primes, _at(self._tables), _at(inverses)
        self._divide(*fields, threads=self._threads)
        return out

    def hoisted_rotations(
        self, ciphertext: Residues, keys: Mapping[int, Residues], count: int
    ) -> Residues:
        raised = self.raise_to_all_primes(ciphertext)
        digits_DPN = self.digits(self.coefficients(ciphertext[1]))
        tiles = len(self.primes) * self.degree // TILE
        rotated = np.empty((tiles, count, 2, TILE), np.uint32)
        rotated[:, 0] = raised.reshape(2, tiles, TILE).transpose(1, 0, 2)
        for steps in range(1, count):
            self._run_rotation(
                self._rotate,
                digits_DPN,
                steps,
                keys[steps],
                raised[0],
                _at(rotated) + steps * rotated.strides[1],
                rotated.strides[2],
                rotated.strides[0],
            )
        return rotated

    def add_rotated(
        self, total: Residues, given: Residues, steps: int, keys_D2PN: Residues
    ) -> None:
        digits_DPN = self.digits(self.divide_by_last(self.coefficients(given[1])))
        strides = total.strides[0], TILE * total.itemsize
        self._run_rotation(
            self._add_rotated, digits_DPN, steps, keys_D2PN, given[0], _at(total), *strides
        )

    def _run_rotation(
        self,
        function: NativeFunction,
        digits_DPN: Residues,
        steps: int,
        keys_D2PN: Residues,
        added_PN: Residues,
        out: int,
        polynomial_bytes: int,
        tile_bytes: int,
    ) -> None:
        assert keys_D2PN.flags.c_contiguous
        assert added_PN.flags.c_contiguous
        if steps not in self._orders:
            self._orders[steps] = self.rotation(steps)
        order = self._orders[steps]
        given = _at(digits_DPN), len(digits_DPN), _at(order), _at(keys_D2PN), _at(added_PN)
        places = out, polynomial_bytes, tile_bytes
        fields = *given, *places, len(self.primes), _at(self._tables)
        function(*fields, threads=self._threads)

    def multiply_sum(self, diagonals: Residues, vectors: Residues, sums: Residues) -> None:
        assert all(each.flags.c_contiguous for each in (diagonals, vectors, sums))
        given = _at(diagonals), diagonals.shape[1], _at(vectors), vectors.shape[1]
        fields = *given, _at(sums), sums.shape[2], _at(self._tables)
        self._multiply_sum(*fields, threads=self._threads)


def _quotients(factors: npt.NDArray[np.uint64] | np.uint64, prime: int) -> Residues:
    """floor(2^32 w / p) of each w."""
    return (np.left_shift(factors, np.uint64(32)) // np.uint64(prime)).astype(np.uint32)


def _at(array: npt.NDArray[np.uint32] | npt.NDArray[np.int32]) -> int:
    return array.ctypes.data
