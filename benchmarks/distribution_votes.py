"""Which lies of a node `verify="cdv"` outvotes, by the next-token distributions of three chains.

Texts of 16 and 64 tokens run through three thirds of the demo model as nodes run them. In a chain
that lies, the second node's outputs, or the last one's, are altered. Bounds are fitted to half of
the texts, of which honest chains differ by batches and by prefill; the rest is judged as sessions
do, token by token, the lie first, so that it is believed as long as it agrees. Honest chains stand
in the first row: what is found there is a false alarm, and the greedy tokens that differ are those
of a prefill and of a batch.

`python -m benchmarks.distribution_votes RESULT` writes the bounds of a result into the package.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.audit_attacks import BATCH, KINDS, Bench, attacks
from benchmarks.audit_thresholds import (
    TOKEN_MARGIN,
    choose_texts,
    compute_states,
    largest_errors,
    run_in_batches,
    write_thresholds,
)
from benchmarks.models import model_folder
from benchmarks.options import Options, Quant
from benchmarks.results import print_table
from nesa_node.core.ids import Span
from nesa_node.engine.model.embedder_and_head import load_embedder_and_head
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.checkpoint import LocalCheckpoint, open_folder
from nesa_node.verification.agreement import AgreementHistory
from nesa_node.verification.comparison import PairErrors, Threshold
from nesa_node.verification.distributions import TOTAL_VARIATION, ComputeLogits, DistributionMeasure

DEFAULTS = Options(model="demo", runs=60, prompt_tokens=16, new_tokens=64)
QUICK = Options(model="tiny", runs=4, prompt_tokens=4, new_tokens=20)
MARGIN = 1.5
"""Bounds are this multiple of the largest that was seen of honest chains, of means and of
quantiles: wider than those of audits, which a second computation confirms."""
LEAST_TOKEN_BOUND = 1e-3
"""Bound on one token, at least: one token in a thousand may be drawn otherwise. In float32, honest
distances are far below, and single ones may be many times as large as those that were seen."""
LIES = (
    "other model",
    "int8",
    "int4",
    "first block skipped",
    "middle block skipped",
    "x 1.05",
    "1 % noise",
)
"""Of `audit_attacks.attacks`, by the second of three nodes."""
CERTAIN = 0.99
"""Probability of the likeliest token from which on a position counts as certain."""


@dataclass(frozen=True, slots=True)
class RecordedMeasure:
    """A `PairMeasure` that reads distances which were computed before."""

    errors: PairErrors
    scheme: str = TOTAL_VARIATION

    def errors_of_pairs(self, outputs: Sequence[Tensor]) -> PairErrors:
        """Distances at the positions `outputs[0]`."""
        return {pair: errors_T[outputs[0]] for pair, errors_T in self.errors.items()}


@dataclass(frozen=True, slots=True)
class Chains:
    """Outputs [T, D] of the last block of each text, by honest chains and by those that lie."""

    honest: Sequence[Sequence[Tensor]]
    lies: Iterator[tuple[str, list[Tensor]]]
    """Of the second half of the texts."""
    head: ComputeLogits


def run(options: Options) -> list[dict[str, Any]]:
    torch.manual_seed(options.seed)
    rows = []
    with model_folder(options) as folder:
        checkpoint = open_folder(folder)
        for dtype, quant_type in KINDS if options.model == "demo" else KINDS[:1]:
            for row in judge_kind(checkpoint, dtype, quant_type, options):
                kind = {
                    "family": checkpoint.config.model_type,
                    "dtype": dtype,
                    "quantization": quant_type,
                    "backend": "cpu",
                    "blocks": checkpoint.num_blocks,
                }
                rows.append(kind | row)
                print(dtype, quant_type, row["attack"], row["found"], flush=True)
    show(rows)
    return rows


def judge_kind(
    checkpoint: LocalCheckpoint, dtype: str, quant_type: Quant, options: Options
) -> Iterator[dict[str, Any]]:
    """Rows of one kind of weights, that of honest chains first, with the bounds."""
    chains = run_chains(checkpoint, dtype, quant_type, options)
    measure = DistributionMeasure(chains.head)
    # Distributions are compared from the prompt's last token on: those before are never asked for.
    start, half = options.prompt_tokens - 1, options.runs // 2
    texts = [[each[start:] for each in outputs] for outputs in zip(*chains.honest, strict=True)]
    errors = [measure.errors_of_pairs(outputs) for outputs in texts]
    fitted_NT = torch.cat([torch.stack(list(each.values())) for each in errors[:half]])
    allowed = fit(fitted_NT)
    tested = largest_errors(
        torch.stack([torch.stack(list(each.values())) for each in errors[half:]]), allowed.clip
    )
    tokens = fitted_NT.shape[1]
    sessions = [
        _select(each, three)
        for each in errors[half:]
        for three in combinations(range(len(chains.honest)), 3)
    ]
    bounds = allowed.token, allowed.mean, allowed.clip, *allowed.quantiles
    logits = [chains.head(one[0]).float() for one in texts[half:]]
    chosen = [each_TV.argmax(-1) for each_TV in logits]
    certain = torch.cat([each_TV.softmax(-1).amax(-1) >= CERTAIN for each_TV in logits])
    # Of a batch and of a prefill: two batches may round alike.
    honest_T = torch.cat([each[0, 2] for each in errors[half:]])
    others = [chains.head(each[2]).argmax(-1) for each in texts[half:]]
    yield {
        "attack": "honest",
        "sessions": len(sessions),
        "found": sum(count_believed(each, allowed) < (tokens, 3) for each in sessions),
        "fitted_tokens": allowed.fitted_tokens,
        "schemes": {TOTAL_VARIATION: {"none": {"bounds": [float(f"{b:.4g}") for b in bounds]}}},
        "tested": [
            round(each / bound, 3)
            for each, bound in zip(tested, (*bounds[:2], *bounds[3:]), strict=True)
        ],
        "believed_tokens": [tokens] * half,
        "wrong_tokens": sum(
            int((one != other).sum()) for one, other in zip(chosen, others, strict=True)
        ),
        "positions": len(honest_T),
        "certain_positions": int(certain.sum()),
        "median_distance": _medians(honest_T, certain),
    }
    for name, outputs in chains.lies:
        believed, wrong, distances = [], 0, []
        for lie_TD, honest, chosen_T in zip(outputs, texts[half:], chosen, strict=True):
            found = measure.errors_of_pairs([lie_TD[start:], *honest[:2]])
            until, _ = count_believed(found, allowed)
            believed.append(until)
            wrong += int((chains.head(lie_TD[start:]).argmax(-1) != chosen_T)[:until].sum())
            distances.append(found[0, 1])
        lie_T = torch.cat(distances)
        yield {
            "attack": name,
            "sessions": len(believed),
            "found": sum(until < tokens for until in believed),
            "believed_tokens": believed,
            "wrong_tokens": wrong,
            "positions": len(lie_T),
            "certain_positions": int(certain.sum()),
            "median_distance": _medians(lie_T, certain),
        }


def run_chains(
    checkpoint: LocalCheckpoint, dtype: str, quant_type: Quant, options: Options
) -> Chains:
    """Honest chains in large and small batches, by one prefill, and alone; and those that lie."""
    blocks = load_blocks(
        checkpoint,
        Span(0, checkpoint.num_blocks),
        dtype=getattr(torch, dtype),
        device="cpu",
        quant_type=quant_type,
    )
    embedder, head = load_embedder_and_head(checkpoint, dtype=getattr(torch, dtype), device="cpu")
    prompt, third = options.prompt_tokens, checkpoint.num_blocks // 3
    tokens = prompt + options.new_tokens
    texts = choose_texts(checkpoint, tokens, options.runs, options)
    inputs = [embedder(ids_L, 0) for ids_L in texts]
    first, middle, last = (
        blocks.select(Span(*ends))
        for ends in ((0, third), (third, 2 * third), (2 * third, checkpoint.num_blocks))
    )
    before = run_in_batches(first, inputs, prompt, BATCH)
    after = run_in_batches(middle, before, prompt, BATCH)
    honest = [
        run_in_batches(last, after, prompt, BATCH),
        run_in_batches(blocks, inputs, prompt, 4),
        [states[-1] for states in compute_states(checkpoint, blocks, texts)],
        run_in_batches(blocks, inputs, prompt, 1),
    ]
    half = options.runs // 2

    def lies() -> Iterator[tuple[str, list[Tensor]]]:
        bench = Bench(checkpoint, dtype, quant_type, middle.span, prompt)
        found = attacks(bench, before[half:])
        for name in LIES:
            if name in found:
                yield name, run_in_batches(last, found[name](), prompt, BATCH)
        yield "x 1.05, last node", [output_TD * 1.05 for output_TD in honest[0][half:]]

    return Chains(honest, lies(), head)


def fit(errors_NT: Tensor) -> Threshold:
    """Bounds that these distances of honest chains are within, by margins.

    In means, each counts at most as the largest of them.
    """
    token, mean, *quantiles = largest_errors(errors_NT[None], math.inf)
    return Threshold(
        token=max(TOKEN_MARGIN * token, LEAST_TOKEN_BOUND),
        mean=MARGIN * mean,
        clip=token,
        fitted_tokens=errors_NT.numel(),
        quantiles=tuple(MARGIN * each for each in quantiles),
    )


def _select(errors: PairErrors, chains: Sequence[int]) -> PairErrors:
    pairs = combinations(range(len(chains)), 2)
    return {(one, other): errors[chains[one], chains[other]] for one, other in pairs}


def count_believed(errors: PairErrors, allowed: Threshold) -> tuple[int, int]:
    """For how many tokens all three chains agree, and how many do at the next one (or the last)."""
    history = AgreementHistory(RecordedMeasure(errors), allowed)
    tokens, agreeing = len(errors[0, 1]), 3
    for at in range(tokens):
        agreeing = len(history.find_group(range(3), [torch.tensor([at])]))
        if agreeing < 3:
            return at, agreeing
    return tokens, agreeing


def _medians(distances_T: Tensor, certain: Tensor) -> dict[str, float | None]:
    """Where the likeliest token is certain, and elsewhere; None without positions."""
    return {
        name: float(distances_T[where].median()) if where.any() else None
        for name, where in (("certain", certain), ("uncertain", ~certain))
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """How often, and after how many tokens, lies are outvoted, and how far they are to be seen."""
    print_table(
        "Sessions in which a chain is outvoted by next-token distributions",
        "attack|dtype|weights|sessions|found|believed tokens (median)|other greedy tokens of these"
        "|distance where certain|elsewhere",
        [
            [
                row["attack"],
                row["dtype"],
                row["quantization"],
                str(row["sessions"]),
                f"{row['found'] / row['sessions']:.1%}",
                *_cells(row),
            ]
            for row in rows
        ],
    )


def _cells(row: dict[str, Any]) -> list[str]:
    believed = sorted(row["believed_tokens"])
    medians = row["median_distance"]
    return [
        str(believed[len(believed) // 2]),
        str(row["wrong_tokens"]),
        *(
            "" if medians[key] is None else f"{medians[key]:.2g}"
            for key in ("certain", "uncertain")
        ),
    ]


if __name__ == "__main__":
    found = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    write_thresholds([row for row in found if row["attack"] == "honest"])
