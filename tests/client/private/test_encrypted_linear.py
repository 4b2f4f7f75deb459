"""Linear layers that nodes compute, with answers that no node should give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nesa_node.client.private.encrypted_linear import (
    TOKENS_AT_ONCE,
    EncryptedLinear,
    EncryptedProduct,
)
from nesa_node.client.private.private_link import Answer
from nesa_node.core.errors import ProtocolError
from nesa_node.privacy.encrypted_product import encode_matrix, multiply
from nesa_node.privacy.layout import plan_layout
from nesa_node.privacy.native_ring import make_ring
from nesa_node.privacy.parameters import RingParameters
from nesa_node.privacy.products import LinearProduct
from nesa_node.privacy.secret_key import SecretKey
from tests.privacy.keys import expanded_keys

RING = make_ring(RingParameters())
SECRET = SecretKey(RING)
PRODUCT = LinearProduct(("q", "k"), (6, 4), 8)
LAYOUT = plan_layout(10, 8, RING.parameters.slots)
WEIGHT = np.random.default_rng(0).normal(size=(10, 8))
MATRIX = encode_matrix(RING, LAYOUT, WEIGHT)
KEYS = expanded_keys(SECRET, RING, [LAYOUT])


class Node:
    """Multiplies in this process; `scale` is what it says of its products."""

    def __init__(self, scale: float = MATRIX.scale) -> None:
        self.asked: list[int] = []
        self._scale = scale

    def __call__(self, path: str, layout: Any, tokens: Sequence[Any]) -> list[Answer]:
        self.asked.append(len(tokens))
        expanded = [[each.expand(RING) for each in chunks] for chunks in tokens]
        return [
            (np.stack(multiply(RING, MATRIX, chunks, KEYS)), self._scale) for chunks in expanded
        ]


def layers(node: Node) -> tuple[EncryptedLinear, EncryptedLinear]:
    product = EncryptedProduct(PRODUCT, RING, SECRET, node)
    bias = nn.Parameter(torch.arange(4.0), requires_grad=False)
    return EncryptedLinear("q", product, None), EncryptedLinear("k", product, bias)


def test_layers_with_one_input_ask_once() -> None:
    node = Node()
    q, k = layers(node)
    for _ in range(2):
        x = torch.randn(1, TOKENS_AT_ONCE + 3, 8)
        expected = x.double() @ torch.from_numpy(WEIGHT).T
        assert torch.allclose(q(x).double(), expected[..., :6], atol=1e-4)
        assert torch.allclose(k(x).double(), expected[..., 6:] + torch.arange(4.0), atol=1e-4)
    assert node.asked == [TOKENS_AT_ONCE, 3] * 2


def test_another_input_is_asked_for_anew() -> None:
    node = Node()
    q, k = layers(node)
    first, second = torch.randn(1, 1, 8), torch.randn(1, 1, 8)
    q(first)
    expected = second.double() @ torch.from_numpy(WEIGHT).T
    assert torch.allclose(k(second).double() - torch.arange(4.0), expected[..., 6:], atol=1e-4)
    assert node.asked == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_products_that_are_not_finite_are_an_error(dtype: torch.dtype) -> None:
    q, _ = layers(Node(scale=1e-40))
    with pytest.raises(ProtocolError, match="product at q is not finite"):
        q(torch.randn(1, 1, 8, dtype=dtype))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_are_an_error(value: float) -> None:
    q, _ = layers(Node())
    with pytest.raises(ProtocolError, match="inputs of q are not finite"):
        q(torch.tensor([[[value, *[0.0] * 7]]]))
