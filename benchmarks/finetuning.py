"""Fine-tuning of the demo model on real text: three daemons against PEFT in one process.

Pairs of questions and answers from the Debian handbook, LoRA of rank 8 on all linear layers, AdamW,
a cosine schedule. All runs have the same initial adapters, micro-batches and order. With full
weights a third run has hidden states and gradients in blockwise8. With `--quant-type nf4` PEFT has
a copy of the weights that nf4 computes with.

R rows, L tokens of each, T tokens, D hidden.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer

from benchmarks.handbook import write_records
from benchmarks.models import load_local, model_folder
from benchmarks.options import Options, Quant
from benchmarks.results import print_table
from benchmarks.swarms import daemon_flags, torch_threads
from nesa_node.cli.services.local_swarm import local_swarm
from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.training.data.batches import (
    BatchOrder,
    MicroBatchData,
    PaddedLayout,
    split_validation,
)
from nesa_node.client.training.data.examples import IGNORED
from nesa_node.client.training.data.records import read_examples
from nesa_node.client.training.finetuning import TrainingPlan
from nesa_node.client.training.finetuning_session import FinetuningOptions
from nesa_node.client.training.training_link import TrainingLink
from nesa_node.core.ids import split_evenly
from nesa_node.engine.kernels.quantized_linear import is_quantizable, make_quantized_linear
from nesa_node.engine.weights.hub import open_checkpoint

DEFAULTS = Options(model="demo", nodes=(3,), threads=(1,), runs=300, prompt_tokens=80)
"""`runs` are steps, `prompt_tokens` bounds an example."""
QUICK = Options(model="demo", nodes=(3,), threads=(1,), runs=2, prompt_tokens=48)
MICRO_BATCHES = 2
LEARNING_RATE = 1e-3
VALIDATION_SHARE = 0.05
WINDOW = 20
"""Steps whose mean loss is a point of the curve."""
CACHE_TOKENS = 2048
ASKED_TITLES = ("mdadm", "The Role of Debian", "Setting up RAID")
ANSWER_TOKENS = 48
RUNS: tuple[str | None, ...] = (None, "exact", "blockwise8")
"""Quality of hidden states; None is PEFT in one process. Quantized weights do without the last."""


class Data:
    """Micro-batches of each step, and those to validate with."""

    def __init__(self, folder: Path, options: Options) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        with TemporaryDirectory(prefix="nesa-bench-data-") as temporary:
            records = Path(temporary) / "handbook.jsonl"
            write_records(records)
            found = read_examples(records, self.tokenizer, max_length=options.prompt_tokens)
        train, held_out = split_validation(found.examples, VALIDATION_SHARE, seed=options.seed)
        layout = PaddedLayout(1)
        self.order = BatchOrder(
            train, layout, seed=options.seed, micro_batches_per_step=MICRO_BATCHES
        )
        checks = BatchOrder(held_out, layout, seed=options.seed, micro_batches_per_step=1)
        self.held_out = [each for n in range(checks.steps_per_epoch) for each in checks.step(n)]
        steps = options.runs
        self.plan = TrainingPlan(
            steps=steps, learning_rate=LEARNING_RATE, warmup_steps=max(steps // 30, 1)
        )

    def ask(self, model: Any) -> list[str]:
        """Greedy answers to questions of the handbook's kind."""
        answers = []
        for title in ASKED_TITLES:
            content = f"What does the Debian handbook say of: {title}?"
            ids_1L = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": content}],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=False,
            )
            with torch.no_grad():
                out_1L = model.generate(ids_1L, max_new_tokens=ANSWER_TOKENS, do_sample=False)
            text = self.tokenizer.decode(out_1L[0, ids_1L.shape[1] :], skip_special_tokens=True)
            answers.append(text)
        return answers


