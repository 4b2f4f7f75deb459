"""Embedding and head of a model: token ids to hidden states, and hidden states to logits.

L tokens, R rows of one token each, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nesa_node.core.errors import ContextLengthError
from nesa_node.engine.kernels.linear import FastLinear
from nesa_node.engine.kernels.threads import ThreadController


@dataclass(frozen=True, slots=True)
class EmbeddingModules:
    """Modules of a model's input side. `ModelFamily` says which exist, and their order."""

    tokens: nn.Module
    projection_in: nn.Module | None
    positions: nn.Embedding | None
    norm: nn.Module | None


class Embedder:
    """Embedding of token ids: the first block's input."""

    def __init__(self, modules: EmbeddingModules, *, context_length: int) -> None:
        self.context_length = context_length
        self._modules = modules
        self._weight = next(modules.tokens.parameters())

    @property
    def token_embedding(self) -> nn.Module:
        """The model's token embedding module, without projection, positions or norm."""
        return self._modules.tokens

    @property
    def vocab_size(self) -> int:
        return int(self._weight.shape[0])

    @property
    def dtype(self) -> torch.dtype:
        return self._weight.dtype

    @torch.inference_mode()
    def __call__(self, ids_L: Tensor, position: int) -> Tensor:
        """Embed int64 ids at positions `position` to `position + L` of their sequence.

        Returns hidden_LD in the model's dtype and on its device. Raises `ContextLengthError`, and
        `ValueError` for ids outside the vocabulary.
        """
        end = position + len(ids_L)
        if not 0 <= position <= end <= self.context_length:
            raise ContextLengthError(f"{end} tokens; the model holds {self.context_length}")
        self._check_ids(ids_L)
        places_L = None
        if self._modules.positions is not None:
            places_L = torch.arange(position, end, device=self._weight.device)
        return self._embed(ids_L, places_L)

    @torch.inference_mode()
    def embed_rows(self, ids_R: Tensor, positions_R: Tensor) -> Tensor:
        """Embed one id of each of R sequences at its own position (both int64).

        Returns hidden_RD in the model's dtype and on its device. Raises as `__call__` does.
        """
        if int(positions_R.max()) >= self.context_length:
            longest = int(positions_R.max()) + 1
            raise ContextLengthError(f"{longest} tokens; the model holds {self.context_length}")
        self._check_ids(ids_R)
        return self._embed(ids_R, positions_R.to(self._weight.device))

    def _check_ids(self, ids_L: Tensor) -> None:
        if len(ids_L) and not 0 <= int(ids_L.min()) <= int(ids_L.max()) < self.vocab_size:
            raise ValueError(f"token ids must be 0 to {self.vocab_size - 1}")

    def _embed(self, ids_L: Tensor, positions_L: Tensor | None) -> Tensor:
        modules = self._modules
        hidden_LD: Tensor = modules.tokens(ids_L.to(self._weight.device))
        if modules.projection_in is not None:
            hidden_LD = modules.projection_in(hidden_LD)
        if modules.positions is not None and positions_L is not None:
            places_L = positions_L + int(getattr(modules.positions, "offset", 0))
            hidden_LD = hidden_LD + nn.functional.embedding(places_L, modules.positions.weight)
        if modules.norm is not None:
            hidden_LD = modules.norm(hidden_LD)
        return hidden_LD


class Head:
    """Final norm and LM head: the last block's output to logits in the model's dtype."""

    def __init__(
        self,
        final: Sequence[nn.Module],
        lm_head: nn.Linear,
        *,
        softcap: float | None,
    ) -> None:
        self._final_modules = tuple(final)
        self._dtype, self._device = lm_head.weight.dtype, lm_head.weight.device
        self._lm_head = FastLinear(lm_head)
        self._softcap = softcap
        self._threads = ThreadController()

    @property
    def lm_head(self) -> nn.Linear:
        """The model's LM head module: normed hidden states to logits, before any soft cap."""
        return self._lm_head

    @property
    def vocab_size(self) -> int:
        return self._lm_head.out_features

    @torch.inference_mode()
    def apply_final_norm(self, hidden_LD: Tensor) -> Tensor:
        """Apply the final norm: transformers' `last_hidden_state` [L, D], in the model's dtype."""
        hidden_LD = hidden_LD.to(device=self._device, dtype=self._dtype)
        for module in self._final_modules:
            hidden_LD = module(hidden_LD)
        return hidden_LD

    def __call__(self, hidden_LD: Tensor) -> Tensor:
        if self._device.type != "cpu":
            return self._compute_logits(hidden_LD)
        # For a large vocabulary, the head takes as long as many blocks.
        return self._threads.run(lambda: self._compute_logits(hidden_LD), len(hidden_LD))

    @torch.inference_mode()
    def _compute_logits(self, hidden_LD: Tensor) -> Tensor:
        logits_LV: Tensor = self._lm_head(self.apply_final_norm(hidden_LD))
        if self._softcap is not None:
            logits_LV = torch.tanh(logits_LV / self._softcap) * self._softcap
        return logits_LV
