"""Errors of outputs against thresholds.

T tokens, D hidden.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import nesa_node.verification
from nesa_node.verification.comparison import (
    EVIDENT_FACTOR,
    MIN_EVIDENT_TOKENS,
    MIN_MEAN_TOKENS,
    MIN_QUANTILE_TOKENS,
    ComputationKind,
    Measure,
    Threshold,
    compare,
    compare_rows,
    find_threshold,
    is_confirmed,
    is_evident,
    perturb,
)
from nesa_node.verification.schemes import SCHEMES

ALLOWED = Threshold(
    token=0.05, mean=0.01, clip=0.016, fitted_tokens=1, quantiles=(0.008, 0.012, 0.018)
)
RELATIVE = Measure("relative-l2", b"")
TABLE = Path(nesa_node.verification.__file__).parent / "thresholds.json"


def shifted(expected_TD: torch.Tensor, errors: list[float]) -> torch.Tensor:
    """`expected_TD` with the given relative error at each token."""
    norm_T1 = expected_TD.norm(dim=-1, keepdim=True)
    direction_D = torch.nn.functional.normalize(torch.ones(expected_TD.shape[1]), dim=0)
    shifted_TD: torch.Tensor = expected_TD + torch.tensor(errors)[:, None] * norm_T1 * direction_D
    return shifted_TD


@pytest.mark.parametrize(
    ("errors", "outcome", "first"),
    [
        ([0.009] * 20, "passed", None),
        ([0.009] * 9 + [0.051] + [0.0] * 10, "failed", 9),
        # A few tokens are far off at honest nodes, too.
        ([0.009] * 17 + [0.049] * 2, "passed", None),
        ([0.012] * MIN_MEAN_TOKENS, "failed", None),
        ([0.012] * (MIN_MEAN_TOKENS - 1), "passed", None),
        ([math.nan] * 2, "failed", 0),
        # A little noise at each token, where few honest tokens have none.
        ([0.0085] * MIN_QUANTILE_TOKENS, "failed", None),
        ([0.0085] * (MIN_QUANTILE_TOKENS - 1), "passed", None),
        ([0.0085] * 28 + [0.0075] * 20, "passed", None),
        ([0.0085] * 29 + [0.0075] * 19, "failed", None),
        # Or much at some tokens, too few for the mean, whose errors are clipped.
        ([0.0125] * 12 + [0.004] * 36, "passed", None),
        ([0.0125] * 13 + [0.004] * 35, "failed", None),
        ([0.04] * 4 + [0.004] * 44, "passed", None),
        ([0.04] * 5 + [0.004] * 43, "failed", None),
    ],
)
def test_one_token_or_the_mean_may_be_wrong(
    errors: list[float], outcome: str, first: int | None
) -> None:
    expected_TD = torch.randn((len(errors), 8), generator=torch.Generator().manual_seed(0))
    found = compare(shifted(expected_TD, errors), expected_TD, ALLOWED, RELATIVE)
    assert (found.outcome, found.first_wrong) == (outcome, first)


def test_without_a_threshold_nothing_is_judged() -> None:
    expected_TD = torch.ones(4, 8)
    found = compare(2 * expected_TD, expected_TD, None, RELATIVE)
    assert (found.outcome, found.of_allowed) == ("uncalibrated", None)
    assert found.worst == pytest.approx(1.0)


def test_the_worst_row_counts() -> None:
    expected_TD = torch.ones(4, 8)
    given = [expected_TD, shifted(expected_TD, [0.075] * 4), expected_TD]
    found = compare_rows(given, [expected_TD] * 3, ALLOWED, RELATIVE)
    assert found.outcome == "failed"
    assert found.of_allowed == pytest.approx(1.5)


def test_a_clear_error_is_beyond_that_of_two_honest_computations() -> None:
    expected_TD = torch.randn((20, 8), generator=torch.Generator().manual_seed(0))
    own, small, same, clear = (
        compare(shifted(expected_TD, [error] * 20), expected_TD, ALLOWED, RELATIVE)
        for error in (0.008, 0.006, 0.011, 0.013)
    )
    assert same.outcome == clear.outcome == "failed"
    assert same.of_clear([own, small]) < 1
    assert clear.of_clear([own, small]) > 1


def test_quantiles_of_many_tokens_are_clear_sooner() -> None:
    expected_TD = torch.randn((64, 8), generator=torch.Generator().manual_seed(0))
    own, same, clear = (
        compare(shifted(expected_TD, [error] * 64), expected_TD, ALLOWED, RELATIVE)
        for error in (0.01, 0.0119, 0.0121)
    )
    assert same.of_clear([own]) < 1
    assert clear.of_clear([own]) > 1


def test_only_errors_beyond_what_is_allowed_are_clear() -> None:
    """Of a text that loops all errors are large, and at an honest node one token's is larger."""
    expected_TD = torch.randn((64, 8), generator=torch.Generator().manual_seed(0))
    further_TD = shifted(expected_TD, [-0.0105] * 64)
    honest_TD = shifted(expected_TD, [0.0085] * 63 + [0.03])
    found = compare(honest_TD, expected_TD, ALLOWED, RELATIVE)
    assert found.outcome == "failed"
    assert found.of_clear([compare(further_TD, expected_TD, ALLOWED, RELATIVE)]) < 1
    assert not is_confirmed([honest_TD], [expected_TD], [[further_TD]], ALLOWED, RELATIVE)
    wrong_TD = shifted(expected_TD, [0.0085] * 63 + [0.09])
    assert is_confirmed([wrong_TD], [expected_TD], [[further_TD]], ALLOWED, RELATIVE)


