"""How often audits accuse honest nodes: sessions of many shapes, judged as a client judges them.

The demo model's blocks run sessions as a node does, of random spans, batches, chunks of prompts,
lengths and codecs, in machine code and without; the client's auditor gets what they gave. Texts are
program code, while bounds are fitted to documents, and random tokens that end in a loop, as answers
of small models do. `honest-sessions` has audits of daemons.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoTokenizer

import nesa_node
from benchmarks.audit_thresholds import (
    CODECS,
    KINDS,
    compute_states,
    new_tables,
    pass_through_codec,
)
from benchmarks.models import model_folder
from benchmarks.options import Options, Quant
from benchmarks.results import print_table
from nesa_node.client.verification.audit_history import AuditHistory
from nesa_node.client.verification.audit_record import AuditRecord
from nesa_node.client.verification.auditor import Auditor
from nesa_node.client.verification.session_audit import HopWork, RowWork
from nesa_node.core.ids import PeerId, Span
from nesa_node.engine.model import recomputation
from nesa_node.engine.model.blocks import ModelBlocks, RowChunk
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.checkpoint import LocalCheckpoint, open_folder
from nesa_node.swarm.protocol.messages import Computation

DEFAULTS = Options(model="demo", runs=9600, prompt_tokens=96, new_tokens=48, batches=(1, 4, 16, 32))
QUICK = Options(model="tiny", runs=6, prompt_tokens=8, new_tokens=8, batches=(2,))
TEXTS, LOOPS = 32, 12
MAX_PERIOD = 3
CHUNKS = (5, 32, 10_000)
"""Tokens of a prompt that a node takes at once."""
SPAN_BLOCKS = (1, 1, 2, 2, 3, 3, 4, 5, 6, 8, 8, 10, 10, 12, 15, 30)
"""Long ones, which take longest, are rare."""
MAX_ROWS = 3
"""Of one session."""
CODE = Path(nesa_node.__file__).parent


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """A session's work, and how a node did it."""

    work: HopWork
    batch: int
    is_native: bool


def run(options: Options) -> list[dict[str, Any]]:
    torch.manual_seed(options.seed)
    rows = []
    with model_folder(options) as folder:
        checkpoint = open_folder(folder)
        kinds = KINDS if options.model == "demo" else KINDS[:1]
        for dtype, quant_type in kinds:
            count = -(-options.runs // len(kinds))
            with loaded_once(checkpoint, dtype, quant_type) as blocks:
                rows.append(_audit_kind(checkpoint, blocks, quant_type, count, options))
            print(dtype, quant_type, rows[-1]["outcomes"], flush=True)
    show(rows)
    return rows


@contextmanager
def loaded_once(
    checkpoint: LocalCheckpoint, dtype: str, quant_type: Quant
) -> Iterator[ModelBlocks]:
    """The model's blocks; an auditor gets other copies, and loads each of them once."""

    @cache
    def load(span: Span) -> ModelBlocks:
        return load_blocks(
            checkpoint,
            span,
            dtype=getattr(torch, dtype),
            device="cpu",
            quant_type=quant_type,
        )

    with patch.object(recomputation, "load_blocks", lambda _, span, **__: load(span)):
        yield load(Span(0, checkpoint.num_blocks))


def _audit_kind(
    checkpoint: LocalCheckpoint,
    blocks: ModelBlocks,
    quant_type: Quant,
    count: int,
    options: Options,
) -> dict[str, Any]:
    rng = random.Random(options.seed)
    auditor = Auditor(checkpoint, 1.0, AuditHistory(None), rng=rng)
    tokens = options.prompt_tokens + options.new_tokens
    texts = choose_code(checkpoint, tokens, options) + draw_loops(checkpoint, tokens, rng)
    states = list(compute_states(checkpoint, blocks, texts))
    outcomes: Counter[str] = Counter()
    shapes: Counter[str] = Counter()
    closest = 0.0
    failed: list[str] = []
    while outcomes.total() < count:
        for made in make_sessions(blocks, quant_type, states, rng, options):
            record = asyncio.run(auditor.judge(made.work))
            outcomes[record.outcome] += 1
            closest = max(closest, record.of_allowed or 0.0)
            shapes.update(_shape_of(made))
            if record.outcome != "passed":
                failed.append(_describe(made, record))
    return {
        "dtype": str(blocks.dtype).removeprefix("torch."),
        "quantization": quant_type,
        "audits": outcomes.total(),
        "outcomes": dict(outcomes),
        "largest_of_allowed": closest,
        "shapes": dict(sorted(shapes.items())),
        "not_passed": failed[:20],
    }


def choose_code(checkpoint: LocalCheckpoint, tokens: int, options: Options) -> list[Tensor]:
    """Token ids of parts of this package's code, for random models of random ones."""
    if options.model != "demo":
        generator = torch.Generator().manual_seed(options.seed)
        drawn_NL = torch.randint(checkpoint.config.vocab_size, (4, tokens), generator=generator)
        return list(drawn_NL)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder, trust_remote_code=False)
    paths = sorted(CODE.rglob("*.py"))
    random.Random(options.seed).shuffle(paths)
    found = (tokenizer(path.read_text("utf-8"))["input_ids"][:tokens] for path in paths)
    return [torch.tensor(ids) for ids in found if len(ids) == tokens][:TEXTS]


