"""Ways to compare a node's outputs with those of another computation: sketches and their errors.

Each makes a sketch of values, and errors of two sketches: zero where they are equal, infinite where
what was given is not finite. Only `relative-l2` keeps all of the values. The other schemes are here
to be compared with it (`benchmarks/audit_attacks.py`), or where only sketches can be exchanged.

T tokens, D hidden, K numbers of a token's sketch.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

SEED_BYTES = 16
"""Least length of a seed: one that can be guessed is as good as known."""
DEFAULT_SCHEME = "relative-l2"
_MANTISSA_BITS = 7
"""Of bfloat16, which TOPLOC reads values as."""
_GREY_LEVELS = 255


class ComparisonScheme(ABC):
    """A kind of sketch. Sketches of two computations of the same values have small errors."""

    is_per_token = True
    """Whether there is an error for each token, and not one for all of them."""

    @property
    def resolution(self) -> float:
        """The smallest error above zero, if errors are counts; else zero."""
        return 0.0

    @abstractmethod
    def sketch(self, values_TD: Tensor, seed: bytes) -> Tensor:
        """Sketch of `values_TD`, of any floating dtype and device, on the CPU.

        Schemes with random parts draw them from `seed`, at least `SEED_BYTES` random bytes that the
        node must not know before it has sealed its values. Raises `ValueError` for a shorter one.
        """

    @abstractmethod
    def errors(self, given: Tensor, expected: Tensor) -> Tensor:
        """Errors of two sketches made with the same seed: [T] or, if not `is_per_token`, [1].

        In float64. Raises `ValueError` for sketches of different shapes.
        """


class RelativeL2(ComparisonScheme):
    """Norm of each token's difference by that of what was expected. The sketch is all values."""

    def sketch(self, values_TD: Tensor, seed: bytes) -> Tensor:
        """See `ComparisonScheme`: the values [T, D]."""
        return values_TD.to("cpu", torch.float64)

    def errors(self, given: Tensor, expected: Tensor) -> Tensor:
        """See `ComparisonScheme`. Zero where both are zero, infinite where only `expected` is."""
        _check_shapes(given, expected)
        off_T = torch.linalg.vector_norm(given - expected, dim=-1)
        size_T = torch.linalg.vector_norm(expected, dim=-1)
        return _finite_or_inf(torch.where(off_T == 0, 0.0, off_T / size_T))


@dataclass(frozen=True)
class RandomProjection(RelativeL2):
    """Projections on `numbers` random directions, and the relative error of these (`RelativeL2`).

    Norms of differences are kept within about 1 / sqrt(2 * numbers). Source: Johnson and
    Lindenstrauss 1984, with the Gaussian matrix of Dasgupta and Gupta 2003. With a seed that is
    known, a node can change its outputs within the null space at will.
    """

    numbers: int

    def sketch(self, values_TD: Tensor, seed: bytes) -> Tensor:
        """See `ComparisonScheme`: [T, K] in float64."""
        return values_TD.to("cpu", torch.float64) @ directions(
            seed, values_TD.shape[1], self.numbers
        )


@dataclass(frozen=True)
class RandomHyperplanes(ComparisonScheme):
    """On which sides of `planes` random hyperplanes a token lies: the share of sides that differ.

    Its expectation is the angle between both by pi (Charikar 2002, SimHash): lengths are not seen.
    """

    planes: int

    @property
    def resolution(self) -> float:
        """See `ComparisonScheme`."""
        return 1 / self.planes

    def sketch(self, values_TD: Tensor, seed: bytes) -> Tensor:
        """See `ComparisonScheme`: [T, K], zeros and ones; NaN for tokens that are not finite."""
        values_TD = values_TD.to("cpu", torch.float64)
        sides_TK = (values_TD @ directions(seed, values_TD.shape[1], self.planes) > 0).double()
        sides_TK[~values_TD.isfinite().all(1)] = torch.nan
        return sides_TK

    def errors(self, given: Tensor, expected: Tensor) -> Tensor:
        """See `ComparisonScheme`."""
        _check_shapes(given, expected)
        return _finite_or_inf((given - expected).abs().mean(1))


