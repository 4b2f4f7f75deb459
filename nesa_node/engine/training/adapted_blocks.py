"""A span's blocks with PEFT's adapters in them, trained on the weights that are served.

Serving runs fused layers without autograd; here the same span is transformers' own decoder, whose
layers hold the served weights in place of their own, so that a span is in memory once. Where the
weights themselves are trained, it has a copy of its own.

R sequences, L tokens of each, D hidden.
"""

from __future__ import annotations

import copy
import math
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nesa_node.core.errors import ConfigError
from nesa_node.core.ids import Span
from nesa_node.engine.kernels.quantized_experts import QuantizedExperts
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.loading import detach_span
from nesa_node.engine.model.splice import run_decoder, slice_decoder
from nesa_node.engine.training.adapters import (
    BlockAdapter,
    BottleneckConfig,
    DeepPromptConfig,
    FullConfig,
    require_supported,
)
from nesa_node.engine.training.training_spec import TrainingSpec
from nesa_node.engine.training.training_state import Partition
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.engine.weights.families import ModelFamily
from nesa_node.engine.weights.model_tree import initializer_lock
from nesa_node.engine.weights.skeleton import Skeleton

if TYPE_CHECKING:
    from peft import PeftConfig

    from nesa_node.engine.training.training_spec import AdapterConfig

    _Adapter = PeftConfig | BottleneckConfig | DeepPromptConfig

_random_numbers = threading.Lock()
"""Held while numbers are drawn from a seed: all threads of a process share torch's generator."""
_SEEDS = 1 << 63
_ADAPTER = "default"
_SEED_STEP = 0x9E3779B97F4A7C15
"""Distance of the seeds of two blocks."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What a span's forward needs beside hidden states, and computes again for the backward."""

    seed: int
    """Of dropout, from 0 to 2**63 - 1. The same seed gives the same result on any cut."""
    mask_RL: Tensor | None = None
    """1 for tokens and 0 for padding; None without padding."""
    positions_RL: Tensor | None = None
    """Position of each token; None for 0, 1, 2, ... Of one sequence, positions that begin again
    separate the texts that are packed into it."""

    def count_text_tokens(self) -> list[int]:
        """Tokens of each text that is packed into one sequence; empty where there is no packing."""
        if self.positions_RL is None or len(self.positions_RL) > 1:
            return []
        starts = (self.positions_RL[0] == 0).nonzero().flatten().tolist()
        return [end - start for start, end in pairwise([*starts, self.positions_RL.shape[1]])]


