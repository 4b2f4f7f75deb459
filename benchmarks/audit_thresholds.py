"""How far honest nodes are from an auditor's recomputation, and the thresholds that follow.

The demo model's blocks run texts as nodes do, chunks of a prompt and then single tokens, in batches
of several sizes; the auditor's recomputation is one prefill, block by block. Thresholds are fitted
to half of the texts, and tested on the others.

`python -m benchmarks.audit_thresholds RESULT` writes those of a result into the package.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
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
from nesa_node.engine.model.loading import load_blocks, load_embedder_and_head
from nesa_node.engine.weights.checkpoint import LocalCheckpoint, open_folder
from nesa_node.verification.comparison import MIN_MEAN_TOKENS, Threshold, relative_errors

DEFAULTS = Options(model="demo", runs=5, new_tokens=32, prompt_tokens=16, batches=(1, 10))
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
"""Thresholds are this multiple of the largest error that was seen, of one token and of means:
single tokens are now and then several times as far off as all others."""
CLIP_FACTOR = 2.0
"""In means, errors count as at most this multiple of the median."""
THRESHOLDS = Path(nesa_node.__file__).parent / "verification" / "thresholds.json"
TEXTS = Path(nesa_node.__file__).parent.parent / "docs"


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of a kind of computation: N batch sizes and places of the span, S texts, T tokens."""

    fitted_NST: Tensor
    tested_NST: Tensor


def run(options: Options) -> list[dict[str, Any]]:
    rows = []
    with model_folder(options) as folder:
        checkpoint = open_folder(folder)
        for dtype, quant_type in KINDS if options.model == "demo" else KINDS[:1]:
            shorter: dict[str, Threshold] = {}
            for length, codec, errors in measure(checkpoint, dtype, quant_type, options):
                fitted = fit(errors.fitted_NST)
                # Errors grow with the number of blocks; a sample may say otherwise by chance.
                if (least := shorter.get(codec)) is not None:
                    pairs = zip(astuple(fitted), astuple(least), strict=True)
                    fitted = Threshold(*map(max, pairs))
                shorter[codec] = fitted
                rows.append(
                    {
                        "family": checkpoint.config.model_type,
                        "dtype": dtype,
                        "quantization": quant_type,
                        "backend": "cpu",
                        "codec": codec,
                        "blocks": length,
                        **asdict(fitted),
                        "tested_tokens": errors.tested_NST.numel(),
                        "tested_token": float(errors.tested_NST.max()) / fitted.token,
                        "tested_mean": _largest_mean(errors.tested_NST, fitted.clip) / fitted.mean,
                    }
                )
    show(rows)
    return rows


def fit(errors_NST: Tensor) -> Threshold:
    clip = CLIP_FACTOR * float(errors_NST.flatten(1).median(dim=1).values.max())
    return Threshold(
        token=TOKEN_MARGIN * float(errors_NST.max()),
        mean=MEAN_MARGIN * _largest_mean(errors_NST, clip),
        clip=clip,
        fitted_tokens=errors_NST.numel(),
    )


def _largest_mean(errors_NST: Tensor, clip: float) -> float:
    """The largest mean of clipped errors over as few tokens as are judged by it."""
    windows = errors_NST.clamp(max=clip).unfold(2, MIN_MEAN_TOKENS, 1)
    return float(windows.mean(-1).max())


def measure(
    checkpoint: LocalCheckpoint, dtype: str, quant_type: Quant, options: Options
) -> Iterator[tuple[int, str, Errors]]:
    """Errors by length of span and codec."""
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
    half = len(states) // 2
    for length in sorted({min(length, checkpoint.num_blocks) for length in LENGTHS}):
        found: dict[str, list[Tensor]] = {codec: [] for codec in CODECS}
        last = checkpoint.num_blocks - length
        for start in sorted({0, last // 2, last}):
            span = blocks.select(Span(start, start + length))
            for size in options.batches:
                outputs = [
                    output_TD
                    for first in range(0, len(states), size)
                    for output_TD in run_as_node(
                        span,
                        [each[start] for each in states[first : first + size]],
                        options.prompt_tokens,
                    )
                ]
                for codec in CODECS:
                    errors = [
                        relative_errors(pass_through_codec(output_TD, codec), each[start + length])
                        for output_TD, each in zip(outputs, states, strict=True)
                    ]
                    found[codec].append(torch.stack(errors))
        for codec, parts in found.items():
            errors_NST = torch.stack(parts)
            yield (
                length,
                codec,
                Errors(errors_NST[:, :half], errors_NST[:, half:]),
            )


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
    print_table(
        "Largest relative errors of honest nodes, and those of other texts as a share of them",
        "dtype|weights|codec|blocks|token|mean|tested token|tested mean|tokens",
        [
            [
                row["dtype"],
                row["quantization"],
                row["codec"],
                str(row["blocks"]),
                f"{row['token']:.2e}",
                f"{row['mean']:.2e}",
                f"{row['tested_token']:.2f}",
                f"{row['tested_mean']:.2f}",
                f"{row['fitted_tokens']:,}",
            ]
            for row in rows
        ],
    )


KEPT = (
    "family", "dtype", "quantization", "backend", "codec", "blocks", "token", "mean", "clip",
    "fitted_tokens",
)  # fmt: skip

if __name__ == "__main__":
    found = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    lines = [json.dumps({key: row[key] for key in KEPT}) for row in found]
    THRESHOLDS.write_text("[\n" + ",\n".join(lines) + "\n]\n", "utf-8")
