"""How far honest nodes are from an auditor's recomputation, and each scheme's thresholds.

The demo model's blocks run texts as nodes do, chunks of a prompt and then single tokens, in batches
of several sizes; the auditor's recomputation is one prefill, block by block. Thresholds are fitted
to half of the texts, and tested on the others.

`python -m benchmarks.audit_thresholds RESULT` writes those of a result into the package.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

import nesa_node
from benchmarks.models import model_folder
from benchmarks.options import Options, Quant
from benchmarks.results import print_table
from nesa_node.compression.tensors import decode, encode
from nesa_node.core.ids import Span
from nesa_node.engine.cache.pages import PAGE_TOKENS, PageTable, pages_for
from nesa_node.engine.model.blocks import ModelBlocks, RowChunk
from nesa_node.engine.model.embedder_and_head import load_embedder_and_head
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.checkpoint import LocalCheckpoint, open_folder
from nesa_node.verification.comparison import (
    MIN_MEAN_TOKENS,
    MIN_QUANTILE_TOKENS,
    QUANTILE_SHARES,
    Threshold,
    error_quantiles,
)
from nesa_node.verification.schemes import DEFAULT_SCHEME, SCHEMES, SEED_BYTES, ComparisonScheme

DEFAULTS = Options(model="demo", runs=8, new_tokens=48, prompt_tokens=16, batches=(16, 1))
QUICK = Options(model="tiny", runs=2, new_tokens=20, prompt_tokens=4, batches=(2,))
TEXTS_PER_RUN = 2
KINDS: tuple[tuple[str, Quant], ...] = (
    ("float32", "none"),
    ("bfloat16", "none"),
    ("float32", "int8"),
    ("bfloat16", "int8"),
    ("float32", "nf4"),
    ("bfloat16", "nf4"),
)
CODECS = ("none", "bfloat16", "float16", "int8", "blockwise8", "int4")
LENGTHS = (1, 2, 4, 6, 8, 10, 12, 15, 20, 30)
TOKEN_MARGIN, MEAN_MARGIN = 4.0, 1.25
QUANTILE_MARGINS = (1.08, 1.12, 1.2)
"""Thresholds are this multiple of the largest error that was seen, of one token, of means and of
quantiles: single tokens are now and then several times as far off as all others."""
CLIP_FACTOR = 2.0
"""In means, errors count as at most this multiple of the median."""
THRESHOLDS = Path(nesa_node.__file__).parent / "verification" / "thresholds.json"
TEXTS = Path(nesa_node.__file__).parent.parent / "docs"


Errors = dict[tuple[str, str], Tensor]
"""By scheme and codec: of N batch sizes and places of the span, S texts and T tokens (or one number
of all) [N, S, T]."""


def run(options: Options) -> list[dict[str, Any]]:
    rows = []
    with model_folder(options) as folder:
        checkpoint = open_folder(folder)
        for dtype, quant_type in KINDS if options.model == "demo" else KINDS[:1]:
            shorter: dict[tuple[str, str], Threshold] = {}
            for length, errors in measure(checkpoint, dtype, quant_type, options):
                schemes: dict[str, dict[str, Any]] = {name: {} for name in SCHEMES}
                for (name, codec), errors_NST in errors.items():
                    half = errors_NST.shape[1] // 2
                    fitted = fit(errors_NST[:, :half], SCHEMES[name])
                    # Errors grow with the number of blocks; a sample may say otherwise by chance.
                    if (least := shorter.get((name, codec))) is not None:
                        fitted = _wider(fitted, least)
                    shorter[name, codec] = fitted
                    schemes[name][codec] = _describe(fitted, errors_NST[:, half:])
                tokens = options.prompt_tokens + options.new_tokens
                rows.append(
                    {
                        "family": checkpoint.config.model_type,
                        "dtype": dtype,
                        "quantization": quant_type,
                        "backend": "cpu",
                        "blocks": length,
                        "fitted_tokens": errors_NST.shape[0] * half * tokens,
                        "schemes": schemes,
                    }
                )
                print(dtype, quant_type, length, flush=True)
    show(rows)
    return rows


def _wider(one: Threshold, other: Threshold) -> Threshold:
    return Threshold(
        token=max(one.token, other.token),
        mean=max(one.mean, other.mean),
        clip=max(one.clip, other.clip),
        fitted_tokens=max(one.fitted_tokens, other.fitted_tokens),
        quantiles=tuple(map(max, one.quantiles, other.quantiles)),
    )


def _describe(fitted: Threshold, tested_NST: Tensor) -> dict[str, list[float]]:
    """A threshold, and the largest errors of other texts as a share of it."""
    tested = largest_errors(tested_NST, fitted.clip)
    bounds = fitted.token, fitted.mean, fitted.clip, *fitted.quantiles
    return {
        "bounds": [_round(bound) for bound in bounds],
        "tested": [
            round(each / allowed, 3)
            for each, allowed in zip(tested, (*bounds[:2], *bounds[3:]), strict=True)
        ],
    }


def _round(bound: float) -> float:
    return float(f"{bound:.4g}")


def fit(errors_NST: Tensor, scheme: ComparisonScheme) -> Threshold:
    """Bounds that these honest errors are within, by margins.

    Counts that are zero here may be one elsewhere.
    """
    least = scheme.resolution
    clip = CLIP_FACTOR * max(float(errors_NST.flatten(1).median(dim=1).values.max()), least)
    count = errors_NST.numel()
    if not scheme.is_per_token:
        largest = max(float(errors_NST.max()), least)
        token, mean = TOKEN_MARGIN * largest, MEAN_MARGIN * largest
        same = (mean,) * len(QUANTILE_SHARES)
        return Threshold(token, mean, clip=token, fitted_tokens=count, quantiles=same)
    token, mean, *quantiles = largest_errors(errors_NST, clip)
    return Threshold(
        token=TOKEN_MARGIN * max(token, least),
        mean=MEAN_MARGIN * max(mean, least / MIN_MEAN_TOKENS),
        clip=clip,
        fitted_tokens=count,
        quantiles=tuple(
            margin * max(each, least)
            for each, margin in zip(quantiles, QUANTILE_MARGINS, strict=True)
        ),
    )


def largest_errors(errors_NST: Tensor, clip: float) -> list[float]:
    """The largest error of a token, mean of clipped errors, and quantiles.

    Means and quantiles over as few tokens as are judged by them.
    """
    tokens = errors_NST.shape[2]
    means = errors_NST.clamp(max=clip).unfold(2, min(MIN_MEAN_TOKENS, tokens), 1).mean(-1)
    windows = errors_NST.unfold(2, min(MIN_QUANTILE_TOKENS, tokens), 1).flatten(0, 2)
    quantiles = [max(each) for each in zip(*map(error_quantiles, windows), strict=True)]
    return [float(errors_NST.max()), float(means.max()), *quantiles]


def measure(
    checkpoint: LocalCheckpoint, dtype: str, quant_type: Quant, options: Options
) -> Iterator[tuple[int, Errors]]:
    """Errors by length of span."""
    seeds = random.Random(options.seed)
    blocks = load_blocks(
        checkpoint,
        Span(0, checkpoint.num_blocks),
        dtype=getattr(torch, dtype),
        device="cpu",
        quant_type=quant_type,
    )
    tokens = options.prompt_tokens + options.new_tokens
    texts = choose_texts(checkpoint, tokens, TEXTS_PER_RUN * options.runs, options)
    states = list(compute_states(checkpoint, blocks, texts))
    for length in sorted({min(length, checkpoint.num_blocks) for length in LENGTHS}):
        found: dict[tuple[str, str], list[Tensor]] = {}
        last = checkpoint.num_blocks - length
        places = sorted({0, last // 2, last})
        # Batch sizes take turns over the places: all of both would take twice as long.
        for turn in range(max(len(places), len(options.batches))):
            start = places[turn % len(places)]
            span = blocks.select(Span(start, start + length))
            inputs = [each[start] for each in states]
            size = options.batches[turn % len(options.batches)]
            outputs = run_in_batches(span, inputs, options.prompt_tokens, size)
            errors = [
                measure_errors(output_TD, each[start + length], seeds.randbytes(SEED_BYTES))
                for output_TD, each in zip(outputs, states, strict=True)
            ]
            for key in errors[0]:
                found.setdefault(key, []).append(torch.stack([each[key] for each in errors]))
        yield length, {key: torch.stack(parts) for key, parts in found.items()}


def measure_errors(
    given_TD: Tensor, expected_TD: Tensor, seed: bytes
) -> dict[tuple[str, str], Tensor]:
    """Errors of what the node gave by scheme and codec."""
    sent = {codec: pass_through_codec(given_TD, codec) for codec in CODECS}
    found = {}
    for name, scheme in SCHEMES.items():
        sketch = scheme.sketch(expected_TD, seed)
        for codec, sent_TD in sent.items():
            found[name, codec] = scheme.errors(scheme.sketch(sent_TD, seed), sketch)
    return found


def run_in_batches(
    blocks: ModelBlocks, inputs: Sequence[Tensor], prompt: int, size: int
) -> list[Tensor]:
    """Outputs of `run_as_node` in batches of `size` sessions."""
    return [
        output_TD
        for first in range(0, len(inputs), size)
        for output_TD in run_as_node(blocks, inputs[first : first + size], prompt)
    ]


def compute_states(
    checkpoint: LocalCheckpoint, blocks: ModelBlocks, texts: Sequence[Tensor]
) -> Iterator[list[Tensor]]:
    """Of each text the input of every block, and the last one's output, by one prefill each."""
    embedder, _ = load_embedder_and_head(checkpoint, dtype=blocks.dtype, device="cpu")
    for ids_L in texts:
        states = [embedder(ids_L, 0)]
        for block in range(blocks.span.end):
            one, tokens = blocks.select(Span(block, block + 1)), len(ids_L)
            states.append(
                one.forward(states[-1], [RowChunk(new_tables(one, 1, tokens)[0], tokens)])
            )
        yield states


