"""Loaders of a model's parts: a span of blocks, the embedding, the head.

L tokens, R rows of one token each, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

from nesa_node.core.errors import ContextLengthError
from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import QuantType
from nesa_node.engine.cache.paged_attention import ATTENTION_NAME as PAGED_ATTENTION
from nesa_node.engine.kernels.linear import (
    FastLinear,
    iterate_modules,
    load_gemv,
    replace_linear_layers,
)
from nesa_node.engine.kernels.threads import ThreadController
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.fused_decoder import FusedDecoder
from nesa_node.engine.model.splice import AbsentModule, ModelEnds, slice_decoder
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.engine.weights.files import Progress
from nesa_node.engine.weights.skeleton import EmptyModel, Skeleton


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
        self._weight = next(tokens.parameters())

    @property
    def vocab_size(self) -> int:
        return int(self._weight.shape[0])

    @property
    def dtype(self) -> torch.dtype:
        return self._weight.dtype

    @property
    def device(self) -> torch.device:
        return self._weight.device

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

    @torch.no_grad()
    def embed_batch(self, ids_RL: Tensor, positions_RL: Tensor) -> Tensor:
        """Embed R sequences of L ids, for training: the result [R, L, D] may enter a graph.

        Raises as `__call__` does.
        """
        embeds_RLD = self.embed_tokens(ids_RL, positions_RL)
        return self.complete(embeds_RLD, positions_RL.to(self._weight.device))

    @torch.no_grad()
    def embed_tokens(self, ids_RL: Tensor, positions_RL: Tensor) -> Tensor:
        """Token embeddings alone of R sequences of L ids, for `complete`.

        Raises as `__call__` does.
        """
        if int(positions_RL.max()) >= self.context_length:
            longest = int(positions_RL.max()) + 1
            raise ContextLengthError(f"{longest} tokens; the model holds {self.context_length}")
        self._check_ids(ids_RL.flatten())
        embeds_RLD: Tensor = self.token_embedding(ids_RL.to(self._weight.device))
        return embeds_RLD

    def _check_ids(self, ids_L: Tensor) -> None:
        if len(ids_L) and not 0 <= int(ids_L.min()) <= int(ids_L.max()) < self.vocab_size:
            raise ValueError(f"token ids must be 0 to {self.vocab_size - 1}")

    def _embed(self, ids_L: Tensor, positions_L: Tensor | None) -> Tensor:
        return self.complete(self.token_embedding(ids_L.to(self._weight.device)), positions_L)

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
        lm_head: nn.Linear,
        *,
        softcap: float | None,
        ends: ModelEnds | None = None,
    ) -> None:
        """`ends` stands for `final` and `softcap`, where the model's own code has to run."""
        self._final_modules = tuple(final)
        self._dtype, self._device = lm_head.weight.dtype, lm_head.weight.device
        self._lm_head = FastLinear(lm_head)
        self._softcap = softcap
        self._threads = ThreadController()
        self._ends = ends
        if ends is not None:
            ends.model.set_output_embeddings(self._lm_head)

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


