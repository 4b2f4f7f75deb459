"""Polynomials by coefficients and values, in numpy and in machine code."""

from __future__ import annotations

from math import prod

import numpy as np
import numpy.typing as npt
import pytest

from nesa_node.privacy.native_ring import NativeRing, make_ring
from nesa_node.privacy.parameters import MOST_MODULUS_BITS, SIGMA, RingParameters
from nesa_node.privacy.ring import TILE, Residues, Ring, to_tiles
from nesa_node.privacy.sampling import random_errors, random_ternary, uniform_residues
from nesa_node.privacy.slots import coefficients_of, slots_of

PARAMETERS = RingParameters()
REFERENCE = Ring(PARAMETERS)
LARGE = RingParameters(8192, (28, 28, 28, 28, 28, 28, 28))
NATIVE = make_ring(PARAMETERS)


@pytest.fixture(params=["reference", "machine code"])
def ring(request: pytest.FixtureRequest) -> Ring:
    return REFERENCE if request.param == "reference" else NATIVE


def random_residues(rng: np.random.Generator, *shape: int, ring: Ring = REFERENCE) -> Residues:
    drawn = rng.integers(0, 1 << 40, (*shape, len(ring.primes), ring.degree))
    return (drawn % ring.primes_P1.astype(np.int64)).astype(np.uint32)


def largest_residues(ring: Ring, *shape: int) -> Residues:
    whole = np.empty((*shape, len(ring.primes), ring.degree), np.uint32)
    whole[:] = ring.primes_P1 - 1
    return whole


def test_machine_code_is_made_here() -> None:
    assert isinstance(NATIVE, NativeRing)


def test_primes_let_the_transform_exist() -> None:
    primes = PARAMETERS.primes
    assert len(set(primes)) == 4
    assert [each.bit_length() for each in primes] == [26, 26, 26, 28]
    for prime in primes:
        assert prime % 8192 == 1
        assert all(prime % divisor for divisor in range(2, int(prime**0.5) + 1))
    assert prod(primes).bit_length() <= MOST_MODULUS_BITS[4096]
    assert SIGMA >= 3.19


