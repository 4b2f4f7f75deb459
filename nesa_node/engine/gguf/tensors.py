"""Tensors of a GGUF file, read as the parameters of transformers' model.

llama.cpp's converter renames tensors, turns rows of queries and keys around, adds one to some
norms, stacks experts. Here each parameter of the model has the stored tensors that it is made of,
and for each of their rows the row that it becomes, so that a tensor is read, dequantized and put in
order a few rows at a time.

E experts, I their inner size, H heads, G groups of heads, D a head's size, R rows, C columns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nesa_node.core.errors import CorruptCheckpointError, UnsupportedModelError
from nesa_node.engine.gguf.architectures import GgufArchitecture
from nesa_node.engine.gguf.header import GgufHeader, GgufTensor
from nesa_node.engine.kernels.machine_code import allocate_in_huge_pages

CHUNK_ELEMENTS = 1 << 18
"""Numbers that are dequantized at a time: 1 MiB, and the package's copies of them."""
LLAMA3_TENSOR = "rope_freqs.weight"
LONGROPE_TENSORS = ("rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that a config states, not a parameter: divisors of rotary frequencies."""
PLAIN_DTYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Types of ggml that hold numbers, not blocks."""
_TRANSPOSED = re.compile(r"blk\.\d+\.(attn_qkv|attn_output|ffn_up|ffn_down)\.weight")
"""Matrices of GPT-2, which transformers multiplies from the other side."""
_EXPERTS = re.compile(
    r"(?P<layer>.*\.(?P<block>\d+)\.mlp)\.experts\.(?P<name>gate_up_proj|down_proj)(?P<bias>_bias)?"
)


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A stored tensor, of whose rows each becomes a row of a parameter: `rows`, or the same one.

    With `rows` [R], the stored tensor has R rows, however many of its dimensions they take.
    """

    tensor: GgufTensor
    rows: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the model, and what it is made of."""

    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]
    is_transposed: bool = False
    """Stored with its last two dimensions exchanged."""
    offset: float = 0.0
    """What the converter added to each value."""

    @property
    def dtype(self) -> torch.dtype:
        """That of plain numbers; float32 of what is computed from blocks, or changed."""
        kinds = {part.tensor.kind for part in self.parts}
        plain = PLAIN_DTYPES.get(kinds.pop()) if len(kinds) == 1 and not self.offset else None
        return plain or torch.float32


class TensorMap:
    """Finds the stored tensors of a model's parameters."""

    def __init__(
        self,
        header: GgufHeader,
        architecture: GgufArchitecture,
        config: Any,
        shapes: Mapping[str, torch.Size],
    ) -> None:
        """`shapes` are those of the parameters and buffers that a checkpoint of the model has."""
        self._header = header
        self._architecture = architecture
        self._config = config
        self._shapes = shapes
        self._gguf_name = _name_finder(architecture.name, int(config.num_hidden_layers))

    def find_parameters(self) -> dict[str, Parameter]:
        """Parameters by transformers' names, all of the file's tensors in one of them.

        A parameter without a tensor is left out. Raises `UnsupportedModelError` for a tensor that
        the model has no place for, and `CorruptCheckpointError` for one of another shape.
        """
        found: dict[str, Parameter] = {}
        for name, size in self._shapes.items():
            if (parameter := self._find(name, tuple(size))) is not None:
                found[name] = parameter
        used = {part.tensor.name for each in found.values() for part in each.parts}
        if self._architecture.rotates:
            used.add(LLAMA3_TENSOR)
        if self._architecture.model_type == "phi3":
            used.update(LONGROPE_TENSORS)
        if left := sorted(set(self._header.tensors) - used):
            shown = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if left[4:] else "")
            raise UnsupportedModelError(
                f"{self._header.name} holds {shown}, for which transformers' "
                f"{self._config.model_type} has no place: without them it would be another model"
            )
        return found

    def _find(self, name: str, shape: tuple[int, ...]) -> Parameter | None:
        if (match := _EXPERTS.fullmatch(name)) is not None:
            return self._find_experts(name, shape, match)
        gguf_name = self._gguf_name(name)
        tensor = self._header.tensors.get(gguf_name) if gguf_name else None
        if tensor is None:
            return None
        is_transposed = self._architecture.is_transposed and bool(_TRANSPOSED.fullmatch(gguf_name))
        wanted = shape[::-1] if is_transposed else shape
        self._check(name, _squeeze(tensor.shape) == _squeeze(wanted), [tensor], shape)
        return Parameter(
            shape,
            (StoredPart(tensor, self._row_order(tensor)),),
            is_transposed,
            self._architecture.norm_offset if gguf_name.endswith("norm.weight") else 0.0,
        )

    def _row_order(self, tensor: GgufTensor) -> Tensor | None:
        order = self._architecture.row_order
        kind = tensor.name.split(".")[-2]
        if order is None or kind not in order.kinds:
            return None
        heads = int(self._config.num_attention_heads)
        groups = _count_groups(self._config)
        rows = order.find(count_rows(tensor), groups if kind == "attn_k" else heads, groups)
        if rows is None:
            raise CorruptCheckpointError(
                f"{self._header.name}: {tensor.name} has {count_rows(tensor)} rows, which are not "
                f"those of {heads} heads in {groups} groups"
            )
        return rows

    def _find_experts(
        self, name: str, shape: tuple[int, ...], match: re.Match[str]
    ) -> Parameter | None:
        """All experts of a block in one tensor: [E, 2 I, C]."""
        suffix = "bias" if match["bias"] else "weight"
        is_transposed = self._architecture.interleaves_gates and suffix == "weight"
        kinds = ("down",) if match["name"] == "down_proj" else ("gate", "up")
        stored = [self._stacked(match["block"], kind, suffix) for kind in kinds]
        if any(not each for each in stored):
            return None
        view = (shape[0], *shape[:0:-1]) if is_transposed else shape
        experts, inner = view[0], view[1] // len(kinds)
        parts = []
        for index, tensors in enumerate(stored):
            own = (inner, *view[2:])
            fits = [(experts, *own)] if len(tensors) == 1 else [own] * experts
            self._check(name, [each.shape for each in tensors] == fits, tensors, shape)
            rows_EI = _expert_rows(
                experts, inner, index, len(kinds), self._architecture.interleaves_gates
            )
            per_tensor = [rows_EI.reshape(-1)] if len(tensors) == 1 else list(rows_EI)
            parts += [StoredPart(*pair) for pair in zip(tensors, per_tensor, strict=True)]
        return Parameter(shape, tuple(parts), is_transposed)

    def _stacked(self, block: str, kind: str, suffix: str) -> list[GgufTensor]:
        """The tensor of all experts, or in older files one of each."""
        tensors = self._header.tensors
        if (one := tensors.get(f"blk.{block}.ffn_{kind}_exps.{suffix}")) is not None:
            return [one]
        names = (f"blk.{block}.ffn_{kind}.{expert}.{suffix}" for expert in range(len(tensors)))
        found = []
        for name in names:
            if name not in tensors:
                break
            found.append(tensors[name])
        return found

    def _check(
        self, name: str, fits: bool, tensors: Sequence[GgufTensor], shape: tuple[int, ...]
    ) -> None:
        if not fits:
            shown = ", ".join(f"{each.name} {list(each.shape)}" for each in tensors[:3])
            raise CorruptCheckpointError(
                f"{self._header.name}: {shown} cannot be {name}, which its metadata makes "
                f"{list(shape)}"
            )


