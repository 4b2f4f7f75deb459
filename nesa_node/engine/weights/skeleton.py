"""A model without weights, and the mapping of a checkpoint's tensors to its parameters.

R rows, C columns.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from nesa_node.core.errors import CorruptCheckpointError, UnsupportedModelError
from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import QuantType
from nesa_node.engine.kernels.linear import iterate_modules
from nesa_node.engine.kernels.machine_code import copy_to_huge_pages
from nesa_node.engine.kernels.quantized_experts import (
    find_stack,
    make_quantized_experts,
    quantize_stack,
)
from nesa_node.engine.kernels.quantized_linear import (
    compute_quantized_bytes,
    is_quantizable,
    make_quantized_linear,
)
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.engine.weights.expert_stacks import (
    is_expert_stacking,
    read_stack,
    stack_experts,
)
from nesa_node.engine.weights.families import ModelFamily
from nesa_node.engine.weights.files import Progress
from nesa_node.engine.weights.model_tree import initializer_lock, make_empty_model


@dataclass(slots=True)
class TensorSource:
    """Checkpoint tensors (pattern, name) of one of the model's tensors, and their converter."""

    names: list[tuple[str, str]] = field(default_factory=list)
    converter: WeightConverter | None = None


class ModelTensors:
    """A model without weights, of which parts can be loaded.

    Names are mapped as in transformers' own loading: renamed layers, fused experts, an optional
    base-model prefix. Those of other libraries' models are a checkpoint's. Of a module whose
    children are models, each child's names are mapped so.
    """

    def __init__(self, checkpoint: Checkpoint, model: nn.Module) -> None:
        self.checkpoint = checkpoint
        self.model: Any = model
        self.model.eval().requires_grad_(False)
        tensors = self.model.state_dict()
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self._dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        self._models = _find_models(model)
        tied = {
            prefix + source: prefix + target
            for prefix, each in self._models.items()
            for source, target in each.all_tied_weights_keys.items()
        }
        self._tied_names = {**tied, **{source: target for target, source in tied.items()}}
        self._loaded_tied_tensors: dict[str, Tensor] = {}
        self._sources = self._map_names()

    @property
    def tensor_names(self) -> list[str]:
        """Names of all of the model's tensors."""
        return list(self._shapes)

    def module_names(self, *paths: str) -> list[str]:
        """Return the names of the model's tensors in these modules."""
        prefixes = tuple(f"{path}." for path in paths)
        return [name for name in self._shapes if name.startswith(prefixes)]

    def source_names(self, names: Iterable[str]) -> list[str]:
        """Return the names of the checkpoint's tensors that these are made from.

        Raises `CorruptCheckpointError` naming those that the checkpoint lacks.
        """
        wanted = [name for name in names if not self._is_computed(name)]
        if missing := [name for name in wanted if self._stored_name(name) not in self._sources]:
            shown = ", ".join(missing[:8]) + (
                f" and {len(missing) - 8} more" if missing[8:] else ""
            )
            raise CorruptCheckpointError(f"{self.checkpoint.name} lacks the tensors {shown}")
        stored = (self._sources[self._stored_name(name)] for name in wanted)
        return [name for source in stored for _, name in source.names]

    def nbytes(
        self, names: Iterable[str], dtype: torch.dtype | None, quant_type: QuantType = "none"
    ) -> int:
        """Return the bytes of these tensors in memory, loaded with this dtype and quantization.

        Raises `UnsupportedModelError` where weights do not fit into nf4's blocks.
        """
        plain, total = [], 0
        for name in names:
            size = self._compute_quantized_bytes(name, quant_type)
            if size is None:
                plain.append(name)
            else:
                total += size
        if dtype is None:
            return sum(self._shapes[name].numel() * self._dtypes[name].itemsize for name in plain)
        infos = (self.checkpoint.tensors[source] for source in self.source_names(plain))
        return total + sum(info.numel * dtype.itemsize for info in infos)

    def load(
        self,
        names: Iterable[str],
        *,
        dtype: torch.dtype | None,
        device: torch.device,
        task: str,
        quant_type: QuantType = "none",
        progress: Progress | None = None,
    ) -> None:
        """Fetch these tensors and assign them, one after another. Blocks the thread.

        Without a `dtype` each gets that of the model's own, which is not quantized then.
        With a `quant_type`, linear layers and experts are replaced by quantized ones as their
        weights are read, an expert at a time where the checkpoint has them so. Peak memory is that
        of the loaded tensors plus the largest of them as stored in the checkpoint. Tied tensors
        share memory, unless the checkpoint holds different values for them. Raises
        `CorruptCheckpointError` for a missing tensor or one of another shape, and
        `UnsupportedModelError` for weights that cannot be quantized so.
        """
        wanted = list(names)
        self.checkpoint.fetch(self.source_names(wanted), progress)
        total, done = self.nbytes(wanted, dtype, quant_type), 0
        for name in wanted:
            size = self._compute_quantized_bytes(name, quant_type)
            if size is None:
                loaded = self._load_tensor(name, dtype or self._dtypes[name], device)
                done += assign(self.model, name, loaded)
            else:
                assert dtype is not None
                self._load_quantized(name, quant_type, dtype, device)
                done += size
            if progress is not None:
                progress(task, done, total)

    def take(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return loaded tensors, which the model then has no more."""
        taken = {}
        for name in names:
            path, _, leaf = name.rpartition(".")
            taken[name] = getattr(self.model.get_submodule(path), leaf).detach()
            assign(self.model, name, torch.empty_like(taken[name], device="meta"))
        self._loaded_tied_tensors.clear()
        return taken

    def _map_names(self) -> dict[str, TensorSource]:
        # Numeric order as in transformers: experts are stacked in the order of their names.
        left = sorted(self.checkpoint.tensors, key=_natural_sort_key)
        sources: dict[str, TensorSource] = {}
        for prefix, model in self._models.items():
            sources |= self._map_names_of(prefix, model, [n for n in left if n.startswith(prefix)])
            left = [name for name in left if not name.startswith(prefix)]
        return sources | {name: TensorSource([("", name)]) for name in left}

    def _map_names_of(
        self, prefix: str, model: PreTrainedModel, stored: Sequence[str]
    ) -> dict[str, TensorSource]:
        transforms = get_model_conversion_mapping(model)
        renamings = [item for item in transforms if isinstance(item, WeightRenaming)]
        converters = [item for item in transforms if isinstance(item, WeightConverter)]
        by_pattern = {pattern: item for item in converters for pattern in item.source_patterns}
        sources: dict[str, TensorSource] = {}
        shapes = {
            name.removeprefix(prefix): shape
            for name, shape in self._shapes.items()
            if name.startswith(prefix)
        }
        for name in stored:
            target, pattern = rename_source_key(
                name.removeprefix(prefix), renamings, converters, model.base_model_prefix, shapes
            )
            if target not in shapes:
                continue  # masks and frequencies saved by older versions; other heads
            source = sources.setdefault(prefix + target, TensorSource())
            source.names.append((pattern or "", name))
            if pattern is not None:
                source.converter = by_pattern[pattern]
        return sources

    def is_same_tensor(self, first: str, second: str) -> bool:
        """Whether two of the model's tensors are one of the checkpoint's."""
        return self._stored_name(first) == self._stored_name(second)

    def _stored_name(self, name: str) -> str:
        """Return the checkpoint's name of a tensor: its own or that of the tied tensor."""
        twin = self._tied_names.get(name)
        return twin if twin in self._sources and name not in self._sources else name

    def _is_computed(self, name: str) -> bool:
        """Whether no checkpoint need hold it: sinusoids of positions (Marian, Pegasus)."""
        path, _, leaf = name.rpartition(".")
        is_stored = self._stored_name(name) in self._sources
        return (
            not is_stored
            and leaf == "weight"
            and hasattr(self.model.get_submodule(path), "create_weight")
        )

    def find_linear_layer(self, name: str) -> nn.Module | None:
        """Return the linear layer of this weight, which may be quantized; else None."""
        path, _, leaf = name.rpartition(".")
        module: nn.Module = self.model.get_submodule(path)
        return module if leaf == "weight" and is_quantizable(module) else None

    def _compute_quantized_bytes(self, name: str, quant_type: QuantType) -> int | None:
        """Bytes of a weight that is quantized; None for all else."""
        if quant_type == "none":
            return None
        path, _, leaf = name.rpartition(".")
        if (router := self.checkpoint.family.router) is not None and f".{router}." in path:
            return None  # its own code may read the layer's weight
        if (linear := self.find_linear_layer(name)) is not None:
            return compute_quantized_bytes(linear, quant_type)
        shape = find_stack(self.model.get_submodule(path), leaf)
        return None if shape is None else shape.compute_bytes(quant_type)

    def _load_quantized(
        self, name: str, quant_type: QuantType, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Replace the module of this weight, or put the weight into its replacement."""
        path, _, leaf = name.rpartition(".")
        module: nn.Module = self.model.get_submodule(path)
        made: nn.Module
        if (shape := find_stack(module, leaf)) is not None:
            made = make_quantized_experts(module)
            matrices = self._read_experts(name)
            stack = quantize_stack(matrices, shape, quant_type, dtype=dtype, device=device)
            made.add_module(leaf, stack)
        else:
            weight = self.read_weight(name)
            made = make_quantized_linear(module, weight, quant_type, dtype=dtype, device=device)
        self.model.set_submodule(path, made, strict=True)

    def _read_experts(self, name: str) -> Iterator[Tensor]:
        """Read the matrices [R, C] of a stacked weight, each when it is asked for.

        What the checkpoint has stacked is read at once. Raises `CorruptCheckpointError`.
        """
        source, shape = self._sources[self._stored_name(name)], self._shapes[name]
        if source.converter is None or not is_expert_stacking(source.converter):
            yield from self.read_weight(name)
            return
        try:
            yield from read_stack(source.converter, source.names, self.checkpoint.read, shape)
        except ValueError as error:
            raise CorruptCheckpointError(f"{self.checkpoint.name}: {name}: {error}") from error

    def read_weight(self, name: str) -> Tensor:
        """Read a tensor in its stored dtype, without assigning it. Raises as `load` does."""
        return self._read_checked(name, self._stored_name(name))

    def _load_tensor(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        stored = self._stored_name(name)
        twin = self._loaded_tied_tensors.get(self._tied_names.get(name, ""))
        if twin is not None and stored != name:
            return twin
        if self._is_computed(name):
            module: Any = self.model.get_submodule(name.rpartition(".")[0])
            made: Tensor = module.create_weight()
            return made.to(device=device, dtype=dtype)
        tensor = self._read_checked(name, stored).to(device=device, dtype=dtype)
        if twin is not None and torch.equal(twin, tensor):
            return twin
        tensor = copy_to_huge_pages(tensor)
        if name in self._tied_names:
            self._loaded_tied_tensors[name] = tensor
        return tensor

    def _read_checked(self, name: str, stored: str) -> Tensor:
        """Read a tensor in its stored dtype. Raises `CorruptCheckpointError` for another shape."""
        tensor = self._read_converted(stored)
        if tensor.shape != self._shapes[name]:
            raise CorruptCheckpointError(
                f"{self.checkpoint.name}: {stored} has shape {list(tensor.shape)}, "
                f"its config makes it {list(self._shapes[name])}"
            )
        return tensor

    def _read_converted(self, name: str) -> Tensor:
        source = self._sources[name]
        read = self.checkpoint.read
        if source.converter is None:
            return read(source.names[0][1])
        if is_expert_stacking(source.converter):
            try:
                return stack_experts(source.converter, source.names, read)
            except ValueError as error:
                raise CorruptCheckpointError(f"{self.checkpoint.name}: {name}: {error}") from error
        converter = copy.deepcopy(source.converter)
        prefix, model = next(each for each in self._models.items() if name.startswith(each[0]))
        own = name.removeprefix(prefix)
        for pattern, origin in source.names:
            opener: Callable[[], Tensor] = partial(read, origin)
            converter.add_tensor(own, origin, pattern, opener)  # type: ignore[arg-type]
        made = converter.convert(own, model=model, config=model.config)
        if set(made) != {own}:
            raise UnsupportedModelError(f"{name} is converted to {sorted(made)}; one is expected")
        tensor: Tensor = made[own][0] if isinstance(made[own], list) else made[own]
        return tensor


def assign(root: nn.Module, name: str, tensor: Tensor) -> int:
    """Make a tensor the value of a parameter or buffer below `root`; returns its bytes."""
    path, _, leaf = name.rpartition(".")
    module = root.get_submodule(path)
    if leaf in module._parameters:
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[leaf] = tensor
    return tensor.nbytes


def _find_models(model: nn.Module) -> dict[str, PreTrainedModel]:
    """The models of transformers that a module is or has as children, by prefix of their names."""
    if isinstance(model, PreTrainedModel):
        return {"": model}
    children = model.named_children()
    return {f"{name}.": child for name, child in children if isinstance(child, PreTrainedModel)}


MAX_BUFFER_BYTES = 1 << 30
"""Of one module's tables that no checkpoint holds: a config alone says how large they are."""


class EmptyModel:
    """Causal LM of a checkpoint's config on the meta device. No tensor of it is named here."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.family: ModelFamily = checkpoint.family
        self.model: Any = make_empty_model(checkpoint.config)

    @property
    def decoder(self) -> Any:
        return self.model.get_submodule(self.family.decoder)

    def make_buffers(self, root: nn.Module, device: torch.device) -> None:
        """Compute the buffers of `root` that no checkpoint holds (rotary frequencies, scales).

        Call it before `load`, since transformers' initialization also resets a module's weights.
        Raises `UnsupportedModelError` if transformers leaves one of them unset, and for more than
        `MAX_BUFFER_BYTES` in one module.
        """
        for module in iterate_modules(root):
            fresh = {
                name: buffer
                for name, buffer in module._buffers.items()
                if name in module._non_persistent_buffers_set
                and buffer is not None
                and buffer.is_meta
            }
            if not fresh:
                continue
            if sum(buffer.nbytes for buffer in fresh.values()) > MAX_BUFFER_BYTES:
                raise UnsupportedModelError(
                    f"{self.checkpoint.name}: tables of {type(module).__name__} would take more "
                    f"than {MAX_BUFFER_BYTES >> 20} MiB"
                )
            # What is left as it was, from one of two beginnings, has no initialization.
            first = self._initialize(module, fresh, (torch.nan, 0), device)
            second = self._initialize(module, fresh, (torch.nan, 1), device)
            for name in fresh:
                made = second[name]
                if not (bool(torch.isfinite(made).all()) and torch.equal(first[name], made)):
                    raise UnsupportedModelError(
                        f"{self.checkpoint.name}: transformers has no initialization of "
                        f"{type(module).__name__}.{name}, so that the model cannot be served"
                    )

    def _initialize(
        self,
        module: nn.Module,
        fresh: Mapping[str, Tensor],
        fills: tuple[float, int],
        device: torch.device,
    ) -> dict[str, Tensor]:
        """Let transformers initialize a module's buffers, which begin as floats or other numbers
        of `fills`; returns them.
        """
        for name, buffer in fresh.items():
            fill = fills[not buffer.is_floating_point()]
            module._buffers[name] = torch.full_like(buffer, fill, device=device)
        with initializer_lock:
            self.model._init_weights(module)
        return {name: getattr(module, name) for name in fresh}

    def require_complete(self, root: nn.Module) -> None:
        """Assert that every parameter and buffer of `root` has a value."""
        left = [
            f"{type(module).__name__}.{name}"
            for module in iterate_modules(root)
            for name, value in (*module._parameters.items(), *module._buffers.items())
            if value is not None and value.is_meta
        ]
        assert not left, f"never loaded: {left}"


class Skeleton(EmptyModel, ModelTensors):
    """Causal LM of a checkpoint's config on the meta device, and the checkpoint's tensors of it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        EmptyModel.__init__(self, checkpoint)
        ModelTensors.__init__(self, checkpoint, self.model)

    def block_names(self, span: Span) -> list[str]:
        """Return the names of the model's tensors in these blocks."""
        indices = range(span.start, span.end)
        return self.module_names(*(f"{self.family.layers_path}.{index}" for index in indices))


def _natural_sort_key(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
