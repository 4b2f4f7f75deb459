"""`nesa-node finetune`: adapters trained on a swarm's nodes, from a data file to a PEFT folder."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from nesa_node.cli.finetuning_flags import AdapterFlags, DataFlags, TrainingFlags
from nesa_node.cli.flags import OUTPUT, Flags, ModelArgument, load_command_config
from nesa_node.cli.process_setup import exit_on_interrupt
from nesa_node.core.errors import ConfigError, require_training

if TYPE_CHECKING:
    from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
    from nesa_node.client.training.data.batches import BatchOrder, MicroBatchData
    from nesa_node.client.training.data.examples import TrainingExample
    from nesa_node.client.training.finetuning import StepReport, TrainingSummary
    from nesa_node.core.settings.models import ClientConfig
    from nesa_node.engine.training.training_spec import AdapterConfig

DEFAULT_LENGTH = 1024
FEW_STEPS = 20
"""Fewer than these are pointed out: adapters have hardly left their first values by then."""
TENSORBOARD_NAME = "tensorboard"
INITIAL_NAME = "initial-adapter"
"""Folder of a published adapter with which the training begins."""


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
    from nesa_node.cli.views.training import print_training_summary, require_tensorboard
    from nesa_node.core.settings.models import ClientConfig

    config = load_command_config(ClientConfig, flags, model=model)
    chosen = data or DataFlags()
    require_model(config)
    require_training()
    if training is not None and training.tensorboard:
        require_tensorboard()
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
        from nesa_node.engine.training.adapters import FullConfig
    with distributed:
        path = tokenizer.name_or_path
        trained = _choose_adapter(adapter or AdapterFlags(), distributed, config, output, path)
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
        is_full = isinstance(trained.adapter, FullConfig)
        run = _Run(distributed, output, chosen, trained, training or TrainingFlags())
        summary = run.train(found.examples, validation)
        save_last_swarm(config, config.model)
    print_training_summary(summary, output, is_model=is_full)
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
    flags: AdapterFlags,
    model: DistributedModelForCausalLM,
    config: ClientConfig,
    output: Path,
    tokenizer_path: str,
) -> _Trained:
    """Make the config of new adapters, or find the one to go on with.

    A published adapter is fetched into a folder of `output`, once.
    """
    from nesa_node.client.training.adapter_folder import read_adapter
    from nesa_node.engine.training.prompted_input import count_virtual_tokens

    if flags.initial_adapter is None:
        served = None
        if flags.method == "lora" and flags.target_modules is None:
            served = model.find_served_modules()
        if served is not None:
            print(
                f"[adapters on {', '.join(served)}: nodes do not serve those of a mixture's "
                "experts; --target-modules all-linear trains them, for PEFT]",
                file=sys.stderr,
            )
        made = flags.make_config(tokenizer_path, served)
        return _Trained(made, count_virtual_tokens(made))
    if flags != AdapterFlags(initial_adapter=flags.initial_adapter):
        raise ConfigError(
            "--initial-adapter has its own kind, rank and modules: leave out --method, --rank, "
            "--alpha, --dropout, --target-modules and --prompt-text"
        )
    folder = Path(flags.initial_adapter).expanduser()
    if not folder.is_dir():
        assert config.model is not None
        folder = _fetch(flags.initial_adapter, config, config.model, output)
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
        from nesa_node.cli.views.training import TensorBoardLog, TrainingDisplay
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
            average_every=training.average_every,
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
            if training.steps is None and plan.steps < FEW_STEPS:
                told = "[so few steps teach a model little: --steps 100 trains longer]"
                print(told, file=sys.stderr)
            with ExitStack() as stack:
                display = stack.enter_context(TrainingDisplay(plan.steps, session.applied))
                board = None
                if training.tensorboard:
                    folder = self._output / TENSORBOARD_NAME
                    board = stack.enter_context(TensorBoardLog(folder, session.applied))

                def report(told: StepReport) -> None:
                    display.show(told)
                    if board is not None:
                        board.write(told)

                summary = run_training(
                    session, order, plan, validation=checks, log=log, report=report
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
        virtual = self._trained.num_virtual_tokens
        layout: PackedLayout | PaddedLayout = PaddedLayout(data.rows, num_virtual_tokens=virtual)
        if data.packing:
            layout = PackedLayout(self._max_tokens, num_virtual_tokens=virtual)
        return BatchOrder(
            examples, layout, seed=self._training.seed, micro_batches_per_step=micro_batches
        )