def read_parameter(parameter: Parameter) -> Tensor:
    """Read a parameter into new CPU memory, in its `dtype`.

    Beside it, memory for a few times `CHUNK_ELEMENTS` numbers is taken. Raises
    `CorruptCheckpointError` for a file that became shorter.
    """
    whole = allocate_in_huge_pages(parameter.shape, parameter.dtype)
    view = whole.transpose(-1, -2) if parameter.is_transposed else whole
    for part in parameter.parts:
        columns = part.tensor.numel // (
            count_rows(part.tensor) if part.rows is None else len(part.rows)
        )
        for first, chunk in _read_rows(part.tensor, columns):
            if parameter.offset:
                chunk = chunk.float() - parameter.offset
            end = first + len(chunk)
            rows = torch.arange(first, end) if part.rows is None else part.rows[first:end]
            _put(view, rows, chunk, columns)
    return whole


def read_vector(tensor: GgufTensor, most: int) -> list[float]:
    """A small tensor's numbers. Raises `CorruptCheckpointError` for more than `most`."""
    if tensor.numel > most:
        raise CorruptCheckpointError(f"{tensor.file}: {tensor.name} has {tensor.numel} numbers")
    numbers: list[float] = []
    for _, chunk in _read_rows(tensor, tensor.numel):
        numbers += chunk.reshape(-1).tolist()
    return numbers


