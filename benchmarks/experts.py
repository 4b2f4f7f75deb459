"""A block of a mixture of experts with its weights in 16 bits, int8 and nf4: bytes, error, speed.

`8x22b` is a block of Mixtral 8x22B by its published dimensions. Weights are drawn, a matrix at a
time, as loading asks for them (normal, 0.02), so that errors are those of weights without outliers.
All three blocks are in memory at once, 9.3 GB of them, and take turns: each step is one random
hidden state for each session, the same for all, behind `prompt_tokens` cached ones. Which experts a
token gets is up to the block's own router, so that a router which sees other hidden states may
choose others: such tokens count as errors, too.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import MixtralConfig

from benchmarks.figures import median_ratio
from benchmarks.options import Options, Quant
from benchmarks.results import print_table
from nesa_node.core.ids import Span
from nesa_node.engine.cache.pages import PAGE_TOKENS, PageTable, pages_for
from nesa_node.engine.kernels.threads import fix_threads
from nesa_node.engine.model.blocks import ModelBlocks, RowChunk
from nesa_node.engine.model.devices import compute_block_bytes
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.engine.weights.files import Progress, TensorInfo

DEFAULTS = Options(
    model="8x22b", dtype="bfloat16", threads=(2,), sessions=(1, 8), runs=9, prompt_tokens=64
)
QUICK = Options(
    model="tiny", dtype="bfloat16", threads=(1,), sessions=(1, 8), runs=2, prompt_tokens=8
)
SHAPES: dict[str, dict[str, int]] = {
    "8x22b": {
        "hidden_size": 6144,
        "intermediate_size": 16384,
        "num_hidden_layers": 56,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "vocab_size": 32_768,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 320,
    },
}
EXPERTS, USED_EXPERTS = 8, 2
STD = 0.02
ERROR_TOKENS = 32
STEPS = 3
"""Of each kind of weights, one after the other."""
PAPER_SAVING = 0.30
"""What the paper states that 8 bits save of Mixtral 8x22B's memory."""
_QUANT_TYPES: tuple[Quant, ...] = ("none", "int8", "nf4")


class DrawnCheckpoint(Checkpoint):
    """A Mixtral whose tensors are drawn from a seed when they are read."""

    def __init__(self, shape: Mapping[str, int], seed: int) -> None:
        make: Any = MixtralConfig
        config = make(
            **shape,
            num_local_experts=EXPERTS,
            num_experts_per_tok=USED_EXPERTS,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        tensors = {
            name: TensorInfo(size, torch.bfloat16, 2 * torch.Size(size).numel(), "", 0)
            for name, size in _tensor_shapes(config)
        }
        super().__init__("mixtral", Path(), config, tensors)
        self._seed = seed

    def read(self, name: str) -> Tensor:
        shape = self.tensors[name].shape
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return torch.randn(shape, generator=generator).mul_(STD).to(torch.bfloat16)

    def fetch(self, names: Iterable[str], progress: Progress | None = None) -> None:
        pass

    def download_sizes(self, names: Iterable[str]) -> Mapping[str, int]:
        return {}

    def require_download_allowed(self, names: Iterable[str]) -> None:
        pass

    def fetch_side_files(self) -> Path:
        raise NotImplementedError

    def tensor_digests(self) -> Mapping[str, str]:
        raise NotImplementedError


def _tensor_shapes(config: Any) -> Iterable[tuple[str, tuple[int, ...]]]:
    """Names and shapes as Mixtral's checkpoints have them."""
    hidden, inner = config.hidden_size, config.intermediate_size
    head = hidden // config.num_attention_heads
    cached = config.num_key_value_heads * head
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config.vocab_size, hidden)
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        for name, outputs in (("q", hidden), ("k", cached), ("v", cached), ("o", hidden)):
            yield f"{layer}.self_attn.{name}_proj.weight", (outputs, hidden)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{name}.weight", (hidden,)
        yield f"{layer}.block_sparse_moe.gate.weight", (EXPERTS, hidden)
        for expert in range(EXPERTS):
            of_expert = f"{layer}.block_sparse_moe.experts.{expert}"
            yield f"{of_expert}.w1.weight", (inner, hidden)
            yield f"{of_expert}.w3.weight", (inner, hidden)
            yield f"{of_expert}.w2.weight", (hidden, inner)


