"""Whether a node's outputs are those of its blocks: errors by a scheme, and how large they may be.

Honest machines differ by rounding: in the order of additions, by batch and kernel. How much depends
on the numbers that they compute with, so that a node is compared with a computation of its own
declared kind, by a threshold that was fitted to that kind.

T tokens, D hidden.
"""

from __future__ import annotations

import json
import math
import operator
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import combinations
from typing import Literal

import torch

from nesa_node.verification.schemes import DEFAULT_SCHEME, SCHEMES

MIN_MEAN_TOKENS = 16
"""Tokens from which on their mean error is judged: means of fewer scatter."""

MIN_QUANTILE_TOKENS = 48
"""Tokens from which on quantiles of their errors are judged, too: these scatter least."""
QUANTILE_SHARES = (0.4, 0.75, 0.9)
"""Shares of tokens that are not further off than each quantile. Few honest tokens have large
errors; so the first one shows a node that adds a little noise to all tokens, and the last one a
node that adds much to some."""

CLEAR_FACTOR = 1.5
CLEAR_QUANTILE_FACTORS = (1.2, 1.35, 1.5)
"""How much more than an auditor's own computations differ by an error must be, of a token and of
means, or a quantile: those of two honest computations of a text are within a tenth to a fourth."""

ORDINARY_OF_ALLOWED = 2.0
"""How many times the allowed errors an auditor's own computations may differ by before what is
clear grows with them: of texts that loop, where all errors are large and alike, honest machines
differ by half as much again."""

PERTURBATIONS = 4
"""Computations of perturbed inputs that an auditor makes: where tokens repeat, their errors are
alike, and quantiles scatter as single tokens do."""
FLOAT32_MARGIN = 5.0
"""By how much more in float32, whose rounding is far below any lie's error: inputs can be found for
which single honest tokens differ by twice as much as an auditor's own computations."""

MAX_EXCUSED = 4.0
"""How many times the allowed errors those of a node may be (in float32 `FLOAT32_MARGIN` times more)
that passes because an auditor's own computations differ as much: bounds are fitted to one model,
and a second one differed by up to three times as much. By more, all do of inputs made for that."""

MIN_EVIDENT_TOKENS = 16
EVIDENT_FACTOR = 8.0
"""How many tokens have to be how many times as far off as two computations differ, for an accuser
to be believed: see `is_evident`."""

Outcome = Literal["passed", "failed", "uncalibrated"]
PairErrors = Mapping[tuple[int, int], torch.Tensor]
"""Errors [T] of each two of several computations of the same, by their indices."""


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
    """Largest errors of an honest node, and from how much they were fitted."""

    token: float
    """Of one token."""
    mean: float
    """Mean over `MIN_MEAN_TOKENS` tokens or more, of errors that count as at most `clip`."""
    clip: float
    """Twice the median: single tokens of honest nodes are several times as far off as most."""
    fitted_tokens: int
    quantiles: tuple[float, ...] = (math.inf,) * len(QUANTILE_SHARES)
    """`QUANTILE_SHARES` of `MIN_QUANTILE_TOKENS` tokens or more have at most these errors."""


