"""Schemes that compare outputs: against small references, and what each of them cannot see.

T tokens, D hidden.
"""

from __future__ import annotations

import hashlib
import math
import struct
from itertools import pairwise
from statistics import NormalDist
from typing import get_args

import pytest
import torch

from nesa_node.core.settings.choices import AuditScheme
from nesa_node.verification.comparison import ComputationKind, Measure, compare, find_threshold
from nesa_node.verification.schemes import (
    DEFAULT_SCHEME,
    SCHEMES,
    SEED_BYTES,
    RandomHyperplanes,
    RandomProjection,
    TopValues,
    directions,
)

SEED = bytes(range(SEED_BYTES))
TOKENS, HIDDEN = 20, 96


def hidden_states(seed: int = 0, tokens: int = TOKENS, hidden: int = HIDDEN) -> torch.Tensor:
    """Values with a few dimensions that are far larger than all others, as Llamas have."""
    generator = torch.Generator().manual_seed(seed)
    values_TD = torch.randn((tokens, hidden), generator=generator)
    values_TD[:, 7] *= 50
    values_TD[:, 40] -= 80
    return values_TD


def changed(values_TD: torch.Tensor, size: float, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise_TD = torch.randn(values_TD.shape, generator=generator)
    scaled_TD: torch.Tensor = values_TD + size * values_TD.norm(dim=1, keepdim=True) * (
        noise_TD / noise_TD.norm(dim=1, keepdim=True)
    )
    return scaled_TD


def errors(scheme: str, given_TD: torch.Tensor, expected_TD: torch.Tensor) -> list[float]:
    found: list[float] = Measure(scheme, SEED).errors(given_TD, expected_TD).tolist()
    return found


def test_every_scheme_has_a_name_that_may_be_given() -> None:
    assert get_args(AuditScheme) == tuple(SCHEMES)
    assert next(iter(SCHEMES)) == DEFAULT_SCHEME


def test_directions_are_normal_numbers_of_the_seed() -> None:
    words = struct.unpack("<150I", hashlib.shake_256(SEED).digest(4 * 30 * 5))
    expected = [NormalDist().inv_cdf((word + 0.5) / 2**32) for word in words]
    assert directions(SEED, 30, 5).flatten().tolist() == pytest.approx(expected, rel=1e-9)


def test_relative_l2_is_the_norm_of_the_difference_by_that_of_what_was_expected() -> None:
    expected_TD = hidden_states()
    given_TD = changed(expected_TD, 0.03)
    assert errors("relative-l2", given_TD, expected_TD) == pytest.approx([0.03] * TOKENS, rel=1e-4)
    given_TD = torch.tensor([[3.0, 4.5], [0.0, 0.0], [0.0, 1.0]])
    expected_TD = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0]])
    assert errors("relative-l2", given_TD, expected_TD) == pytest.approx([0.1, 0.0, math.inf])


def test_projections_keep_relative_errors() -> None:
    """With 32 numbers within about a third, each token and each seed on its own."""
    expected_TD = torch.randn((400, HIDDEN), generator=torch.Generator().manual_seed(0))
    given_TD = changed(expected_TD, 0.03)
    found = torch.tensor(errors("jl-32", given_TD, expected_TD))
    assert found.median() == pytest.approx(0.03, rel=0.1)
    assert 0.01 < found.min() < found.max() < 0.09
    matrix_DK = directions(SEED, HIDDEN, 32)
    for token in (0, 399):
        expected_D, given_D = (each[token].tolist() for each in (expected_TD, given_TD))
        off_D = [one - other for one, other in zip(given_D, expected_D, strict=True)]
        off, size = (
            math.hypot(
                *(
                    sum(a * b for a, b in zip(vector_D, matrix_DK[:, k].tolist(), strict=True))
                    for k in range(32)
                )
            )
            for vector_D in (off_D, expected_D)
        )
        assert found[token] == pytest.approx(off / size, rel=1e-6)


def test_hyperplanes_tell_the_angle() -> None:
    """The share of planes between two vectors is their angle by pi."""
    for angle in (0.02, 0.5, math.pi / 2, math.pi):
        expected_TD = torch.zeros(1, HIDDEN)
        expected_TD[0, 0] = 3
        given_TD = torch.zeros(1, HIDDEN)
        given_TD[0, 0], given_TD[0, 1] = math.cos(angle), math.sin(angle)
        scheme = RandomHyperplanes(20_000)
        sketches = [scheme.sketch(each_TD, SEED) for each_TD in (given_TD, expected_TD)]
        found = float(scheme.errors(*sketches))
        assert found == pytest.approx(angle / math.pi, rel=0.1)


