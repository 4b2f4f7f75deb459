"""A fine-tuning session: adapters on the swarm's nodes, trained by this client's data and loss.

R rows, L tokens of each, T tokens of all texts, N positions that are learned, D hidden.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, PretrainedConfig

from nesa_node.client.model.head import EmbeddingAndHead
from nesa_node.client.model.loop_thread import HeldContext, LoopThread
from nesa_node.client.training.checkpoint_file import (
    CheckpointLabel,
    load_checkpoint,
    save_checkpoint,
)
from nesa_node.client.training.data.batches import (
    MicroBatchData,
    add_virtual_tokens,
    prepend_virtual_tokens,
    require_predicted,
    row_lengths,
    split_rows,
)
from nesa_node.client.training.data.examples import IGNORED
from nesa_node.client.training.recorded_steps import RecordedPass
from nesa_node.client.training.replica_group import ReplicaOptions
from nesa_node.client.training.trainable_model import RemoteOptimizer, TrainableModel
from nesa_node.client.training.training_chain import TrainingChain
from nesa_node.client.training.training_link import TrainingLimits
from nesa_node.client.training.training_span import SpanState
from nesa_node.core.errors import ConfigError
from nesa_node.engine.training.prompted_input import PromptedInput
from nesa_node.engine.training.text_layout import TextLayout
from nesa_node.engine.training.training_spec import TrainingSpec
from nesa_node.engine.training.training_state import ZeroStage, hash_state
from nesa_node.routing.chains import Hop
from nesa_node.swarm.dht.training_notices import SessionPlan

if TYPE_CHECKING:
    from nesa_node.engine.training.training_spec import AdapterConfig

T = TypeVar("T")

LOSS_CHUNK_POSITIONS = 256
"""Positions whose logits are computed at once: of a large vocabulary they take much memory."""
MAX_RECORDED_BYTES = 512 << 20
"""Inputs and gradients that are kept to replay steps; with more a checkpoint is made earlier."""
_SEED_STEP = 0xD1B54A32D192ED03


class OpenChain(Protocol):
    """Opens the spans that a session trains through."""

    def __call__(
        self,
        limits: TrainingLimits,
        replicas: ReplicaOptions,
        plan: SessionPlan,
        state: SpanState | None,
    ) -> AbstractAsyncContextManager[TrainingChain]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuningOptions:
    """Options of a session that do not change its adapters."""

    learning_rate: float = 2e-4
    """Used where a step names none."""
    max_grad_norm: float | None = 1.0
    """Bound of the norm of all nodes' gradients together; None does not clip."""
    max_tokens: int = 2048
    """Tokens of a micro-batch, with the padding of its rows, at most."""
    max_kept_tokens: int | None = None
    """Tokens of micro-batches that nodes keep between forward and backward; None: of eight."""
    checkpoint_every: int = 20
    """Steps between two checkpoints, to which the session returns when a node is lost."""
    checkpoint_path: Path | None = None
    """File of the checkpoints, from which a later session continues; None: in memory only."""
    replicas: int = 1
    """Nodes that train each span, on different micro-batches, where the swarm has as many."""
    zero_stage: ZeroStage = 0
    """What replicas divide: 1 optimizer state, 2 gradients too, 3 also the weights of a
    `FullConfig` (`ReplicaOptions`)."""
    average_every: int = 1
    """Above 1, replicas train apart, and are averaged after so many steps (`ReplicaOptions`)."""
    data_digest: str = ""
    """Digest of the order of micro-batches, where a session continues with the same."""
    objective: str = "cross entropy of next tokens"
    """What is minimised, as the session's plan says it: `step` computes this one."""

    def __post_init__(self) -> None:
        """Raises `ConfigError`."""
        if not (math.isfinite(self.learning_rate) and self.learning_rate >= 0):
            raise ConfigError(f"learning_rate must be a number from 0 on, got {self.learning_rate}")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm must be positive, got {self.max_grad_norm}")
        if min(self.max_tokens, self.checkpoint_every) < 1:
            raise ConfigError("max_tokens and checkpoint_every must be at least 1")
        if self.max_kept_tokens is not None and self.max_kept_tokens < self.max_tokens:
            raise ConfigError("max_kept_tokens must be at least max_tokens")
        self.make_replica_options()

    def make_replica_options(self) -> ReplicaOptions:
        """Raises `ConfigError`."""
        return ReplicaOptions(
            replicas=self.replicas, zero_stage=self.zero_stage, average_every=self.average_every
        )

    def make_plan(self, spec: TrainingSpec) -> SessionPlan:
        return SessionPlan(
            session=secrets.token_hex(16),
            spec=hashlib.sha256(spec.encode()).hexdigest(),
            objective=self.objective,
            data=self.data_digest,
            max_tokens=self.max_tokens,
            checkpoint_every=self.checkpoint_every,
            replicas=self.replicas,
            zero_stage=self.zero_stage,
            average_every=self.average_every,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step was."""

    step: int
    """Counted from 1."""
    loss: float
    """Mean cross entropy of the positions that are learned, before the step."""
    grad_norm: float
    """Norm of all gradients, before clipping."""
    learning_rate: float
    num_tokens: int
    num_targets: int
    seconds: float


class FinetuningSession:
    """Adapters in training. Made by `model.finetuning_session(...)`; close it, or use `with`.

    From one thread at a time. After an interrupted call the session can only be closed; a
    checkpoint on disk continues it.
    """

    def __init__(
        self,
        ends: EmbeddingAndHead,
        loop: LoopThread,
        open_chain: OpenChain,
        spec: TrainingSpec,
        config: AdapterConfig,
        options: FinetuningOptions,
        *,
        prompt: PromptedInput | None,
        initial_state: SpanState | None,
        model_id: str,
        save: Callable[[Path, Mapping[str, Tensor]], None],
        model_config: PretrainedConfig,
        generation_config: GenerationConfig,
    ) -> None:
        """Open sessions at nodes. Raises what `TrainingChain.open` raises, and `ConfigError`.

        `prompt` is the chain's first span, if the client trains one. `initial_state` has the
        adapters' values before the first step, if they are not those that PEFT would give them.
        `save` writes a state as a folder.
        """
        self.options = options
        self.config = config
        self.num_virtual_tokens = 0 if prompt is None else prompt.num_virtual_tokens
        """Trained vectors before each text, which count as its tokens."""
        self._ends = ends
        self._embed = ends.embedder.embed_batch if prompt is None else prompt.embed_batch
        self._loop = loop
        self._seed = spec.seed
        self._save = save
        trained = spec.encode().hex() + ("" if prompt is None else f" {prompt.label}")
        if initial_state is not None:
            trained += f" from {hash_state(initial_state.tensors).hex()}"
        self._label = CheckpointLabel(model_id, trained, options.data_digest)
        state = None
        if options.checkpoint_path is not None:
            state = load_checkpoint(options.checkpoint_path, self._label)
        limits = TrainingLimits(
            max_tokens=options.max_tokens,
            max_kept_tokens=options.max_kept_tokens or 8 * options.max_tokens,
        )
        plan = options.make_plan(spec)
        self._held: HeldContext[TrainingChain] = loop.hold(
            open_chain(limits, options.make_replica_options(), plan, state or initial_state)
        )
        self.chain = self._held.value
        self.model = TrainableModel(
            self, ends, model_config, generation_config, max_tokens=options.max_tokens
        )
        """The model with its adapters as a torch module, for loops of the caller's own."""
        self.optimizer = RemoteOptimizer(self, self.model, learning_rate=options.learning_rate)
        """Applies the steps of `model` on the nodes."""

    @property
    def applied(self) -> int:
        """Optimizer steps that were applied."""
        return self.chain.applied

    @property
    def hops(self) -> tuple[Hop, ...]:
        """Current nodes and their spans."""
        return self.chain.hops

    def step(
        self,
        batch: Sequence[MicroBatchData] | Mapping[str, Tensor],
        *,
        learning_rate: float | None = None,
    ) -> StepResult:
        """Train on a batch: its micro-batches' passes, pipelined over the nodes, and one update.

        `batch` is a list of micro-batches, or has `input_ids` and `labels` [R, L] with an
        `attention_mask` of padding at the right, as transformers' models take them. The loss is the
        mean over all positions that are learned. Raises `ConfigError` for a batch without any or
        whose rows are too long, and what `TrainingChain` raises.
        """
        started = time.perf_counter()
        micro = self._to_micro_batches(batch)
        num_targets = sum(each.num_targets for each in micro)
        if not num_targets:
            raise ConfigError("no label of this batch is learned: all are -100")
        losses = [0.0] * len(micro)

        async def compute_gradient(number: int, output_TD: Tensor) -> Tensor:
            losses[number], grad_TD = await asyncio.to_thread(
                self._loss_and_gradient, micro[number], output_TD, num_targets
            )
            return grad_TD

        rate = self.options.learning_rate if learning_rate is None else learning_rate
        inputs = [self._to_input(number, each) for number, each in enumerate(micro)]
        self._run(self.chain.run_step(inputs, compute_gradient))
        norm = self._finish_step(rate)
        return StepResult(
            step=self.applied,
            loss=sum(losses),
            grad_norm=norm,
            learning_rate=rate,
            num_tokens=sum(sum(map(sum, each.text_lengths)) for each in micro),
            num_targets=num_targets,
            seconds=time.perf_counter() - started,
        )

    def evaluate(self, batch: Sequence[MicroBatchData] | Mapping[str, Tensor]) -> float:
        """Mean cross entropy of the positions that are learned, without dropout.

        Raises as `step` does.
        """
        micro = self._to_micro_batches(batch)
        num_targets = sum(each.num_targets for each in micro)
        if not num_targets:
            raise ConfigError("no label of this batch counts: all are -100")
        inputs = [self._to_input(number, each) for number, each in enumerate(micro)]
        outputs = self._run(self.chain.evaluate(inputs))
        with torch.no_grad():
            return sum(
                self._compute_loss(each, output_TD, num_targets)
                for each, output_TD in zip(micro, outputs, strict=True)
            )

    def checkpoint(self) -> None:
        """Fetch adapters and optimizer state, and write them if there is a file for them.

        Raises `OSError`, and what `TrainingChain` raises.
        """
        state = self._run(self.chain.checkpoint())
        if self.options.checkpoint_path is not None:
            save_checkpoint(self.options.checkpoint_path, self._label, state)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the adapters as a folder that `peft.PeftModel.from_pretrained` loads.

        With a `FullConfig` it is a whole model, for `from_pretrained` of transformers and for
        `nesa-node run`. Raises `OSError`, and what `TrainingChain` raises.
        """
        state = self._run(self.chain.checkpoint())
        self._save(Path(folder), state.tensors)

    def close(self) -> None:
        """Leave the nodes, which forget the adapters. Idempotent."""
        self._held.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_backwards(self) -> int:
        """Micro-batches of the step under way that have gone backward."""
        return self.chain.num_backwards

    def run_forward(
        self, hidden: Sequence[tuple[TextLayout, Tensor]], *, keep: bool
    ) -> tuple[list[Tensor], list[RecordedPass]]:
        """Run inputs [T, D] of texts through the blocks: outputs, and passes for `run_backward`.

        Without `keep` there is no dropout, and there are no passes. Raises `ConfigError` for more
        tokens than nodes keep, and what `TrainingChain` raises.
        """
        first = self.chain.num_forwards
        inputs = [
            (layout, self._dropout_seed(first + at), hidden_TD)
            for at, (layout, hidden_TD) in enumerate(hidden)
        ]
        if not keep:
            return self._run(self.chain.evaluate(inputs)), []
        return self._run(self.chain.forward(inputs))

    def run_backward(self, passes: Sequence[RecordedPass], grads: Sequence[Tensor]) -> list[Tensor]:
        """Run gradients [T, D] of outputs backward; return those of the inputs."""
        return self._run(self.chain.backward(passes, grads))

    def apply(self, learning_rate: float) -> float:
        """Update the adapters by the gradients of the step; return their norm before clipping."""
        return self._finish_step(learning_rate)

    def restart_step(self) -> None:
        """Forget the micro-batches of the step under way."""
        self._run(self.chain.restart_step())

    def _finish_step(self, learning_rate: float) -> float:
        norm = self._run(self.chain.apply(learning_rate, self.options.max_grad_norm))
        if (
            self.chain.steps_since_checkpoint >= self.options.checkpoint_every
            or self.chain.recorded_bytes > MAX_RECORDED_BYTES
        ):
            self.checkpoint()
        return norm

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(work)

    def _to_micro_batches(
        self, batch: Sequence[MicroBatchData] | Mapping[str, Tensor]
    ) -> list[MicroBatchData]:
        if isinstance(batch, Mapping):
            return self._split_rows(prepend_virtual_tokens(batch, self.num_virtual_tokens))
        if not self.num_virtual_tokens:
            for each in batch:
                require_predicted(each)
        micro = [add_virtual_tokens(each, self.num_virtual_tokens) for each in batch]
        for each in micro:
            tokens = each.ids_RL.numel()
            if tokens > self.options.max_tokens:
                raise ConfigError(
                    f"a micro-batch of {tokens} tokens; this session takes at most "
                    f"{self.options.max_tokens} (max_tokens)"
                )
        return micro

    def _split_rows(self, batch: Mapping[str, Tensor]) -> list[MicroBatchData]:
        """Rows of a batch as micro-batches of as many rows as fit."""
        ids_RL, labels_RL = batch["input_ids"], batch["labels"]
        lengths = row_lengths(batch.get("attention_mask"), ids_RL)
        found = []
        for start, end in split_rows(lengths, self.options.max_tokens):
            columns = max(lengths[start:end])
            labels = labels_RL[start:end, :columns].clone()
            labels[:, 0] = IGNORED
            for row, length in enumerate(lengths[start:end]):
                labels[row, length:] = IGNORED
            found.append(
                MicroBatchData(
                    ids_RL[start:end, :columns],
                    labels,
                    tuple((length,) for length in lengths[start:end]),
                    int((labels != IGNORED).sum()),
                )
            )
        return found

    def _to_input(self, number: int, micro: MicroBatchData) -> tuple[TextLayout, int, Tensor]:
        layout = TextLayout(micro.text_lengths)
        hidden_TD = layout.from_rows(self.embed(micro.ids_RL, layout))
        return layout, self._dropout_seed(number), hidden_TD

    def embed(self, ids_RL: Tensor, layout: TextLayout) -> Tensor:
        """Make the chain's input [R, L, D] of ids, at the positions of their texts."""
        batch = layout.make_batch(0)
        positions_RL = batch.positions_RL
        if positions_RL is None:
            positions_RL = torch.arange(ids_RL.shape[1]).expand(ids_RL.shape)
        return self._embed(ids_RL, positions_RL)

    def _dropout_seed(self, number: int) -> int:
        """Seed of a micro-batch: the same when its step runs again."""
        at = self.applied * (1 << 20) + number + 1
        return (self._seed + _SEED_STEP * at) % (1 << 63)

    def _loss_and_gradient(
        self, micro: MicroBatchData, output_TD: Tensor, num_targets: int
    ) -> tuple[float, Tensor]:
        output_TD = output_TD.detach().requires_grad_()
        with torch.enable_grad():
            loss = self._compute_loss(micro, output_TD, num_targets)
        assert output_TD.grad is not None
        if not math.isfinite(loss):
            raise ConfigError(
                f"the loss of step {self.applied + 1} is not finite: use a lower learning rate"
            )
        return loss, output_TD.grad

    def _compute_loss(self, micro: MicroBatchData, output_TD: Tensor, num_targets: int) -> float:
        """Sum of the cross entropies, divided by `num_targets`; with gradients, where enabled."""
        layout = TextLayout(micro.text_lengths)
        labels_T = layout.from_rows(micro.labels_RL.to(output_TD.device))
        # The label of a position is predicted by the one before it.
        learned_N = (labels_T != IGNORED).nonzero().flatten()
        total = 0.0
        if output_TD.requires_grad and not len(learned_N):
            output_TD.grad = torch.zeros_like(output_TD)
        for at_N in torch.split(learned_N, LOSS_CHUNK_POSITIONS):
            logits_NV = self._ends.logits_with_gradients(output_TD[at_N - 1])
            loss = (
                functional.cross_entropy(logits_NV.float(), labels_T[at_N], reduction="sum")
                / num_targets
            )
            if output_TD.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total
