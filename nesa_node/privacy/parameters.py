"""Sizes of CKKS: the ring's degree, its primes, and what tables of security allow of them."""

from __future__ import annotations

from dataclasses import dataclass

SIGMA = 3.2
"""Standard deviation of errors, whose table values begin at 3.19."""
INPUT_SCALE = 2.0**38
"""Of a slot of 1 in what clients encrypt: errors of encryption are 10^-9 of it."""
MOST_MODULUS_BITS = {4096: 106, 8192: 214}
"""Most bits of all primes together for 128-bit security with ternary secrets, by degree.

Security Guidelines for Implementing Homomorphic Encryption (2024), table 5.2. SEAL's table (2018)
allows a little more: 109 and 218.
"""


@dataclass(frozen=True, slots=True)
class RingParameters:
    """Polynomials modulo X^degree + 1 and primes.

    The last of `prime_bits` is that of the prime that keys alone have (`P`); the product of the
    primes before is the modulus of ciphertexts (`Q`). Raises `ValueError` for parameters beyond
    `MOST_MODULUS_BITS`, and for primes that 64-bit sums do not hold.
    """

    degree: int = 4096
    prime_bits: tuple[int, ...] = (26, 26, 26, 28)

    def __post_init__(self) -> None:
        if (most := MOST_MODULUS_BITS.get(self.degree)) is None:
            raise ValueError(f"no ring of degree {self.degree}: {list(MOST_MODULUS_BITS)}")
        if sum(self.prime_bits) > most:
            raise ValueError(
                f"primes of {sum(self.prime_bits)} bits are not secure at degree {self.degree}: "
                f"at most {most}"
            )
        if len(self.prime_bits) < 3 or not all(20 <= bits <= 28 for bits in self.prime_bits):
            raise ValueError("a ring has three primes or more, of 20 to 28 bits")

    @property
    def slots(self) -> int:
        """Complex numbers that a ciphertext holds."""
        return self.degree // 2

    @property
    def primes(self) -> tuple[int, ...]:
        """The largest primes of these bits that are 1 modulo 2 * degree, all different."""
        found: list[int] = []
        for bits in self.prime_bits:
            candidate = (1 << bits) + 1
            while candidate >= 1 << bits or candidate in found or not _is_prime(candidate):
                candidate -= 2 * self.degree
            found.append(candidate)
        return tuple(found)


def _is_prime(number: int) -> bool:
    """Of numbers below 2^32, by the Miller-Rabin test to bases 2, 3, 5 and 7."""
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 3, 5, 7):
        power = pow(base, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True
