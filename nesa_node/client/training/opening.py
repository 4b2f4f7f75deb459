"""What a fine-tuning session opens: the spec of its adapters, the client's blocks, the nodes'."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from nesa_node.client.model.layers import LocalConnection
from nesa_node.client.session.base import SwarmConnection
from nesa_node.client.session.connection import RemoteConnection
from nesa_node.client.training.replica_group import ReplicaOptions
from nesa_node.client.training.training_chain import TrainingChain
from nesa_node.client.training.training_link import TrainingLimits
from nesa_node.client.training.training_span import LocalTrainingSpan, SpanState
from nesa_node.core.errors import UnsupportedFeatureError
from nesa_node.core.ids import ModelId, Span
from nesa_node.engine.model.loading import Embedder
from nesa_node.engine.training.adapted_blocks import AdaptedBlocks, find_adapter_shapes
from nesa_node.engine.training.adapters import OptimizerConfig
from nesa_node.engine.training.prompted_input import PromptedInput, is_prompt_tuning
from nesa_node.engine.training.span_trainer import SpanTrainer
from nesa_node.engine.training.training_spec import TrainingSpec, make_spec
from nesa_node.engine.weights.checkpoint import Checkpoint, compute_model_id
from nesa_node.engine.weights.skeleton import Skeleton

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
        config: AdapterConfig,
        optimizer: OptimizerConfig,
        seed: int,
    ) -> None:
        """`layers` are as `DistributedModelForCausalLM` has them; `connect` joins the swarm.

        Raises `ConfigError` for adapters that nodes do not train, and what joining raises.
        """
        self.model_id: ModelId = compute_model_id(checkpoint)

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
        assert isinstance(connection, RemoteConnection)
        self._connection = connection

    @asynccontextmanager
    async def open(
        self, limits: TrainingLimits, replicas: ReplicaOptions, state: SpanState | None
    ) -> AsyncIterator[TrainingChain]:
        """Open a session at each node; with `state` training continues from there."""
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
                replicas=replicas,
                state=state,
                local=local,
            )
            async with opening as chain:
                yield chain

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