@dataclass(frozen=True)
class TopValues(ComparisonScheme):
    """The `count` largest values of a token in bfloat16: exponents that differ, and mantissas.

    The error is the mean over what is expected to be largest: 1 where the exponent is another or
    the place is not among those given, else the difference of mantissas by their range. Source:
    TOPLOC (Ong et al. 2025), which has 128 values of 32 tokens (four of each), and three bounds: on
    the exponents that differ, the mean and the median of mantissas' differences; here they are one
    number. Its polynomial, a way to store places and values, is left out. Values that are not among
    the largest are not seen.
    """

    count: int

    @property
    def resolution(self) -> float:
        """See `ComparisonScheme`."""
        return 1 / (self.count << _MANTISSA_BITS)

    def sketch(self, values_TD: Tensor, seed: bytes) -> Tensor:
        """See `ComparisonScheme`: places and values, [2, T, K]."""
        values_TD = values_TD.to("cpu", torch.float64)
        places_TK = values_TD.abs().topk(min(self.count, values_TD.shape[1]), dim=1).indices
        values_TK = values_TD.gather(1, places_TK).to(torch.bfloat16)
        return torch.stack([places_TK.double(), values_TK.double()])

    def errors(self, given: Tensor, expected: Tensor) -> Tensor:
        """See `ComparisonScheme`."""
        _check_shapes(given, expected)
        is_same_TKK = expected[0][:, :, None] == given[0][:, None]
        at_TK = is_same_TKK.to(torch.uint8).argmax(2)
        values_TK = given[1].gather(1, at_TK)
        bits_TK, other_TK = (
            each.to(torch.bfloat16).view(torch.int16).int() for each in (values_TK, expected[1])
        )
        is_alike_TK = bits_TK >> _MANTISSA_BITS == other_TK >> _MANTISSA_BITS
        apart_TK = (bits_TK - other_TK).abs().double() / (1 << _MANTISSA_BITS)
        errors_T = torch.where(is_same_TKK.any(2) & is_alike_TK, apart_TK, 1.0).mean(1)
        is_finite_T = given[1].isfinite().all(1) & expected[1].isfinite().all(1)
        return torch.where(is_finite_T, errors_T, torch.inf)


@dataclass(frozen=True)
class DifferenceHash(ComparisonScheme):
    """A difference hash of all tokens as a picture: the share of bits that differ.

    The picture, a row of D pixels for each token, is scaled to `side` rows of `side + 1`, and a bit
    says whether a pixel is brighter than the one before it. Source: dHash (Krawetz 2013), which
    "Secure Multiparty Generative AI" names for text. It does not say how values become pixels: here
    as 256 grey levels from the smallest value to the largest. A few values far from the rest,
    which Llamas have, leave it a few levels. `is_scaled`: pixels are each token's
    z-scores, not rounded. Of both, changed lengths of tokens are not seen, but by rounding.
    """

    side: int
    is_scaled: bool
    is_per_token = False

    @property
    def resolution(self) -> float:
        """See `ComparisonScheme`."""
        return 1 / self.side**2

    def sketch(self, values_TD: Tensor, seed: bytes) -> Tensor:
        """See `ComparisonScheme`: [side, side], zeros and ones; NaN if a value is not finite.

        No tokens have no bits: [0, 0].
        """
        values_TD = values_TD.to("cpu", torch.float64)
        if not len(values_TD):
            return values_TD.new_empty(0, 0)
        if self.is_scaled:
            off_TD = values_TD - values_TD.mean(1, keepdim=True)
            pixels_TD = off_TD / off_TD.square().mean(1, keepdim=True).sqrt().clamp(min=1e-300)
        else:
            lowest = values_TD.min()
            range_ = (values_TD.max() - lowest).clamp(min=1e-300)
            pixels_TD = ((values_TD - lowest) / range_ * _GREY_LEVELS).round()
        size = self.side, self.side + 1
        picture = functional.adaptive_avg_pool2d(pixels_TD[None], size)[0]
        if not self.is_scaled:
            picture = picture.round()
        bits = (picture[:, 1:] > picture[:, :-1]).double()
        return bits if values_TD.isfinite().all() else bits * torch.nan

    def errors(self, given: Tensor, expected: Tensor) -> Tensor:
        """See `ComparisonScheme`: one number, or none if there were no tokens."""
        _check_shapes(given, expected)
        if not given.numel():
            return given.new_empty(0)
        return _finite_or_inf((given - expected).abs().mean()[None])


SCHEMES: Mapping[str, ComparisonScheme] = {
    DEFAULT_SCHEME: RelativeL2(),
    "jl-32": RandomProjection(32),
    "toploc": TopValues(4),
    "simhash": RandomHyperplanes(256),
    "dhash": DifferenceHash(8, is_scaled=False),
    "dhash-z": DifferenceHash(32, is_scaled=True),
}
"""All schemes by name, the default first."""


@lru_cache(maxsize=2)
def directions(seed: bytes, hidden_size: int, count: int) -> Tensor:
    """A matrix [D, K] in float64 of independent normal numbers, the same for a seed everywhere.

    SHAKE-256 of the seed, read as 32-bit integers, through the inverse of the normal distribution.
    Raises `ValueError` for a seed below `SEED_BYTES`.
    """
    if len(seed) < SEED_BYTES:
        raise ValueError(f"a seed of {len(seed)} bytes can be guessed: give at least {SEED_BYTES}")
    drawn = hashlib.shake_256(seed).digest(4 * hidden_size * count)
    uniform = (torch.frombuffer(bytearray(drawn), dtype=torch.uint32).double() + 0.5) / 2**32
    normal: Tensor = torch.special.ndtri(uniform)
    return normal.view(hidden_size, count)


def _check_shapes(given: Tensor, expected: Tensor) -> None:
    if given.shape != expected.shape:
        raise ValueError(
            f"a sketch of shape {list(given.shape)} cannot be compared with one of "
            f"{list(expected.shape)}"
        )


def _finite_or_inf(errors: Tensor) -> Tensor:
    return torch.where(errors.isnan(), torch.inf, errors)