def reference_toploc(given_D: list[float], expected_D: list[float], count: int) -> float:
    """One token's error, from the bytes of bfloat16."""

    def largest(values: list[float]) -> list[int]:
        return sorted(range(len(values)), key=lambda at: -abs(values[at]))[:count]

    def rounded(value: float) -> float:
        return float(torch.tensor(value).bfloat16())

    def parts(value: float) -> tuple[int, int]:
        bits = struct.unpack(">I", struct.pack(">f", rounded(value)))[0] >> 16
        return bits >> 7, bits & 127

    apart = 0.0
    for at in largest(expected_D):
        (exponent, mantissa), (other, other_mantissa) = parts(given_D[at]), parts(expected_D[at])
        if at not in largest(given_D) or exponent != other:
            apart += 1
        else:
            apart += abs(mantissa - other_mantissa) / 128
    return apart / count


@pytest.mark.parametrize("size", [1e-4, 0.01, 0.1, 1.0])
def test_toploc_counts_exponents_and_mantissas_of_the_largest_values(size: float) -> None:
    expected_TD = hidden_states()
    given_TD = changed(expected_TD, size)
    scheme = TopValues(6)
    sketches = [scheme.sketch(each_TD, SEED) for each_TD in (given_TD, expected_TD)]
    assert scheme.errors(*sketches).tolist() == pytest.approx(
        [
            reference_toploc(*pair, 6)
            for pair in zip(given_TD.tolist(), expected_TD.tolist(), strict=True)
        ]
    )


def reference_dhash(values_TD: torch.Tensor, side: int, is_scaled: bool) -> list[bool]:
    """Bits of the hash, pixel by pixel. Sides divide the picture."""
    rows = values_TD.double().tolist()
    if is_scaled:
        for row in rows:
            mean = sum(row) / len(row)
            deviation = math.sqrt(sum((value - mean) ** 2 for value in row) / len(row))
            row[:] = [(value - mean) / deviation for value in row]
    else:
        low, high = min(map(min, rows)), max(map(max, rows))
        rows = [[float(round((value - low) / (high - low) * 255)) for value in row] for row in rows]
    tall, wide = len(rows) // side, len(rows[0]) // (side + 1)
    bits = []
    for down in range(side):
        pixels = [
            sum(rows[down * tall + y][across * wide + x] for y in range(tall) for x in range(wide))
            / (tall * wide)
            for across in range(side + 1)
        ]
        if not is_scaled:
            pixels = [float(round(pixel)) for pixel in pixels]
        bits += [right > left for left, right in pairwise(pixels)]
    return bits


@pytest.mark.parametrize(("name", "side"), [("dhash", 8), ("dhash-z", 32)])
def test_difference_hashes_compare_neighbouring_pixels(name: str, side: int) -> None:
    expected_TD = hidden_states(tokens=2 * side, hidden=8 * (side + 1))
    given_TD = changed(expected_TD, 0.5)
    bits = [
        reference_dhash(each_TD, side, name == "dhash-z") for each_TD in (given_TD, expected_TD)
    ]
    different = sum(one != other for one, other in zip(*bits, strict=True))
    assert different
    assert errors(name, given_TD, expected_TD) == pytest.approx([different / side**2])


@pytest.mark.parametrize("name", SCHEMES)
def test_equal_values_have_no_error_and_other_ones_do(name: str) -> None:
    expected_TD = hidden_states()
    assert set(errors(name, expected_TD, expected_TD)) == {0.0}
    other = errors(name, hidden_states(seed=9), expected_TD)
    assert len(other) == (TOKENS if SCHEMES[name].is_per_token else 1)
    assert min(other) > 0


@pytest.mark.parametrize(
    ("name", "sees"), [(name, name in ("relative-l2", "jl-32", "toploc")) for name in SCHEMES]
)
def test_only_some_schemes_see_that_all_is_larger(name: str, sees: bool) -> None:
    # Each value rounded to bfloat16 is then another one, twice as large exactly.
    expected_TD = hidden_states()
    assert (max(errors(name, 2 * expected_TD, expected_TD)) > 0) == sees


