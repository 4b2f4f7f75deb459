"""The largest lie that audits pass: what a node can do to a text with errors below all bounds.

A node of the demo model's middle blocks knows the bounds, the weights after it, and the text to
come, which no real one does. It adds to each token's output the error that raises the loss of what
follows most (projected gradient ascent), with lengths that the bounds allow: some tokens carry as
much as a single one may, the others as much as the mean and the quantiles leave. All are made
smaller, where that is needed, until an audit passes them; then the model goes on from the lie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.audit_thresholds import KINDS, choose_texts, compute_states
from benchmarks.models import load_local, model_folder
from benchmarks.options import Options
from benchmarks.results import print_table
from nesa_node.core.ids import Span
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.checkpoint import LocalCheckpoint, open_folder
from nesa_node.verification.comparison import (
    QUANTILE_SHARES,
    ComputationKind,
    Measure,
    Threshold,
    compare,
    find_threshold,
)
from nesa_node.verification.schemes import DEFAULT_SCHEME

DEFAULTS = Options(model="demo", runs=20, prompt_tokens=16, new_tokens=48)
QUICK = Options(model="tiny", runs=1, prompt_tokens=4, new_tokens=60)
STEPS = 12
SHRINK, MAX_SHRINKS = 0.99, 40
"""Factor on errors that do not pass, once outputs are rounded, and how often it is tried."""


@dataclass(frozen=True, slots=True)
class Effect:
    """On the texts that follow a node's outputs, over all tokens."""

    flipped: int
    """Tokens that greedy decoding would choose otherwise."""
    honest_loss: float
    loss: float
    """Sums of cross entropies, in nats."""
    tokens: int
    passed: int
    largest: float
    """Error of a token."""


class Tail:
    """The blocks after the span, and the head, through which gradients flow."""

    def __init__(self, local: Any, first_block: int) -> None:
        self._local = local
        self._layers: Sequence[nn.Module] = local.model.layers[first_block:]

    def __call__(self, hidden_TD: Tensor) -> Tensor:
        """Logits [T, V]."""
        hidden_1TD = hidden_TD[None]
        positions_1T = torch.arange(len(hidden_TD))[None]
        rotary = self._local.model.rotary_emb(hidden_1TD, positions_1T)
        for layer in self._layers:
            hidden_1TD = layer(hidden_1TD, position_embeddings=rotary)
        logits_TV: Tensor = self._local.lm_head(self._local.model.norm(hidden_1TD))[0]
        return logits_TV


def run(options: Options) -> list[dict[str, Any]]:
    torch.manual_seed(options.seed)
    rows = []
    with model_folder(options) as folder:
        checkpoint = open_folder(folder)
        third = checkpoint.num_blocks // 3
        span = Span(third, 2 * third)
        local = load_local(folder, options).requires_grad_(False)
        tail = Tail(local, span.end)
        for dtype, quant_type in KINDS if options.model == "demo" else KINDS[:1]:
            kind = ComputationKind(checkpoint.config.model_type, dtype, quant_type, "cpu")
            allowed = find_threshold(kind, len(span))
            assert allowed is not None
            blocks = load_blocks(
                checkpoint,
                Span(0, span.end),
                dtype=getattr(torch, dtype),
                device="cpu",
                quant_type=quant_type,
            )
            texts = _choose_texts(checkpoint, options)
            expected = [states[span.end] for states in compute_states(checkpoint, blocks, texts)]
            # The share of tokens at the largest error, from none to all that the bounds leave.
            for base in (0.0, 0.5, 1.0):
                effects = [
                    lie(tail, ids_L, expected_TD, limits(allowed, len(ids_L), base), allowed)
                    for ids_L, expected_TD in zip(texts, expected, strict=True)
                ]
                rows.append(_summarize(dtype, quant_type, span, base, effects))
                print(rows[-1], flush=True)
    show(rows)
    return rows


def _choose_texts(checkpoint: LocalCheckpoint, options: Options) -> list[Tensor]:
    tokens = options.prompt_tokens + options.new_tokens
    return choose_texts(checkpoint, tokens, options.runs, options)


