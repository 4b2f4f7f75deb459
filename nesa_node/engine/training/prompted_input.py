"""Shallow prompt tuning: trained vectors before the token embeddings of each text.

They come before the first block, so that the client has them: nodes train nothing, and pass
gradients to it. Deep prompts (`DeepPromptConfig`) are at each block, on the nodes.

R sequences, L tokens of each, N virtual tokens of all texts, P of each text, D hidden.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import Span
from nesa_node.engine.model.embedder_and_head import Embedder
from nesa_node.engine.training.adapted_blocks import MicroBatch, initializing
from nesa_node.engine.training.adapters import get_kind
from nesa_node.engine.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from peft import PromptTuningConfig

KIND = "PROMPT_TUNING"
PARAMETER = "prompt_embeddings"
"""Name in PEFT's files."""


class PromptedInput:
    """The first block's input, made of token embeddings and of a prompt that is trained.

    A `TrainableSpan` without blocks. A text's first P tokens are virtual: the prompt stands in
    place of their embeddings. Then come, as PEFT's models do it with both, the family's projection,
    positions and norm. Not thread-safe: one thread runs it.
    """

    span = Span(0, 0)
    indexes = (0,)

    def __init__(
        self, config: PromptTuningConfig, embedder: Embedder, checkpoint: Checkpoint, *, seed: int
    ) -> None:
        """Initialize the prompt as PEFT does in one process after `torch.manual_seed(seed)`.

        May load a tokenizer (`prompt_tuning_init="TEXT"`). Raises `ConfigError` for a config that
        is not supported, or that PEFT refuses.
        """
        self.config = _complete(config, checkpoint)
        """`config` with what PEFT adds from the model's."""
        self.device, self.dtype = embedder.device, embedder.dtype
        self.hidden_size = int(checkpoint.config.hidden_size)
        self.num_virtual_tokens: int = self.config.num_virtual_tokens
        """P."""
        self._embedder = embedder
        if (size := next(embedder.token_embedding.parameters()).shape[1]) != self.hidden_size:
            raise ConfigError(
                f"the model's token embeddings have {size} numbers and its hidden states "
                f"{self.hidden_size}: PEFT's prompts do not fit it"
            )
        self._prompt_PD = nn.Parameter(_draw(self.config, embedder.token_embedding, seed))
        self.parameters = {PARAMETER: self._prompt_PD}
        self.shapes: dict[str, tuple[int, ...]] = {
            PARAMETER: (self.num_virtual_tokens, self.hidden_size)
        }

    @property
    def label(self) -> str:
        """What distinguishes this prompt's training from that of another prompt."""
        config = self.config
        init = str(getattr(config.prompt_tuning_init, "value", config.prompt_tuning_init))
        return f"{KIND} {self.num_virtual_tokens} {init} {config.prompt_tuning_init_text or ''}"

    def embed_batch(self, ids_RL: Tensor, positions_RL: Tensor) -> Tensor:
        """Token embeddings [R, L, D] for `run_block`; those of virtual tokens mean nothing.

        Raises `ContextLengthError`, and `ValueError` for ids outside the vocabulary.
        """
        return self._embedder.embed_tokens(ids_RL, positions_RL)

    def run_block(
        self, index: int, hidden_RLD: Tensor, batch: MicroBatch, *, dropout: bool = True
    ) -> Tensor:
        """Make the first block's input [R, L, D] of `embed_batch`'s result.

        In the caller's gradient mode. Gradients of a virtual token's embedding are added in the
        order of rows and of the texts in them.
        """
        positions_RL = batch.positions_RL
        if positions_RL is None:
            positions_RL = torch.arange(hidden_RLD.shape[1]).expand(hidden_RLD.shape[:2])
        positions_RL = positions_RL.to(self.device)
        is_virtual_RL = positions_RL < self.num_virtual_tokens
        # An embedding, since the backward of an index adds in the order that threads have.
        prompt_ND = nn.functional.embedding(positions_RL[is_virtual_RL], self._prompt_PD)
        embeds_RLD = hidden_RLD.index_put((is_virtual_RL,), prompt_ND.to(hidden_RLD.dtype))
        return self._embedder.complete(embeds_RLD, positions_RL)


def is_prompt_tuning(config: object) -> TypeGuard[PromptTuningConfig]:
    """Whether a config is `peft.PromptTuningConfig`."""
    return get_kind(config) == KIND


def count_virtual_tokens(config: object) -> int:
    """Trained vectors that stand before each text; 0 for adapters in blocks."""
    return int(config.num_virtual_tokens) if is_prompt_tuning(config) else 0


def _complete(config: PromptTuningConfig, checkpoint: Checkpoint) -> PromptTuningConfig:
    """Return a checked copy with the fields that PEFT fills from the model's config."""
    count: Any = config.num_virtual_tokens
    task = getattr(config.task_type, "value", config.task_type)
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"num_virtual_tokens must be a positive number, got {count!r}")
    if task != "CAUSAL_LM":
        raise ConfigError(f'task_type={task!r}: a prompt for a swarm\'s model needs "CAUSAL_LM"')
    if config.modules_to_save:
        raise ConfigError("modules_to_save: only the prompt is trained")
    written = copy.deepcopy(config)
    written.inference_mode = False
    expected = {
        "num_transformer_submodules": 1,
        "token_dim": int(checkpoint.config.hidden_size),
        "num_layers": checkpoint.num_blocks,
        "num_attention_heads": int(checkpoint.config.num_attention_heads),
    }
    for name, value in expected.items():
        if getattr(config, name) not in (None, value):
            raise ConfigError(f"{name}={getattr(config, name)!r}: the model needs {value}")
        setattr(written, name, value)
    return written


def _draw(config: PromptTuningConfig, token_embedding: nn.Module, seed: int) -> Tensor:
    """Initial values [P, D] in float32, on the embedding's device."""
    from peft import PromptEmbedding

    device = next(token_embedding.parameters()).device
    try:
        with initializing(seed):
            make: Any = PromptEmbedding
            made = make(copy.deepcopy(config), token_embedding)
    except (OSError, ValueError, TypeError, IndexError, ZeroDivisionError) as error:
        init = config.prompt_tuning_init
        raise ConfigError(f"PEFT cannot make a prompt by {init}: {error}") from error
    values_PD: Tensor = made.embedding.weight.detach().to(device, torch.float32)
    return values_PD
