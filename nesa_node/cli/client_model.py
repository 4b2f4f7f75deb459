"""Opening of a client's distributed model and tokenizer, and choice of the swarm's peers."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self, TypeVar

from nesa_node.cli.interrupts import leaving_at_once
from nesa_node.core.config import ClientConfig, SharedConfig, default_known_swarms_dir
from nesa_node.core.errors import ConfigError
from nesa_node.core.known_swarms import KnownSwarm, KnownSwarms

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nesa_node.client.causal_lm import DistributedModelForCausalLM
    from nesa_node.client.inference import InferenceSession

_Config = TypeVar("_Config", bound=SharedConfig)


def require_model(config: ClientConfig) -> str:
    """The model's name. Raises `ConfigError` where it is missing."""
    if config.model is None:
        raise ConfigError("MODEL is required: a local folder or the name of a model on the hub")
    return config.model


def with_peers(config: _Config, model: str | None = None) -> _Config:
    """`config` with initial peers: those given, else a local node's, else the last swarm's.

    Prints on stderr which known swarm it uses. A swarm of `model` is preferred. Raises
    `ConfigError` if no swarm is known.
    """
    if config.initial_peers:
        return config
    known = KnownSwarms(default_known_swarms_dir()).find(model)
    if known is None:
        raise ConfigError(
            "--initial-peers is required: the address of any member of the swarm, such as "
            "192.0.2.7:31330 (no node runs on this machine, and no swarm was used before)"
        )
    print(f"{how_known(known)}; --initial-peers chooses another", file=sys.stderr)
    return config.model_copy(update={"initial_peers": known.addresses})


def how_known(known: KnownSwarm) -> str:
    """Text such as `using the node attic of MODEL on this machine`, or about the last swarm."""
    model = f" of {known.model}" if known.model else ""
    if known.source == "running":
        name = f" {known.name}" if known.name else ""
        return f"using the node{name}{model} on this machine"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(known.saved_at))
    return f"using the last swarm{model}, {known.addresses[0]}, used {when}"


def remember_swarm(config: SharedConfig, model: str | None = None) -> None:
    """Save the peers of the config, which answered, for later commands without --initial-peers."""
    if config.initial_peers:
        KnownSwarms(default_known_swarms_dir()).remember(config.initial_peers, model)


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
    with leaving_at_once():
        from nesa_node.client.opening import open_model, open_named

    return open_model(config, open_named(config, name))


class FollowingModel:
    """A client's model that is reopened when a local node has restarted on another port.

    Only without --initial-peers. Leaving the context closes the model.
    """

    def __init__(self, config: ClientConfig) -> None:
        """Resolve the initial peers. Raises as `with_peers`."""
        self._follows = not config.initial_peers
        self._config = with_peers(config, require_model(config))
        self._opened = ExitStack()

    def open(self) -> tuple[DistributedModelForCausalLM, PreTrainedTokenizerBase]:
        """Open as `open_client_model`; the context owns the model."""
        model, tokenizer = open_client_model(self._config)
        return self._opened.enter_context(model), tokenizer

    def moved(self) -> DistributedModelForCausalLM | None:
        """Close the model and reopen it with the node that runs on this machine now.

        None, and nothing is closed, if that node's addresses are the same or no node runs.
        """
        known = KnownSwarms(default_known_swarms_dir()).find(self._config.model)
        if not self._follows or known is None or known.source != "running":
            return None
        if known.addresses == self._config.initial_peers:
            return None
        print(how_known(known), file=sys.stderr)
        config = self._config.model_copy(update={"initial_peers": known.addresses})
        with self._opened.pop_all():
            model, _ = open_client_model(config)
            self._opened.enter_context(model)
        self._config = config
        return model

    def remember(self) -> None:
        remember_swarm(self._config, self._config.model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()


def route_text(session: InferenceSession) -> str:
    """Text such as `chain …WmQh4s 0:10 → …Pz1kLd 10:20`, with codecs if any is not "none"."""
    hops = " → ".join(f"{short_peer(hop.peer_id)} {hop.span}" for hop in session.hops)
    codecs = session.codecs
    compressed = any(codec != "none" for codec in codecs)
    return f"chain {hops}, sent as {' → '.join(codecs)}" if compressed else f"chain {hops}"


def short_peer(peer_id: str) -> str:
    """The last 6 characters of a peer id: all Ed25519 ids have the same prefix."""
    return f"…{peer_id[-6:]}"
