"""Tokens per CPU second of LoRA training: three spans against PEFT in one process.

All in this process, on `--threads`: what a swarm adds, its hops and waits, is not in it. Both run
the same micro-batches of full sequences and one AdamW step, in turns.
"""

from __future__ import annotations

import time
import warnings
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.models import model_folder
from benchmarks.options import Options
from benchmarks.results import print_table
from nesa_node.core.ids import Span
from nesa_node.core.settings.declaration import default_cache_dir
from nesa_node.engine.model.embedder_and_head import load_embedder_and_head
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.training.adapted_blocks import AdaptedBlocks, MicroBatch
from nesa_node.engine.training.adapters import OptimizerConfig
from nesa_node.engine.training.kept_micro_batches import KEEPS, Keep
from nesa_node.engine.training.span_trainer import SpanTrainer, finish
from nesa_node.engine.weights.hub import open_checkpoint

DEFAULTS = Options(model="50m", threads=(1,), runs=5, prompt_tokens=128, batches=(1, 8))
QUICK = Options(model="tiny", threads=(1,), runs=1, prompt_tokens=8, batches=(1,))
MICRO_BATCHES = 4
SPANS = 3


def run(options: Options) -> list[dict[str, Any]]:
    [threads] = options.threads
    torch.set_num_threads(threads or torch.get_num_threads())
    warnings.simplefilter("ignore")  # of what PEFT asks transformers by names that will go
    with model_folder(options) as folder:
        rows = [measure(str(folder), rows, options) for rows in options.batches]
    show(rows)
    return rows


def measure(folder: str, rows: int, options: Options) -> dict[str, Any]:
    """One row, for micro-batches of so many sequences."""
    import peft

    config: Any = peft.LoraConfig(r=8, target_modules="all-linear")
    checkpoint = open_checkpoint(folder, cache_dir=default_cache_dir())
    vocabulary = int(checkpoint.config.vocab_size)
    generator = torch.Generator().manual_seed(options.seed)
    batches = [
        torch.randint(vocabulary, (rows, options.prompt_tokens), generator=generator)
        for _ in range(MICRO_BATCHES)
    ]
    trainings = {"local": LocalTraining(folder, config, options).run_step}
    for keep in KEEPS:
        trainings[keep] = CutTraining(folder, config, options, keep).run_step
    seconds: dict[str, list[float]] = {name: [] for name in ("local", *KEEPS)}
    for turn in range(options.runs + 1):
        for name, run_step in trainings.items():
            started = time.process_time()
            run_step(turn, batches)
            if turn:  # the first one allocates and compiles
                seconds[name].append(time.process_time() - started)
    tokens = MICRO_BATCHES * rows * options.prompt_tokens
    per_s = {name: tokens / median(each) for name, each in seconds.items()}
    return {
        "rows": rows,
        "tokens_per_cpu_s": per_s,
        "ratio": {keep: per_s[keep] / per_s["local"] for keep in KEEPS},
        "runs": [seconds],
    }


class LocalTraining:
    """PEFT in one process, without activation checkpointing."""

    def __init__(self, folder: str, config: Any, options: Options) -> None:
        import peft

        auto: Any = AutoModelForCausalLM
        base = auto.from_pretrained(folder, dtype=options.torch_dtype, trust_remote_code=False)
        torch.manual_seed(options.seed)
        self._model: Any = peft.get_peft_model(base, config)
        self._model.train()
        trained = [value for value in self._model.parameters() if value.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-3)

    def run_step(self, step: int, batches: list[Tensor]) -> None:
        del step
        self._optimizer.zero_grad()
        for ids_RL in batches:
            logits_RLV = self._model(input_ids=ids_RL, use_cache=False).logits
            torch.autograd.backward(compute_loss(logits_RLV, ids_RL))
        self._optimizer.step()


class CutTraining:
    """The same through spans, one after the other."""

    def __init__(self, folder: str, config: Any, options: Options, keep: Keep) -> None:
        checkpoint = open_checkpoint(folder, cache_dir=default_cache_dir())
        dtype = options.torch_dtype
        self._embedder, self._head = load_embedder_and_head(checkpoint, dtype=dtype, device="cpu")
        count = checkpoint.num_blocks
        cuts = [count * part // SPANS for part in range(SPANS + 1)]
        self._spans = []
        for start, end in pairwise(cuts):
            served = load_blocks(
                checkpoint,
                Span(start, end),
                dtype=dtype,
                device="cpu",
                quant_type=options.quant_type,
            )
            adapted = AdaptedBlocks(served, checkpoint, config, seed=options.seed)
            self._spans.append(SpanTrainer(adapted, OptimizerConfig(), keep=keep))

    def run_step(self, step: int, batches: list[Tensor]) -> None:
        for number, ids_RL in enumerate(batches):
            positions_RL = torch.arange(ids_RL.shape[1]).expand_as(ids_RL)
            hidden_RLD = self._embedder.embed_batch(ids_RL, positions_RL)
            for span in self._spans:
                hidden_RLD = finish(span.forward(step, number, hidden_RLD, MicroBatch(number)))
            hidden_RLD.requires_grad_()
            logits_RLV = self._head.logits_with_gradients(hidden_RLD)
            [grad_RLD] = torch.autograd.grad(compute_loss(logits_RLV, ids_RL), hidden_RLD)
            for span in reversed(self._spans):
                grad_RLD = finish(span.backward(step, number, grad_RLD))
        for span in self._spans:
            span.apply(step, micro_batches=len(batches), learning_rate=1e-3, scale=1.0)


def compute_loss(logits_RLV: Tensor, ids_RL: Tensor) -> Tensor:
    predicted = logits_RLV[:, :-1].float().flatten(0, 1)
    return torch.nn.functional.cross_entropy(predicted, ids_RL[:, 1:].flatten()) / MICRO_BATCHES


def show(rows: list[dict[str, Any]]) -> None:
    print_table(
        "Tokens per CPU second of LoRA training, in one process and through three spans",
        "sequences|one\nprocess|" + "|".join(f"{keep} kept" for keep in KEEPS),
        [
            [
                str(row["rows"]),
                f"{row['tokens_per_cpu_s']['local']:.0f}",
                *(
                    f"{row['tokens_per_cpu_s'][keep]:.0f} ({row['ratio'][keep]:.2f})"
                    for keep in KEEPS
                ),
            ]
            for row in rows
        ],
    )