def run(options: Options) -> list[dict[str, Any]]:
    warnings.simplefilter("ignore")  # of what PEFT asks transformers by names that will go
    with model_folder(options) as folder, torch_threads(1):
        data = Data(folder, options)
        runs = RUNS if options.quant_type == "none" else RUNS[:2]
        rows = [measure(folder, data, options, options.quant_type, each) for each in runs]
    add_differences(rows)
    show(rows)
    return rows


def measure(
    folder: Path, data: Data, options: Options, weights: Quant, quality: str | None
) -> dict[str, Any]:
    started, processor_s = time.monotonic(), time.process_time()
    if quality is None:
        found = train_here(folder, data, options, weights)
    else:
        found = train_in_swarm(folder, data, options, weights, quality)
    return {
        "weights": weights,
        "quality": quality or "PEFT",
        "seconds": time.monotonic() - started,
        "cpu_s_of_this_process": time.process_time() - processor_s,
        **found,
    }


def make_config() -> Any:
    import peft

    return peft.LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear")


def train_here(folder: Path, data: Data, options: Options, weights: Quant) -> dict[str, Any]:
    """PEFT in one process."""
    import peft

    base = load_local(folder, options)
    if weights != "none":
        use_dequantized(base, weights, options)
    before_answers = data.ask(base)
    torch.manual_seed(options.seed)
    model: Any = peft.get_peft_model(base, copy.deepcopy(make_config()))
    values = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(values, lr=0.0, weight_decay=0.0)
    before = evaluate(model, data)
    losses = []
    model.train()
    for step in range(options.runs):
        micro = data.order.step(step)
        targets = sum(each.num_targets for each in micro)
        optimizer.param_groups[0]["lr"] = data.plan.rate_of(step)
        optimizer.zero_grad()
        total = 0.0
        for each in micro:
            loss = sum_of_losses(model, each) / targets
            torch.autograd.backward(loss)
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(values, 1.0)
        optimizer.step()
        losses.append(total)
    after = evaluate(model, data)
    return {
        "losses": losses,
        "held_out": [before, after],
        "answers": {"before": before_answers, "after": data.ask(model.eval())},
    }


def evaluate(model: Any, data: Data) -> float:
    model.eval()
    targets = sum(each.num_targets for each in data.held_out)
    with torch.no_grad():
        return sum(float(sum_of_losses(model, each)) for each in data.held_out) / targets


def sum_of_losses(model: Any, micro: MicroBatchData) -> Tensor:
    """Sum of the cross entropies of what is learned."""
    logits_RLV = model(input_ids=micro.ids_RL, use_cache=False).logits
    return functional.cross_entropy(
        logits_RLV[:, :-1].float().flatten(0, 1),
        micro.labels_RL[:, 1:].flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )


def use_dequantized(model: Any, weights: Quant, options: Options) -> None:
    """Give the linear layers of the blocks the weights that quantized ones compute with."""
    assert weights != "none"
    for layer in model.model.layers:
        for module in layer.modules():
            if is_quantizable(module):
                quantized = make_quantized_linear(
                    module,
                    module.weight.data,
                    weights,
                    dtype=options.torch_dtype,
                    device=torch.device("cpu"),
                )
                module.weight.data = quantized.dequantize(options.torch_dtype)