def draw_loops(checkpoint: LocalCheckpoint, tokens: int, rng: random.Random) -> list[Tensor]:
    """Random token ids, of which few repeat from some place on."""
    loops = []
    for _ in range(LOOPS):
        ids = [rng.randrange(checkpoint.config.vocab_size) for _ in range(tokens)]
        first, period = rng.randint(1, tokens // 2), rng.randint(1, MAX_PERIOD)
        for at in range(first + period, tokens):
            ids[at] = ids[at - period]
        loops.append(torch.tensor(ids))
    return loops


def make_sessions(
    blocks: ModelBlocks,
    quant_type: Quant,
    states: Sequence[Sequence[Tensor]],
    rng: random.Random,
    options: Options,
) -> list[Made]:
    """Work of sessions that share a node's batches. Some have several rows."""
    length = min(rng.choice(SPAN_BLOCKS), blocks.num_blocks)
    start = rng.randint(0, blocks.num_blocks - length)
    span = Span(start, start + length)
    size = rng.choice(options.batches)
    prompt = rng.randint(1, options.prompt_tokens)
    tokens = prompt + rng.randint(0, options.new_tokens)
    inputs = [rng.choice(states)[start][:tokens] for _ in range(size)]
    is_native = rng.random() < 0.5
    outputs = run_in_chunks(
        blocks.select(span), inputs, prompt, rng.choice(CHUNKS), is_native=is_native
    )
    codec = rng.choice(CODECS)
    made = []
    while inputs:
        taken = rng.randint(1, MAX_ROWS)
        sent = [pass_through_codec(output_TD, codec) for output_TD in outputs[:taken]]
        work = make_work(blocks, quant_type, span, inputs[:taken], sent, codec)
        made.append(Made(work, size, is_native))
        inputs, outputs = inputs[taken:], outputs[taken:]
    return made


def make_work(
    blocks: ModelBlocks,
    quant_type: Quant,
    span: Span,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    codec: str,
) -> HopWork:
    """Work of a session with these rows, each [T, D]."""
    rows = [
        RowWork(
            prefix_LD=input_TD[:0],
            inputs_LD=input_TD,
            positions=tuple(range(len(input_TD))),
            outputs_PD=output_TD,
            row=number,
        )
        for number, (input_TD, output_TD) in enumerate(zip(inputs, outputs, strict=True))
    ]
    return HopWork(
        peer=PeerId("honest"),
        span=span,
        session=b"",
        first_block=span.start,
        computation=Computation(
            dtype=str(blocks.dtype).removeprefix("torch."),  # type: ignore[arg-type]  # one of `Dtype`
            quantization=quant_type,
            backend="cpu",
        ),
        codec=codec,
        rows=tuple(rows),
        is_own=True,
    )


def run_in_chunks(
    blocks: ModelBlocks, inputs: Sequence[Tensor], prompt: int, chunk: int, *, is_native: bool
) -> list[Tensor]:
    """Outputs [T, D] of sessions that share a batch: prompts in chunks, then single tokens."""
    compiled = blocks._compiled_decoder
    blocks._compiled_decoder = compiled if is_native else None
    try:
        tables = new_tables(blocks, len(inputs), len(inputs[0]))
        outputs = [
            [
                blocks.forward(part_TD, [RowChunk(table, len(part_TD))])
                for part_TD in torch.split(input_TD[:prompt], chunk)
            ]
            for input_TD, table in zip(inputs, tables, strict=True)
        ]
        for at in range(prompt, len(inputs[0])):
            step_SD = torch.stack([input_TD[at] for input_TD in inputs])
            output_SD = blocks.forward(step_SD, [RowChunk(table, 1) for table in tables])
            for kept, output_D in zip(outputs, output_SD, strict=True):
                kept.append(output_D[None])
        return [torch.cat(kept) for kept in outputs]
    finally:
        blocks._compiled_decoder = compiled


def _shape_of(made: Made) -> list[str]:
    work = made.work
    return [
        f"blocks {len(work.span)}",
        f"batch {made.batch}",
        f"rows {len(work.rows)}",
        f"codec {work.codec}",
        "machine code" if made.is_native else "torch",
    ]


def _describe(made: Made, record: AuditRecord) -> str:
    tokens = len(made.work.rows[0].inputs_LD)
    shape = ", ".join([*_shape_of(made), f"{tokens} tokens"])
    return f"{record.outcome} ({shape}): {record.reason or record.of_allowed}"


def show(rows: Sequence[dict[str, Any]]) -> None:
    print_table(
        "Audits of honest sessions",
        "dtype|weights|audits|passed|failed|not audited|uncalibrated|largest error,\nof allowed",
        [
            [
                row["dtype"],
                row["quantization"],
                str(row["audits"]),
                *(
                    str(row["outcomes"].get(outcome, 0))
                    for outcome in ("passed", "failed", "not audited", "uncalibrated")
                ),
                f"{row['largest_of_allowed']:.2f}",
            ]
            for row in rows
        ],
    )
