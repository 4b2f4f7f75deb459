"""Attempts to have an audit blame an honest node, by inputs for which honest machines differ.

The node before it, or a client that shares its cache, may send a node anything. Attempts begin with
the demo model's hidden states, or with inputs of which, by gradient descent, the blocks leave
little, so that what was rounded is large beside it. These are changed at random: tokens are scaled,
channels raised, tokens made to cancel, values made tiny, huge or not finite. Those that came
nearest to a conviction are changed further. The node computes as nodes do, the client's auditor
judges it.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.audit_thresholds import KINDS, compute_states
from benchmarks.honest_audits import choose_code, loaded_once, make_work, run_in_chunks
from benchmarks.models import model_folder
from benchmarks.options import Options, Quant
from benchmarks.results import print_table
from nesa_node.client.verification.audit_history import AuditHistory
from nesa_node.client.verification.auditor import Auditor
from nesa_node.client.verification.recomputation import recompute
from nesa_node.client.verification.session_audit import HopWork
from nesa_node.core.ids import Span
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.weights.checkpoint import Checkpoint, LocalCheckpoint, open_folder
from nesa_node.verification.comparison import FLOAT32_MARGIN, Measure, compare
from nesa_node.verification.schemes import DEFAULT_SCHEME

DEFAULTS = Options(model="demo", runs=5400, prompt_tokens=16, new_tokens=48)
QUICK = Options(model="tiny", runs=12, prompt_tokens=4, new_tokens=8)
MAX_BLOCKS = 6
GENERATION = 20
"""Attempts that begin with the same best ones."""
BEST = 8
CANCELLED_TEXTS, CANCEL_STEPS, CANCEL_RATE = 2, 40, 0.04
"""Texts of a span whose outputs are made small, steps, and their size by the inputs' deviation."""

Change = Callable[[Tensor, random.Random], None]
"""Changes inputs [T, D], in float32, in place."""


def _scale_tokens(input_TD: Tensor, rng: random.Random) -> None:
    for at in rng.sample(range(len(input_TD)), rng.randint(1, len(input_TD))):
        input_TD[at] *= 10 ** rng.uniform(-6, 6)


def _raise_channels(input_TD: Tensor, rng: random.Random) -> None:
    for channel in rng.sample(range(input_TD.shape[1]), rng.randint(1, 4)):
        input_TD[:, channel] *= 10 ** rng.uniform(0, 5)


def _cancel(input_TD: Tensor, rng: random.Random) -> None:
    """Tokens in pairs, of opposite signs and nearly the same values."""
    for at in range(0, len(input_TD) - 1, 2):
        input_TD[at + 1] = -input_TD[at] * (1 + 10 ** rng.uniform(-7, -2))


def _repeat(input_TD: Tensor, rng: random.Random) -> None:
    input_TD[:] = input_TD[rng.randrange(len(input_TD))].clone()


def _flatten(input_TD: Tensor, rng: random.Random) -> None:
    """Channels that hardly differ, of which norms divide nearly nothing by nearly nothing."""
    input_TD[:] = input_TD.mean() + 10 ** rng.uniform(-8, 0) * input_TD


def _shrink(input_TD: Tensor, rng: random.Random) -> None:
    input_TD *= 10 ** rng.uniform(-40, -4)


def _make_infinite(input_TD: Tensor, rng: random.Random) -> None:
    at, channel = rng.randrange(len(input_TD)), rng.randrange(input_TD.shape[1])
    input_TD[at, channel] = rng.choice([math.inf, -math.inf, math.nan, 3e38, -3e38])


def _add_noise(input_TD: Tensor, rng: random.Random) -> None:
    input_TD += 10 ** rng.uniform(-3, 1) * input_TD.std() * torch.randn_like(input_TD)


CHANGES: tuple[Change, ...] = (
    _scale_tokens, _raise_channels, _cancel, _repeat, _flatten, _shrink, _make_infinite, _add_noise
)  # fmt: skip


@dataclass
class Attempts:
    """What came of those on one kind of weights."""

    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    largest: float = 0.0
    """Largest finite error of an honest node, as a multiple of what is allowed."""
    nearest: float = 0.0
    """Largest of those that are excused, as a multiple of what would be clear."""
    failed: list[str] = field(default_factory=list)


