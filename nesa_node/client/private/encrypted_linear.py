"""Linear layers whose weights are on nodes that see neither inputs nor outputs.

T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from nesa_node.client.private.private_link import Answer
from nesa_node.privacy.ciphertext import FreshCiphertext
from nesa_node.privacy.layout import ProductLayout, plan_layout
from nesa_node.privacy.products import LinearProduct
from nesa_node.privacy.ring import Ring
from nesa_node.privacy.secret_key import SecretKey

Ask = Callable[[str, ProductLayout, Sequence[Sequence[FreshCiphertext]]], Sequence[Answer]]
"""Has a node multiply each token's ciphertexts with the weights at a path. Blocks the thread."""


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
        y_TO = torch.from_numpy(np.stack(rows)).to(device=x.device, dtype=x.dtype)
        y = y_TO.reshape(*x.shape[:-1], -1)
        parts = torch.split(y, list(self._product.outputs), dim=-1)
        return dict(zip(self._product.paths, parts, strict=True))


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