def choose_texts(
    checkpoint: LocalCheckpoint, tokens: int, count: int, options: Options
) -> list[Tensor]:
    """Token ids of parts of the project's documents, for random models of random ones."""
    if options.model != "demo":
        generator = torch.Generator().manual_seed(options.seed)
        drawn_NL = torch.randint(checkpoint.config.vocab_size, (count, tokens), generator=generator)
        return list(drawn_NL)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder, trust_remote_code=False)
    ids: list[int] = []
    for path in sorted(TEXTS.rglob("*.md")):
        ids += tokenizer(path.read_text("utf-8"))["input_ids"]
    step = (len(ids) - tokens) // count
    return [torch.tensor(ids[at * step : at * step + tokens]) for at in range(count)]


def run_as_node(blocks: ModelBlocks, inputs: Sequence[Tensor], prompt: int) -> list[Tensor]:
    """Outputs [T, D] of sessions that share a batch: `prompt` tokens each, then one at a time."""
    tokens = len(inputs[0])
    tables = new_tables(blocks, len(inputs), tokens)
    outputs = [
        [blocks.forward(row_TD[:prompt], [RowChunk(table, prompt)])]
        for row_TD, table in zip(inputs, tables, strict=True)
    ]
    for at in range(prompt, tokens):
        step_SD = torch.stack([row_TD[at] for row_TD in inputs])
        output_SD = blocks.forward(step_SD, [RowChunk(table, 1) for table in tables])
        for kept, output_D in zip(outputs, output_SD, strict=True):
            kept.append(output_D[None])
    return [torch.cat(kept) for kept in outputs]