class AdaptedBlocks:
    """A span's blocks with trainable adapters, or weights, run one block at a time.

    Not thread-safe: one thread owns it.
    """

    def __init__(
        self,
        served: ModelBlocks,
        checkpoint: Checkpoint,
        config: AdapterConfig | None,
        *,
        seed: int,
        partition: Partition | None = None,
    ) -> None:
        """Initialize the adapters of `served.span` as PEFT does for the whole model; None: none.

        They have the values, in float32, that PEFT gives them after `torch.manual_seed(seed)`,
        whichever span they belong to. A `FullConfig` reads the checkpoint's weights once more.
        Raises `ConfigError` for a config that PEFT refuses for this model, or that is not
        supported, and what `Skeleton.load` raises. Of weights that are divided, a node reads those
        of its `partition` alone.
        """
        self.span = served.span
        self.device, self.dtype = served.device, served.dtype
        if isinstance(config, FullConfig):
            self.dtype = config.torch_dtype
        self.hidden_size = served.hidden_size
        self.parameters: dict[str, nn.Parameter] = {}
        """Trainable parameters, by the names of PEFT's files where PEFT has such adapters; weights
        by transformers' names."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Of the parameters, also of those that are not read here."""
        self._decoders: dict[int, Any] = {}
        self._edges: dict[int, BlockAdapter] = {}
        skeleton = Skeleton(checkpoint)
        family = skeleton.family
        self._family = family
        self._separates_texts = family.separates_texts
        decoder = detach_span(skeleton, self.span, dtype=self.dtype, device=self.device)
        for name, child in decoder.named_children():
            if isinstance(child, nn.Dropout):  # of embeddings, which the client has
                decoder._modules[name] = nn.Identity()
        layers = dict(enumerate(_layers(decoder, family), self.span.start))
        if isinstance(config, FullConfig):
            self._load_weights(skeleton, partition or Partition())
        else:
            self._put_adapters(skeleton, layers, served, config, seed)
        skeleton.require_complete(decoder)
        for local, index in enumerate(layers):
            self._decoders[index] = slice_decoder(
                decoder, family.layers_name, Span(local, local + 1)
            )

    def _load_weights(self, skeleton: Skeleton, partition: Partition) -> None:
        """Read the weights to train, and leave those empty that other replicas have."""
        self.shapes = _find_weight_shapes(skeleton, self.span)
        owned = partition.select(self.shapes)
        for name in skeleton.block_names(self.span):
            skeleton.load([name], dtype=self.dtype, device=self.device, task="weights to train")
            if name in self.shapes:
                value = skeleton.model.get_parameter(name).requires_grad_(True)
                self.parameters[name] = value
                if partition.divides_parameters and name not in owned:
                    value.data = value.data.new_empty(0)

    def _put_adapters(
        self,
        skeleton: Skeleton,
        layers: Mapping[int, nn.Module],
        served: ModelBlocks,
        config: _Adapter | None,
        seed: int,
    ) -> None:
        """Make the adapters, and put the served weights beside them."""
        if isinstance(config, BottleneckConfig | DeepPromptConfig):
            for index in layers:
                with initializing(_block_seed(seed, index)):
                    self._edges[index] = config.make_module(served.hidden_size).to(self.device)
        elif config is not None:
            require_supported(config)
            for layer in layers.values():
                _put_placeholders(layer, self.dtype, self.device)
            _inject(skeleton, config, seed)
        for layer, parts in zip(layers.values(), served.split_layers(), strict=True):
            for path, part in parts.items():
                _put(layer, path, part)
        for index, layer in layers.items():
            path, module = f"{skeleton.family.layers_path}.{index}", layer
            if edge := self._edges.get(index):
                path, module = f"{path}.{edge.title}", edge
            for name, value in module.named_parameters():
                if value.requires_grad:
                    value.data = value.data.float()
                    self.parameters[_peft_name(path, name)] = value
                    self.shapes[_peft_name(path, name)] = tuple(value.shape)

    @property
    def indexes(self) -> range:
        return range(self.span.start, self.span.end)

    def run_block(
        self, index: int, hidden_RLD: Tensor, batch: MicroBatch, *, dropout: bool = True
    ) -> Tensor:
        """Run block `index` of the model on its input [R, L, D], in the caller's gradient mode.

        Dropout draws from a seed of its own: a second run gives the same result. The random
        numbers of the process are left as they are.
        """
        edge = self._edges.get(index)
        decoder = self._decoders[index]
        if decoder.training != dropout:
            decoder.train(dropout)
        devices = [self.device] if self.device.type == "cuda" else []
        with _random_numbers, torch.random.fork_rng(devices):
            torch.manual_seed(_block_seed(batch.seed, index))
            positions_RL = self._positions(hidden_RLD, batch)
            if edge is not None:
                hidden_RLD = edge.change_input(hidden_RLD, positions_RL)
            mask_RL = None if batch.mask_RL is None else batch.mask_RL.to(self.device)
            sizes = [] if self._separates_texts else batch.count_text_tokens()
            if len(sizes) > 1:
                texts = torch.split(hidden_RLD, sizes, 1)
                places = torch.split(positions_RL, sizes, 1)
                outputs = map(partial(self._run_decoder, decoder), texts, places)
                output_RLD = torch.cat(list(outputs), 1)
            else:
                output_RLD = self._run_decoder(decoder, hidden_RLD, positions_RL, mask_RL)
            return output_RLD if edge is None else edge.change_output(output_RLD)

    def _positions(self, hidden_RLD: Tensor, batch: MicroBatch) -> Tensor:
        if batch.positions_RL is not None:
            return batch.positions_RL.to(self.device)
        return torch.arange(hidden_RLD.shape[1], device=self.device).unsqueeze(0)

    def _run_decoder(
        self,
        decoder: Any,
        hidden_RLD: Tensor,
        positions_RL: Tensor,
        mask_RL: Tensor | None = None,
    ) -> Tensor:
        return run_decoder(
            decoder,
            self._family,
            hidden_RLD,
            attention_mask=mask_RL,
            position_ids=positions_RL,
            use_cache=False,
        )


def find_served_modules(checkpoint: Checkpoint) -> list[str] | None:
    """Names of a mixture's layers that nodes serve adapters of: all but its experts and router.

    None where they serve those of all linear layers.
    """
    skeleton = Skeleton(checkpoint)
    block: nn.Module = skeleton.model.get_submodule(f"{skeleton.family.layers_path}.0")
    matrices = [value for value in block.parameters() if value.ndim > 1]
    if all(value.ndim == 2 for value in matrices):  # experts' are stacked
        return None
    names = [name for name, each in block.named_modules() if isinstance(each, nn.Linear)]
    return sorted(name.rpartition(".")[2] for name in names)


