"""Which lies of a node audits find: sessions by attack, kind of weights, scheme and codec.

A span of the demo model runs sessions of 16 and 48 tokens as a node does, altered; the auditor has
the inputs, and computes them again in the declared kind: by one prefill, and, where that fails,
token by token. An attack is found where both say so, as in an audit. Sessions that are honest stand
in the first row: what is found there is a false conviction.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.audit_thresholds import (
    CODECS,
    choose_texts,
    compute_states,
    new_tables,
    pass_through_codec,
    run_in_batches,
)
from benchmarks.models import model_folder
from benchmarks.options import Options, Quant
from benchmarks.results import print_table
from nesa_node.core.ids import Span
from nesa_node.engine.model.blocks import ModelBlocks, RowChunk
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.checkpoint import LocalCheckpoint, open_folder
from nesa_node.verification.comparison import (
    PERTURBATIONS,
    Comparison,
    ComputationKind,
    find_threshold,
    judge,
    perturb,
)
from nesa_node.verification.schemes import DEFAULT_SCHEME, SCHEMES, SEED_BYTES

DEFAULTS = Options(model="demo", runs=300, prompt_tokens=16, new_tokens=48)
QUICK = Options(model="tiny", runs=2, prompt_tokens=4, new_tokens=14)
KINDS: tuple[tuple[str, Quant], ...] = (
    ("float32", "none"),
    ("bfloat16", "none"),
    ("bfloat16", "int8"),
)
BATCH = 20
LORA_RANK, LORA_SCALE = 8, 0.02
"""Of the adapter: its product's norm is this share of a weight's, as after a short training."""

Attack = Callable[[], list[Tensor]]
"""Outputs [T, D] of all sessions, by the node that is audited."""
Alter = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """What the auditor of a session has."""

    input_TD: Tensor
    expected_TD: Tensor
    """By one prefill."""
    further_TD: tuple[Tensor, ...]
    """Token by token, and by prefills of perturbed inputs."""
    seed: bytes


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
                checkpoint.name, checkpoint.folder, checkpoint.config, checkpoint.stored
            )
            checkpoint.alter = alter
        return load_blocks(
            checkpoint,
            self.span,
            dtype=getattr(torch, self.dtype),
            device="cpu",
            quant_type=self.quant_type if quant_type is None else quant_type,
        )

    def run(self, blocks: ModelBlocks, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Outputs of the blocks for each session's inputs."""
        return run_in_batches(blocks, inputs, self.prompt, BATCH)

    def skip(self, blocks: ModelBlocks, inputs: Sequence[Tensor], left_out: int) -> list[Tensor]:
        """Outputs of every block but one."""
        for part in (Span(self.span.start, left_out), Span(left_out + 1, self.span.end)):
            if len(part):
                inputs = self.run(blocks.select(part), inputs)
        return list(inputs)

    def forget(self, blocks: ModelBlocks, inputs: Sequence[Tensor], window: int) -> list[Tensor]:
        """Outputs with a cache of the last `window` tokens only."""
        outputs = []
        for input_TD in inputs:
            ends = range(1, len(input_TD) + 1)
            parts = [input_TD[max(end - window, 0) : end] for end in ends]
            tables = new_tables(blocks, len(parts), window)
            chunks = [
                RowChunk(table, len(part_LD)) for table, part_LD in zip(tables, parts, strict=True)
            ]
            each_TD = blocks.forward(torch.cat(parts), chunks)
            lasts = torch.tensor([len(part_LD) for part_LD in parts]).cumsum(0) - 1
            outputs.append(each_TD[lasts])
        return outputs

    def with_other_token(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Inputs with another text's token as the prompt's fourth."""
        changed = []
        for input_TD, other_TD in zip(inputs, [*inputs[1:], inputs[0]], strict=True):
            changed_TD = input_TD.clone()
            changed_TD[3] = other_TD[5]
            changed.append(changed_TD)
        return changed


def attacks(bench: Bench, inputs: Sequence[Tensor]) -> Mapping[str, Attack]:
    """Attacks by name; each is made when its turn comes."""
    blocks = bench.load()
    honest = bench.run(blocks, inputs)
    start, end = bench.span.start, bench.span.end
    middle = (start + end) // 2

    def altered(quant_type: Quant | None = None, alter: Alter | None = None) -> Attack:
        return lambda: bench.run(bench.load(quant_type, alter), inputs)

    def skipping(block: int) -> Attack:
        return lambda: bench.skip(blocks, inputs, block)

    def changing(change: Callable[[Tensor], Tensor]) -> Attack:
        return lambda: [change(output_TD) for output_TD in honest]

    found: dict[str, Attack] = {
        "honest": lambda: honest,
        "other model": altered(alter=other_weights),
        "int8": altered("int8"),
        "fp8": altered(alter=_round_to_fp8),
        "int4": altered("nf4"),
        "first block skipped": skipping(start),
        "middle block skipped": skipping(middle),
        "last block skipped": skipping(end - 1),
        "wrong block": altered(alter=_exchange(bench, middle)),
        "echo": lambda: list(inputs),
        "random": changing(_random_like),
        "stale cache": changing(lambda output_TD: output_TD.roll(1, 0)),
        "another session's": lambda: [*honest[1:], honest[0]],
        "short KV": lambda: bench.forget(blocks, inputs, 16),
        "LoRA": altered(alter=_add_lora),
        "one prompt token changed": lambda: bench.run(blocks, bench.with_other_token(inputs)),
        "x 1.05": changing(lambda output_TD: output_TD * 1.05),
        "1 % noise": changing(_add_noise),
    }
    if bench.quant_type != "none":
        del found[bench.quant_type]
    return found


def _is_weight(name: str) -> bool:
    return name.endswith("proj.weight")


def _seeded(name: str, shape: Sequence[int]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(tuple(shape), generator=generator)


def other_weights(name: str, weight: Tensor) -> Tensor:
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


def _random_like(output_TD: Tensor) -> Tensor:
    drawn_TD = torch.randn(output_TD.shape)
    return (drawn_TD * output_TD.float().std()).to(output_TD.dtype)


def _add_noise(output_TD: Tensor) -> Tensor:
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
            sessions = _read_sessions(bench, options)
            judges = [_Judge(bench, scheme, sessions) for scheme in SCHEMES]
            for name, make in attacks(bench, [each.input_TD for each in sessions]).items():
                counts = _count_found(judges, make())
                rows.append(
                    {
                        "attack": name,
                        "dtype": dtype,
                        "quantization": quant_type,
                        "blocks": str(span),
                        "sessions": len(sessions),
                        "found": counts,
                    }
                )
                print(name, dtype, quant_type, counts[DEFAULT_SCHEME], flush=True)
    show(rows)
    return rows


def _read_sessions(bench: Bench, options: Options) -> list[Session]:
    start, end = bench.span.start, bench.span.end
    blocks = load_blocks(
        bench.checkpoint,
        Span(0, end),
        dtype=getattr(torch, bench.dtype),
        device="cpu",
        quant_type=bench.quant_type,
    )
    tokens = options.prompt_tokens + options.new_tokens
    texts = choose_texts(bench.checkpoint, tokens, options.runs, options)
    known = [
        (states[start], states[end]) for states in compute_states(bench.checkpoint, blocks, texts)
    ]
    inputs = [input_TD for input_TD, _ in known]
    audited = blocks.select(bench.span)
    further = zip(
        run_in_batches(audited, inputs, 1, BATCH),
        *(
            run_in_batches(audited, list(map(perturb, inputs)), tokens, 1)
            for _ in range(PERTURBATIONS)
        ),
        strict=True,
    )
    seeds = random.Random(options.seed)
    return [
        Session(*each, further_TD, seeds.randbytes(SEED_BYTES))
        for each, further_TD in zip(known, further, strict=True)
    ]


class _Judge:
    """An auditor's verdicts by one scheme."""

    def __init__(self, bench: Bench, scheme: str, sessions: Sequence[Session]) -> None:
        self.name, self._scheme = scheme, SCHEMES[scheme]
        self._allowed = {}
        for codec in CODECS:
            kind = ComputationKind(
                bench.checkpoint.config.model_type, bench.dtype, bench.quant_type, "cpu", codec
            )
            self._allowed[codec] = find_threshold(kind, len(bench.span), scheme)
        self._seeds = [each.seed for each in sessions]
        make = self._scheme.sketch
        self._expected = [make(each.expected_TD, each.seed) for each in sessions]
        self._further = [
            [make(each_TD, each.seed) for each_TD in each.further_TD] for each in sessions
        ]
        self._own = {
            codec: [
                [
                    self._scheme.errors(
                        make(pass_through_codec(each_TD, codec), each.seed), expected
                    )
                    for each_TD in each.further_TD
                ]
                for each, expected in zip(sessions, self._expected, strict=True)
            ]
            for codec in CODECS
        }

    def finds(self, session: int, codec: str, sent_TD: Tensor) -> bool:
        """Whether outputs, decoded, count as wrong."""
        given = self._scheme.sketch(sent_TD, self._seeds[session])
        expected, further = self._expected[session], self._further[session]
        errors = [self._scheme.errors(given, each) for each in (expected, *further)]
        found, *others = (self._judge(each, sent_TD, codec) for each in errors)
        own, sent = (
            [self._judge(each, sent_TD, codec) for each in self._own[name][session]]
            for name in ("none", codec)
        )
        return found.is_confirmed_by(others, own, sent, sent_TD.dtype)

    def _judge(self, errors: Tensor, sent_TD: Tensor, codec: str) -> Comparison:
        return judge(errors, len(sent_TD), self.name, self._allowed[codec])


def _count_found(judges: Sequence[_Judge], outputs: Sequence[Tensor]) -> dict[str, dict[str, int]]:
    """Sessions in which an audit fails, by scheme and codec."""
    counts = {each.name: dict.fromkeys(CODECS, 0) for each in judges}
    for session, output_TD in enumerate(outputs):
        sent = {codec: pass_through_codec(output_TD, codec) for codec in CODECS}
        for each in judges:
            for codec, sent_TD in sent.items():
                counts[each.name][codec] += each.finds(session, codec, sent_TD)
    return counts


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Shares by codec for the default scheme, and by scheme where values are sent as they are."""
    print_table(
        f"Share of sessions in which an audit finds the attack by {DEFAULT_SCHEME}, by codec",
        "|".join(("attack", "dtype", "weights", "sessions", *CODECS)),
        [_cells(row, [row["found"][DEFAULT_SCHEME][codec] for codec in CODECS]) for row in rows],
    )
    print_table(
        "The same by scheme, without a codec",
        "|".join(("attack", "dtype", "weights", "sessions", *SCHEMES)),
        [_cells(row, [row["found"][scheme]["none"] for scheme in SCHEMES]) for row in rows],
    )


def _cells(row: dict[str, Any], counts: Sequence[int]) -> list[str]:
    sessions: int = row["sessions"]
    shares = [f"{count / sessions:.1%}" for count in counts]
    return [row["attack"], row["dtype"], row["quantization"], str(sessions), *shares]
