"""Opening of a distributed model and its tokenizer by a `ClientConfig`."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from nesa_node.client.causal_lm import DistributedModelForCausalLM
from nesa_node.client.model import choose_salt, connected_model
from nesa_node.client.options import ConnectionOptions
from nesa_node.core.config import ClientConfig, default_decisions_path, secret_text
from nesa_node.core.waiting import waiting
from nesa_node.engine.checkpoint import Checkpoint, open_checkpoint
from nesa_node.engine.devices import choose_device
from nesa_node.engine.memory import require_room_for_ends
from nesa_node.engine.threads import fix_threads
from nesa_node.engine.tokenizer import load_discovered_tokenizer, load_tokenizer


def open_named(config: ClientConfig, name: str) -> Checkpoint:
    """Open the checkpoint `name`, a folder or hub name. Raises as `open_checkpoint` does."""
    return open_checkpoint(
        name, revision=config.revision, token=secret_text(config.token), cache_dir=config.cache_dir
    )


def open_model(
    config: ClientConfig, checkpoint: Checkpoint, *, discovered: bool = False
) -> tuple[DistributedModelForCausalLM, PreTrainedTokenizerBase]:
    """Load the tokenizer, embedding and head of `checkpoint`. The caller closes the model.

    The swarm is joined with the first session. `discovered` marks models chosen by untrusted peers:
    their tokenizers are restricted, and embedding and head must leave free memory
    (`require_room_for_ends`). Raises what fetching files raises, and `ConfigError`.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if config.threads is not None:
        fix_threads(config.threads)
    dtype = checkpoint.resolve_dtype(config.torch_dtype)
    # Embedding and head are small: by default they stay in main memory.
    device = choose_device("cpu" if config.device == "auto" else config.device)
    if discovered:
        require_room_for_ends(checkpoint, dtype=dtype, device=device)
    load = load_discovered_tokenizer if discovered else load_tokenizer
    folder = checkpoint.fetch_side_files()
    with waiting("the tokenizer to be loaded"):
        tokenizer = load(folder)
    options = ConnectionOptions(
        initial_peers=config.initial_peers,
        routing=config.route,
        swarm_key=secret_text(config.swarm_key),
        step_timeout_s=config.step_timeout_s,
        replicate_cache=config.replicate_cache,
        quality=config.quality,
        min_precision=config.min_precision,
        strategy=config.strategy,
        decisions=default_decisions_path(),
    )
    model = connected_model(
        checkpoint,
        options,
        dtype=dtype,
        device=device,
        prefix_salt=choose_salt(config.reuse_prefix, None),
    )
    return model, tokenizer
