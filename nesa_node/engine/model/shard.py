"""A shard: some of a model's blocks without their names, place, or the rest of the model.

Its config is that of a model which has these blocks only, and no vocabulary; its weights are sent
as bytes, those of each block in the order of the layer's parameters.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from nesa_node.core.errors import ProtocolError, UnsupportedModelError
from nesa_node.core.ids import Span
from nesa_node.engine.kernels.linear import iterate_modules, load_gemv
from nesa_node.engine.kernels.machine_code import copy_to_huge_pages
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.loading import detach_served_span, finish_blocks
from nesa_node.engine.weights.checkpoint import Checkpoint, LocalCheckpoint
from nesa_node.engine.weights.families import FAMILIES, read_config_text
from nesa_node.engine.weights.skeleton import EmptyModel, Skeleton, assign

_VOCABULARY = 8
"""Tokens of the model that a shard's config describes: it has no embedding and no head."""
_NEUTRAL = {
    "final_logit_softcapping": None,
    "tie_word_embeddings": False,
    "_remove_final_layer_norm": False,
}
"""Settings of what follows the blocks, of which a shard has nothing."""
_SECRET_KEYS = (
    *("_name_or_path", "architectures", "transformers_version", "torch_dtype", "dtype"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_first_dropout"),
    *(
        "summary_proj_to_labels",
        "id2label",
        "label2id",
        "task_specific_params",
        "auto_map",
        "tokenizer_class",
    ),
)


def make_shard_config(checkpoint: Checkpoint, span: Span) -> bytes:
    """JSON of a config with the blocks `span` only. It tells what a layer is, and of no other one.

    Raises `UnsupportedModelError` for a model whose layers compute with their place, or may do so.
    """
    config: Any = copy.deepcopy(checkpoint.config)
    if checkpoint.family.tree is not None:
        raise UnsupportedModelError(
            f"{checkpoint.name} is a {config.model_type}, whose layers may compute with their "
            f"place, which a shard hides; those of {', '.join(FAMILIES)} do not"
        )
    if getattr(config, "scale_attn_by_inverse_layer_idx", False):
        raise UnsupportedModelError(
            f"{checkpoint.name} scales attention by the place of a layer, which a shard hides"
        )
    types = getattr(config, "layer_types", None)
    config.num_hidden_layers = len(span)
    if types is not None:
        config.layer_types = list(types)[span.start : span.end]
    config.vocab_size = _VOCABULARY
    for key, value in _NEUTRAL.items():
        if hasattr(config, key):
            setattr(config, key, value)
    if hasattr(config, "word_embed_proj_dim"):
        config.word_embed_proj_dim = config.hidden_size
    config.pad_token_id = config.bos_token_id = config.eos_token_id = 0
    known = type(config)().to_dict().keys() - _SECRET_KEYS
    raw = {key: value for key, value in config.to_dict().items() if key in known | {"model_type"}}
    if "max_window_layers" in raw:
        raw["max_window_layers"] = len(span)
    return msgspec.json.encode(raw)


def hash_layout(layer: nn.Module) -> bytes:
    """SHA-256 of the names and shapes of a layer's tensors: 32 bytes."""
    listed = [[name, *tensor.shape] for name, tensor in layer.state_dict().items()]
    return hashlib.sha256(msgspec.json.encode(listed)).digest()


def read_shard(skeleton: Skeleton, span: Span, dtype: torch.dtype) -> Iterator[Tensor]:
    """The weights of blocks `span` on the CPU, in the order in which they are sent.

    Raises what `Checkpoint.fetch` and `Skeleton.read_weight` raise.
    """
    names = skeleton.block_names(span)
    skeleton.checkpoint.fetch(skeleton.source_names(names))
    for name in names:
        yield skeleton.read_weight(name).to(dtype).contiguous()


class ShardLoader:
    """Makes blocks of what a model's owner sends."""

    def __init__(self, config: bytes, blocks: int, *, dtype: torch.dtype, device: torch.device):
        """Takes no memory for weights yet. Raises `ModelError` for a config that is not served, and
        whatever transformers does for one that it cannot make a model of.
        """
        if device.type == "cpu":
            # Compile while the weights arrive; the result is cached for `Linear`.
            Thread(target=load_gemv, args=(dtype,), daemon=True).start()
        parsed = read_config_text(config, name="a shard")
        if parsed.model_type not in FAMILIES:
            raise UnsupportedModelError(f"shards of {parsed.model_type} models are not held")
        self.checkpoint = LocalCheckpoint("a shard", Path(), parsed, {})
        if self.checkpoint.num_blocks != blocks:
            raise UnsupportedModelError(
                f"a shard of {blocks} blocks has a config of {self.checkpoint.num_blocks}"
            )
        self._span = Span(0, blocks)
        self._dtype, self._device = dtype, device
        # Names of tensors tell their place: here none has more than its name within a layer.
        self._model = EmptyModel(self.checkpoint)
        layers = list(getattr(self._model.decoder, self._model.family.layers_name))
        self.layout = hash_layout(layers[0])
        self._missing = [
            (layer, name, tensor.shape)
            for layer in layers
            for name, tensor in layer.state_dict().items()
        ]
        self.nbytes = sum(shape.numel() for *_, shape in self._missing) * dtype.itemsize
        """Of all weights."""
        buffers = [
            buffer
            for module in iterate_modules(self._model.decoder)
            for buffer in module._buffers.values()
            if buffer is not None
        ]
        self.buffer_bytes = sum(buffer.numel() * buffer.itemsize for buffer in buffers)
        """Of what is computed by the config."""
        heads = self.checkpoint.family.list_cache_heads(self.checkpoint.config)
        self.cache_bytes_per_token = sum(each.bytes_per_token(dtype) for each in heads)

    def begin(self) -> None:
        """Take memory for what is not sent, and for the first tensor."""
        self._decoder = detach_served_span(
            self._model, self._span, dtype=self._dtype, device=self._device
        )
        self._tensor = self._next_tensor()
        self._filled = 0

    def add(self, data: bytes | bytearray) -> None:
        """Take the next bytes. Raises `ProtocolError` for more than there are."""
        view = memoryview(data)
        while len(view):
            if self._tensor is None:
                raise ProtocolError("bad_shard", "more bytes came than the weights have")
            target = self._tensor.reshape(-1).view(torch.uint8).numpy()
            count = min(len(view), len(target) - self._filled)
            target[self._filled : self._filled + count] = memoryview(view[:count])
            view, self._filled = view[count:], self._filled + count
            if self._filled == len(target):
                self._assign(self._tensor)
                self._tensor, self._filled = self._next_tensor(), 0

    def _assign(self, tensor: Tensor) -> None:
        layer, name, _ = self._missing.pop(0)
        assign(layer, name, copy_to_huge_pages(tensor.to(self._device)))

    def _next_tensor(self) -> Tensor | None:
        return torch.empty(self._missing[0][2], dtype=self._dtype) if self._missing else None

    def finish(self) -> ModelBlocks:
        """The blocks, once all weights came. Raises `ProtocolError` before."""
        if self._tensor is not None:
            raise ProtocolError("bad_shard", "weights are missing")
        return finish_blocks(
            self._model, self._decoder, self._span, dtype=self._dtype, device=self._device
        )