def new_tables(blocks: ModelBlocks, rows: int, tokens: int) -> list[PageTable]:
    pages = pages_for(tokens)
    reservation = blocks.new_pool(rows * pages * PAGE_TOKENS).reserve(rows * pages)
    tables = [reservation.new_table() for _ in range(rows)]
    for table in tables:
        table.reserve(tokens)
    return tables


def pass_through_codec(output_TD: Tensor, codec: str) -> Tensor:
    """`output_TD` as its receiver decodes it."""
    if codec == "none":
        return output_TD
    meta, payload = encode(output_TD, codec=codec)
    return decode(meta, payload, max_bytes=meta.max_nbytes)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The default scheme's bounds without a codec."""
    default = [row["schemes"][DEFAULT_SCHEME]["none"] for row in rows]
    print_table(
        f"Bounds on {DEFAULT_SCHEME} of honest nodes, and errors of other texts as a share of them",
        "dtype|weights|blocks|token|mean|quantiles|tested token|mean|quantiles|tokens",
        [
            [
                row["dtype"],
                row["quantization"],
                str(row["blocks"]),
                *(f"{bound:.2e}" for bound in each["bounds"][:2]),
                " ".join(f"{bound:.2e}" for bound in each["bounds"][3:]),
                *(f"{tested:.2f}" for tested in each["tested"][:2]),
                " ".join(f"{tested:.2f}" for tested in each["tested"][2:]),
                f"{row['fitted_tokens']:,}",
            ]
            for row, each in zip(rows, default, strict=True)
        ],
    )


KEPT = "family", "dtype", "quantization", "backend", "blocks", "fitted_tokens"


def write_thresholds(rows: Sequence[dict[str, Any]]) -> None:
    """Put the bounds of a result's rows into the package, in place of those of the same schemes."""
    kept = json.loads(THRESHOLDS.read_text("utf-8"))
    names = list(dict.fromkeys(name for row in rows for name in row["schemes"]))
    made = [
        {"scheme": name}
        | {key: row[key] for key in KEPT}
        | {"codecs": {codec: each["bounds"] for codec, each in row["schemes"][name].items()}}
        for name in names
        for row in rows
    ]
    lines = map(json.dumps, [*made, *(row for row in kept if row["scheme"] not in names)])
    THRESHOLDS.write_text("[\n" + ",\n".join(lines) + "\n]\n", "utf-8")


if __name__ == "__main__":
    write_thresholds(json.loads(Path(sys.argv[1]).read_text("utf-8")))