def find_adapter_shapes(
    checkpoint: Checkpoint, config: AdapterConfig | None, span: Span
) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters that `AdaptedBlocks` has for `span`, without its weights.

    Raises `ConfigError` as `AdaptedBlocks` does.
    """
    if config is None:
        return {}
    skeleton = Skeleton(checkpoint)
    found: dict[str, tuple[int, ...]] = {}
    model: nn.Module = skeleton.model
    if isinstance(config, FullConfig):
        return _find_weight_shapes(skeleton, span)
    if not isinstance(config, BottleneckConfig | DeepPromptConfig):
        require_supported(config)
        _inject(skeleton, config, 0)
    for index in range(span.start, span.end):
        path = f"{skeleton.family.layers_path}.{index}"
        module = model.get_submodule(path)
        if isinstance(config, BottleneckConfig | DeepPromptConfig):
            with torch.device("meta"):
                edge = config.make_module(int(checkpoint.config.hidden_size))
            path, module = f"{path}.{edge.title}", edge
        for name, value in module.named_parameters():
            if value.requires_grad:
                found[_peft_name(path, name)] = tuple(value.shape)
    return found


def _find_weight_shapes(skeleton: Skeleton, span: Span) -> dict[str, tuple[int, ...]]:
    paths = [f"{skeleton.family.layers_path}.{index}" for index in range(span.start, span.end)]
    return {
        f"{path}.{name}": tuple(value.shape)
        for path in paths
        for name, value in skeleton.model.get_submodule(path).named_parameters()
    }


def count_adapter_values(served: ModelBlocks, spec: TrainingSpec) -> int:
    """Upper bound of the numbers that the adapters of a span have, before they take memory."""
    if spec.bottleneck is not None:
        size = spec.bottleneck.size
        return served.num_blocks * (2 * (size + 2) * served.hidden_size + size)
    if spec.deep_prompt is not None:
        return served.num_blocks * spec.deep_prompt.num_virtual_tokens * served.hidden_size
    if spec.full is not None:
        return sum(
            _count_weights(part) for layer in served.split_layers() for part in layer.values()
        )
    if spec.lora is None and spec.ia3 is None:
        return 0
    rank = 1 if spec.lora is None else spec.lora.max_rank
    return rank * sum(
        _count_features(part) for layer in served.split_layers() for part in layer.values()
    )


def _count_weights(part: nn.Module | Tensor) -> int:
    if isinstance(part, Tensor):
        return part.numel()
    if isinstance(part, QuantizedExperts):
        return part.count_weights()
    linear: Any = part
    bias = 0 if linear.bias is None else linear.out_features
    return int(linear.in_features * linear.out_features + bias)


def _count_features(part: nn.Module | Tensor) -> int:
    """Inputs and outputs of what can have an adapter: a linear layer, each of stacked matrices."""
    if isinstance(part, Tensor):
        shape = tuple(part.shape)
        return math.prod(shape[:-2]) * sum(shape[-2:]) if len(shape) > 1 else 0
    if isinstance(part, QuantizedExperts):
        return 0  # `_put` refuses adapters of them
    linear: Any = part
    return int(linear.in_features + linear.out_features)


def _layers(decoder: Any, family: ModelFamily) -> Iterable[nn.Module]:
    layers: nn.ModuleList = getattr(decoder, family.layers_name)
    return layers


def _peft_name(path: str, name: str) -> str:
    """Name in PEFT's files of parameter `name` of the module at `path`."""
    return f"base_model.model.{path}.{name.replace(f'.{_ADAPTER}', '')}"


def _block_seed(seed: int, index: int) -> int:
    return (seed + _SEED_STEP * (index + 1)) % _SEEDS


@contextmanager
def initializing(seed: int) -> Iterator[None]:
    """Let torch's initializers draw from `seed`, and leave the process's random numbers alone."""
    with initializer_lock, _random_numbers, torch.random.fork_rng([]):
        torch.manual_seed(seed)
        yield


def _inject(skeleton: Skeleton, config: PeftConfig, seed: int) -> None:
    from peft import inject_adapter_in_model

    with initializing(seed), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what PEFT changes in the config to fit the model
        try:
            inject_adapter_in_model(copy.deepcopy(config), skeleton.model, _ADAPTER)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"PEFT refuses this adapter: {error}") from error


def _put_placeholders(layer: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give parameters values without memory: PEFT reads their shape, dtype and device."""
    for module in layer.modules():
        for name, value in module._parameters.items():
            if value is not None:
                empty = torch.empty((), dtype=dtype, device=device).expand(value.shape)
                module._parameters[name] = nn.Parameter(empty, requires_grad=False)


def _put(layer: nn.Module, path: str, part: nn.Module | Tensor) -> None:
    """Put a served module or weight at `path`, below the adapter that PEFT has put there.

    Raises `ConfigError` for an adapter of quantized experts.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    *names, leaf = path.split(".")
    parent: Any = layer
    for name in names:
        parent = getattr(parent, name)
        if isinstance(parent, BaseTunerLayer):
            parent = parent.get_base_layer()
    if isinstance(part, Tensor):
        if leaf in parent._parameters:
            parent._parameters[leaf] = nn.Parameter(part.detach(), requires_grad=False)
        else:
            parent._buffers[leaf] = part
        return
    if isinstance(getattr(parent, leaf), BaseTunerLayer):
        if isinstance(part, QuantizedExperts):
            raise ConfigError(
                f"this node holds a mixture's experts ({path}) in fewer bits, of which no adapter "
                "is trained: leave them out of --target-modules, or use nodes without --quant-type"
            )
        parent, leaf = getattr(parent, leaf), "base_layer"
    setattr(parent, leaf, part)