def run(options: Options) -> list[dict[str, Any]]:
    """One row per kind of weights and number of sessions."""
    checkpoint = DrawnCheckpoint(SHAPES[options.model], options.seed)
    sizes = {
        kind: compute_block_bytes(checkpoint, options.torch_dtype, kind) for kind in _QUANT_TYPES
    }
    blocks, load_s = {}, {}
    for kind in _QUANT_TYPES:
        started = time.perf_counter()
        blocks[kind] = load_blocks(
            checkpoint,
            Span(0, 1),
            dtype=options.torch_dtype,
            device=options.device,
            quant_type=kind,
        )
        load_s[kind] = time.perf_counter() - started
    errors = measure_errors(blocks, options.seed)
    ends = 2 * sum(
        info.numel for name, info in checkpoint.tensors.items() if ".layers." not in name
    )
    rows = []
    for threads in options.threads:
        fix_threads(threads or torch.get_num_threads())
        for sessions in options.sessions:
            samples = measure_speed(blocks, sessions, options)
            rows += [
                {
                    "quant_type": kind,
                    "threads": threads,
                    "sessions": sessions,
                    "block_bytes": blocks[kind].weight_bytes,
                    "share": sizes[kind][0] / sizes["none"][0],
                    "model_share": (sum(sizes[kind]) + ends) / (sum(sizes["none"]) + ends),
                    "load_s": load_s[kind],
                    **errors[kind],
                    "tokens_per_s": sessions / median(samples[kind]),
                    "speed": median_ratio(samples["none"], samples[kind]),
                    "runs": [{"step_s": samples[kind]}],
                }
                for kind in _QUANT_TYPES
            ]
    show(rows, options)
    return rows


def measure_errors(blocks: Mapping[Quant, ModelBlocks], seed: int) -> dict[Quant, dict[str, float]]:
    """Relative errors of one prompt's outputs, and of what the block adds to its inputs."""
    generator = torch.Generator().manual_seed(seed)
    hidden_LD = torch.randn(ERROR_TOKENS, blocks["none"].hidden_size, generator=generator)
    hidden_LD = hidden_LD.to(blocks["none"].dtype)
    outputs = {
        kind: each.forward(hidden_LD, [RowChunk(row, ERROR_TOKENS)])
        for kind, each in blocks.items()
        for row in _new_rows(each, 1, ERROR_TOKENS)
    }
    exact_LD = outputs["none"].float()
    found = {}
    for kind, output_LD in outputs.items():
        difference_L = (output_LD.float() - exact_LD).norm(dim=1)
        added_L = (exact_LD - hidden_LD.float()).norm(dim=1)
        found[kind] = {
            "output_error": float(difference_L.norm() / exact_LD.norm()),
            "added_error": float(difference_L.norm() / added_L.norm()),
            "added_error_median": float((difference_L / added_L).median()),
        }
    return found


def measure_speed(
    blocks: Mapping[Quant, ModelBlocks], sessions: int, options: Options
) -> dict[Quant, list[float]]:
    """Seconds of steps of one token for each session, the kinds of weights taking turns."""
    generator = torch.Generator().manual_seed(options.seed + 1)
    size = blocks["none"].hidden_size
    prompt_LD = torch.randn(options.prompt_tokens, size, generator=generator)
    tokens = options.prompt_tokens + 1
    tables = {kind: _new_rows(each, sessions, tokens) for kind, each in blocks.items()}
    for kind, each in blocks.items():
        for table in tables[kind]:
            each.forward(prompt_LD, [RowChunk(table, options.prompt_tokens)])
    samples: dict[Quant, list[float]] = {kind: [] for kind in blocks}
    for turn in range(options.runs + 1):
        hidden_SRD = torch.randn(STEPS, sessions, size, generator=generator)
        for kind, each in blocks.items():
            started = time.perf_counter()
            for hidden_RD in hidden_SRD:
                each.forward(hidden_RD, [RowChunk(table, 1) for table in tables[kind]])
                for table in tables[kind]:
                    table.truncate(options.prompt_tokens)
                    table.reserve(options.prompt_tokens + 1)
            if turn:  # the first one touches all memory
                samples[kind].append((time.perf_counter() - started) / STEPS)
    return samples


def _new_rows(blocks: ModelBlocks, rows: int, tokens: int) -> list[PageTable]:
    """Empty rows of one pool, with room for `tokens` each."""
    pages = rows * pages_for(tokens)
    reservation = blocks.new_pool(pages * PAGE_TOKENS).reserve(pages)
    tables = [reservation.new_table() for _ in range(rows)]
    for table in tables:
        table.reserve(tokens)
    return tables


def show(rows: Sequence[Mapping[str, Any]], options: Options) -> None:
    print_table(
        f"experts: one block of {options.model}, {options.dtype}",
        "weights|GB|of 16 bits|whole model|load s|error of output|of what it adds|its median|"
        "threads|sessions|tokens/s|of 16 bits",
        [
            [
                options.dtype if row["quant_type"] == "none" else row["quant_type"],
                f"{row['block_bytes'] / 1e9:.3f}",
                f"{row['share']:.3f}",
                f"{row['model_share']:.3f}",
                f"{row['load_s']:.0f}",
                *(
                    f"{row[name]:.4f}"
                    for name in ("output_error", "added_error", "added_error_median")
                ),
                str(row["threads"]),
                str(row["sessions"]),
                f"{row['tokens_per_s']:.2f}",
                f"{row['speed']:.2f}",
            ]
            for row in rows
        ],
    )
    saved = {row["quant_type"]: 1 - row["model_share"] for row in rows}
    print(
        f"memory saved of the whole model: int8 {saved['int8']:.0%}, nf4 {saved['nf4']:.0%}; the "
        f"paper states {PAPER_SAVING:.0%} of Mixtral 8x22B for its 8 bits"
    )
