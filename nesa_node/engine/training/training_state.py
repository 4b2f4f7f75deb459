"""Tensors that a state of adapters and optimizer may have, and how replicas divide them.

States come from peers: a node continues with one, and a client writes adapters from it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from nesa_node.compression import tensors
from nesa_node.compression.codecs import UNCOMPRESSED
from nesa_node.compression.tensors import TensorMeta
from nesa_node.core.errors import ConfigError, ProtocolError
from nesa_node.core.ids import Span
from nesa_node.engine.training.adapters import OptimizerConfig

V = TypeVar("V")
ZeroStage = Literal[0, 1, 2, 3]
ADAPTER = "adapter."
"""Begins the name of a parameter of the adapters."""
STEP = "step"
"""Key of AdamW's count of updates, one number for each parameter."""


_NO_BLOCK = -1


def block_of(name: str) -> int:
    """Index of the block that a parameter, or a tensor of a state, belongs to.

    It is the first number in the name; -1 without any.
    """
    return next((int(part) for part in name.split(".") if part.isdigit()), _NO_BLOCK)


def select_adapters(state: Mapping[str, V]) -> dict[str, V]:
    """The parameters of a state, by their own names, without the optimizer's tensors."""
    return {
        name.removeprefix(ADAPTER): value
        for name, value in state.items()
        if name.startswith(ADAPTER)
    }


def select_blocks(state: Mapping[str, V], span: Span) -> dict[str, V]:
    """Tensors of a span's blocks. Those of no block belong to a span that has none."""
    blocks = range(span.start, span.end) or (_NO_BLOCK,)
    return {name: value for name, value in state.items() if block_of(name) in blocks}


def hash_state(tensors: Mapping[str, Tensor]) -> bytes:
    """SHA-256 over names, dtypes, shapes and values of a state as `SpanTrainer.export` returns it.

    In order of names.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        head = f"{name} {value.dtype} {list(value.shape)}\n".encode()
        digest.update(head)
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()


@dataclass(frozen=True, slots=True)
class Partition:
    """What one of a span's replicas updates, and keeps, of the span's parameters (ZeRO)."""

    stage: ZeroStage = 0
    """1 divides the optimizer's state, 2 gradients too, 3 also the parameters."""
    rank: int = 0
    count: int = 1
    """Replicas."""

    def __post_init__(self) -> None:
        """Raises `ConfigError`."""
        if not 0 <= self.rank < self.count:
            raise ConfigError(f"part {self.rank} of {self.count}")

    @property
    def hands_over(self) -> bool:
        """Whether gradients are handed over with each micro-batch, and not kept."""
        return self.stage >= 2 and self.count > 1

    @property
    def divides_parameters(self) -> bool:
        return self.stage == 3 and self.count > 1

    def select(self, shapes: Mapping[str, Sequence[int]]) -> frozenset[str]:
        """Names of the parameters that this replica updates, of all of a span's."""
        if not self.stage:
            return frozenset(shapes)
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        owners = assign_owners(sizes, self.count)
        return frozenset(name for name, owner in owners.items() if owner == self.rank)


