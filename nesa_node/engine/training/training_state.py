"""Tensors that a state of adapters and optimizer may have, on the node and in the client.

States come from peers: a node continues with one, and a client writes adapters from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nesa_node.compression import tensors
from nesa_node.compression.codecs import UNCOMPRESSED
from nesa_node.compression.tensors import TensorMeta
from nesa_node.core.errors import ProtocolError
from nesa_node.engine.training.adapters import OptimizerConfig

ADAPTER = "adapter."
"""Begins the name of a parameter of the adapters."""
STEP = "step"
"""Key of AdamW's count of updates, one number for each parameter."""


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

    def check_shape(self, name: str, shape: Sequence[int]) -> None:
        """Raise `ProtocolError("bad_tensor")` for a name or shape that no such state has."""
        expected = self._shapes.get(name)
        if expected is None:
            raise ProtocolError("bad_tensor", f"the state of another span or adapter: {name}")
        if tuple(shape) != expected:
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

    def __init__(self, shapes: StateShapes, count: int, max_bytes: int) -> None:
        """Raises `ProtocolError("too_large")` for more tensors than a state has."""
        if count > shapes.max_tensors:
            raise ProtocolError(
                "too_large",
                f"a state of {count} tensors; this span's has at most {shapes.max_tensors}",
            )
        self.found: dict[str, Tensor] = {}
        self._shapes = shapes
        self._count = count
        self._max_bytes = max_bytes

    @property
    def is_complete(self) -> bool:
        return len(self.found) == self._count

    def add(self, name: str, meta: TensorMeta, payload: bytearray) -> None:
        """Decode one. Raises `ProtocolError("bad_tensor")`."""
        self._shapes.check_shape(name, meta.shape)
        if meta.codec != UNCOMPRESSED or name in self.found:
            raise ProtocolError("bad_tensor", f"{name} is compressed, or comes twice")
        self.found[name] = tensors.decode(meta, payload, max_bytes=self._max_bytes)
