"""Tensors that a state of adapters and optimizer may have, on the node and in the client.

States come from peers: a node continues with one, and a client writes adapters from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nesa_node.core.errors import ProtocolError
from nesa_node.engine.training.adapters import OptimizerConfig

STEP = "step"
"""Key of AdamW's count of updates, one number for each parameter."""


class StateShapes:
    """Names and shapes of a span's state, as `SpanTrainer.export` makes it."""

    def __init__(self, parameters: Mapping[str, Sequence[int]], optimizer: OptimizerConfig) -> None:
        """`parameters` are the shapes of the adapters' parameters by name."""
        self._keys = optimizer.state_keys
        self._adapters = {f"adapter.{name}": tuple(shape) for name, shape in parameters.items()}
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

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise `ProtocolError("bad_tensor")` for a state that the optimizer cannot continue with.

        A parameter that had no gradient yet has no optimizer state; another one has all of it.
        """
        if missing := sorted(set(self._adapters) - set(tensors)):
            raise ProtocolError("bad_tensor", f"the state lacks {missing[0]}")
        for name, value in tensors.items():
            self.check_shape(name, value.shape)
            if value.dtype != torch.float32:
                raise ProtocolError("bad_tensor", f"{name}: a state is in float32")
            if not bool(torch.isfinite(value).all()):
                raise ProtocolError("bad_tensor", f"{name}: not all numbers are finite")
            if (
                name.startswith((f"optimizer.{STEP}.", "optimizer.exp_avg_sq."))
                and (value < 0).any()
            ):
                raise ProtocolError("bad_tensor", f"{name} is negative")
        for name in self._adapters:
            owner = name.removeprefix("adapter.")
            wanted = [f"optimizer.{key}.{owner}" for key in self._keys]
            lacking = [each for each in wanted if each not in tensors]
            if lacking and len(lacking) < len(wanted):
                raise ProtocolError("bad_tensor", f"the state lacks {lacking[0]}")
