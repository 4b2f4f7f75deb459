"""Which lies of a node audits find: shares of sessions by attack, kind of weights and codec.

A span of the demo model runs sessions of 16 and 48 tokens as a node does, altered; the auditor has
the inputs, and computes them again by one prefill in the declared kind. Sessions that are honest
stand in the first row: what is found there is a false conviction.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.audit_thresholds import (
    choose_texts,
    compute_states,
    pass_through_codec,
    run_as_node,
)
from benchmarks.models import model_folder
from benchmarks.options import Options, Quant
from benchmarks.results import print_table
from nesa_node.core.ids import Span
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.checkpoint import LocalCheckpoint, open_folder
from nesa_node.verification.comparison import ComputationKind, compare, find_threshold

DEFAULTS = Options(model="demo", runs=300, prompt_tokens=16, new_tokens=48)
QUICK = Options(model="tiny", runs=2, prompt_tokens=4, new_tokens=14)
KINDS: tuple[tuple[str, Quant], ...] = (
    ("float32", "none"),
    ("bfloat16", "none"),
    ("bfloat16", "int8"),
)
CODECS = ("none", "int8", "blockwise8", "int4")
BATCH = 20
LORA_RANK, LORA_SCALE = 8, 0.02
"""Of the adapter: its product's norm is this share of a weight's, as after a short training."""

States = Sequence[Tensor]
"""Of one text: the input [T, D] of every block, and the last one's output."""
Run = Callable[[Sequence[States]], list[Tensor]]
"""Outputs [T, D] of a batch of sessions, by the node that is audited."""
Alter = Callable[[str, Tensor], Tensor]


class AlteredCheckpoint(LocalCheckpoint):
    """A checkpoint whose tensors change as they are read."""

    alter: Alter

    def read(self, name: str) -> Tensor:
        return self.alter(name, super().read(name))


@dataclass(frozen=True, slots=True)
class Bench:
    """What attacks of one kind of weights need."""

    checkpoint: LocalCheckpoint
    dtype: str
    quant_type: Quant
    span: Span
    prompt: int

    def load(self, quant_type: Quant | None = None, alter: Alter | None = None) -> ModelBlocks:
        """The span's blocks, in other weights."""
        checkpoint = self.checkpoint
        if alter is not None:
            checkpoint = AlteredCheckpoint(
                checkpoint.name, checkpoint.folder, checkpoint.config, checkpoint.tensors
            )
            checkpoint.alter = alter
        return load_blocks(
            checkpoint,
            self.span,
            dtype=getattr(torch, self.dtype),
            device="cpu",
            quant_type=self.quant_type if quant_type is None else quant_type,
        )

    def running(self, blocks: ModelBlocks) -> Run:
        return lambda batch: run_as_node(
            blocks, [states[self.span.start] for states in batch], self.prompt
        )

    def skipping(self, blocks: ModelBlocks, left_out: int) -> Run:
        """Every block but one."""
        start, end = self.span.start, self.span.end
        parts = [Span(start, left_out), Span(left_out + 1, end)]

        def run(batch: Sequence[States]) -> list[Tensor]:
            inputs = [states[start] for states in batch]
            for part in parts:
                if len(part):
                    inputs = run_as_node(blocks.select(part), inputs, self.prompt)
            return inputs

        return run

    def changing(self, blocks: ModelBlocks, change: Callable[[Tensor, Tensor], Tensor]) -> Run:
        """`change(inputs, outputs)` of the honest computation."""
        honest = self.running(blocks)

        def run(batch: Sequence[States]) -> list[Tensor]:
            outputs = honest(batch)
            return [
                change(states[self.span.start], output_TD)
                for states, output_TD in zip(batch, outputs, strict=True)
            ]

        return run

    def forgetting(self, blocks: ModelBlocks, window: int) -> Run:
        """A cache of the last `window` tokens only."""

        def run(batch: Sequence[States]) -> list[Tensor]:
            outputs = []
            for states in batch:
                input_TD = states[self.span.start]
                ends = range(1, len(input_TD) + 1)
                kept = [input_TD[max(end - window, 0) : end] for end in ends]
                each = [run_as_node(blocks, [part_TD], len(part_TD))[0][-1:] for part_TD in kept]
                outputs.append(torch.cat(each))
            return outputs

        return run

    def with_other_token(self, blocks: ModelBlocks) -> Run:
        """The prompt's fourth token is that of another text."""

        def run(batch: Sequence[States]) -> list[Tensor]:
            inputs = []
            for states, others in zip(batch, [*batch[1:], batch[0]], strict=True):
                changed_TD = states[self.span.start].clone()
                changed_TD[3] = others[self.span.start][5]
                inputs.append(changed_TD)
            return run_as_node(blocks, inputs, self.prompt)

        return run