class _ZeroPositions(nn.Module):
    """Stand-in for learned positions in a decoder: zero, since the embedder has added them."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._zero = torch.zeros((), dtype=dtype, device=device)

    def forward(self, *_: object, **__: object) -> Tensor:
        return self._zero


def load_blocks(
    checkpoint: Checkpoint,
    span: Span,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    quant_type: QuantType = "none",
    progress: Progress | None = None,
) -> ModelBlocks:
    """Load the tensors of blocks `span` of a model. Blocks the thread.

    Linear layers are held as `quant_type` says, everything else in `dtype`, which is also that of
    activations. Peak memory is the span's plus that of the largest tensor, as stored in the
    checkpoint. Raises `CorruptCheckpointError` (a tensor is missing or misshapen), what
    `Checkpoint.fetch` raises, `UnsupportedModelError` for weights that cannot be quantized so, and
    `ValueError` for a span that is empty or outside the model.
    """
    if not len(span) or span.end > checkpoint.num_blocks:
        raise ValueError(f"{checkpoint.name} has blocks 0:{checkpoint.num_blocks}, not {span}")
    device = torch.device(device)
    if device.type == "cpu" and quant_type == "none":
        # Compile while this thread reads the weights; the result is cached for `Linear`.
        Thread(target=load_gemv, args=(dtype,), daemon=True).start()
    skeleton = Skeleton(checkpoint)
    decoder = detach_served_span(skeleton, span, dtype=dtype, device=device)
    skeleton.load(
        skeleton.block_names(span),
        dtype=dtype,
        device=device,
        task=f"loading blocks {span}",
        quant_type=quant_type,
        progress=progress,
    )
    return finish_blocks(skeleton, decoder, span, dtype=dtype, device=device)


def finish_blocks(
    model: EmptyModel, decoder: Any, span: Span, *, dtype: torch.dtype, device: torch.device
) -> ModelBlocks:
    """Blocks of a `detach_served_span` decoder, all of whose weights are loaded."""
    model.require_complete(decoder)
    weight_bytes = _count_bytes(decoder)
    if model.family.has_llama_layers:
        decoder = FusedDecoder(decoder, model.checkpoint.context_length)
    replace_linear_layers(decoder)
    return ModelBlocks(
        decoder, model.checkpoint, span, weight_bytes=weight_bytes, dtype=dtype, device=device
    )


def _count_bytes(root: nn.Module) -> int:
    weights = {
        id(weight): weight.nbytes
        for module in iterate_modules(root)
        for weight in module._parameters.values()
        if weight is not None
    }
    return sum(weights.values())


def load_blocks_without_linear_layers(
    checkpoint: Checkpoint,
    span: Span,
    replace: Callable[[str, nn.Module], nn.Module],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> ModelBlocks:
    """Load blocks `span` with other modules for their linear layers, whose weights are not read.

    `replace(path, layer)` makes the module at `path`; a bias that it has is loaded. Raises as
    `load_blocks` does.
    """
    device = torch.device(device)
    skeleton = Skeleton(checkpoint)
    names = []
    for name in skeleton.block_names(span):
        if (layer := skeleton.find_linear_layer(name)) is None:
            names.append(name)
        else:
            path = name.removesuffix(".weight")
            skeleton.model.set_submodule(path, replace(path, layer), strict=True)
    decoder = detach_served_span(skeleton, span, dtype=dtype, device=device)
    skeleton.load(names, dtype=dtype, device=device, task=f"loading blocks {span}")
    skeleton.require_complete(decoder)
    weight_bytes = _count_bytes(decoder)
    return ModelBlocks(
        decoder, checkpoint, span, weight_bytes=weight_bytes, dtype=dtype, device=device
    )


def detach_served_span(
    model: EmptyModel, span: Span, *, dtype: torch.dtype, device: torch.device
) -> Any:
    """`detach_span` with attention over pages, where rows can be packed."""
    if model.family.packs_rows:
        model.model.config._attn_implementation = PAGED_ATTENTION
    return detach_span(model, span, dtype=dtype, device=device)


def detach_span(model: EmptyModel, span: Span, *, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a decoder of the blocks `span`, without what comes before and after them.

    It takes `inputs_embeds` and returns the last block's raw output. Buffers that no checkpoint
    holds are made; weights are missing yet, and those that are loaded into `model` are its.
    """
    family = model.family
    decoder: Any = slice_decoder(model.decoder, family.layers_name, span)
    if family.tree is not None:
        absent = AbsentModule(int(decoder.config.hidden_size), dtype=dtype, device=device)
        for name in list(decoder._modules):
            # Tables of rotary frequencies are for layers; everything else is before or after them.
            if name != family.layers_name and "rotary" not in name and "rope" not in name:
                decoder._modules[name] = absent
        model.make_buffers(decoder, device)
        return decoder
    for name in (family.embedding, family.projection_in):
        if name is not None:
            decoder._modules[name] = None
    if family.positions is not None:
        decoder._modules[family.positions] = _ZeroPositions(dtype, device)
    if family.embedding_norm is not None:
        decoder._modules[family.embedding_norm] = nn.Identity()
    for name in family.final_modules:
        if decoder._modules.get(name) is not None:
            decoder._modules[name] = nn.Identity()
    model.make_buffers(decoder, device)
    return decoder


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
    progress: Progress | None = None,
) -> tuple[Embedder, Head]:
    """Load the embedding and the head; a tied weight is in memory once.

    Raises as `load_blocks` does.
    """
    device = torch.device(device)
    skeleton = Skeleton(checkpoint)
    family, decoder = skeleton.family, skeleton.decoder
    ends = None if family.tree is None else ModelEnds(skeleton.model, family)
    own = getattr(decoder, family.embedding) if ends is None else skeleton.model
    skeleton.make_buffers(own, device)
    for names, task in (
        (_embedder_names(skeleton), "loading embeddings"),
        (_head_names(skeleton), "loading the head"),
    ):
        skeleton.load(names, dtype=dtype, device=device, task=task, progress=progress)
    lm_head = skeleton.model.get_submodule(family.head)
    assert isinstance(lm_head, nn.Linear)
    if ends is not None:
        skeleton.require_complete(skeleton.model)
        tokens = skeleton.model.get_input_embeddings()
        return _ends_as_parts(ends, tokens, lm_head, checkpoint.context_length)

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
    return embedder, Head(final, lm_head, softcap=softcap)


def _ends_as_parts(
    ends: ModelEnds, tokens: nn.Module, lm_head: nn.Linear, context_length: int
) -> tuple[Embedder, Head]:
    embedder = Embedder(
        tokens,
        projection_in=None,
        positions=None,
        norm=None,
        context_length=context_length,
        ends=ends,
    )
    return embedder, Head((), lm_head, softcap=None, ends=ends)
