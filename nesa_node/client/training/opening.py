"""What a fine-tuning session opens: the spec of its adapters, the client's blocks, the nodes'."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nesa_node.client.model.layers import LocalConnection
from nesa_node.client.session.base import SwarmConnection
from nesa_node.client.session.connection import RemoteConnection
from nesa_node.client.training.adapter_folder import read_adapter, save_adapter
from nesa_node.client.training.replica_group import ReplicaOptions
from nesa_node.client.training.training_chain import TrainingChain
from nesa_node.client.training.training_link import TrainingLimits
from nesa_node.client.training.training_span import LocalTrainingSpan, SpanState
from nesa_node.core.errors import ConfigError, UnsupportedFeatureError
from nesa_node.core.ids import ModelId, Span
from nesa_node.engine.model.embedder_and_head import Embedder
from nesa_node.engine.training.adapted_blocks import AdaptedBlocks, find_adapter_shapes
from nesa_node.engine.training.adapters import FullConfig, OptimizerConfig
from nesa_node.engine.training.prompted_input import PromptedInput, is_prompt_tuning
from nesa_node.engine.training.span_trainer import SpanTrainer
from nesa_node.engine.training.training_spec import TrainingSpec, make_spec
from nesa_node.engine.training.training_state import ADAPTER, select_adapters
from nesa_node.engine.weights.checkpoint import Checkpoint, compute_model_id
from nesa_node.engine.weights.model_folder import write_model
from nesa_node.engine.weights.skeleton import Skeleton
from nesa_node.swarm.dht.training_notices import SessionPlan

if TYPE_CHECKING:
    from nesa_node.engine.training.training_spec import AdapterConfig


class TrainingOpener:
    """Opens chains of spans with the adapters of one spec."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        embedder: Embedder,
        layers: Sequence[tuple[SwarmConnection | None, Span]],
        connect: Callable[[], SwarmConnection],
        config: AdapterConfig | str | Path,
        optimizer: OptimizerConfig,
        seed: int,
    ) -> None:
        """`layers` are as `DistributedModelForCausalLM` has them; `connect` joins the swarm.

        `config` may be the folder of an adapter, which gives the initial values. Raises
        `ConfigError` for adapters that nodes do not train or that do not fit the model, and what
        joining raises.
        """
        self.model_id: ModelId = compute_model_id(checkpoint)
        values: Mapping[str, Tensor] | None = None
        if isinstance(config, str | Path):
            config, values = read_adapter(Path(config))
        self.prompt: PromptedInput | None = None
        """What the client itself trains, for a shallow prompt."""
        if is_prompt_tuning(config):
            self.prompt = PromptedInput(config, embedder, checkpoint, seed=seed)
        self.config = config if self.prompt is None else self.prompt.config

        def find_modules() -> Iterator[str]:
            return (name for name, _ in Skeleton(checkpoint).model.named_modules())

        on_nodes = config if self.prompt is None else None
        self.spec: TrainingSpec = make_spec(on_nodes, optimizer, seed, find_modules=find_modules)
        self._checkpoint = checkpoint
        self.initial_state: SpanState | None = None
        """What the adapters begin with, if not with PEFT's initial values."""
        if values is not None:
            self._require_fitting(values)
            tensors = {f"{ADAPTER}{name}": value for name, value in values.items()}
            self.initial_state = SpanState(0, tensors)
        self._local = [
            (connection, span)
            for connection, span in layers
            if isinstance(connection, LocalConnection) and len(span)
        ]
        remote = [span for connection, span in layers if connection is None and len(span)]
        if len(remote) != 1:
            raise UnsupportedFeatureError(
                "fine-tuning through the swarm needs blocks in the swarm: keep fewer here"
            )
        self._remote = remote[0]
        connection = connect()
        if not isinstance(connection, RemoteConnection):
            raise UnsupportedFeatureError(
                "fine-tuning needs nodes that see hidden states as they are: leave out private"
            )
        self._connection = connection

    @asynccontextmanager
    async def open(
        self,
        limits: TrainingLimits,
        replicas: ReplicaOptions,
        plan: SessionPlan,
        state: SpanState | None,
    ) -> AsyncIterator[TrainingChain]:
        """Open a session at each node; with `state` training continues from there.

        Raises `ConfigError` for stage 3 of ZeRO with adapters.
        """
        if replicas.zero_stage == 3 and self.spec.full is None:
            raise ConfigError(
                "zero_stage=3 divides weights that are trained: use it with FullConfig"
            )
        local = await asyncio.to_thread(self._make_local)
        shapes = await asyncio.to_thread(
            find_adapter_shapes, self._checkpoint, self.spec.make_config(), self._remote
        )
        with ExitStack() as stack:
            if self.prompt is not None:
                worker = stack.enter_context(ThreadPoolExecutor(1, "nesa-prompt"))
                trainer = SpanTrainer(self.prompt, self.spec.optimizer)
                local.insert(0, LocalTrainingSpan(trainer, worker))
            opening = self._connection.open_training(
                self._remote,
                spec=self.spec,
                shapes=shapes,
                limits=limits,
                plan=plan,
                replicas=replicas,
                state=state,
                local=local,
            )
            async with opening as chain:
                yield chain

    def save(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Write what was trained: an adapter, or a whole model. Raises `OSError`."""
        if not isinstance(self.config, FullConfig):
            save_adapter(folder, self.config, state, base_model=self._checkpoint.name)
            return
        blocks = select_adapters(state)
        write_model(folder, self._checkpoint, blocks, self.config.torch_dtype)

    def _require_fitting(self, values: Mapping[str, Tensor]) -> None:
        """Raise `ConfigError` for values of another model or of another config."""
        if self.prompt is not None:
            shapes = {name: tuple(value.shape) for name, value in self.prompt.parameters.items()}
        else:
            blocks = Span(0, self._checkpoint.num_blocks)
            shapes = find_adapter_shapes(self._checkpoint, self.spec.make_config(), blocks)
        for name in sorted({*shapes, *values}):
            found = tuple(values[name].shape) if name in values else None
            if found != shapes.get(name):
                raise ConfigError(
                    f"the adapter does not fit this model: {name} has the shape {found}, and "
                    f"{shapes.get(name)} is needed"
                )
            if not bool(torch.isfinite(values[name]).all()):
                raise ConfigError(f"the adapter's {name} has numbers that are not finite")

    def _make_local(self) -> list[LocalTrainingSpan]:
        made = []
        for connection, span in self._local:
            for blocks in connection.find_parts(span):
                adapted = AdaptedBlocks(
                    blocks, self._checkpoint, self.spec.make_config(), seed=self.spec.seed
                )
                trainer = SpanTrainer(adapted, self.spec.optimizer)
                made.append(LocalTrainingSpan(trainer, connection.worker))
        return made
