"""Products of vectors that masks hide, each mask one vector.

T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import numpy.typing as npt

from nesa_node.client.private.mask_stock import Mask, MaskedProduct, MaskStock, make_masks
from nesa_node.client.private.private_link import PrivateLink
from nesa_node.client.private.private_nodes import PrivateNodes
from nesa_node.client.private.remote_linear import Multipliers
from nesa_node.core.metrics import KEPT_MASKS, MetricSample
from nesa_node.core.wait_tracking import track_wait
from nesa_node.engine.weights.skeleton import Skeleton
from nesa_node.privacy.masked_product import (
    Masked,
    make_integer_linear,
    multiply_masked,
    plan_mask_layout,
    quantize_inputs,
    quantize_rows,
    reveal,
)
from nesa_node.privacy.product_check import IntegerProductCheck
from nesa_node.privacy.products import LinearProduct, read_rows
from nesa_node.privacy.ring import Ring


class MaskedMultiplier:
    """Takes masks from the stock."""

    def __init__(
        self,
        product: MaskedProduct,
        check: IntegerProductCheck,
        stock: MaskStock,
        ring: Ring,
        nodes: PrivateNodes,
        read_weights: Callable[[], Iterable[npt.NDArray[np.float64]]],
    ) -> None:
        """`read_weights` gives slices [O', I] of the weights, from the first row to the last."""
        self._product = product
        self._check = check
        self._stock = stock
        self._ring = ring
        self._nodes = nodes
        self._read_weights = read_weights

    def multiply(self, x_TI: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """See `Multiplier`."""
        numbers_TI, scales_T = quantize_inputs(x_TI)
        while True:
            masks = self._take(len(numbers_TI))
            masked_TI = np.stack(
                [mask.hide(numbers) for mask, numbers in zip(masks, numbers_TI, strict=True)]
            )
            with track_wait("nodes to multiply"):
                peer, answers_TO = self._nodes.run(
                    self._nodes.ask(
                        self._product.block, partial(self._multiply, masked_TI=masked_TI)
                    )
                )
            y_TO = reveal(answers_TO, np.stack([mask.product_O for mask in masks]))
            if self._check.accepts(numbers_TI, y_TO):
                return y_TO * self._check.scales_O * scales_T[:, None]
            wrong = {peer}
            if self._is_product(masked_TI, answers_TO):
                given = zip(masks, numbers_TI, y_TO, strict=True)
                wrong = {
                    mask.maker
                    for mask, x_I, y_O in given
                    if not self._check.accepts(x_I[None], y_O[None])
                }
            for each in wrong:
                reason = f"its product at {self._product.path} was wrong"
                self._nodes.run(self._nodes.reject(each, reason))

    def _take(self, count: int) -> list[Mask]:
        masks = self._stock.take(self._product, count)
        if missing := count - len(masks):
            with track_wait("masks to be made"):
                masks += self._nodes.run(
                    make_masks(self._nodes, self._ring, self._product, missing)
                )
        return masks

    async def _multiply(self, link: PrivateLink, masked_TI: Masked) -> Masked:
        return await link.multiply_masked(self._product.path, masked_TI, len(self._check.scales_O))

    def _is_product(self, masked_TI: Masked, answers_TO: Masked) -> bool:
        """Whether the node that multiplied now did so rightly, or else the masks are wrong. That
        takes the weights once more.
        """
        right_TO = np.concatenate(
            [
                multiply_masked(make_integer_linear(quantize_rows(rows)[0]), masked_TI)
                for rows in self._read_weights()
            ],
            axis=1,
        )
        return np.array_equal(answers_TO, right_TO)


class MaskedMultipliers(Multipliers):
    """Keeps the checks of all products, and masks for them."""

    scheme = "masks"

    def __init__(self, ring: Ring, stock: MaskStock) -> None:
        self._ring = ring
        self._stock = stock
        self._checks: dict[str, IntegerProductCheck] = {}

    def make(
        self, skeleton: Skeleton, product: LinearProduct, block: int, nodes: PrivateNodes
    ) -> MaskedMultiplier:
        read = partial(read_rows, skeleton, product)
        layout = plan_mask_layout(sum(product.outputs), product.inputs, self._ring.degree)
        masked = MaskedProduct(product.paths[0], block, layout)
        if (check := self._checks.get(masked.path)) is None:
            check = self._checks[masked.path] = IntegerProductCheck(read())
        self._stock.add_product(masked)
        return MaskedMultiplier(masked, check, self._stock, self._ring, nodes, read)

    def computing(self) -> AbstractContextManager[None]:
        return self._stock.pausing()

    def samples(self) -> Iterable[MetricSample]:
        return [MetricSample(KEPT_MASKS, (), self._stock.kept)]
