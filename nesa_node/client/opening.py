"""The distributed model and its tokenizer as a config asks for them, for commands and gateways."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from nesa_node.client.causal_lm import DistributedModelForCausalLM
from nesa_node.client.model import AutoDistributedModelForCausalLM
from nesa_node.core.config import ClientConfig, secret_text
from nesa_node.engine.checkpoint import Checkpoint, open_checkpoint
from nesa_node.engine.threads import fix_threads
from nesa_node.engine.tokenizer import load_tokenizer


def open_model(
    config: ClientConfig, name: str
) -> tuple[Checkpoint, DistributedModelForCausalLM, PreTrainedTokenizerBase]:
    """Load tokenizer and ends of model `name`, a folder or a name on the hub. Close the model.

    The swarm is joined at the first session. Raises what opening the checkpoint raises, and
    `ConfigError`.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if config.threads is not None:
        fix_threads(config.threads)
    token = secret_text(config.token)
    checkpoint = open_checkpoint(
        name, revision=config.revision, token=token, cache_dir=config.cache_dir
    )
    tokenizer = load_tokenizer(checkpoint.fetch_side_files())
    model = AutoDistributedModelForCausalLM.from_pretrained(
        name,
        initial_peers=config.initial_peers,
        dtype=config.torch_dtype,
        # The ends are small: without a word they stay where every machine has room.
        device="cpu" if config.device == "auto" else config.device,
        revision=config.revision,
        token=token,
        cache_dir=config.cache_dir,
        routing=config.route,
        swarm_key=secret_text(config.swarm_key),
        step_timeout_s=config.step_timeout_s,
        replicate_cache=config.replicate_cache,
        quality=config.quality,
        min_precision=config.min_precision,
        strategy=config.strategy,
        reuse_prefix=config.reuse_prefix,
    )
    return checkpoint, model, tokenizer