def test_an_error_is_confirmed_by_the_row_that_has_it() -> None:
    """A row whose two computations differ as much excuses only itself."""
    expected_TD = torch.randn((64, 8), generator=torch.Generator().manual_seed(0))
    small, large = (shifted(expected_TD, [error] * 64) for error in (0.001, 0.02))
    wrong = shifted(expected_TD, [-0.02] * 64)
    both = [expected_TD, expected_TD]
    assert is_confirmed([wrong, expected_TD], both, [[small, large]], ALLOWED, RELATIVE)
    assert not is_confirmed([wrong, expected_TD], both, [[large, small]], ALLOWED, RELATIVE)
    assert not is_confirmed([wrong], [expected_TD], [[wrong]], ALLOWED, RELATIVE)


def test_an_error_is_confirmed_by_all_computations() -> None:
    expected_TD = torch.randn((64, 8), generator=torch.Generator().manual_seed(0))
    small, large = ([shifted(expected_TD, [error] * 64)] for error in (0.001, 0.02))
    wrong, expected = [shifted(expected_TD, [-0.02] * 64)], [expected_TD]
    assert is_confirmed(wrong, expected, [small, small], ALLOWED, RELATIVE)
    # In float32, by more than in coarser dtypes.
    near = [shifted(expected_TD, [0.005] * 64)]
    assert not is_confirmed(wrong, expected, [small, near], ALLOWED, RELATIVE)
    coarse = [[each.bfloat16() for each in rows] for rows in (wrong, expected, small, near)]
    assert is_confirmed(coarse[0], coarse[1], coarse[2:], ALLOWED, RELATIVE)
    assert not is_confirmed(wrong, expected, [small, large], ALLOWED, RELATIVE)
    assert not is_confirmed(wrong, expected, [large, small], ALLOWED, RELATIVE)


