"""Linear layers that nodes compute, with answers that no node should give."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import pytest
import torch
from torch import nn

from nesa_node.client.private.encrypted_multiplier import EncryptedMultiplier
from nesa_node.client.private.private_link import Answer, PrivateLink
from nesa_node.client.private.private_nodes import BlockNodes
from nesa_node.client.private.remote_linear import (
    TOKENS_AT_ONCE,
    RemoteLinear,
    RemoteProduct,
)
from nesa_node.core.errors import ProtocolError
from nesa_node.core.ids import PeerId
from nesa_node.privacy.encrypted_product import encode_matrix, multiply
from nesa_node.privacy.layout import plan_layout
from nesa_node.privacy.native_ring import make_ring
from nesa_node.privacy.parameters import RingParameters
from nesa_node.privacy.product_check import ProductCheck
from nesa_node.privacy.products import LinearProduct
from nesa_node.privacy.secret_key import SecretKey
from tests.privacy.keys import expanded_keys

RING = make_ring(RingParameters())
T = TypeVar("T")
PRODUCT = LinearProduct(("q", "k"), (6, 4), 8)
LAYOUT = plan_layout(10, 8, RING.parameters.slots)
WEIGHT = np.random.default_rng(0).normal(size=(10, 8))
MATRIX = encode_matrix(RING, LAYOUT, WEIGHT)


class Nodes(BlockNodes, PrivateLink):
    """One after another, they multiply in this process; each is asked until it is rejected."""

    def __init__(self, *scales: float) -> None:
        """`scales` are what nodes say of their products, without any the right one."""
        self.asked: list[int] = []
        self.rejected: list[str] = []
        self._scales = list(scales or [MATRIX.scale])
        self._make_key()

    def _make_key(self) -> None:
        self._secret = SecretKey(RING)
        self._keys = expanded_keys(self._secret, RING, [LAYOUT])

    @property
    def secret(self) -> SecretKey:
        return self._secret

    def ask(self, work: Callable[[PrivateLink], Awaitable[T]]) -> tuple[PeerId, T]:
        peer = PeerId(f"node {len(self._scales)}")
        return peer, asyncio.run(cast(Coroutine[Any, Any, T], work(self)))

    async def multiply(self, path: str, layout: Any, tokens: Sequence[Any]) -> list[Answer]:
        self.asked.append(len(tokens))
        expanded = [[each.expand(RING) for each in chunks] for chunks in tokens]
        return [
            (np.stack(multiply(RING, MATRIX, chunks, self._keys)), self._scales[0])
            for chunks in expanded
        ]

    def reject(self, peer: PeerId, reason: str) -> None:
        self.rejected.append(f"{peer}: {reason}")
        self._scales.pop(0)
        self._make_key()


def layers(nodes: Nodes) -> tuple[RemoteLinear, RemoteLinear]:
    check = ProductCheck(RING.parameters, [WEIGHT])
    product = RemoteProduct(PRODUCT, EncryptedMultiplier(PRODUCT, check, RING.parameters, nodes))
    bias = nn.Parameter(torch.arange(4.0), requires_grad=False)
    return RemoteLinear("q", product, None), RemoteLinear("k", product, bias)


def test_layers_with_one_input_ask_once() -> None:
    nodes = Nodes()
    q, k = layers(nodes)
    for _ in range(2):
        x = torch.randn(1, TOKENS_AT_ONCE + 3, 8)
        expected = x.double() @ torch.from_numpy(WEIGHT).T
        assert torch.allclose(q(x).double(), expected[..., :6], atol=1e-4)
        assert torch.allclose(k(x).double(), expected[..., 6:] + torch.arange(4.0), atol=1e-4)
    assert nodes.asked == [TOKENS_AT_ONCE, 3] * 2


def test_another_input_is_asked_for_anew() -> None:
    nodes = Nodes()
    q, k = layers(nodes)
    first, second = torch.randn(1, 1, 8), torch.randn(1, 1, 8)
    q(first)
    expected = second.double() @ torch.from_numpy(WEIGHT).T
    assert torch.allclose(k(second).double() - torch.arange(4.0), expected[..., 6:], atol=1e-4)
    assert nodes.asked == [1, 1]


@pytest.mark.parametrize("wrong", [MATRIX.scale * 1.001, 1e-40])
def test_a_wrong_product_is_asked_for_again_under_another_key(wrong: float) -> None:
    """Of another node, for what the first one answered may have told it of the key."""
    nodes = Nodes(wrong, MATRIX.scale)
    first_key = nodes.secret
    q, _ = layers(nodes)
    x = torch.randn(1, 2, 8)
    expected = x.double() @ torch.from_numpy(WEIGHT).T
    assert torch.allclose(q(x).double(), expected[..., :6], atol=1e-4)
    assert nodes.rejected == ["node 2: its product at q was wrong"]
    assert nodes.asked == [2, 2]
    assert nodes.secret is not first_key


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_are_an_error(value: float) -> None:
    q, _ = layers(Nodes())
    with pytest.raises(ProtocolError, match="inputs of q are not finite"):
        q(torch.tensor([[[value, *[0.0] * 7]]]))
