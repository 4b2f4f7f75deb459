"""Embedding and head of a model, which run in clients, and their loading.

L tokens, R rows of one token each, N ids, D hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nesa_node.core.errors import ContextLengthError, UnsupportedModelError
from nesa_node.core.settings.choices import QuantType
from nesa_node.engine.kernels.linear import FastLinear
from nesa_node.engine.kernels.quantized_linear import (
    BLOCK_SIZE,
    QuantizedLinear,
    quantize_matrix,
)
from nesa_node.engine.kernels.threads import ThreadController
from nesa_node.engine.model.splice import ModelEnds
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.engine.weights.files import Progress
from nesa_node.engine.weights.skeleton import Skeleton


class QuantizedEmbedding(nn.Module):
    """Embedding with the rows of a quantized matrix; what else it does remains."""

    def __init__(self, embedding: nn.Embedding, matrix_VD: QuantizedLinear) -> None:
        """`matrix_VD` may be the head, too. `embedding` need not be loaded."""
        super().__init__()
        self.matrix = matrix_VD
        self._template = _with_weight(embedding, None)

    @property
    def num_embeddings(self) -> int:
        return self.matrix.out_features

    def forward(self, ids: Tensor) -> Tensor:
        """Embed int64 ids [...]: hidden states [..., D] in the dtype of the matrix's inputs."""
        rows_ND = self.matrix.dequantize_rows(ids.flatten())
        places = torch.arange(len(rows_ND), device=ids.device).view(ids.shape)
        embeds: Tensor = _with_weight(self._template, rows_ND)(places)
        return embeds


def _with_weight(embedding: nn.Embedding, weight: Tensor | None) -> nn.Embedding:
    """A shallow copy: threads embed at once, each with its own rows."""
    twin = copy.copy(embedding)
    twin._parameters = {
        "weight": None if weight is None else nn.Parameter(weight, requires_grad=False)
    }
    twin.padding_idx = None  # an index of other rows; it concerns gradients alone
    return twin


class Embedder:
    """Embedding of token ids: the first block's input. `ModelFamily` says which modules exist."""

    def __init__(
        self,
        tokens: nn.Module,
        *,
        projection_in: nn.Module | None,
        positions: nn.Embedding | None,
        norm: nn.Module | None,
        context_length: int,
        ends: ModelEnds | None = None,
    ) -> None:
        """`ends` stands for all but `tokens`, where the model's own code has to run."""
        self.token_embedding = tokens
        """Without projection, positions or norm."""
        self.context_length = context_length
        self._projection_in, self._positions, self._norm = projection_in, positions, norm
        self._ends = ends
        if isinstance(tokens, QuantizedEmbedding):
            self.vocab_size, self.dtype = tokens.num_embeddings, tokens.matrix.input_dtype
        else:
            weight = next(tokens.parameters())
            self.vocab_size, self.dtype = len(weight), weight.dtype
        self.device = next(tokens.parameters()).device

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
        if self._positions is not None or self._ends is not None:
            places_L = torch.arange(position, end, device=self.device)
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
        return self._embed(ids_R, positions_R.to(self.device))

    @torch.no_grad()
    def embed_batch(self, ids_RL: Tensor, positions_RL: Tensor) -> Tensor:
        """Embed R sequences of L ids, for training: the result [R, L, D] may enter a graph.

        Raises as `__call__` does.
        """
        embeds_RLD = self.embed_tokens(ids_RL, positions_RL)
        return self.complete(embeds_RLD, positions_RL.to(self.device))

    @torch.no_grad()
    def embed_tokens(self, ids_RL: Tensor, positions_RL: Tensor) -> Tensor:
        """Token embeddings alone of R sequences of L ids, for `complete`.

        Raises as `__call__` does.
        """
        if int(positions_RL.max()) >= self.context_length:
            longest = int(positions_RL.max()) + 1
            raise ContextLengthError(f"{longest} tokens; the model holds {self.context_length}")
        self._check_ids(ids_RL.flatten())
        embeds_RLD: Tensor = self.token_embedding(ids_RL.to(self.device))
        return embeds_RLD

    def _check_ids(self, ids_L: Tensor) -> None:
        if len(ids_L) and not 0 <= int(ids_L.min()) <= int(ids_L.max()) < self.vocab_size:
            raise ValueError(f"token ids must be 0 to {self.vocab_size - 1}")

    def _embed(self, ids_L: Tensor, positions_L: Tensor | None) -> Tensor:
        return self.complete(self.token_embedding(ids_L.to(self.device)), positions_L)

    def complete(self, embeds_LD: Tensor, positions_L: Tensor | None) -> Tensor:
        """Make the first block's input [..., L, D] of token embeddings, as the family does.

        `positions_L` are on the model's device. In the caller's gradient mode.
        """
        if self._ends is not None:
            assert positions_L is not None
            places_L = positions_L.expand(embeds_LD.shape[:-1]).flatten()
            return self._ends.embed(embeds_LD.flatten(0, -2), places_L).view(embeds_LD.shape)
        hidden_LD = embeds_LD
        if self._projection_in is not None:
            hidden_LD = self._projection_in(hidden_LD)
        if self._positions is not None and positions_L is not None:
            places_L = positions_L + int(getattr(self._positions, "offset", 0))
            hidden_LD = hidden_LD + nn.functional.embedding(places_L, self._positions.weight)
        if self._norm is not None:
            hidden_LD = self._norm(hidden_LD)
        return hidden_LD