def limits(allowed: Threshold, tokens: int, base: float) -> Tensor:
    """Lengths of errors, [T], largest first, relative to each token's norm.

    A share of the tokens has the error that single ones may have, the next ones what the quantiles
    allow; as many as must be few have `base` times the lowest of these, which is for the mean.
    """
    found_T = torch.full((tokens,), base * allowed.quantiles[0])
    above = [*allowed.quantiles[1:], allowed.token]
    # Ranks from the smallest error: beyond each share, the next quantile's bound.
    firsts = [math.ceil(share * tokens) for share in QUANTILE_SHARES]
    ends = [*firsts[1:], tokens]
    for bound, first, end in zip(above, firsts, ends, strict=True):
        found_T[first:end] = bound
    # Where the mean of clipped errors is too large still, all but the largest give way.
    counted_T = found_T.clamp(max=allowed.clip)
    spent, left = counted_T[firsts[-1] :].sum(), counted_T[: firsts[-1]].sum()
    found_T[: firsts[-1]] *= ((allowed.mean * tokens - spent) / left).clamp(0, 1)
    return found_T.flip(0)


def lie(
    tail: Tail, ids_L: Tensor, expected_TD: Tensor, limits_T: Tensor, allowed: Threshold
) -> Effect:
    """The worst that errors of these lengths do to a text, in any order of tokens."""
    true_TD = expected_TD.float()
    with torch.no_grad():
        honest_TV = tail(true_TD)
    chosen_T = honest_TV.argmax(-1)
    best_T2 = honest_TV.topk(2).values.T
    # The largest errors where two tokens are nearest to each other.
    sizes_T = torch.empty(len(ids_L))
    sizes_T[(best_T2[0] - best_T2[1]).argsort()] = limits_T
    sizes_T *= true_TD.norm(dim=-1)
    delta_TD = torch.randn_like(true_TD)
    for _ in range(STEPS):
        delta_TD = _scaled(delta_TD, sizes_T).requires_grad_()
        loss = nn.functional.cross_entropy(tail(true_TD + delta_TD), chosen_T)
        (gradient_TD,) = torch.autograd.grad(loss, delta_TD)
        # Half a step towards the gradient's direction.
        delta_TD = delta_TD.detach() + 0.5 * _scaled(gradient_TD, sizes_T)
    delta_TD = _scaled(delta_TD, sizes_T)
    for shrinks in range(MAX_SHRINKS):
        given_TD = (true_TD + SHRINK**shrinks * delta_TD).to(expected_TD.dtype)
        found = compare(given_TD, expected_TD, allowed, Measure(DEFAULT_SCHEME, b""))
        if found.outcome == "passed":
            break
    with torch.no_grad():
        lied_TV = tail(given_TD.float())
    return Effect(
        flipped=int((lied_TV.argmax(-1) != chosen_T).sum()),
        honest_loss=_loss(honest_TV, ids_L),
        loss=_loss(lied_TV, ids_L),
        tokens=len(ids_L),
        passed=found.outcome == "passed",
        largest=found.worst,
    )


def _scaled(delta_TD: Tensor, sizes_T: Tensor) -> Tensor:
    return nn.functional.normalize(delta_TD, dim=-1) * sizes_T[:, None]


def _loss(logits_TV: Tensor, ids_L: Tensor) -> float:
    return float(nn.functional.cross_entropy(logits_TV[:-1], ids_L[1:], reduction="sum"))


def _summarize(
    dtype: str, quant_type: str, span: Span, base: float, effects: Sequence[Effect]
) -> dict[str, Any]:
    tokens = sum(each.tokens for each in effects)
    predicted = tokens - len(effects)
    return {
        "dtype": dtype,
        "quantization": quant_type,
        "blocks": str(span),
        "base": base,
        "texts": len(effects),
        "passed": sum(each.passed for each in effects),
        "largest_error": max(each.largest for each in effects),
        "flipped": sum(each.flipped for each in effects) / tokens,
        "honest_perplexity": math.exp(sum(each.honest_loss for each in effects) / predicted),
        "perplexity": math.exp(sum(each.loss for each in effects) / predicted),
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    print_table(
        "The worst that a node does to texts with errors that audits pass",
        "dtype|weights|errors of 40 %,\nof allowed|texts|passed|largest error|tokens flipped|"
        "perplexity\nhonest|lied",
        [
            [
                row["dtype"],
                row["quantization"],
                f"{row['base']:.1f}",
                str(row["texts"]),
                str(row["passed"]),
                f"{row['largest_error']:.2e}",
                f"{row['flipped']:.2%}",
                f"{row['honest_perplexity']:.2f}",
                f"{row['perplexity']:.2f}",
            ]
            for row in rows
        ],
    )