@pytest.mark.parametrize(("own", "wrong", "confirmed"), [(0.02, -0.04, True), (0.06, -0.1, False)])
def test_where_all_errors_are_large_a_clear_one_is_larger(
    own: float, wrong: float, confirmed: bool
) -> None:
    """An honest node of a looping answer, 4.1 x beyond its bounds, was barred for such an error."""
    expected_TD = torch.randn((64, 8), generator=torch.Generator().manual_seed(0))
    rows = [[shifted(expected_TD, [each] * 64).bfloat16()] for each in (wrong, 0.0, own)]
    given, expected, further = rows
    assert is_confirmed(given, expected, [further], ALLOWED, RELATIVE) == confirmed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_perturbed_by_what_rounding_loses(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values_LD = torch.randn((50, 100), generator=generator).to(dtype)
    changed_LD = perturb(values_LD)
    assert changed_LD.dtype == dtype
    moved_LD = (changed_LD.double() / values_LD.double() - 1).abs()
    assert 0.2 < (moved_LD > 0).double().mean() < 0.8
    assert float(moved_LD.max()) <= torch.finfo(dtype).eps
    assert not torch.equal(perturb(values_LD), changed_LD)
    strange_D = torch.tensor([0.0, math.inf, -math.inf], dtype=dtype)
    assert torch.equal(perturb(strange_D), strange_D)
    assert perturb(values_LD[:0]).shape == (0, 100)


def test_what_a_codec_loses_confirms_nothing() -> None:
    expected_TD = torch.randn((64, 8), generator=torch.Generator().manual_seed(0))
    coarse = shifted(expected_TD, [0.02] * 64)
    again = [[shifted(expected_TD, [0.001] * 64)]]
    assert is_confirmed([coarse], [expected_TD], again, ALLOWED, RELATIVE)
    assert not is_confirmed(
        [coarse], [expected_TD], again, ALLOWED, RELATIVE, as_sent=lambda _: coarse
    )


def test_shipped_thresholds_are_those_of_the_next_longer_span() -> None:
    rows = json.loads(TABLE.read_text())
    lengths = {row["blocks"] for row in rows}
    kind = ComputationKind("llama", "bfloat16", "none", "cpu")
    longest = find_threshold(kind, max(lengths))
    assert longest is not None
    assert find_threshold(kind, max(lengths) - 1) == longest
    assert find_threshold(kind, max(lengths) + 1) is None
    shortest = find_threshold(kind, 1)
    assert shortest is not None
    assert shortest.mean < longest.mean
    assert find_threshold(ComputationKind("llama", "bfloat16", "none", "NVIDIA H200"), 1) is None


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bounds_of_every_scheme_are_shipped(scheme: str) -> None:
    for dtype in ("float32", "bfloat16"):
        allowed = find_threshold(ComputationKind("llama", dtype, "none", "cpu"), 10, scheme)
        assert allowed is not None
        assert 0 < allowed.quantiles[0] <= allowed.quantiles[1] <= allowed.quantiles[2] < math.inf
        assert 0 < allowed.mean <= allowed.token
        assert allowed.fitted_tokens >= 1000


def test_shipped_thresholds_tell_int8_from_bfloat16() -> None:
    """Weights in int8 change the outputs of ten blocks by 1.9 % (blocks 10 to 19, measured)."""
    allowed = find_threshold(ComputationKind("llama", "bfloat16", "none", "cpu"), 10)
    assert allowed is not None
    assert allowed.mean < 0.019


@pytest.mark.parametrize(
    ("tokens", "error", "own", "expected"),
    [
        (MIN_EVIDENT_TOKENS, 0.3, 0.01, True),
        (MIN_EVIDENT_TOKENS - 1, 0.3, 0.01, False),
        (MIN_EVIDENT_TOKENS, 0.04, 0.001, False),  # within the bound on a token
        (MIN_EVIDENT_TOKENS, 0.3, 0.3 / EVIDENT_FACTOR * 1.1, False),
        (MIN_EVIDENT_TOKENS, 0.3, 0.3 / EVIDENT_FACTOR * 0.9, True),
    ],
)
def test_work_is_evident_where_many_tokens_are_far_from_both_computations(
    tokens: int, error: float, own: float, expected: bool
) -> None:
    """However little the two differ at most tokens: the worst one counts."""
    once_TD = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    again_TD = shifted(once_TD, [0.0] * 63 + [own])
    given_TD = shifted(once_TD, [error] * tokens + [0.0] * (64 - tokens))
    for rows in ([given_TD], [once_TD, given_TD]):
        once, again = ([each] * len(rows) for each in (once_TD, again_TD))
        for further in ([again], [once, again], [again, once]):
            assert is_evident(rows, once, further, ALLOWED, RELATIVE) is expected
        assert is_evident(rows, again, [once], ALLOWED, RELATIVE) is expected
        assert not is_evident(rows, once, [again], None, RELATIVE)


def test_outputs_that_one_of_several_computations_gives_are_not_evident() -> None:
    once_TD, again_TD = torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(1))
    tight = Threshold(token=1e-9, mean=1e-9, clip=1e-9, fitted_tokens=1)
    far = 1e3 * torch.ones(64, 128)
    assert is_evident([far], [once_TD], [[once_TD]], tight, RELATIVE)
    for further in ([[again_TD]], [[once_TD], [again_TD]]):
        assert not is_evident([again_TD], [once_TD], further, tight, RELATIVE)
