"""Opening of a client's distributed model and tokenizer, and choice of the swarm's peers."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from itertools import groupby
from typing import TYPE_CHECKING, Self, TypeVar

from nesa_node.cli.process_setup import exit_on_interrupt
from nesa_node.core.errors import ConfigError
from nesa_node.core.known_swarms import KnownSwarm, KnownSwarmStore
from nesa_node.core.settings.declaration import default_known_swarms_dir, secret_text
from nesa_node.core.settings.models import ClientConfig, GatewayConfig, SharedConfig, TaskConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nesa_node.client.graphs.swarm_pipeline import SwarmPipeline
    from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
    from nesa_node.client.model.inference_session import InferenceSession


_Config = TypeVar("_Config", bound=SharedConfig)


def require_model(config: ClientConfig) -> str:
    """The model's name. Raises `ConfigError` where it is missing."""
    if config.model is None:
        raise ConfigError(
            "MODEL is required: a local folder or GGUF file, or the name of a model on the hub"
        )
    return config.model


def open_pipeline(config: TaskConfig | GatewayConfig, task: str, network: str) -> SwarmPipeline:
    """Join the swarm of a network in pieces. Blocks; raises as `SwarmPipeline` does."""
    # Imported late: transformers' pipelines take a second.
    from nesa_node.client.graphs.swarm_pipeline import SwarmPipeline

    return SwarmPipeline(
        task,
        network,
        initial_peers=config.initial_peers,
        revision=config.revision,
        token=secret_text(config.token),
        cache_dir=config.cache_dir,
        swarm_key=secret_text(config.swarm_key),
        routing=config.route,
    )


def resolve_initial_peers(config: _Config, model: str | None = None) -> _Config:
    """`config` with initial peers: those given, else a local node's, else the last swarm's.

    Prints on stderr which known swarm it uses. A swarm of `model` is preferred. Raises
    `ConfigError` if no swarm is known.
    """
    if config.initial_peers or (isinstance(config, ClientConfig) and config.deployment):
        return config
    known = KnownSwarmStore(default_known_swarms_dir()).find(model)
    if known is None:
        raise ConfigError(
            "--initial-peers is required: the address of any member of the swarm, such as "
            "192.0.2.7:31330 (no node runs on this machine, and no swarm was used before)"
        )
    print(f"{describe_known_swarm(known)}; --initial-peers chooses another", file=sys.stderr)
    return config.model_copy(update={"initial_peers": known.addresses})


def describe_known_swarm(known: KnownSwarm) -> str:
    """Text such as `using the node attic of MODEL on this machine`, or about the last swarm."""
    model = f" of {known.model}" if known.model else ""
    if known.source == "running":
        name = f" {known.name}" if known.name else ""
        return f"using the node{name}{model} on this machine"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(known.saved_at))
    return f"using the last swarm{model}, {known.addresses[0]}, used {when}"


def save_last_swarm(config: SharedConfig, model: str | None = None) -> None:
    """Save the peers of the config, which answered, for later commands without --initial-peers."""
    if config.initial_peers:
        KnownSwarmStore(default_known_swarms_dir()).save_last(config.initial_peers, model)


def open_client_model(
    config: ClientConfig,
) -> tuple[DistributedModelForCausalLM, PreTrainedTokenizerBase]:
    """Load tokenizer, embedding and head; the swarm is joined by the first session.

    The caller closes the model. Raises `ConfigError` without a model, and errors of the checkpoint.
    """
    name = require_model(config)
    if config.replicate_cache and config.route == "star":
        raise ConfigError(
            "--replicate-cache needs --route chain: a star's nodes must not learn of each other"
        )
    with exit_on_interrupt():
        from nesa_node.client.model.auto import open_model, open_named_checkpoint

    return open_model(
        config, open_named_checkpoint(config, name), adapter=getattr(config, "adapter", None)
    )


class ReconnectingModel:
    """A client's model that is reopened when a local node has restarted on another port.

    Only without --initial-peers. Leaving the context closes the model.
    """

    def __init__(self, config: ClientConfig) -> None:
        """Resolve the initial peers. Raises as `resolve_initial_peers`."""
        self._may_reconnect = not (config.initial_peers or config.deployment)
        self._config = resolve_initial_peers(config, require_model(config))
        self._open_models = ExitStack()

    def open(self) -> tuple[DistributedModelForCausalLM, PreTrainedTokenizerBase]:
        """Open as `open_client_model`; the context owns the model."""
        model, tokenizer = open_client_model(self._config)
        return self._open_models.enter_context(model), tokenizer

    def reconnect(self) -> DistributedModelForCausalLM | None:
        """Close the model and reopen it with the node that runs on this machine now.

        None, and nothing is closed, if that node's addresses are the same or no node runs.
        """
        known = KnownSwarmStore(default_known_swarms_dir()).find(self._config.model)
        if not self._may_reconnect or known is None or known.source != "running":
            return None
        if known.addresses == self._config.initial_peers:
            return None
        print(describe_known_swarm(known), file=sys.stderr)
        config = self._config.model_copy(update={"initial_peers": known.addresses})
        with self._open_models.pop_all():
            model, _ = open_client_model(config)
            self._open_models.enter_context(model)
        self._config = config
        return model

    def save_swarm(self) -> None:
        save_last_swarm(self._config, self._config.model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open_models.close()


def describe_route(session: InferenceSession) -> str:
    """Text such as `chain …WmQh4s 0:10 → …Pz1kLd 10:20`, with codecs if any is not "none".

    Nodes that compute the same blocks are joined by `+`, chains beside each other by `|`.
    """
    hops, reached = "", 0
    for span, same in groupby(session.hops, key=lambda hop: hop.span):
        if hops:
            hops += " | " if span.start < reached else " → "
        hops += f"{' + '.join(short_peer_id(hop.peer_id) for hop in same)} {span}"
        reached = span.end
    codecs = session.codecs
    compressed = any(codec != "none" for codec in codecs)
    return f"chain {hops}, sent as {' → '.join(codecs)}" if compressed else f"chain {hops}"


def short_peer_id(peer_id: str) -> str:
    """The last 6 characters of a peer id: all Ed25519 ids have the same prefix."""
    return f"…{peer_id[-6:]}"