@pytest.mark.parametrize(
    ("degree", "bits", "why"),
    [
        (4096, (27, 27, 27, 28), "not secure at degree 4096: at most 106"),
        (8192, (28,) * 8, "not secure at degree 8192: at most 214"),
        (2048, (26, 26, 26, 28), "no ring of degree 2048"),
        (4096, (26, 26), "three primes or more"),
        (4096, (19, 26, 26, 28), "of 20 to 28 bits"),
        (8192, (30, 30, 30, 30), "of 20 to 28 bits"),
    ],
)
def test_parameters_that_are_refused(degree: int, bits: tuple[int, ...], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        RingParameters(degree, bits)


def test_products_of_values_are_products_of_polynomials(ring: Ring) -> None:
    rng = np.random.default_rng(1)
    first, second = rng.integers(-1000, 1000, (2, ring.degree))
    whole = np.convolve(first, second)
    expected = whole[: ring.degree].copy()
    expected[:-1] -= whole[ring.degree :]
    values = [ring.values(ring.residues(each, 4)) for each in (first, second)]
    result = ring.coefficients(ring.multiply(values[0], values[1]))
    assert np.array_equal(result, ring.residues(expected, 4))


@pytest.mark.parametrize("parameters", [PARAMETERS, LARGE], ids=["4096", "8192"])
def test_machine_code_computes_what_the_reference_does(parameters: RingParameters) -> None:
    rng = np.random.default_rng(2)
    reference, native = Ring(parameters), make_ring(parameters)
    primes = len(reference.primes)
    for some in (random_residues(rng, 3, ring=reference), largest_residues(reference, 1)):
        for count in (primes, 2):
            given = some[:, :count]
            assert np.array_equal(native.values(given), reference.values(given))
            assert np.array_equal(native.coefficients(given), reference.coefficients(given))
        assert np.array_equal(native.divide_by_last(some), reference.divide_by_last(some))
        shorter = some[:, :3]
        assert np.array_equal(native.divide_by_last(shorter), reference.divide_by_last(shorter))
        digits = some[0, : primes - 1]
        assert np.array_equal(native.digits(digits), reference.digits(digits))


@pytest.mark.parametrize("threads", [1, 2])
def test_machine_code_rotates_and_multiplies_as_the_reference_does(threads: int) -> None:
    rng = np.random.default_rng(3)
    native = make_ring(PARAMETERS, threads)
    ciphertext = random_residues(rng, 2)[:, :3].copy()
    keys = {steps: random_residues(rng, 3, 2) for steps in (1, 2, 32)}
    keys[2] = largest_residues(REFERENCE, 3, 2)
    vectors = native.hoisted_rotations(ciphertext, keys, 3)
    assert np.array_equal(vectors, REFERENCE.hoisted_rotations(ciphertext, keys, 3))
    total = random_residues(rng, 2)
    expected, given = total.copy(), random_residues(rng, 2)
    native.add_rotated(total, given, 32, keys[32])
    REFERENCE.add_rotated(expected, given, 32, keys[32])
    assert np.array_equal(total, expected)
    for count, steps in ((7, 3), (1, 1), (3, 3)):
        diagonals = to_tiles(random_residues(rng, count).reshape(count, -1))
        pairs = to_tiles(random_residues(rng, steps, 2).reshape(2 * steps, -1))
        sums = random_residues(rng, -(-count // steps), 2)
        wanted = sums.copy()
        native.multiply_sum(diagonals, pairs.reshape(-1, steps, 2, TILE), sums)
        REFERENCE.multiply_sum(diagonals, pairs.reshape(-1, steps, 2, TILE), wanted)
        assert np.array_equal(sums, wanted)


def test_128_products_of_the_largest_residues_do_not_overflow(ring: Ring) -> None:
    diagonals = to_tiles(largest_residues(ring, 128).reshape(128, -1))
    vectors = to_tiles(largest_residues(ring, 128, 2).reshape(256, -1)).reshape(-1, 128, 2, TILE)
    sums = np.zeros((1, 2, 4, ring.degree), np.uint32)
    ring.multiply_sum(diagonals, vectors, sums)
    # (-1) (-1) for each.
    assert (sums == 128).all()


def test_rotation_moves_slots_to_the_left(ring: Ring) -> None:
    rng = np.random.default_rng(4)
    slots = rng.normal(size=2048) + 1j * rng.normal(size=2048)
    values = ring.values(ring.residues(coefficients_of(slots, 2.0**20), 1))
    rotated = ring.coefficients(np.ascontiguousarray(values[:, ring.rotation(5)]))
    whole = rotated[0].astype(np.int64)
    centered = np.where(whole > ring.primes[0] // 2, whole - ring.primes[0], whole)
    assert np.abs(slots_of(centered, 2.0**20) - np.roll(slots, -5)).max() < 1e-3


def test_slots_are_values_at_powers_of_a_root() -> None:
    coefficients = np.random.default_rng(5).integers(-100, 100, 64)
    found = slots_of(coefficients, 1.0)
    for slot in (0, 1, 7, 31):
        root = np.exp(1j * np.pi / 64 * pow(5, slot, 128))
        assert abs(np.polyval(coefficients[::-1], root) - found[slot]) < 1e-8
    assert np.array_equal(coefficients_of(found, 1.0), coefficients)


def test_random_polynomials_have_their_distributions() -> None:
    ternary = random_ternary(300_000)
    assert set(np.unique(ternary)) == {-1, 0, 1}
    assert np.abs(np.bincount(ternary + 1) - 100_000).max() < 5 * 260
    errors = random_errors(300_000)
    assert abs(errors.std() - SIGMA) < 0.03
    assert abs(errors.mean()) < 0.03
    # Beyond six standard deviations lie two in a billion.
    assert np.abs(errors).max() < 6 * SIGMA
    uniform = uniform_residues(REFERENCE, 4, b"seed" * 8, b"label")
    assert (uniform < REFERENCE.primes_P1).all()
    shares: npt.NDArray[np.float64] = uniform / REFERENCE.primes_P1
    assert np.abs(np.histogram(shares, 16, (0, 1))[0] - 1024).max() < 5 * 32


def test_uniform_polynomials_are_those_of_their_seed() -> None:
    one = uniform_residues(REFERENCE, 4, b"a" * 32, b"label")
    assert np.array_equal(one, uniform_residues(REFERENCE, 4, b"a" * 32, b"label"))
    assert np.array_equal(one[:2], uniform_residues(REFERENCE, 2, b"a" * 32, b"label"))
    for seed, label in ((b"b" * 32, b"label"), (b"a" * 32, b"other")):
        assert not np.array_equal(one, uniform_residues(REFERENCE, 4, seed, label))