@pytest.mark.parametrize("name", SCHEMES)
def test_tokens_are_compared_one_by_one(name: str) -> None:
    expected_TD, given_TD = hidden_states(), hidden_states(seed=3)
    if SCHEMES[name].is_per_token:
        order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))
        found = errors(name, given_TD[order], expected_TD[order])
        assert found == pytest.approx(torch.tensor(errors(name, given_TD, expected_TD))[order])


@pytest.mark.parametrize("name", ["jl-32", "simhash"])
def test_another_seed_is_another_sketch(name: str) -> None:
    scheme, values_TD = SCHEMES[name], hidden_states()
    assert torch.equal(scheme.sketch(values_TD, SEED), scheme.sketch(values_TD, SEED))
    assert not torch.equal(scheme.sketch(values_TD, SEED), scheme.sketch(values_TD, SEED[::-1]))
    with pytest.raises(ValueError, match="15 bytes can be guessed"):
        scheme.sketch(values_TD, SEED[1:])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 7, HIDDEN - 1])
@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_not_finite_is_infinitely_wrong(name: str, place: int, value: float) -> None:
    """Also where the scheme does not look."""
    expected_TD = hidden_states()
    given_TD = expected_TD.clone()
    given_TD[4, place] = value
    found = errors(name, given_TD, expected_TD)
    wrong = 4 if SCHEMES[name].is_per_token else 0
    assert found[wrong] == math.inf
    assert sum(error == math.inf for error in found) == 1


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 1), (2, 40), (70, 2)])
def test_small_shapes_have_errors(name: str, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    expected_TD = torch.randn(shape, generator=generator).bfloat16()
    found = errors(name, -expected_TD, expected_TD)
    assert len(found) == (shape[0] if SCHEMES[name].is_per_token else 1)
    zeros_TD = torch.zeros(shape)
    assert set(errors(name, zeros_TD, zeros_TD)) == {0.0}


@pytest.mark.parametrize("name", SCHEMES)
def test_no_tokens_have_no_errors(name: str) -> None:
    nothing_TD = torch.zeros(0, HIDDEN)
    assert errors(name, nothing_TD, nothing_TD) == []
    with pytest.raises(ValueError, match="no tokens"):
        compare(nothing_TD, nothing_TD, None, Measure(name, SEED))


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("shape", [(TOKENS - 1, HIDDEN), (TOKENS, HIDDEN - 1), (1, HIDDEN)])
def test_other_shapes_are_refused(name: str, shape: tuple[int, int]) -> None:
    """Those that torch would extend, too."""
    with pytest.raises(ValueError, match="cannot be compared"):
        errors(name, torch.zeros(shape), hidden_states())


@pytest.mark.parametrize(
    ("leaked", "found"), [(True, 0), (False, 300)], ids=["leaked seed", "fresh seed"]
)
def test_a_forgery_within_the_null_space_needs_the_seed(leaked: bool, found: int) -> None:
    """Outputs changed by 5 % in directions that a known projection does not see."""
    hidden = 576
    kind = ComputationKind("llama", "bfloat16", "none", "cpu")
    allowed = find_threshold(kind, 10, "jl-32")
    assert allowed is not None
    generator = torch.Generator().manual_seed(0)
    failed = 0
    for session in range(300):
        expected_TD = hidden_states(session, 64, hidden)
        known, fresh = (
            hashlib.sha256(f"{name} {session}".encode()).digest() for name in ("known", "fresh")
        )
        basis_DK, _ = torch.linalg.qr(directions(known, hidden, 32))
        change_TD = torch.randn((64, hidden), generator=generator, dtype=torch.float64)
        change_TD -= change_TD @ basis_DK @ basis_DK.T
        change_TD *= 0.05 * (expected_TD.norm(dim=1) / change_TD.norm(dim=1))[:, None]
        given_TD = (expected_TD + change_TD).bfloat16()
        measure = Measure("jl-32", known if leaked else fresh)
        failed += compare(given_TD, expected_TD, allowed, measure).outcome == "failed"
    assert failed == found


def test_a_sketch_is_small() -> None:
    """What a scheme is for: a sketch in place of 9,216 bytes of float32."""
    values_TD = hidden_states()
    assert RandomProjection(32).sketch(values_TD, SEED).shape == (TOKENS, 32)
    assert TopValues(4).sketch(values_TD, SEED).shape == (2, TOKENS, 4)
    assert SCHEMES["dhash"].sketch(values_TD, SEED).shape == (8, 8)
