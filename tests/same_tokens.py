"""What "the same tokens" means, as an assertion.

float32 results depend in their last bits on how many rows a matrix product has. So tokens must be
equal, except that a row's first divergence is excused where the reference could not tell the two
tokens apart: where the score it chose by is closer than 1e-5 x max|logit| for both, or where a
mixture's router is that close between the last expert it takes and the next. What follows an
excused divergence is another text and is not compared. At most one excuse per 10,000 tokens
compared in the whole test run; each is printed.

B rows, L columns, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

CLOSENESS = 1e-5
TOKENS_PER_EXCUSE = 10_000
INT8_CACHE_CLOSENESS = 1e-3
"""With a KV cache in 8 bits, where a last bit can round a cached value to the next of 255."""


@dataclass
class Ledger:
    """What a test run has compared and excused so far."""

    compared: int = 0
    excuses: list[str] = field(default_factory=list)

    @property
    def allowed(self) -> int:
        return math.ceil(self.compared / TOKENS_PER_EXCUSE)


LEDGER = Ledger()


@dataclass(frozen=True)
class ReferenceRun:
    """One `generate` of the reference and what it decided by; `generate` may have expanded rows."""

    model: PreTrainedModel
    input_ids_BL: Tensor
    attention_mask_BL: Tensor
    sequences_BL: Tensor
    logits: Sequence[Tensor]
    """Per new column: raw logits [B, V]."""
    scores: Sequence[Tensor]
    """Per new column: processed scores [B, V]."""
    rng_states: Sequence[Tensor] | None
    """Per new column, when sampling: the generator's state before the draw."""
    closeness: float = CLOSENESS

    @property
    def prompt_columns(self) -> int:
        return self.input_ids_BL.shape[1]

    def new_tokens(self, row: int = 0) -> list[int]:
        tokens: list[int] = self.sequences_BL[row, self.prompt_columns :].tolist()
        return tokens


class _RememberGenerator(LogitsProcessor):
    def __init__(self) -> None:
        self.states: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.states.append(torch.get_rng_state())
        return scores


def run_reference(
    model: PreTrainedModel,
    input_ids_BL: Tensor,
    attention_mask_BL: Tensor | None = None,
    *,
    seed: int | None = None,
    closeness: float = CLOSENESS,
    **options: Any,
) -> ReferenceRun:
    """Let `model` generate with `options`, after `torch.manual_seed(seed)` where one is given."""
    if attention_mask_BL is None:
        attention_mask_BL = torch.ones_like(input_ids_BL)
    remember = _RememberGenerator()
    processors = LogitsProcessorList([*options.pop("logits_processor", []), remember])
    generate: Any = model.generate
    if seed is not None:
        torch.manual_seed(seed)
    output = generate(
        input_ids_BL,
        attention_mask=attention_mask_BL,
        logits_processor=processors,
        **{**options, "return_dict_in_generate": True},
        output_logits=True,
        output_scores=True,
    )
    repeats = len(output.sequences) // len(input_ids_BL)
    return ReferenceRun(
        model,
        input_ids_BL.repeat_interleave(repeats, 0),
        attention_mask_BL.repeat_interleave(repeats, 0),
        output.sequences,
        output.logits,
        output.scores,
        remember.states if options.get("do_sample") else None,
        closeness,
    )


def assert_same_tokens(
    reference: PreTrainedModel,
    sequences_BL: Tensor,
    input_ids_BL: Tensor,
    attention_mask_BL: Tensor | None = None,
    *,
    seed: int | None = None,
    ledger: Ledger = LEDGER,
    **options: Any,
) -> ReferenceRun:
    """Assert that `sequences_BL` (prompt and new tokens) are what `reference` generates.

    `options` are those of `generate`; a sampled run needs the `seed` that `torch.manual_seed` was
    given before. Returns the reference's run, for further comparisons with `assert_same_as`.
    """
    run = run_reference(reference, input_ids_BL, attention_mask_BL, seed=seed, **options)
    assert_same_as(run, sequences_BL, ledger=ledger)
    return run


