"""Linear layers whose weights are on nodes that see neither inputs nor outputs.

T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from nesa_node.client.private.private_nodes import PrivateNodes
from nesa_node.core.errors import ProtocolError
from nesa_node.core.metrics import MetricSample
from nesa_node.core.settings.choices import PrivateScheme
from nesa_node.engine.weights.skeleton import Skeleton
from nesa_node.privacy.products import LinearProduct

TOKENS_AT_ONCE = 32
"""Of one request: their ciphertexts and answers are in memory."""


class Multiplier(Protocol):
    """Nodes that multiply with the weights of one product, and what hides its inputs from them."""

    def multiply(self, x_TI: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Products [T, O] of up to `TOKENS_AT_ONCE` finite vectors. Blocks the thread.

        Raises what asking a node raises.
        """


class Multipliers(ABC):
    """Makes the multipliers of a connection's sessions."""

    scheme: ClassVar[PrivateScheme]

    @abstractmethod
    def make(
        self, skeleton: Skeleton, product: LinearProduct, block: int, nodes: PrivateNodes
    ) -> Multiplier:
        """The multiplier of a session that has these `nodes`. Blocks the thread: the first time all
        weights are read once, for checks of products.
        """

    def computing(self) -> AbstractContextManager[None]:
        """Entered while a session computes."""
        return nullcontext()

    def samples(self) -> Iterable[MetricSample]:
        return ()


class RemoteProduct:
    """The product of one input with layers that share it: it is sent once."""

    def __init__(self, product: LinearProduct, multiplier: Multiplier) -> None:
        self._product = product
        self._multiplier = multiplier
        self._input: Tensor | None = None
        self._outputs: dict[str, Tensor] = {}

    def take(self, path: str, x: Tensor) -> Tensor:
        """Output of the layer at `path`, [..., O], in the dtype and on the device of x [..., I].

        Blocks the thread. Raises what asking a node raises.
        """
        if self._input is not x:
            self._outputs = self._multiply(x)
            self._input = x
        output = self._outputs.pop(path)
        if not self._outputs:
            self._input = None
        return output

    def _multiply(self, x: Tensor) -> dict[str, Tensor]:
        x_TI = x.reshape(-1, self._product.inputs).double().cpu().numpy()
        if not np.isfinite(x_TI).all():
            path = self._product.paths[0]
            raise ProtocolError(
                "not_finite",
                f"inputs of {path} are not finite: the model's numbers are too large for {x.dtype}",
            )
        starts = range(0, len(x_TI), TOKENS_AT_ONCE)
        rows = [self._multiplier.multiply(x_TI[at : at + TOKENS_AT_ONCE]) for at in starts]
        y_TO = torch.from_numpy(np.concatenate(rows)).to(device=x.device, dtype=x.dtype)
        y = y_TO.reshape(*x.shape[:-1], -1)
        parts = torch.split(y, list(self._product.outputs), dim=-1)
        return dict(zip(self._product.paths, parts, strict=True))


class RemoteLinear(nn.Module):
    """Stands for the linear layer at `path`; its bias is added here."""

    bias: nn.Parameter | None

    def __init__(self, path: str, product: RemoteProduct, bias: nn.Parameter | None) -> None:
        super().__init__()
        self._path, self._product = path, product
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        output = self._product.take(self._path, x)
        return output if self.bias is None else output + self.bias
