"""Whether a node's outputs are those of its blocks: relative errors, and how large they may be.

Honest machines differ by rounding: in the order of additions, by batch and kernel. How much depends
on the numbers that they compute with, so that a node is compared with a computation of its own
declared kind, by a threshold that was fitted to that kind.

T tokens, D hidden.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Literal

import torch

MIN_MEAN_TOKENS = 16
"""Tokens from which on their mean error is judged: means of fewer scatter."""

CLEAR_FACTOR = 1.5
"""How much more than an auditor's own computations differ by an error must be."""

Outcome = Literal["passed", "failed", "uncalibrated"]


@dataclass(frozen=True, slots=True)
class ComputationKind:
    """What decides how large honest differences are."""

    family: str
    """Model type of transformers' config, such as `llama`."""
    dtype: str
    """Of activations and of weights that are not quantized."""
    quantization: str
    backend: str
    """`cpu`, or the name of a GPU."""
    codec: str = "none"
    """How outputs are encoded, without parameters."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """Largest relative errors of an honest node, and from how much they were fitted."""

    token: float
    """Of one token."""
    mean: float
    """Mean over `MIN_MEAN_TOKENS` tokens or more, of errors that count as at most `clip`."""
    clip: float
    """Twice the median: single tokens of honest nodes are several times as far off as most."""
    fitted_tokens: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Errors of a row's outputs beside those that are allowed."""

    outcome: Outcome
    tokens: int
    worst: float
    mean: float
    """Of clipped errors, where a threshold says how."""
    allowed: Threshold | None
    first_wrong: int | None = None
    """Index of the first token beyond the threshold; None if only the mean is beyond, or none."""
    row: int = 0
    """Of several rows, the one that this is about."""

    @property
    def of_allowed(self) -> float | None:
        """The worse of the two errors as a multiple of what is allowed."""
        if self.allowed is None:
            return None
        of_token = self.worst / self.allowed.token
        if self.tokens < MIN_MEAN_TOKENS:
            return of_token
        return max(of_token, self.mean / self.allowed.mean)

    def exceeds(self, honest: Comparison) -> bool:
        """Whether this is clearly more than two honest computations of the same differ by."""
        return self.worst > CLEAR_FACTOR * honest.worst or self.mean > CLEAR_FACTOR * honest.mean


def relative_errors(given_TD: torch.Tensor, expected_TD: torch.Tensor) -> torch.Tensor:
    """Norm of each token's difference by that of what was expected: [T], float64, on the CPU.

    Zero where both are zero, infinite where only `expected_TD` is.
    """
    given_TD, expected_TD = (each.to("cpu", torch.float64) for each in (given_TD, expected_TD))
    off_T = torch.linalg.vector_norm(given_TD - expected_TD, dim=-1)
    size_T = torch.linalg.vector_norm(expected_TD, dim=-1)
    return torch.where(off_T == 0, 0.0, off_T / size_T)


def compare(
    given_TD: torch.Tensor, expected_TD: torch.Tensor, allowed: Threshold | None
) -> Comparison:
    """Compare outputs [T, D], T at least 1, with those of a computation of the same kind.

    Without a threshold the outcome is "uncalibrated".
    """
    errors_T = relative_errors(given_TD, expected_TD)
    tokens, worst = len(errors_T), float(errors_T.max())
    if allowed is None:
        return Comparison("uncalibrated", tokens, worst, float(errors_T.mean()), None)
    mean = float(errors_T.clamp(max=allowed.clip).mean())
    wrong = (~(errors_T <= allowed.token)).nonzero().flatten()
    first = int(wrong[0]) if len(wrong) else None
    mean_is_wrong = tokens >= MIN_MEAN_TOKENS and not mean <= allowed.mean
    outcome: Outcome = "failed" if first is not None or mean_is_wrong else "passed"
    return Comparison(outcome, tokens, worst, mean, allowed, first)


def compare_rows(
    given: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], allowed: Threshold | None
) -> Comparison:
    """The worst of the rows' comparisons, each [T, D], if there are several rows."""
    each = [
        replace(compare(*pair, allowed), row=row)
        for row, pair in enumerate(zip(given, expected, strict=True))
    ]
    return max(each, key=lambda found: (found.outcome == "failed", found.worst))


def is_confirmed(
    given: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    again: Sequence[torch.Tensor],
    allowed: Threshold | None,
) -> bool:
    """Whether `given` is wrong by two computations that round differently, and clearly so.

    A machine that computes may err, too, and a model be one whose honest errors are larger than
    those of the models that were fitted.
    """
    if any(compare_rows(given, each, allowed).outcome != "failed" for each in (expected, again)):
        return False
    own = compare_rows(again, expected, allowed)
    return compare_rows(given, expected, allowed).exceeds(own)


def find_threshold(kind: ComputationKind, blocks: int) -> Threshold | None:
    """The threshold for spans of `blocks` blocks; None where none was fitted.

    Errors grow with the number of blocks: of the fitted lengths, the next longer one counts.
    """
    by_length = _load_thresholds().get(kind, {})
    longer = [length for length in by_length if length >= blocks]
    return by_length[min(longer)] if longer else None


@cache
def _load_thresholds() -> Mapping[ComputationKind, Mapping[int, Threshold]]:
    rows = json.loads(files(__package__).joinpath("thresholds.json").read_text("utf-8"))
    found: dict[ComputationKind, dict[int, Threshold]] = {}
    for row in rows:
        kind = ComputationKind(
            row["family"], row["dtype"], row["quantization"], row["backend"], row["codec"]
        )
        by_length = found.setdefault(kind, {})
        by_length[row["blocks"]] = Threshold(
            row["token"], row["mean"], row["clip"], row["fitted_tokens"]
        )
    return found