def assert_same_as(run: ReferenceRun, sequences_BL: Tensor, *, ledger: Ledger = LEDGER) -> None:
    """Assert that `sequences_BL` are the tokens of `run`. See the head of this file."""
    assert sequences_BL.shape[0] == run.sequences_BL.shape[0], "another number of rows"
    excuses = []
    for row, (ours_L, theirs_L) in enumerate(zip(sequences_BL, run.sequences_BL, strict=True)):
        columns = min(len(ours_L), len(theirs_L))
        different = (ours_L[:columns] != theirs_L[:columns]).nonzero().flatten().tolist()
        end = different[0] if different else columns
        ledger.compared += end - run.prompt_columns + bool(different)
        if different:
            excuses.append(_excuse(run, row, end, int(ours_L[end])))
    if not excuses:
        assert sequences_BL.shape == run.sequences_BL.shape, (
            f"{sequences_BL.shape[1]} columns, the reference has {run.sequences_BL.shape[1]}"
        )
    for excuse in excuses:
        print(f"excused: {excuse}")
    ledger.excuses.extend(excuses)
    assert len(ledger.excuses) <= ledger.allowed, (
        f"{len(ledger.excuses)} excuses in {ledger.compared} tokens: {ledger.excuses}"
    )


def _excuse(run: ReferenceRun, row: int, column: int, ours: int) -> str:
    """Why row `row` may differ at `column`; raises `AssertionError` where nothing excuses it."""
    step = column - run.prompt_columns
    assert step >= 0, f"row {row} changes its prompt at column {column}"
    theirs = int(run.sequences_BL[row, column])
    bound = run.closeness * float(run.logits[step][row].abs().max())
    choice_V = _choice_scores(run, row, step)
    # Equal but for rounding: had the draw not been reproduced, nothing could be said of ours.
    assert float(choice_V.max() - choice_V[theirs]) < bound, (
        "the reference's choice is not its best"
    )
    gap = float(choice_V[theirs] - choice_V[ours])
    what = f"row {row}, new token {step}: {ours} for {theirs}"
    if gap < bound:
        return f"{what}, {gap:.3g} apart, allowed {bound:.3g}"
    for layer, (router_gap, router_bound) in enumerate(_router_gaps(run, row, column)):
        if router_gap < router_bound:
            return f"{what}, router {layer} {router_gap:.3g} apart, allowed {router_bound:.3g}"
    raise AssertionError(f"{what}, {gap:.3g} apart, only {bound:.3g} is excused")


def _choice_scores(run: ReferenceRun, row: int, step: int) -> Tensor:
    """What the choice was the maximum of, in units of logits.

    Sampling draws by dividing each probability by an exponential variate; the greatest wins. The
    logarithm of that is the processed score less the variate's logarithm, but for a constant.
    """
    scores_BV = run.scores[step]
    if run.rng_states is None:
        return scores_BV[row]
    with torch.random.fork_rng():
        torch.set_rng_state(run.rng_states[step])
        variates_BV = torch.empty_like(scores_BV).exponential_()
    return scores_BV[row].log_softmax(-1) - variates_BV[row].log()


def _router_gaps(run: ReferenceRun, row: int, column: int) -> list[tuple[float, float]]:
    """Per layer of a mixture: how far the last expert taken is from the next, and the bound.

    Of the position whose logits chose the token at `column`.
    """
    taken = getattr(run.model.config, "num_experts_per_tok", None)
    if taken is None:
        return []
    mask_L = torch.ones(column, dtype=torch.bool)
    mask_L[: run.prompt_columns] = run.attention_mask_BL[row] != 0
    ids_1L = run.sequences_BL[row, :column][mask_L][None]
    forward: Any = run.model.__call__
    with torch.no_grad():
        routers = forward(ids_1L, output_router_logits=True).router_logits
    gaps = []
    for logits_LE in routers:
        last_E = logits_LE.view(-1, logits_LE.shape[-1])[-1]
        best = last_E.topk(taken + 1).values
        gaps.append((float(best[taken - 1] - best[taken]), CLOSENESS * float(last_E.abs().max())))
    return gaps
