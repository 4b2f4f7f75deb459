"""Complex numbers in the slots of polynomials (CKKS, Cheon et al. 2017, section 3.2).

Slot k is the polynomial's value at zeta^(5^k), zeta a primitive root of unity of order 2 N, so that
the automorphism X -> X^(5^r) rotates slots to the left by r.

S slots, N = 2 S coefficients.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt


def coefficients_of(slots: npt.NDArray[np.complex128], scale: float) -> npt.NDArray[np.int64]:
    """Coefficients [..., N], rounded, of the polynomials with `scale` times `slots` [..., S]."""
    degree = 2 * slots.shape[-1]
    values = np.empty((*slots.shape[:-1], degree), np.complex128)
    places_S, conjugate_places_S = _places(degree)
    values[..., places_S] = slots
    values[..., conjugate_places_S] = slots.conj()
    coefficients = np.fft.fft(values) / degree * _twist(degree).conj()
    rounded: npt.NDArray[np.int64] = np.rint(coefficients.real * scale).astype(np.int64)
    return rounded


def slots_of(coefficients: npt.NDArray[np.int64], scale: float) -> npt.NDArray[np.complex128]:
    """Slots [..., S] of the polynomials with these coefficients [..., N], divided by `scale`."""
    degree = coefficients.shape[-1]
    values = np.fft.ifft(coefficients * _twist(degree)) * (degree / scale)
    taken: npt.NDArray[np.complex128] = values[..., _places(degree)[0]]
    return taken


@cache
def _places(degree: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Indices of the odd powers 5^k of zeta, and of their inverses."""
    powers = [1]
    for _ in range(degree // 2 - 1):
        powers.append(powers[-1] * 5 % (2 * degree))
    powers_S = np.array(powers)
    return powers_S // 2, (2 * degree - powers_S) // 2


@cache
def _twist(degree: int) -> npt.NDArray[np.complex128]:
    twist: npt.NDArray[np.complex128] = np.exp(1j * np.pi * np.arange(degree) / degree)
    return twist