def train_in_swarm(
    folder: Path, data: Data, options: Options, weights: Quant, quality: str
) -> dict[str, Any]:
    """Three daemons, each with one thread and a third of the model."""
    from peft import PeftModel

    checkpoint = open_checkpoint(str(folder), cache_dir=folder)
    spans = split_evenly(checkpoint.num_blocks, options.nodes[0])
    flags = daemon_flags(options.updated({"quant_type": weights}), CACHE_TOKENS)
    with (
        TemporaryDirectory(prefix="nesa-bench-") as temporary,
        local_swarm(folder, spans, Path(temporary), flags=flags, ready_timeout_s=300) as nodes,
        AutoDistributedModelForCausalLM.from_pretrained(
            folder,
            initial_peers=[node.addresses[0] for node in nodes],
            dtype=options.torch_dtype,
            quality=quality,
        ) as model,
        model.finetuning_session(
            make_config(),
            seed=options.seed,
            options=FinetuningOptions(max_tokens=options.prompt_tokens),
        ) as session,
        count_payloads() as payloads,
    ):
        before = session.evaluate(data.held_out)
        payloads.clear()
        losses = [
            session.step(data.order.step(step), learning_rate=data.plan.rate_of(step)).loss
            for step in range(options.runs)
        ]
        sent = [list(each) for each in zip(*payloads, strict=True)]
        after = session.evaluate(data.held_out)
        session.save_pretrained(Path(temporary) / "adapter")
        base = load_local(folder, options)
        if weights != "none":
            use_dequantized(base, weights, options)
        tuned = PeftModel.from_pretrained(base, Path(temporary) / "adapter").eval()
        answers = data.ask(tuned)
    return {
        "losses": losses,
        "held_out": [before, after],
        "bytes_of_16_bits": sum(sent[0]) / (2 * sum(sent[1])),
        "answers": {"after": answers},
    }


@contextmanager
def count_payloads() -> Iterator[list[tuple[int, int]]]:
    """Bytes and numbers of each tensor of hidden states or gradients on the way, both ways."""
    counted: list[tuple[int, int]] = []
    encode, decode = TrainingLink._encode, TrainingLink._decode

    async def counting_encode(link: TrainingLink, values_TD: Tensor) -> Any:
        meta, payload = await encode(link, values_TD)
        counted.append((len(payload), values_TD.numel()))
        return meta, payload

    def counting_decode(link: TrainingLink, meta: Any, data: bytearray, batch: Any) -> Tensor:
        values_TD = decode(link, meta, data, batch)
        counted.append((len(data), values_TD.numel()))
        return values_TD

    with (
        patch.object(TrainingLink, "_encode", counting_encode),
        patch.object(TrainingLink, "_decode", counting_decode),
    ):
        yield counted


def add_differences(rows: list[dict[str, Any]]) -> None:
    """Of each swarm's run to its reference: PEFT, or for blockwise8 the swarm without it."""
    by_run = {(row["weights"], row["quality"]): row for row in rows}
    for row in rows:
        if row["quality"] == "PEFT":
            continue
        other = "PEFT" if row["quality"] == "exact" else "exact"
        reference = by_run[row["weights"], other]
        row["compared_with"] = other
        row["drop_ratio"] = drop_of(row) / drop_of(reference)
        row["largest_difference"] = max(
            abs(ours / theirs - 1)
            for ours, theirs in zip(curve_of(row), curve_of(reference), strict=True)
        )


def drop_of(row: dict[str, Any]) -> float:
    before, after = row["held_out"]
    return float(before - after)


def curve_of(row: dict[str, Any]) -> list[float]:
    losses = row["losses"]
    return [mean(losses[at : at + WINDOW]) for at in range(0, len(losses), WINDOW)]


def show(rows: list[dict[str, Any]]) -> None:
    print_table(
        "Held-out loss of the demo model, fine-tuned on the Debian handbook",
        "weights|hidden\nstates|before|after|drop, of the\nreference's|curve, largest\ndifference"
        "|bytes, of\n16 bits|seconds",
        [
            [
                row["weights"],
                row["quality"],
                f"{row['held_out'][0]:.4f}",
                f"{row['held_out'][1]:.4f}",
                f"{row['drop_ratio']:.4f}" if "drop_ratio" in row else "",
                f"{row['largest_difference']:.2%}" if "drop_ratio" in row else "",
                f"{row['bytes_of_16_bits']:.3f}" if "bytes_of_16_bits" in row else "",
                f"{row['seconds']:.0f}",
            ]
            for row in rows
        ],
    )
    for row in rows:
        for when, answers in row["answers"].items():
            for title, answer in zip(ASKED_TITLES, answers, strict=True):
                print(f"[{row['weights']}, {row['quality']}, {when}] {title}: {answer!r}")