def run(options: Options) -> list[dict[str, Any]]:
    torch.manual_seed(options.seed)
    rows = []
    with model_folder(options) as folder:
        checkpoint = open_folder(folder)
        kinds = KINDS if options.model == "demo" else KINDS[:1]
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False
        )
        decoder = model.requires_grad_(False).model
        for dtype, quant_type in kinds:
            with loaded_once(checkpoint, dtype, quant_type) as blocks:
                count = -(-options.runs // len(kinds))
                found = _attempt(checkpoint, decoder, blocks, quant_type, count, options)
            rows.append(
                {
                    "dtype": dtype,
                    "quantization": quant_type,
                    "attempts": found.outcomes.total(),
                    "outcomes": dict(found.outcomes),
                    "reasons": dict(found.reasons),
                    "largest_of_allowed": found.largest,
                    "nearest_of_clear": found.nearest,
                    "failed": found.failed[:20],
                }
            )
            print(rows[-1], flush=True)
    show(rows)
    return rows


def _attempt(
    checkpoint: LocalCheckpoint,
    decoder: Any,
    blocks: ModelBlocks,
    quant_type: Quant,
    count: int,
    options: Options,
) -> Attempts:
    rng = random.Random(options.seed)
    auditor = Auditor(checkpoint, 1.0, AuditHistory(None), rng=rng)
    tokens = options.prompt_tokens + options.new_tokens
    states = list(compute_states(checkpoint, blocks, choose_code(checkpoint, tokens, options)))
    found = Attempts()
    best: list[tuple[float, int, Tensor]] = []
    begun: list[Tensor] = []
    span = Span(0, 1)
    for number in range(count):
        if number % GENERATION == 0:
            if number % (5 * GENERATION) == 0:
                # Other blocks, for which the best are others.
                length = rng.randint(1, min(MAX_BLOCKS, blocks.num_blocks))
                start = rng.randint(0, blocks.num_blocks - length)
                span, best = Span(start, start + length), []
                begun = [each[span.start].float() for each in states]
                begun += [
                    _cancel_outputs(decoder, span, rng.choice(begun))
                    for _ in range(CANCELLED_TEXTS)
                ]
            best = sorted(best, key=lambda each: -each[0])[:BEST]
        is_new = not best or rng.random() < 0.3
        input_TD = (rng.choice(begun) if is_new else rng.choice(best)[2]).clone()
        for change in rng.sample(CHANGES, rng.randint(0, 2)):
            change(input_TD, rng)
        score = _judge(auditor, blocks, quant_type, span, input_TD.to(blocks.dtype), rng, found)
        best.append((score, number, input_TD))
    return found


def _cancel_outputs(decoder: Any, span: Span, input_TD: Tensor) -> Tensor:
    """Inputs near `input_TD` of which the span leaves little."""
    changed_TD = input_TD.clone().requires_grad_()
    optimizer = torch.optim.Adam([changed_TD], lr=CANCEL_RATE * float(input_TD.std()))
    positions_1T = torch.arange(len(input_TD))[None]
    for _ in range(CANCEL_STEPS):
        hidden_1TD = changed_TD[None]
        turned = decoder.rotary_emb(hidden_1TD, positions_1T)
        for layer in decoder.layers[span.start : span.end]:
            hidden_1TD = layer(hidden_1TD, position_embeddings=turned, position_ids=positions_1T)
        loss = (hidden_1TD[0].norm(dim=1) / changed_TD.norm(dim=1)).log().mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return changed_TD.detach()


def _judge(
    auditor: Auditor,
    blocks: ModelBlocks,
    quant_type: Quant,
    span: Span,
    input_TD: Tensor,
    rng: random.Random,
    found: Attempts,
) -> float:
    """Have an honest node compute; returns how far its error is from what is allowed."""
    outputs = _compute(blocks.select(span), input_TD, rng)
    work = make_work(blocks, quant_type, span, [input_TD], [outputs], codec="none")
    record = asyncio.run(auditor.judge(work))
    found.outcomes[record.outcome] += 1
    if record.outcome == "not audited":
        found.reasons[record.reason] += 1
        # Beyond the bounds, and excused.
        nearness = _nearness(auditor._checkpoint, work)
        found.nearest = max(found.nearest, nearness)
        return 1.0 + nearness
    if record.outcome != "passed":
        found.failed.append(f"blocks {span}, {record.of_allowed} of allowed, {record.worst}")
    score = record.of_allowed or 0.0
    if math.isfinite(score):
        found.largest = max(found.largest, score)
    return score


def _nearness(checkpoint: Checkpoint, work: HopWork) -> float:
    """The node's errors as a multiple of what is clear by the auditor's own computations."""
    (given,) = work.rows
    once, by_token, perturbed = (
        recompute(checkpoint, work, by_token=by_token, is_perturbed=is_perturbed).outputs[0]
        for by_token, is_perturbed in ((False, False), (True, False), (False, True))
    )
    measure = Measure(DEFAULT_SCHEME, b"")
    found, *own = (
        compare(each_TD, once, None, measure) for each_TD in (given.outputs_PD, by_token, perturbed)
    )
    nearness = found.of_clear(own) / (FLOAT32_MARGIN if once.dtype is torch.float32 else 1.0)
    return nearness if math.isfinite(nearness) else 0.0


def _compute(blocks: ModelBlocks, input_TD: Tensor, rng: random.Random) -> Tensor:
    """Outputs [T, D], of a batch whose other sessions are as strange."""
    rows = [input_TD, *[input_TD.flip(0)] * rng.choice((0, 0, 3, 7))]
    prompt = rng.randint(1, len(input_TD))
    chunk = rng.choice((3, 32, 10_000))
    return run_in_chunks(blocks, rows, prompt, chunk, is_native=rng.random() < 0.5)[0]


def show(rows: Sequence[dict[str, Any]]) -> None:
    print_table(
        "Attempts to frame an honest node by what it is sent",
        "dtype|weights|attempts|blamed|passed|beyond bounds,\nexcused|nearest of these,\nof clear",
        [
            [
                row["dtype"],
                row["quantization"],
                str(row["attempts"]),
                *(str(row["outcomes"].get(each, 0)) for each in ("failed", "passed")),
                str(row["outcomes"].get("not audited", 0)),
                f"{row['nearest_of_clear']:.2f}",
            ]
            for row in rows
        ],
    )
