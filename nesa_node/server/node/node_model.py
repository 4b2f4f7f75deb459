"""The model that a daemon serves, and the memory that its blocks need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from nesa_node.core.errors import ConfigError, InsufficientMemoryError
from nesa_node.core.ids import ModelId, Span
from nesa_node.core.settings.choices import CacheDtype, QuantType
from nesa_node.core.settings.models import NodeConfig
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.devices import (
    MemoryFit,
    compute_block_bytes,
    fit_blocks,
    free_memory_bytes,
    usable_bytes,
)
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.privacy.parameters import RingParameters
from nesa_node.privacy.ring import Ring
from nesa_node.server.private.encoded_blocks import SCHEMES

PLANNED_CACHE_TOKENS = 8192
"""Cache tokens for which memory is kept free when the number of blocks is chosen automatically."""
MAX_AUTO_CACHE_TOKENS = 65_536
MIN_CACHE_TOKENS = 128
AUTO_CACHE_FRACTION = 0.5


@dataclass(frozen=True, kw_only=True)
class NodeModel(ABC):
    """A model's checkpoint, data type, quantization and device on this node."""

    unit: ClassVar[str]
    """What its blocks are called."""

    checkpoint: Checkpoint
    model_id: ModelId
    dtype: torch.dtype
    quant_type: QuantType
    cache_dtype: CacheDtype = "auto"
    """What a KV cache holds keys and values in."""
    device: torch.device

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Of the whole model."""

    @property
    @abstractmethod
    def context_length(self) -> int:
        """Most tokens of a sequence."""

    @abstractmethod
    def count_fitting(self, config: NodeConfig) -> int:
        """How many blocks fit into free memory, whichever they are.

        Raises `InsufficientMemoryError` if not even one does.
        """

    @abstractmethod
    def require_memory(self, config: NodeConfig, span: Span, *, regained_bytes: int = 0) -> None:
        """Raise `InsufficientMemoryError` unless `span` fits, with `regained_bytes` more."""

    def count_blocks(self, config: NodeConfig) -> int:
        """How many blocks to serve.

        Raises `InsufficientMemoryError`, `ConfigError`, and `UnsupportedModelError` for weights
        that nf4 cannot hold.
        """
        if (span := config.block_indices or config.first_blocks) is not None:
            if span.end > self.num_blocks:
                flag = "--first-blocks" if config.block_indices is None else "--block-indices"
                raise ConfigError(
                    f"{flag} {span}: {self.checkpoint.name} has {self.unit} 0:{self.num_blocks}"
                )
        elif isinstance(config.num_blocks, int):
            if config.num_blocks > self.num_blocks:
                raise ConfigError(
                    f"--num-blocks {config.num_blocks}: {self.checkpoint.name} has "
                    f"{self.num_blocks} {self.unit}"
                )
            span = Span(0, config.num_blocks)
        else:
            return self.count_fitting(config)
        self.require_memory(config, span)
        return len(span)


class DecoderModel(NodeModel):
    """A language model, whose blocks are equal and need a KV cache."""

    unit = "blocks"

    @property
    def num_blocks(self) -> int:
        return self.checkpoint.num_blocks

    @property
    def context_length(self) -> int:
        return self.checkpoint.context_length

    def count_fitting(self, config: NodeConfig) -> int:
        """With private sessions, blocks whose encoded weights fit, too: one, if none does."""
        fit = self._find_fit(config.attn_cache_tokens or PLANNED_CACHE_TOKENS)
        if (scheme := SCHEMES.get(config.private)) is None:
            return fit.blocks
        encoded = scheme(Ring(RingParameters()), self.checkpoint, Span(0, 1)).nbytes
        beside = 0 if self.device.type != "cpu" else fit.bytes_per_block + fit.cache_bytes_per_block
        count = usable_bytes(free_memory_bytes("cpu")) // (encoded + beside)
        if config.private_cache_gib is not None:
            count = min(count, int(config.private_cache_gib * 2**30) // encoded)
        return max(min(fit.blocks, count), 1)

    def require_memory(self, config: NodeConfig, span: Span, *, regained_bytes: int = 0) -> None:
        blocks, start = len(span), span.start
        cache_tokens = config.attn_cache_tokens or MIN_CACHE_TOKENS
        fit = self._find_fit(cache_tokens, regained_bytes)
        if fit.blocks < blocks:
            sizes = compute_block_bytes(self.checkpoint, self.dtype, self.quant_type)
            needed = sum(sizes[start : start + blocks]) + blocks * fit.cache_bytes_per_block
            raise InsufficientMemoryError(
                f"{blocks} blocks of {self.checkpoint.name} with {cache_tokens} tokens of cache "
                f"take {needed >> 20} MiB, {fit.free_bytes >> 20} MiB are free; {fit.blocks} "
                "blocks would fit: ask for fewer (--num-blocks), a smaller cache, a 16-bit "
                "--torch-dtype, --quant-type int8 or --cache-dtype int8"
            )

    def _find_fit(self, cache_tokens: int, regained_bytes: int = 0) -> MemoryFit:
        return fit_blocks(
            self.checkpoint,
            dtype=self.dtype,
            device=self.device,
            cache_tokens=cache_tokens,
            quant_type=self.quant_type,
            cache_dtype=self.cache_dtype,
            free_bytes=free_memory_bytes(self.device) + regained_bytes,
        )


def count_cache_tokens(config: NodeConfig, blocks: ModelBlocks) -> int:
    """Cache tokens to offer for a loaded span. Raises `InsufficientMemoryError`."""
    free = free_memory_bytes(blocks.device)
    per_token = blocks.cache_bytes_per_token
    if config.attn_cache_tokens is not None:
        if config.attn_cache_tokens * per_token > free:
            raise InsufficientMemoryError(
                f"--attn-cache-tokens {config.attn_cache_tokens} takes "
                f"{config.attn_cache_tokens * per_token >> 20} MiB and {free >> 20} MiB are free"
            )
        return config.attn_cache_tokens
    fitting = int(free * AUTO_CACHE_FRACTION) // per_token
    if fitting < MIN_CACHE_TOKENS:
        raise InsufficientMemoryError(
            f"{free >> 20} MiB are free, which holds {fitting} tokens of cache; "
            f"{MIN_CACHE_TOKENS} are the least: take fewer blocks (--num-blocks)"
        )
    return min(fitting, MAX_AUTO_CACHE_TOKENS)