def attacks(bench: Bench) -> Mapping[str, Callable[[], Run]]:
    """Attacks by name; each is made when its turn comes."""
    blocks = bench.load()
    start, end = bench.span.start, bench.span.end
    middle = (start + end) // 2
    found: dict[str, Callable[[], Run]] = {
        "honest": lambda: bench.running(blocks),
        "other model": lambda: bench.running(bench.load(alter=_other_weights)),
        "int8": lambda: bench.running(bench.load("int8")),
        "fp8": lambda: bench.running(bench.load(alter=_round_to_fp8)),
        "int4": lambda: bench.running(bench.load("nf4")),
        "first block skipped": lambda: bench.skipping(blocks, start),
        "middle block skipped": lambda: bench.skipping(blocks, middle),
        "last block skipped": lambda: bench.skipping(blocks, end - 1),
        "wrong block": lambda: bench.running(bench.load(alter=_exchange(bench, middle))),
        "echo": lambda: bench.changing(blocks, lambda input_TD, _: input_TD),
        "random": lambda: bench.changing(blocks, _random_like),
        "stale cache": lambda: bench.changing(blocks, lambda _, out_TD: out_TD.roll(1, 0)),
        "short KV": lambda: bench.forgetting(blocks, 16),
        "LoRA": lambda: bench.running(bench.load(alter=_add_lora)),
        "one prompt token changed": lambda: bench.with_other_token(blocks),
        "x 1.05": lambda: bench.changing(blocks, lambda _, out_TD: out_TD * 1.05),
        "1 % noise": lambda: bench.changing(blocks, _add_noise),
    }
    if bench.quant_type != "none":
        del found[bench.quant_type]
    return found


def _is_weight(name: str) -> bool:
    return name.endswith("proj.weight")


def _seeded(name: str, shape: Sequence[int]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(tuple(shape), generator=generator)


def _other_weights(name: str, weight: Tensor) -> Tensor:
    """Weights as a fine-tuned copy has them: 2 % off."""
    if not _is_weight(name):
        return weight
    return (weight + 0.02 * weight.float().std() * _seeded(name, weight.shape)).to(weight.dtype)


def _round_to_fp8(name: str, weight: Tensor) -> Tensor:
    if not _is_weight(name):
        return weight
    scale = weight.float().abs().amax(dim=1, keepdim=True) / 448
    rounded = (weight.float() / scale).to(torch.float8_e4m3fn).float() * scale
    return rounded.to(weight.dtype)


def _add_lora(name: str, weight: Tensor) -> Tensor:
    if not _is_weight(name):
        return weight
    rows, columns = weight.shape
    product = _seeded(name, (rows, LORA_RANK)) @ _seeded(name + "A", (LORA_RANK, columns))
    product *= LORA_SCALE * weight.float().norm() / product.norm()
    return (weight + product).to(weight.dtype)


def _exchange(bench: Bench, block: int) -> Alter:
    """Block `block` has the weights of the next one."""

    def alter(name: str, weight: Tensor) -> Tensor:
        if f".{block}." not in name:
            return weight
        return LocalCheckpoint.read(bench.checkpoint, name.replace(f".{block}.", f".{block + 1}."))

    return alter


def _random_like(_: Tensor, output_TD: Tensor) -> Tensor:
    drawn_TD = torch.randn(output_TD.shape)
    return (drawn_TD * output_TD.float().std()).to(output_TD.dtype)


def _add_noise(_: Tensor, output_TD: Tensor) -> Tensor:
    drawn_TD = torch.randn(output_TD.shape)
    drawn_TD *= (
        0.01 * output_TD.float().norm(dim=1, keepdim=True) / drawn_TD.norm(dim=1, keepdim=True)
    )
    return (output_TD + drawn_TD).to(output_TD.dtype)


def run(options: Options) -> list[dict[str, Any]]:
    torch.manual_seed(options.seed)
    rows = []
    with model_folder(options) as folder:
        checkpoint = open_folder(folder)
        third = checkpoint.num_blocks // 3
        span = Span(third, 2 * third)
        for dtype, quant_type in KINDS if options.model == "demo" else KINDS[:1]:
            bench = Bench(checkpoint, dtype, quant_type, span, options.prompt_tokens)
            texts = _read_states(bench, options)
            for name, make in attacks(bench).items():
                shares = _measure(bench, make(), texts)
                rows.append(
                    {
                        "attack": name,
                        "dtype": dtype,
                        "quantization": quant_type,
                        "blocks": str(span),
                        "sessions": len(texts),
                        "found": shares,
                    }
                )
                print(name, dtype, quant_type, shares, flush=True)
    show(rows)
    return rows


def _read_states(bench: Bench, options: Options) -> list[list[Tensor]]:
    blocks = load_blocks(
        bench.checkpoint,
        Span(0, bench.span.end),
        dtype=getattr(torch, bench.dtype),
        device="cpu",
        quant_type=bench.quant_type,
    )
    tokens = options.prompt_tokens + options.new_tokens
    texts = choose_texts(bench.checkpoint, tokens, options.runs, options)
    return list(compute_states(bench.checkpoint, blocks, texts))


def _measure(bench: Bench, run: Run, texts: Sequence[States]) -> dict[str, float]:
    """Share of the sessions that fail an audit, by codec."""
    found = dict.fromkeys(CODECS, 0)
    for first in range(0, len(texts), BATCH):
        batch = texts[first : first + BATCH]
        for states, output_TD in zip(batch, run(batch), strict=True):
            for codec in CODECS:
                kind = ComputationKind(
                    bench.checkpoint.config.model_type,
                    bench.dtype,
                    bench.quant_type,
                    "cpu",
                    codec,
                )
                outcome = compare(
                    pass_through_codec(output_TD, codec),
                    states[bench.span.end],
                    find_threshold(kind, len(bench.span)),
                ).outcome
                found[codec] += outcome == "failed"
    return {codec: count / len(texts) for codec, count in found.items()}


def show(rows: Sequence[dict[str, Any]]) -> None:
    print_table(
        "Share of sessions in which an audit finds the attack, by codec",
        "|".join(("attack", "dtype", "weights", "sessions", *CODECS)),
        [
            [
                row["attack"],
                row["dtype"],
                row["quantization"],
                str(row["sessions"]),
                *(f"{row['found'][codec]:.1%}" for codec in CODECS),
            ]
            for row in rows
        ],
    )