def assign_owners(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Which of `count` nodes updates each parameter: the largest first, to the one with least."""
    loads, owners = [0] * count, {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = rank = loads.index(min(loads))
        loads[rank] += sizes[name]
    return owners


class StateShapes:
    """Names and shapes of a span's state, as `SpanTrainer.export` makes it."""

    def __init__(self, parameters: Mapping[str, Sequence[int]], optimizer: OptimizerConfig) -> None:
        """`parameters` are the shapes of the adapters' parameters by name."""
        self._keys = optimizer.state_keys
        self._adapters = {f"{ADAPTER}{name}": tuple(shape) for name, shape in parameters.items()}
        self._shapes: dict[str, tuple[int, ...]] = dict(self._adapters)
        for name, shape in parameters.items():
            for key in self._keys:
                self._shapes[f"optimizer.{key}.{name}"] = () if key == STEP else tuple(shape)

    @property
    def max_tensors(self) -> int:
        return len(self._shapes)

    @property
    def max_tensor_bytes(self) -> int:
        return 4 * max((math.prod(shape) for shape in self._shapes.values()), default=0)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Raise `ProtocolError("bad_tensor")` for a name that no such state has."""
        expected = self._shapes.get(name)
        if expected is None:
            raise ProtocolError("bad_tensor", f"the state of another span or adapter: {name}")
        return expected

    def check_shape(self, name: str, shape: Sequence[int]) -> None:
        """Raise `ProtocolError("bad_tensor")` for a name or shape that no such state has."""
        if tuple(shape) != self.shape_of(name):
            raise ProtocolError("bad_tensor", f"{name} has shape {list(shape)}")

    def check_values(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise `ProtocolError("bad_tensor")` for what are no numbers, or gradients, of some
        parameters."""
        for name, value in tensors.items():
            if name not in self._adapters:
                raise ProtocolError("bad_tensor", f"{name} is no parameter of this span's adapters")
            self._check_value(name, value)

    def _check_value(self, name: str, value: Tensor) -> None:
        self.check_shape(name, value.shape)
        if value.dtype != torch.float32:
            raise ProtocolError("bad_tensor", f"{name}: a state is in float32")
        if not bool(torch.isfinite(value).all()):
            raise ProtocolError("bad_tensor", f"{name}: not all numbers are finite")

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise `ProtocolError("bad_tensor")` for a state that the optimizer cannot continue with.

        A parameter that had no gradient yet has no optimizer state; another one has all of it.
        """
        if missing := sorted(set(self._adapters) - set(tensors)):
            raise ProtocolError("bad_tensor", f"the state lacks {missing[0]}")
        for name, value in tensors.items():
            self._check_value(name, value)
            if (
                name.startswith((f"optimizer.{STEP}.", "optimizer.exp_avg_sq."))
                and (value < 0).any()
            ):
                raise ProtocolError("bad_tensor", f"{name} is negative")
        for name in self._adapters:
            owner = name.removeprefix(ADAPTER)
            wanted = [f"optimizer.{key}.{owner}" for key in self._keys]
            lacking = [each for each in wanted if each not in tensors]
            if lacking and len(lacking) < len(wanted):
                raise ProtocolError("bad_tensor", f"the state lacks {lacking[0]}")


class StateTensors:
    """Tensors of a state, or of parameters or gradients, that a peer sends one after the other."""

    def __init__(
        self, shapes: StateShapes, count: int, max_bytes: int, codec: str = UNCOMPRESSED
    ) -> None:
        """`codec` is what they may be encoded in, as one row each, beside "none".

        Raises `ProtocolError("too_large")` for more tensors than a state has.
        """
        if count > shapes.max_tensors:
            raise ProtocolError(
                "too_large",
                f"a state of {count} tensors; this span's has at most {shapes.max_tensors}",
            )
        self.found: dict[str, Tensor] = {}
        self._shapes = shapes
        self._count = count
        self._max_bytes = max_bytes
        self._codec = codec

    @property
    def is_complete(self) -> bool:
        return len(self.found) == self._count

    def add(self, name: str, meta: TensorMeta, payload: bytearray) -> None:
        """Decode one. Raises `ProtocolError("bad_tensor")`."""
        shape = self._shapes.shape_of(name)
        if name in self.found or meta.codec not in (UNCOMPRESSED, self._codec):
            raise ProtocolError("bad_tensor", f"{name} is compressed, or comes twice")
        sent = shape if meta.codec == UNCOMPRESSED else (1, math.prod(shape))
        if tuple(meta.shape) != sent:
            raise ProtocolError("bad_tensor", f"{name} has shape {list(meta.shape)}")
        value = tensors.decode(meta, payload, max_bytes=self._max_bytes)
        self.found[name] = value.reshape(shape)