class Head:
    """Final norm and LM head: the last block's output to logits in the model's dtype."""

    def __init__(
        self,
        final: Sequence[nn.Module],
        lm_head: nn.Linear | QuantizedLinear,
        *,
        dtype: torch.dtype,
        softcap: float | None,
        ends: ModelEnds | None = None,
    ) -> None:
        """`dtype` is that of inputs.

        `ends` stands for `final` and `softcap`, where the model's own code has to run.
        """
        self._final_modules = tuple(final)
        self._dtype, self._device = dtype, next(lm_head.parameters()).device
        self._lm_head = FastLinear(lm_head) if isinstance(lm_head, nn.Linear) else lm_head
        self._softcap = softcap
        self._threads = ThreadController()
        self._ends = ends
        if ends is not None:
            ends.model.set_output_embeddings(self._lm_head)

    @property
    def lm_head(self) -> nn.Linear | QuantizedLinear:
        """The model's LM head module: normed hidden states to logits, before any soft cap."""
        return self._lm_head

    @property
    def vocab_size(self) -> int:
        return self._lm_head.out_features

    @torch.inference_mode()
    def apply_final_norm(self, hidden_LD: Tensor) -> Tensor:
        """Apply the final norm: transformers' `last_hidden_state` [L, D], in the model's dtype."""
        return self._norm(hidden_LD)

    def _norm(self, hidden_LD: Tensor) -> Tensor:
        hidden_LD = hidden_LD.to(device=self._device, dtype=self._dtype)
        if self._ends is not None:
            return self._ends.norm(hidden_LD)
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
        return self.logits_with_gradients(hidden_LD)

    def logits_with_gradients(self, hidden_LD: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., D], through which gradients reach the latter."""
        if self._ends is not None:
            hidden_ND = hidden_LD.to(device=self._device, dtype=self._dtype).flatten(0, -2)
            return self._ends.compute_logits(hidden_ND).view(*hidden_LD.shape[:-1], -1)
        logits_LV: Tensor = self._lm_head(self._norm(hidden_LD))
        if self._softcap is not None:
            logits_LV = torch.tanh(logits_LV / self._softcap) * self._softcap
        return logits_LV


def embedder_and_head_names(skeleton: Skeleton) -> list[str]:
    """Return the names of the tensors that `load_embedder_and_head` loads."""
    return [*_embedder_names(skeleton), *_head_names(skeleton)]


def _embedder_names(skeleton: Skeleton) -> list[str]:
    family = skeleton.family
    if family.tree is not None:
        layers, head = f"{family.layers_path}.", f"{family.head}."
        return [name for name in skeleton.tensor_names if not name.startswith((layers, head))]
    return skeleton.module_names(*(f"{family.decoder}.{name}" for name in family.input_modules))


def _head_names(skeleton: Skeleton) -> list[str]:
    family = skeleton.family
    if family.tree is not None:
        return skeleton.module_names(family.head)
    final = (f"{family.decoder}.{name}" for name in family.final_modules)
    return skeleton.module_names(*final, family.head)


def load_embedder_and_head(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    quant_type: QuantType = "none",
    progress: Progress | None = None,
) -> tuple[Embedder, Head]:
    """Load the embedding and the head; a tied weight is in memory once.

    Their matrices [V, D] are held as `quant_type` says. Raises as `load_blocks` does.
    """
    device = torch.device(device)
    skeleton = Skeleton(checkpoint)
    family, decoder = skeleton.family, skeleton.decoder
    ends = None if family.tree is None else ModelEnds(skeleton.model, family)
    own = getattr(decoder, family.embedding) if ends is None else skeleton.model
    skeleton.make_buffers(own, device)
    matrix = "" if quant_type == "none" else _find_embedding_matrix(skeleton)
    own_names = [name for name in _embedder_names(skeleton) if name != matrix]
    load = partial(skeleton.load, dtype=dtype, device=device, progress=progress)
    load(own_names, task="loading embeddings")
    load(_head_names(skeleton), task="loading the head", quant_type=quant_type)
    if matrix:
        _load_quantized_embedding(skeleton, matrix, quant_type, dtype, device)
    lm_head = skeleton.model.get_submodule(family.head)
    assert isinstance(lm_head, nn.Linear | QuantizedLinear)
    if ends is not None:
        skeleton.require_complete(skeleton.model)
        embedder = Embedder(
            skeleton.model.get_input_embeddings(),
            projection_in=None,
            positions=None,
            norm=None,
            context_length=checkpoint.context_length,
            ends=ends,
        )
        return embedder, Head((), lm_head, dtype=dtype, softcap=None, ends=ends)

    def find(name: str | None) -> Any:
        return None if name is None else getattr(decoder, name)

    embedder = Embedder(
        find(family.embedding),
        projection_in=find(family.projection_in),
        positions=find(family.positions),
        norm=find(family.embedding_norm),
        context_length=checkpoint.context_length,
    )
    final = [module for module in map(find, family.final_modules) if module is not None]
    softcap = getattr(checkpoint.config, "final_logit_softcapping", None)
    return embedder, Head(final, lm_head, dtype=dtype, softcap=softcap)


def _find_embedding_matrix(skeleton: Skeleton) -> str:
    """The name of the embedding's matrix [V, D]."""
    embedding = skeleton.model.get_input_embeddings()
    [path] = [path for path, module in skeleton.model.named_modules() if module is embedding]
    return f"{path}.weight"


def _load_quantized_embedding(
    skeleton: Skeleton,
    name: str,
    quant_type: QuantType,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Load the embedding's matrix `name` after the head, which may be the same."""
    embedding = skeleton.model.get_input_embeddings()
    if quant_type == "nf4" and embedding.embedding_dim % BLOCK_SIZE:
        raise UnsupportedModelError(
            f"nf4 holds weights in blocks of {BLOCK_SIZE}, and the embedding of "
            f"{skeleton.checkpoint.name} has rows of {embedding.embedding_dim}; use "
            "--client-quant-type int8"
        )
    head = skeleton.model.get_submodule(skeleton.family.head)
    if isinstance(head, QuantizedLinear) and skeleton.is_same_tensor(
        name, f"{skeleton.family.head}.weight"
    ):
        matrix_VD = head
    else:
        skeleton.checkpoint.fetch(skeleton.source_names([name]))
        weight_VD = skeleton.read_weight(name)
        matrix_VD = quantize_matrix(weight_VD, quant_type, dtype=dtype, device=device)
    path = name.removesuffix(".weight")
    quantized = QuantizedEmbedding(embedding, matrix_VD)
    skeleton.model.set_submodule(path, quantized, strict=True)
