"""Linear layers whose weights are on nodes that see neither inputs nor outputs.

T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from nesa_node.client.private.private_link import Answer
from nesa_node.core.errors import ProtocolError
from nesa_node.privacy.ciphertext import FreshCiphertext
from nesa_node.privacy.layout import ProductLayout, plan_layout
from nesa_node.privacy.products import LinearProduct
from nesa_node.privacy.ring import Ring
from nesa_node.privacy.secret_key import SecretKey

Ask = Callable[[str, ProductLayout, Sequence[Sequence[FreshCiphertext]]], Sequence[Answer]]
"""Has a node multiply each token's ciphertexts with the weights at a path. Blocks the thread."""


TOKENS_AT_ONCE = 32
"""Of one request: their ciphertexts and answers are in memory."""


class EncryptedProduct:
    """The product of one input with layers that share it: it is sent once."""

    def __init__(self, product: LinearProduct, ring: Ring, secret: SecretKey, ask: Ask) -> None:
        self._product = product
        self._layout = plan_layout(sum(product.outputs), product.inputs, ring.parameters.slots)
        self._secret = secret
        self._ask = ask
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
            raise ProtocolError(
                "not_finite",
                f"inputs of {self._product.paths[0]} are not finite: a node multiplied wrongly, or "
                f"the model's numbers are too large for {x.dtype}",
            )
        starts = range(0, len(x_TI), TOKENS_AT_ONCE)
        rows = [self._multiply_rows(x_TI[start : start + TOKENS_AT_ONCE]) for start in starts]
        y_TO = torch.from_numpy(np.concatenate(rows)).to(device=x.device, dtype=x.dtype)
        if not torch.isfinite(y_TO).all():
            path = self._product.paths[0]
            raise ProtocolError("not_finite", f"a node's product at {path} is not finite")
        y = y_TO.reshape(*x.shape[:-1], -1)
        parts = torch.split(y, list(self._product.outputs), dim=-1)
        return dict(zip(self._product.paths, parts, strict=True))

    def _multiply_rows(self, x_TI: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        # Each token has the largest size that can be encrypted; how large it was stays here.
        largest_T = np.abs(x_TI).max(1)
        scales_T = np.where(largest_T > 0, largest_T, 1.0)
        tokens = [
            [self._secret.encrypt(slots) for slots in self._layout.pack(row)]
            for row in x_TI / scales_T[:, None]
        ]
        answers = self._ask(self._product.paths[0], self._layout, tokens)
        rows = [
            self._layout.unpack([self._secret.decrypt(block, scale) for block in blocks]) * largest
            for (blocks, scale), largest in zip(answers, scales_T, strict=True)
        ]
        return np.stack(rows)


class EncryptedLinear(nn.Module):
    """Stands for the linear layer at `path`; its bias is added here."""

    bias: nn.Parameter | None

    def __init__(self, path: str, product: EncryptedProduct, bias: nn.Parameter | None) -> None:
        super().__init__()
        self._path, self._product = path, product
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        output = self._product.take(self._path, x)
        return output if self.bias is None else output + self.bias
