"""A model of transformers whose forward pass runs in a swarm, for synchronous callers."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nesa_node.client.graphs.decoder_sequence import DecoderSequence
from nesa_node.client.graphs.graph_connection import GraphConnection, open_graph_connection
from nesa_node.client.model.loop_thread import HeldContext, LoopThread
from nesa_node.client.routing.request import ConnectionOptions
from nesa_node.core.errors import ConfigError, ContextLengthError
from nesa_node.core.settings.addresses import parse_peer_address
from nesa_node.core.settings.choices import RouteName
from nesa_node.core.settings.declaration import default_cache_dir, user_path
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.engine.weights.families import read_network_config
from nesa_node.engine.weights.hub import open_checkpoint


class RemoteNetwork:
    """A network in a swarm. Any number of threads may run requests at once.

    The swarm is joined with the first request. Use it as a context manager, or call `close`.
    """

    def __init__(self, checkpoint: Checkpoint, options: ConnectionOptions) -> None:
        self.checkpoint = checkpoint
        self._options = options
        self._loop = LoopThread("nesa-network")
        self._guard = threading.Lock()
        self._held: HeldContext[GraphConnection] | None = None

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        initial_peers: str | Sequence[str] = (),
        revision: str | None = None,
        token: str | None = None,
        cache_dir: str | Path | None = None,
        swarm_key: str | None = None,
        identity_path: str | Path | None = None,
        routing: RouteName = "chain",
        recovery_timeout_s: float = 60.0,
    ) -> RemoteNetwork:
        """The network that `name` (a folder or hub name) has the config of; no weights are read.

        Nodes send values to each other, or in a "star" to this client. Requests wait
        `recovery_timeout_s` for nodes. Raises the `ModelError`s of `open_checkpoint`, and
        `ConfigError` for malformed initial peers.
        """
        peers = (initial_peers,) if isinstance(initial_peers, str) else tuple(initial_peers)
        checkpoint = open_checkpoint(
            str(name),
            revision=revision,
            token=token,
            cache_dir=default_cache_dir() if cache_dir is None else user_path(cache_dir),
            read=read_network_config,
        )
        options = ConnectionOptions(
            initial_peers=tuple(map(parse_peer_address, peers)),
            routing=routing,
            swarm_key=swarm_key,
            identity_path=None if identity_path is None else user_path(identity_path),
            recovery_timeout_s=recovery_timeout_s,
        )
        return cls(checkpoint, options)

    def __enter__(self) -> RemoteNetwork:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the swarm. Idempotent."""
        self._loop.close()

    @property
    def connection(self) -> GraphConnection:
        """Joins the swarm, where that is not done. Raises as `open_graph_connection` does."""
        with self._guard:
            held = self._held
            if held is None or not held.is_alive or held.value.is_lost:
                if held is not None:
                    held.release()
                opening = open_graph_connection(self.checkpoint, self._options)
                self._held = held = self._loop.hold(opening)
            return held.value

    def __call__(self, **inputs: Any) -> Any:
        """What the model returns for these inputs, of the class that transformers returns.

        Inputs that the network was captured with and that are missing get what they mostly are:
        masks ones, token types zeros. Raises as `GraphConnection.run` does, and
        `ContextLengthError` for texts that are longer than the model has positions for.
        """
        return self.run(inputs)

    def run_part(self, part: str, inputs: Mapping[str, Tensor]) -> Any:
        """What one of a pipeline's networks gives. Inputs of it have names with its own before."""
        connection = self.connection
        values = self._loop.run(connection.run(inputs, part=part))
        return connection.network.make_output(values)[part]

    def run(self, inputs: Mapping[str, Any], sequence: DecoderSequence | None = None) -> Any:
        """The same, for the next tokens of a sequence (`GraphConnection.run`)."""
        connection = self.connection
        network = connection.network
        given = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        if unknown := given.keys() - set(network.input_names):
            raise ConfigError(
                f"{type(network.model).__name__} in this swarm takes "
                f"{', '.join(network.input_names)}, and not {', '.join(sorted(unknown))}"
            )
        _check_length(network.model, given)
        for name in network.input_names:
            if name not in given:
                given[name] = _default_input(name, given)
        values = self._loop.run(connection.run(given, sequence))
        return network.make_output(values)


def _check_length(model: Any, given: Mapping[str, Tensor]) -> None:
    """Nodes could not compute more, and one that fails is left for a while."""
    config: Any = getattr(model, "config", None)
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int) or getattr(config, "is_encoder_decoder", False):
        return
    if any(each in config.model_type for each in ("roberta", "camembert")):
        # Positions begin behind padding's.
        most -= int(config.pad_token_id) + 1
    ids = given.get("input_ids")
    if ids is not None and ids.shape[-1] > most:
        raise ContextLengthError(
            f"a text of {ids.shape[-1]} tokens; {type(model).__name__} takes at most {most}"
        )


def _default_input(name: str, given: dict[str, Tensor]) -> Tensor:
    ids, image = given.get("input_ids"), given.get("pixel_values")
    if name == "attention_mask":
        for each in (ids, given.get("input_features"), given.get("input_values")):
            if each is not None:
                return torch.ones(each.shape[0], each.shape[-1], dtype=torch.long)
    if name == "token_type_ids" and ids is not None:
        return torch.zeros_like(ids)
    if name == "pixel_mask" and image is not None:
        return torch.ones(image.shape[0], *image.shape[2:], dtype=torch.long)
    raise ConfigError(f"this network needs {name}")
