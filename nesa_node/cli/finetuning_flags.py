"""Flags of `nesa-node finetune`: data, adapters, training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from nesa_node.core.errors import ConfigError

if TYPE_CHECKING:
    from nesa_node.client.training.finetuning import TrainingPlan
    from nesa_node.engine.training.training_spec import AdapterConfig

DATA = Group("Data", sort_key=1)
ADAPTER = Group("Adapter", sort_key=2)
TRAINING = Group("Training", sort_key=3)
WARMUP_SHARE = 0.03


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DataFlags:
    """What is trained on, and in which micro-batches."""

    data: Annotated[
        Path | None,
        Parameter(group=DATA, help="Records to train on: a .jsonl, .json or .txt file."),
    ] = None
    validation: Annotated[Path | None, Parameter(group=DATA, help="Records to validate with.")] = (
        None
    )
    validation_share: Annotated[
        float,
        Parameter(group=DATA, help="Share of the records to validate with; 0: train on all."),
    ] = 0.05
    max_length: Annotated[
        int | None,
        Parameter(
            group=DATA,
            help="Most tokens of a record; longer ones lose their end. [default: 1024, or what "
            "the context holds]",
        ),
    ] = None
    packing: Annotated[
        bool,
        Parameter(group=DATA, help="Put several records into a row; otherwise rows are padded."),
    ] = True
    rows: Annotated[
        int, Parameter(group=DATA, help="Records of a micro-batch without packing.")
    ] = 1
    micro_batches: Annotated[
        int, Parameter(group=DATA, help="Micro-batches of a step: nodes work on several at once.")
    ] = 8


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class AdapterFlags:
    """What is trained."""

    method: Annotated[
        Literal["lora", "ia3", "bottleneck", "prompt", "deep-prompt", "full"],
        Parameter(group=ADAPTER, help="Kind of adapters; full trains the blocks' own weights."),
    ] = "lora"
    weights_dtype: Annotated[
        Literal["float32", "bfloat16"],
        Parameter(group=ADAPTER, help="What --method full trains in."),
    ] = "float32"
    rank: Annotated[
        int, Parameter(group=ADAPTER, help="Rank of LoRA; size of bottlenecks and prompts.")
    ] = 8
    alpha: Annotated[
        float | None, Parameter(group=ADAPTER, help="Scale of LoRA. [default: twice the rank]")
    ] = None
    dropout: Annotated[float, Parameter(group=ADAPTER, help="Dropout of LoRA's inputs.")] = 0.0
    target_modules: Annotated[
        str | None,
        Parameter(
            metavar="NAMES",
            group=ADAPTER,
            help="Linear layers with adapters: names with commas, all-linear, or default, PEFT's "
            "choice for the model. [default: all that nodes serve adapters of]",
        ),
    ] = None
    prompt_text: Annotated[
        str | None,
        Parameter(
            metavar="TEXT",
            group=ADAPTER,
            help="Text whose tokens a prompt begins with. [default: tokens drawn at random]",
        ),
    ] = None

    initial_adapter: Annotated[
        str | None,
        Parameter(
            metavar="ADAPTER",
            group=ADAPTER,
            help="Go on with an adapter, a folder or a published name; it has its own kind, rank "
            "and modules.",
        ),
    ] = None

    def make_config(
        self, tokenizer_path: str, served_modules: Sequence[str] | None
    ) -> AdapterConfig:
        """Make the config; the tokenizer is that of `--prompt-text`. Raises `ConfigError`.

        `served_modules` have LoRA by default; None: all linear layers.
        """
        from peft import IA3Config, LoraConfig, TaskType

        from nesa_node.engine.training.adapters import (
            BottleneckConfig,
            DeepPromptConfig,
            FullConfig,
        )
        from nesa_node.engine.training.training_spec import ALL_LINEAR

        if self.rank < 1:
            raise ConfigError(f"--rank must be at least 1, got {self.rank}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"--dropout must lie in [0, 1), got {self.dropout}")
        if self.method == "prompt":
            return self._make_prompt(tokenizer_path)
        if self.prompt_text is not None:
            raise ConfigError("--prompt-text needs --method prompt")
        if self.method == "bottleneck":
            return BottleneckConfig(self.rank)
        if self.method == "deep-prompt":
            return DeepPromptConfig(self.rank)
        if self.method == "full":
            return FullConfig(self.weights_dtype)
        named = self.target_modules
        modules: str | list[str] | None = None
        if named is None:
            modules = ALL_LINEAR if served_modules is None else list(served_modules)
        elif named == ALL_LINEAR:
            modules = named
        elif named != "default":
            modules = [name.strip() for name in named.split(",") if name.strip()]
        if self.method == "ia3":
            if named in (None, ALL_LINEAR):
                modules = None  # IA3 trains keys, values and one layer of each feed-forward part
            return IA3Config(task_type=TaskType.CAUSAL_LM, target_modules=modules)
        alpha = 2.0 * self.rank if self.alpha is None else self.alpha
        return LoraConfig(
            task_type=TaskType.CAUSAL_LM,
            r=self.rank,
            lora_alpha=alpha,  # type: ignore[arg-type]  # PEFT computes with any number
            lora_dropout=self.dropout,
            target_modules=modules,
        )

    def _make_prompt(self, tokenizer_path: str) -> AdapterConfig:
        from peft import PromptTuningConfig, PromptTuningInit, TaskType

        is_text = self.prompt_text is not None
        return PromptTuningConfig(
            task_type=TaskType.CAUSAL_LM,
            num_virtual_tokens=self.rank,
            prompt_tuning_init=PromptTuningInit.TEXT if is_text else PromptTuningInit.SAMPLE_VOCAB,
            prompt_tuning_init_text=self.prompt_text,
            tokenizer_name_or_path=tokenizer_path if is_text else None,
        )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TrainingFlags:
    """How it is trained."""

    epochs: Annotated[
        float | None, Parameter(group=TRAINING, help="Passes over the data. [default: 3]")
    ] = None
    steps: Annotated[
        int | None, Parameter(group=TRAINING, help="Optimizer steps, in place of --epochs.")
    ] = None
    learning_rate: Annotated[float, Parameter(group=TRAINING, help="Highest learning rate.")] = 2e-4
    schedule: Annotated[
        Literal["constant", "linear", "cosine"],
        Parameter(group=TRAINING, help="What the rate does after the warm-up."),
    ] = "cosine"
    warmup_steps: Annotated[
        int | None,
        Parameter(group=TRAINING, help="Steps in which it rises. [default: 3 % of all]"),
    ] = None
    optimizer: Annotated[
        Literal["adamw", "sgd"], Parameter(group=TRAINING, help="Optimizer on the nodes.")
    ] = "adamw"
    weight_decay: Annotated[float, Parameter(group=TRAINING, help="Weight decay.")] = 0.0
    max_grad_norm: Annotated[
        float,
        Parameter(group=TRAINING, help="Bound of the norm of all gradients; 0: none."),
    ] = 1.0
    seed: Annotated[
        int, Parameter(group=TRAINING, help="Of initial values, dropout and order.")
    ] = 0
    eval_every: Annotated[
        int, Parameter(group=TRAINING, help="Steps between two validations; 0: at the end.")
    ] = 50
    patience: Annotated[
        int,
        Parameter(
            group=TRAINING,
            help="Stop after as many validations without a lower loss; 0: never.",
        ),
    ] = 0
    num_replicas: Annotated[
        int,
        Parameter(
            name="--replicas",
            group=TRAINING,
            help="Nodes that train each block, on different micro-batches, if there are as many.",
        ),
    ] = 1
    zero_stage: Annotated[
        Literal[0, 1, 2, 3],
        Parameter(
            group=TRAINING,
            help="What replicas divide to save memory: 1 the optimizer's state, 2 gradients too, 3 "
            "also the weights of --method full.",
        ),
    ] = 0
    average_every: Annotated[
        int,
        Parameter(
            group=TRAINING,
            help="Steps between two averagings of the replicas; 1: all train on their sum of "
            "gradients. More saves traffic, and trains differently.",
        ),
    ] = 1
    tensorboard: Annotated[
        bool,
        Parameter(
            group=TRAINING,
            negative=(),
            help="Also write event files for TensorBoard, to the folder tensorboard in --output.",
        ),
    ] = False
    checkpoint_every: Annotated[
        int,
        Parameter(
            group=TRAINING,
            help="Steps between two checkpoints, from which the same command continues.",
        ),
    ] = 20

    def make_plan(self, steps_per_epoch: int) -> TrainingPlan:
        """Raises `ConfigError`."""
        from nesa_node.client.training.finetuning import TrainingPlan

        if self.steps is not None and self.epochs is not None:
            raise ConfigError("--steps and --epochs: give one of them")
        epochs = 3.0 if self.epochs is None else self.epochs
        if not (math.isfinite(epochs) and epochs > 0):
            raise ConfigError(f"--epochs must be positive, got {epochs}")
        steps = math.ceil(epochs * steps_per_epoch) if self.steps is None else self.steps
        warmup = self.warmup_steps
        return TrainingPlan(
            steps=steps,
            learning_rate=self.learning_rate,
            schedule=self.schedule,
            warmup_steps=math.ceil(WARMUP_SHARE * steps) if warmup is None else warmup,
            eval_every=self.eval_every,
            patience=self.patience,
        )
