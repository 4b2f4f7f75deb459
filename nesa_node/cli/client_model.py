"""The distributed model and its tokenizer, as the command line's config asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nesa_node.core.config import ClientConfig, SharedConfig
from nesa_node.core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nesa_node.client.causal_lm import DistributedModelForCausalLM
    from nesa_node.client.inference import InferenceSession


def require_model_and_peers(config: ClientConfig) -> str:
    """The model's name. Raises `ConfigError` where it or every peer is missing."""
    if config.model is None:
        raise ConfigError("MODEL is required: a local folder or the name of a model on the hub")
    require_peers(config)
    return config.model


def require_peers(config: SharedConfig) -> None:
    """Raises `ConfigError` without initial peers: a client has no other way to find a swarm."""
    if not config.initial_peers:
        raise ConfigError("--initial-peers is required: the address of any member of the swarm")


def open_client_model(
    config: ClientConfig,
) -> tuple[DistributedModelForCausalLM, PreTrainedTokenizerBase]:
    """Load tokenizer and ends; the swarm is joined at the first session. Close the model.

    Raises `ConfigError` without a model or peers, and what opening the checkpoint raises.
    """
    name = require_model_and_peers(config)
    if config.replicate_cache and config.route == "star":
        raise ConfigError(
            "--replicate-cache needs --route chain: a star's nodes must not learn of each other"
        )
    from nesa_node.client.opening import open_model, open_named

    return open_model(config, open_named(config, name))


def route_text(session: InferenceSession) -> str:
    """`chain …WmQh4s 0:10 → …Pz1kLd 10:20`, and how hidden states travelled if not as they are."""
    hops = " → ".join(f"{short_peer(hop.peer_id)} {hop.span}" for hop in session.hops)
    codecs = session.codecs
    compressed = any(codec != "none" for codec in codecs)
    return f"chain {hops}, sent as {' → '.join(codecs)}" if compressed else f"chain {hops}"


def short_peer(peer_id: str) -> str:
    """The end of a peer id: all Ed25519 ids begin alike."""
    return f"…{peer_id[-6:]}"
