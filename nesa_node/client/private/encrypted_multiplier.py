"""Products of vectors that are encrypted (CKKS).

T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from nesa_node.client.private.private_link import Answer, PrivateLink
from nesa_node.client.private.private_nodes import BlockNodes, PrivateNodes
from nesa_node.client.private.remote_linear import Multipliers
from nesa_node.core.wait_tracking import track_wait
from nesa_node.engine.weights.skeleton import Skeleton
from nesa_node.privacy.ciphertext import FreshCiphertext
from nesa_node.privacy.layout import plan_layout
from nesa_node.privacy.parameters import RingParameters
from nesa_node.privacy.product_check import ProductCheck
from nesa_node.privacy.products import LinearProduct, read_rows
from nesa_node.privacy.ring import Residues
from nesa_node.privacy.secret_key import SecretKey


class EncryptedMultiplier:
    """Encrypts inputs under the session's key."""

    def __init__(
        self,
        product: LinearProduct,
        check: ProductCheck,
        parameters: RingParameters,
        nodes: BlockNodes,
    ) -> None:
        self._path = product.paths[0]
        self._check = check
        self._layout = plan_layout(sum(product.outputs), product.inputs, parameters.slots)
        self._nodes = nodes

    def multiply(self, x_TI: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """See `Multiplier`."""
        # Each token has the largest size that can be encrypted; how large it was stays here.
        largest_T = np.abs(x_TI).max(1)
        scales_T1 = np.where(largest_T > 0, largest_T, 1.0)[:, None]
        scaled_TI = x_TI / scales_T1
        while True:
            secret = self._nodes.secret
            with track_wait("inputs to be encrypted"):
                tokens = [
                    [secret.encrypt(slots) for slots in self._layout.pack(x)] for x in scaled_TI
                ]
            with track_wait("nodes to multiply"):
                peer, answers = self._nodes.ask(partial(self._multiply, tokens=tokens))
            with track_wait("products to be decrypted"):
                y_TO = np.stack([self._decrypt(secret, *answer) for answer in answers])
            if self._check.accepts(scaled_TI, y_TO):
                return y_TO * scales_T1
            self._nodes.reject(peer, f"its product at {self._path} was wrong")

    async def _multiply(
        self, link: PrivateLink, tokens: Sequence[Sequence[FreshCiphertext]]
    ) -> list[Answer]:
        return await link.multiply(self._path, self._layout, tokens)

    def _decrypt(
        self, secret: SecretKey, blocks: Residues, scale: float
    ) -> npt.NDArray[np.float64]:
        return self._layout.unpack([secret.decrypt(block, scale) for block in blocks])


class EncryptedMultipliers(Multipliers):
    """Keeps the checks of all products."""

    scheme = "ckks"

    def __init__(self, parameters: RingParameters) -> None:
        self._parameters = parameters
        self._checks: dict[str, ProductCheck] = {}

    def make(
        self, skeleton: Skeleton, product: LinearProduct, block: int, nodes: PrivateNodes
    ) -> EncryptedMultiplier:
        path = product.paths[0]
        if (check := self._checks.get(path)) is None:
            check = ProductCheck(self._parameters, read_rows(skeleton, product))
            self._checks[path] = check
        return EncryptedMultiplier(product, check, self._parameters, BlockNodes(nodes, block))
