"""`nesa-node finetune`: adapters trained on a swarm's nodes, from a data file to a PEFT folder."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from nesa_node.cli.flags import OUTPUT, Flags, ModelArgument, load_command_config
from nesa_node.cli.process_setup import exit_on_interrupt
from nesa_node.core.errors import ConfigError, require_training

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
    from nesa_node.client.training.data.batches import BatchOrder, MicroBatchData
    from nesa_node.client.training.data.examples import TrainingExample
    from nesa_node.client.training.finetuning import StepReport, TrainingPlan, TrainingSummary
    from nesa_node.core.settings.models import ClientConfig
    from nesa_node.engine.training.training_spec import AdapterConfig

DATA = Group("Data", sort_key=1)
ADAPTER = Group("Adapter", sort_key=2)
TRAINING = Group("Training", sort_key=3)
PLAIN_REPORT_STEPS = 10
"""Steps between two lines where no terminal shows the progress."""
WARMUP_SHARE = 0.03
DEFAULT_LENGTH = 1024
INITIAL_NAME = "initial-adapter"
"""Folder of a published adapter with which the training begins."""


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
        Literal["lora", "ia3", "bottleneck", "prompt", "deep-prompt"],
        Parameter(group=ADAPTER, help="Kind of adapters."),
    ] = "lora"
    rank: Annotated[
        int, Parameter(group=ADAPTER, help="Rank of LoRA; size of bottlenecks and prompts.")
    ] = 8
    alpha: Annotated[
        float | None, Parameter(group=ADAPTER, help="Scale of LoRA. [default: twice the rank]")
    ] = None
    dropout: Annotated[float, Parameter(group=ADAPTER, help="Dropout of LoRA's inputs.")] = 0.0
    target_modules: Annotated[
        str,
        Parameter(
            metavar="NAMES",
            group=ADAPTER,
            help="Linear layers with adapters: names with commas, all-linear, or PEFT's choice "
            "for the model (default).",
        ),
    ] = "all-linear"
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

    def make_config(self, tokenizer_path: str) -> AdapterConfig:
        """Make the config; the tokenizer is that of `--prompt-text`. Raises `ConfigError`."""
        from peft import IA3Config, LoraConfig, TaskType

        from nesa_node.engine.training.adapters import BottleneckConfig, DeepPromptConfig

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
        modules: str | list[str] | None = self.target_modules
        if self.target_modules == "default":
            modules = None
        elif self.target_modules != "all-linear":
            modules = [name.strip() for name in self.target_modules.split(",") if name.strip()]
        if self.method == "ia3":
            if self.target_modules == "all-linear":
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
        Literal[0, 1, 2],
        Parameter(
            group=TRAINING,
            help="What replicas divide to save memory: 1 the optimizer's state, 2 gradients too.",
        ),
    ] = 0
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


def finetune(
    model: ModelArgument = None,
    /,
    *,
    output: Annotated[
        Path | None,
        Parameter(group=OUTPUT, help="Folder of the adapter, its log and its checkpoint."),
    ] = None,
    data: DataFlags | None = None,
    adapter: AdapterFlags | None = None,
    training: TrainingFlags | None = None,
    flags: Flags["ClientConfig"] | None = None,
) -> int:
    """Train adapters for MODEL on the nodes of its swarm: the result is a PEFT folder.

    Data, labels, loss, embedding and head stay on this machine. The same command continues where
    an interrupted one was.
    """
    from nesa_node.cli.client_model import (
        open_client_model,
        require_model,
        resolve_initial_peers,
        save_last_swarm,
    )
    from nesa_node.core.settings.models import ClientConfig

    config = load_command_config(ClientConfig, flags, model=model)
    chosen = data or DataFlags()
    require_model(config)
    require_training()
    if chosen.data is None:
        raise ConfigError(
            "--data is required: a .jsonl file with a record a line, such as "
            '{"messages": [{"role": "user", "content": "..."}, ...]}'
        )
    if output is None:
        raise ConfigError("--output is required: the folder of the adapter")
    config = resolve_initial_peers(config, config.model)
    assert config.model is not None
    distributed, tokenizer = open_client_model(config)
    with exit_on_interrupt():
        from nesa_node.client.training.data.records import read_examples
    with distributed:
        path = tokenizer.name_or_path
        trained = _choose_adapter(adapter or AdapterFlags(), config, config.model, output, path)
        longest = distributed.context_length - trained.num_virtual_tokens
        chosen = replace(chosen, max_length=_choose_length(chosen, longest))
        assert chosen.max_length is not None
        assert chosen.data is not None
        found = read_examples(chosen.data, tokenizer, max_length=chosen.max_length)
        validation = None
        if chosen.validation is not None:
            validation = read_examples(
                chosen.validation, tokenizer, max_length=chosen.max_length
            ).examples
        print(
            f"[{len(found.examples)} examples, {found.num_tokens} tokens, {found.num_targets} of "
            f"them learned; {found.num_cut} cut to {chosen.max_length} tokens, "
            f"{found.num_skipped} skipped]",
            file=sys.stderr,
        )
        run = _Run(distributed, output, chosen, trained, training or TrainingFlags())
        summary = run.train(found.examples, validation)
        save_last_swarm(config, config.model)
    _print_summary(summary, output)
    return 0


def _choose_length(data: DataFlags, longest: int) -> int:
    if longest < 1:
        raise ConfigError("--rank: the model's context has no room for a text after the prompt")
    if data.max_length is None:
        return min(DEFAULT_LENGTH, longest)
    if data.max_length > longest:
        raise ConfigError(
            f"--max-length {data.max_length}: the model holds {longest} tokens of a record"
        )
    return data.max_length


@dataclass(frozen=True)
class _Trained:
    """What is trained: a new adapter, or the folder of one to go on with."""

    adapter: AdapterConfig | Path
    num_virtual_tokens: int
    """Trained vectors before each text."""


def _choose_adapter(
    flags: AdapterFlags, config: ClientConfig, model: str, output: Path, tokenizer_path: str
) -> _Trained:
    """Make the config of new adapters, or find the one to go on with.

    A published adapter is fetched into a folder of `output`, once.
    """
    from nesa_node.client.training.adapter_folder import read_adapter
    from nesa_node.engine.training.prompted_input import count_virtual_tokens

    if flags.initial_adapter is None:
        made = flags.make_config(tokenizer_path)
        return _Trained(made, count_virtual_tokens(made))
    if flags != AdapterFlags(initial_adapter=flags.initial_adapter):
        raise ConfigError(
            "--initial-adapter has its own kind, rank and modules: leave out --method, --rank, "
            "--alpha, --dropout, --target-modules and --prompt-text"
        )
    folder = Path(flags.initial_adapter).expanduser()
    if not folder.is_dir():
        folder = _fetch(flags.initial_adapter, config, model, output)
    return _Trained(folder, count_virtual_tokens(read_adapter(folder)[0]))


def _fetch(name: str, config: ClientConfig, model: str, output: Path) -> Path:
    from nesa_node.core.settings.declaration import secret_text
    from nesa_node.server.adapters.requests import fetch_adapter

    folder = output / INITIAL_NAME
    if not folder.exists():
        output.mkdir(parents=True, exist_ok=True)
        fetch_adapter(
            model,
            name,
            folder,
            initial_peers=config.initial_peers,
            swarm_key=secret_text(config.swarm_key),
        )
    return folder


class _Run:
    """One run of the command: flags, and what they make."""

    def __init__(
        self,
        model: DistributedModelForCausalLM,
        output: Path,
        data: DataFlags,
        trained: _Trained,
        training: TrainingFlags,
    ) -> None:
        assert data.max_length is not None
        self._model = model
        self._output = output
        self._data = data
        self._max_length = data.max_length
        self._trained = trained
        self._training = training

    def train(
        self,
        examples: tuple[TrainingExample, ...],
        validation: tuple[TrainingExample, ...] | None,
    ) -> TrainingSummary:
        """Train, and write the adapter. Raises `ConfigError`, and what the session raises."""
        from nesa_node.client.training.checkpoint_file import dump_json, write_atomically
        from nesa_node.client.training.data.batches import split_validation
        from nesa_node.client.training.finetuning import (
            CHECKPOINT_NAME,
            LOG_NAME,
            TrainingLog,
            digest_examples,
            run_training,
        )
        from nesa_node.client.training.finetuning_session import FinetuningOptions
        from nesa_node.engine.training.adapters import OptimizerConfig
        from nesa_node.engine.weights.adapter_files import ADAPTER_METRICS_FILE

        data, training = self._data, self._training
        share = data.validation_share
        if validation is None and share and len(examples) > 1:
            examples, validation = split_validation(examples, share, seed=training.seed)
        order = self._order(examples, data.micro_batches)
        plan = training.make_plan(order.steps_per_epoch)
        checks: list[MicroBatchData] = []
        if validation:
            checked = self._order(validation, 1)
            checks = [each for n in range(checked.steps_per_epoch) for each in checked.step(n)]
        options = FinetuningOptions(
            learning_rate=training.learning_rate,
            max_grad_norm=training.max_grad_norm or None,
            max_tokens=self._max_tokens,
            checkpoint_every=training.checkpoint_every,
            replicas=training.num_replicas,
            zero_stage=training.zero_stage,
            checkpoint_path=self._output / CHECKPOINT_NAME,
            data_digest=digest_examples(
                examples, data.packing, data.rows, self._max_length, data.micro_batches, plan
            ),
        )
        optimizer = OptimizerConfig(training.optimizer, weight_decay=training.weight_decay)
        with self._model.finetuning_session(
            self._trained.adapter, optimizer=optimizer, seed=training.seed, options=options
        ) as session:
            log = TrainingLog(self._output / LOG_NAME, session.applied)
            hops = ", ".join(f"…{hop.peer_id[-6:]} {hop.span}" for hop in session.hops)
            resumed = f"continued after step {session.applied}, " if session.applied else ""
            print(f"[{resumed}{plan.steps} steps, through {hops}]", file=sys.stderr)
            with _Display(plan.steps, session.applied) as display:
                summary = run_training(
                    session, order, plan, validation=checks, log=log, report=display.show
                )
            session.save_pretrained(self._output)
        figures = {"loss": summary.loss, "eval_loss": summary.eval_loss, "steps": summary.steps}
        write_atomically(
            self._output / ADAPTER_METRICS_FILE,
            dump_json({name: value for name, value in figures.items() if value is not None}),
        )
        return summary

    @property
    def _max_tokens(self) -> int:
        longest = self._max_length + self._trained.num_virtual_tokens
        return longest * (1 if self._data.packing else self._data.rows)

    def _order(self, examples: tuple[TrainingExample, ...], micro_batches: int) -> BatchOrder:
        from nesa_node.client.training.data.batches import BatchOrder, PackedLayout, PaddedLayout

        data = self._data
        layout: PackedLayout | PaddedLayout = PaddedLayout(data.rows)
        if data.packing:
            layout = PackedLayout(self._max_tokens, self._trained.num_virtual_tokens)
        return BatchOrder(
            examples, layout, seed=self._training.seed, micro_batches_per_step=micro_batches
        )


class _Display:
    """Progress on stderr: a bar in a terminal, else a line every `PLAIN_REPORT_STEPS` steps."""

    def __init__(self, steps: int, applied: int) -> None:
        self._steps = steps
        self._applied = applied
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> _Display:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._progress = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._progress.start()
            self._task = self._progress.add_task("", total=self._steps, completed=self._applied)
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, report: StepReport) -> None:
        result = report.result
        line = (
            f"loss {result.loss:.4f}, rate {result.learning_rate:.2g}, "
            f"{report.tokens_per_s:.0f} tokens/s"
        )
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=result.step, description=line)
            if report.eval_loss is not None:
                text = f"step {result.step}: validation loss {report.eval_loss:.4f}"
                self._progress.console.print(text)
            return
        is_told = result.step % PLAIN_REPORT_STEPS == 0 or result.step == report.total_steps
        if not (is_told or report.eval_loss is not None):
            return
        nodes = ", ".join(f"…{peer[-6:]} {spent:.2f} s" for peer, spent in report.node_s.items())
        check = "" if report.eval_loss is None else f", validation loss {report.eval_loss:.4f}"
        print(
            f"step {result.step}/{report.total_steps}: {line}{check}, {report.left_s:.0f} s left "
            f"({nodes})",
            file=sys.stderr,
            flush=True,
        )


def _print_summary(summary: TrainingSummary, output: Path) -> None:
    ended = "stopped early" if summary.stopped_early else "done"
    check = "" if summary.eval_loss is None else f", validation loss {summary.eval_loss:.4f}"
    rate = summary.tokens / summary.seconds if summary.seconds else 0.0
    print(
        f"[{ended} after {summary.steps} steps: loss {summary.loss:.4f}{check}; "
        f"{summary.tokens} tokens in {summary.seconds:.0f} s ({rate:.0f} tokens/s), "
        f"{summary.recoveries} times a node was replaced]",
        file=sys.stderr,
    )
    print(f"adapter in {output} (load it with peft.PeftModel.from_pretrained)")