def count_rows(tensor: GgufTensor) -> int:
    """Rows of a matrix or vector as transformers counts them: all dimensions but the last, or
    numbers of a vector."""
    return tensor.numel if len(tensor.shape) == 1 else tensor.numel // tensor.shape[-1]


def _put(view: Tensor, rows_R: Tensor, chunk_RC: Tensor, columns: int) -> None:
    """Put rows into `view`, which has them in its first dimension, or of experts in two."""
    if view.is_contiguous():
        flat = view.view(-1, columns)
        first, count = int(rows_R[0]), len(rows_R)
        if bool((rows_R[1:] - rows_R[:-1] == 1).all()):
            flat[first : first + count] = chunk_RC
        else:
            flat[rows_R] = chunk_RC.to(flat.dtype)
    elif view.ndim == 2:
        view[rows_R] = chunk_RC.to(view.dtype)
    else:
        inner = view.shape[1]
        view[rows_R // inner, rows_R % inner] = chunk_RC.to(view.dtype)


def _read_rows(tensor: GgufTensor, columns: int) -> Iterator[tuple[int, Tensor]]:
    """Rows [R, C] of a stored tensor with the number of their first: plain numbers, or float32."""
    block = tensor.block
    rows = tensor.numel // columns
    step = max(1, CHUNK_ELEMENTS // columns)
    if columns % block.elements:
        # A row of blocks is cut nowhere: several rows of this count are read together.
        step = max(1, step // block.elements) * block.elements
    with tensor.file.open("rb", buffering=0) as stream:
        for first in range(0, rows, step):
            count = min(step, rows - first) * columns
            start = first * columns // block.elements * block.nbytes
            raw = np.empty(count // block.elements * block.nbytes, np.uint8)
            stream.seek(tensor.offset + start)
            if _read_into(stream, raw.data) < len(raw):
                raise CorruptCheckpointError(f"{tensor.file} ended early; download it again")
            yield first, _decode(raw, tensor.kind).view(-1, columns)


def _read_into(stream: Any, target: memoryview) -> int:
    filled = 0
    while filled < len(target) and (count := stream.readinto(target[filled:])):
        filled += count
    return filled


def _decode(raw: np.ndarray[Any, np.dtype[np.uint8]], kind: int) -> Tensor:
    if (plain := PLAIN_DTYPES.get(kind)) is not None:
        return torch.from_numpy(raw).view(plain)
    # Imported late: it takes a third of a second.
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    # In one row: the package computes sixteen rows at a time, blocks are independent of rows.
    with np.errstate(all="ignore"):  # of files that hold infinite scales
        values = dequantize(raw.reshape(1, -1), GGMLQuantizationType(kind))
    return torch.from_numpy(np.ascontiguousarray(values, np.float32)).view(-1)


def _expert_rows(experts: int, inner: int, index: int, kinds: int, interleaves: bool) -> Tensor:
    """Rows [E, I] of all experts' gates (`index` 0) or of what these are for (1)."""
    row_I = torch.arange(inner)
    row_I = row_I * kinds + index if interleaves else row_I + index * inner
    return torch.arange(experts)[:, None] * (inner * kinds) + row_I


def _squeeze(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _count_groups(config: Any) -> int:
    """Heads of keys and values."""
    if config.model_type == "falcon":
        return int(config.num_kv_heads if config.new_decoder_architecture else 1)
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


@lru_cache(maxsize=4)
def _name_map(architecture: str, blocks: int) -> Any:
    from gguf.constants import MODEL_ARCH_NAMES
    from gguf.tensor_mapping import get_tensor_name_map

    kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
    return get_tensor_name_map(kind, blocks)


def _name_finder(architecture: str, blocks: int) -> Callable[[str], str]:
    """Finds a parameter's name in GGUF; an empty one if there is none."""
    names = _name_map(architecture, blocks)

    def find(name: str) -> str:
        stem, _, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            stem, suffix = name, "weight"
        found = names.get_name(stem)
        if found is None and architecture == "bloom":  # converted from the model without a head
            found = names.get_name(stem.partition(".")[2])
        return f"{found}.{suffix}" if found else ""

    return find