@dataclass(frozen=True, slots=True)
class Measure:
    """How one audit measures errors: its scheme, and the seed that is drawn once work is sealed."""

    scheme: str
    seed: bytes
    """See `ComparisonScheme.sketch`."""

    def errors(self, given_TD: torch.Tensor, expected_TD: torch.Tensor) -> torch.Tensor:
        """Errors by the scheme: [T] or [1], float64, on the CPU. Infinite where not finite.

        Raises `ValueError` for different shapes.
        """
        if given_TD.shape != expected_TD.shape:
            raise ValueError(
                f"outputs of shape {list(given_TD.shape)} cannot be compared with "
                f"{list(expected_TD.shape)}"
            )
        scheme = SCHEMES[self.scheme]
        return scheme.errors(
            scheme.sketch(given_TD, self.seed), scheme.sketch(expected_TD, self.seed)
        )

    def errors_of_pairs(self, outputs: Sequence[torch.Tensor]) -> PairErrors:
        """`errors` of each two of several outputs [T, D], by their indices."""
        pairs = combinations(range(len(outputs)), 2)
        return {(one, other): self.errors(outputs[one], outputs[other]) for one, other in pairs}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Errors of a row's outputs beside those that are allowed."""

    outcome: Outcome
    scheme: str
    tokens: int
    worst: float
    mean: float
    """Of clipped errors, where a threshold says how."""
    quantiles: tuple[float, ...]
    """Errors that `QUANTILE_SHARES` of the tokens do not exceed."""
    allowed: Threshold | None
    first_wrong: int | None = None
    """Index of the first token beyond the threshold; None if only the mean is beyond, or none."""
    row: int = 0
    """Of several rows, the one that this is about."""

    @property
    def of_allowed(self) -> float | None:
        """The worst of these errors as a multiple of what is allowed."""
        return None if self.allowed is None else max(self._multiples(self.allowed))

    def _multiples(self, allowed: Threshold) -> list[float]:
        """Those of `_errors` that are judged, each as a multiple of what is allowed."""
        bounds = [allowed.token]
        if self.tokens >= MIN_MEAN_TOKENS:
            bounds.append(allowed.mean)
        if self.tokens >= MIN_QUANTILE_TOKENS:
            bounds += allowed.quantiles
        judged = zip(self._errors(), bounds, strict=False)
        return [error / bound if error else 0.0 for error, bound in judged]

    def of_clear(self, honest: Sequence[Comparison]) -> float:
        """The worst of the errors beyond what is allowed, as a multiple of what is clearly more
        than any of the `honest` computations of the same differ by.

        What is allowed is no sign of a lie: of one token, honest machines often differ by far more
        than an auditor's own computations do.
        """
        if self.allowed is None:
            return 0.0
        factors = (CLEAR_FACTOR, CLEAR_FACTOR, *CLEAR_QUANTILE_FACTORS)
        own = [max(errors) for errors in zip(*(each._errors() for each in honest), strict=True)]
        # Without any own error, a difference is a clear one.
        clear = [
            error / (factor * other) if other else math.inf
            for error, factor, other in zip(self._errors(), factors, own, strict=True)
        ]
        judged = zip(self._multiples(self.allowed), clear, strict=False)
        return max((each for multiple, each in judged if multiple > 1), default=0.0)

    def _errors(self) -> tuple[float, ...]:
        return self.worst, self.mean, *self.quantiles

    def is_confirmed_by(
        self,
        others: Sequence[Comparison],
        own: Sequence[Comparison],
        sent: Sequence[Comparison],
        dtype: torch.dtype,
    ) -> bool:
        """Whether this failed, clearly, and so did `others`, comparisons with further computations.

        `own` compares these with the one of this; `sent` does so as the codec would have made them.
        """
        is_wrong = all(each.outcome == "failed" for each in (self, *others))
        beyond = max((each.of_allowed or 0.0 for each in own), default=0.0) / ORDINARY_OF_ALLOWED
        margin = _rounding_margin(dtype) * max(1.0, beyond)
        is_clear = self.of_clear(own) > margin and self.of_clear(sent) > 1
        return is_wrong and is_clear

    def is_excusable(self, dtype: torch.dtype) -> bool:
        """Whether errors that further computations do not confirm may be another model's."""
        return (self.of_allowed or 0.0) <= MAX_EXCUSED * _rounding_margin(dtype)


def _rounding_margin(dtype: torch.dtype) -> float:
    return FLOAT32_MARGIN if dtype is torch.float32 else 1.0


def judge(errors: torch.Tensor, tokens: int, scheme: str, allowed: Threshold | None) -> Comparison:
    """Judge the errors of `tokens` tokens by a scheme: one of each, or one of all.

    Without a threshold the outcome is "uncalibrated". Raises `ValueError` if there are no errors.
    """
    if not len(errors):
        raise ValueError("no tokens, of which nothing can be said")
    # One of all is judged as a mean is.
    clip = math.inf if allowed is None or len(errors) < tokens else allowed.clip
    worst, mean = float(errors.max()), float(errors.clamp(max=clip).mean())
    quantiles = error_quantiles(errors)
    if allowed is None:
        return Comparison("uncalibrated", scheme, tokens, worst, mean, quantiles, None)
    wrong = (errors > allowed.token).nonzero().flatten()
    first = int(wrong[0]) if len(wrong) else None
    is_wrong = (
        first is not None
        or (tokens >= MIN_MEAN_TOKENS and mean > allowed.mean)
        or (tokens >= MIN_QUANTILE_TOKENS and any(map(operator.gt, quantiles, allowed.quantiles)))
    )
    outcome: Outcome = "failed" if is_wrong else "passed"
    return Comparison(outcome, scheme, tokens, worst, mean, quantiles, allowed, first)


def error_quantiles(errors: torch.Tensor) -> tuple[float, ...]:
    """The errors that `QUANTILE_SHARES` of the tokens do not exceed."""
    ordered = errors.sort().values
    return tuple(float(ordered[math.ceil(share * len(errors)) - 1]) for share in QUANTILE_SHARES)


def compare(
    given_TD: torch.Tensor,
    expected_TD: torch.Tensor,
    allowed: Threshold | None,
    measure: Measure,
) -> Comparison:
    """Compare outputs [T, D], T at least 1, with those of a computation of the same kind.

    Raises `ValueError` for different shapes and no tokens.
    """
    errors = measure.errors(given_TD, expected_TD)
    return judge(errors, len(given_TD), measure.scheme, allowed)


def compare_rows(
    given: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    allowed: Threshold | None,
    measure: Measure,
) -> Comparison:
    """The worst of the rows' comparisons, each [T, D], if there are several rows."""
    each = [
        replace(compare(*pair, allowed, measure), row=row)
        for row, pair in enumerate(zip(given, expected, strict=True))
    ]
    return max(each, key=lambda found: (found.outcome == "failed", found.worst))


def is_confirmed(
    given: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    further: Sequence[Sequence[torch.Tensor]],
    allowed: Threshold | None,
    measure: Measure,
    *,
    as_sent: Callable[[torch.Tensor], torch.Tensor] = lambda output_TD: output_TD,
) -> bool:
    """Whether `given`, rows [T, D], is wrong by several computations, and clearly so.

    A machine that computes may err, too; a model may be one whose honest errors are larger than
    those of the models that were fitted; and inputs may be made so that honest machines differ.
    `further` are computations like `expected`, which round otherwise: token by token, and
    `PERTURBATIONS` from inputs that `perturb` changed. `as_sent` is what a codec made of `given`:
    computations that differ by less than it loses tell little.
    """
    for given_TD, expected_TD, *further_TD in zip(given, expected, *further, strict=True):
        found = compare(given_TD, expected_TD, allowed, measure)
        others = [compare(given_TD, each_TD, allowed, measure) for each_TD in further_TD]
        own = [compare(each_TD, expected_TD, allowed, measure) for each_TD in further_TD]
        sent = [compare(as_sent(each_TD), expected_TD, allowed, measure) for each_TD in further_TD]
        if found.is_confirmed_by(others, own, sent, given_TD.dtype):
            return True
    return False


def is_evident(
    given: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    further: Sequence[Sequence[torch.Tensor]],
    allowed: Threshold | None,
    measure: Measure,
) -> bool:
    """Whether `given`, rows [T, D], is wrong to a reader that knows neither author nor accuser.

    Inputs may be chosen, so that honest machines differ by more than they use to, and by most at
    some tokens. So `MIN_EVIDENT_TOKENS` of a row have to be too far from `expected`, and
    `EVIDENT_FACTOR` times as far as any of the `further` computations is at any token: these are as
    for `is_confirmed`. `measure` is of a scheme with an error for each token. Without
    a threshold nothing is evident.
    """
    if allowed is None:
        return False
    for given_TD, expected_TD, *further_TD in zip(given, expected, *further, strict=True):
        if len(given_TD):
            own = max(float(measure.errors(each, expected_TD).max()) for each in further_TD)
            least = max(EVIDENT_FACTOR * own, allowed.token)
            if int((measure.errors(given_TD, expected_TD) > least).sum()) >= MIN_EVIDENT_TOKENS:
                return True
    return False


def perturb(values_LD: torch.Tensor) -> torch.Tensor:
    """`values_LD`, each changed at random by at most half its dtype's relative precision.

    Of ordinary values, outputs change as much as those of two honest machines differ; of values
    whose rounding decides, by as much more. The noise is new each time, so that no inputs can be
    made which it does not change.
    """
    generator = torch.Generator().manual_seed(secrets.randbits(63))
    noise_LD = torch.rand(values_LD.shape, generator=generator, dtype=torch.float64) - 0.5
    noise_LD *= torch.finfo(values_LD.dtype).eps
    return (values_LD.double() * (1 + noise_LD)).to(values_LD.dtype)


def find_threshold(
    kind: ComputationKind, blocks: int, scheme: str = DEFAULT_SCHEME
) -> Threshold | None:
    """The threshold of a scheme for spans of `blocks` blocks; None where none was fitted.

    Errors grow with the number of blocks: of the fitted lengths, the next longer one counts.
    """
    by_length = _load_thresholds(scheme).get(kind, {})
    longer = [length for length in by_length if length >= blocks]
    return by_length[min(longer)] if longer else None


@cache
def _load_thresholds(scheme: str) -> Mapping[ComputationKind, Mapping[int, Threshold]]:
    """Thresholds by kind and number of blocks: a row of the file has those of all codecs."""
    rows = json.loads(files(__package__).joinpath("thresholds.json").read_text("utf-8"))
    found: dict[ComputationKind, dict[int, Threshold]] = {}
    for row in rows:
        if row["scheme"] != scheme:
            continue
        for codec, (token, mean, clip, *quantiles) in row["codecs"].items():
            kind = ComputationKind(
                row["family"], row["dtype"], row["quantization"], row["backend"], codec
            )
            by_length = found.setdefault(kind, {})
            by_length[row["blocks"]] = Threshold(
                token, mean, clip, row["fitted_tokens"], tuple(quantiles)
            )
    return found
