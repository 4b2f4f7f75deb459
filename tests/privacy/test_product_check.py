"""Which products pass the check: those of encrypted vectors, and nothing that is much else."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from nesa_node.privacy.layout import plan_layout
from nesa_node.privacy.masked_product import quantize_inputs
from nesa_node.privacy.native_ring import make_ring
from nesa_node.privacy.parameters import RingParameters
from nesa_node.privacy.product_check import IntegerProductCheck, ProductCheck
from tests.privacy.keys import decrypted_products

RING = make_ring(RingParameters())
SHAPES = [(6, 4), (64, 128), (576, 300)]
TOKENS = 8

Matrix = npt.NDArray[np.float64]


def weights(outputs: int, inputs: int) -> Iterator[Matrix]:
    """Like a model's; with columns or rows far larger than the rest; and of rank one."""
    rng = np.random.default_rng(outputs)
    normal = rng.normal(size=(outputs, inputs)) * 0.02
    yield normal
    yield np.where(np.arange(inputs) == inputs // 2, 50.0, 1.0) * normal
    yield np.where(np.arange(outputs) == 3, 30.0, 1.0)[:, None] * normal
    yield np.outer(rng.normal(size=outputs), rng.normal(size=inputs))


def inputs_of(inputs: int) -> Matrix:
    """[T, I] of at most 1 in size: some with one channel far larger than the rest, some equal."""
    rng = np.random.default_rng(inputs)
    x = rng.normal(size=(TOKENS, inputs))
    x[: TOKENS // 2, inputs // 3] = 200.0
    x[-1] = 1.0
    scaled: Matrix = x / np.abs(x).max(1, keepdims=True)
    return scaled


def test_all_honest_products_pass() -> None:
    """By 120 checks of each, with other secret vectors: none comes near what is refused."""
    passed = total = 0
    for shape in SHAPES:
        for weight in weights(*shape):
            x = inputs_of(shape[1])
            layout = plan_layout(*shape, RING.parameters.slots)
            y = decrypted_products(RING, layout, weight, x)
            for _ in range(120):
                check = ProductCheck(RING.parameters, [weight[:3], weight[3:]])
                total += len(y)
                passed += sum(check.accepts(x[at : at + 1], y[at : at + 1]) for at in range(len(y)))
    assert (passed, total) == (11520, 11520)


@pytest.mark.parametrize("shape", SHAPES)
def test_products_with_small_errors_are_refused(shape: tuple[int, int]) -> None:
    """One of a hundredth of y in all, in one output or in all of them; one token's alone."""
    rng = np.random.default_rng(0)
    for weight in weights(*shape):
        x = inputs_of(shape[1])
        y = x @ weight.T
        check = ProductCheck(RING.parameters, [weight])
        assert check.accepts(x, y)
        for token in range(TOKENS):
            size = 0.01 * np.linalg.norm(y[token])
            for error in (np.eye(shape[0])[token % 6], rng.normal(size=shape[0])):
                wrong = y.copy()
                wrong[token] += error / np.linalg.norm(error) * size
                assert not check.accepts(x, wrong)


def test_swapped_and_replayed_products_are_refused() -> None:
    weight = next(weights(64, 128))
    x = inputs_of(128)
    y = x @ weight.T
    check = ProductCheck(RING.parameters, [weight])
    swapped = y[[1, 0, *range(2, TOKENS)]]
    replayed = np.concatenate([y[:-1], y[:1]])
    for wrong in (swapped, replayed, y * 1.01, -y, np.zeros_like(y)):
        assert not check.accepts(x, wrong)
    assert not ProductCheck(RING.parameters, [weight[::-1]]).accepts(x, y)


def test_integer_products_are_told_from_others() -> None:
    rng = np.random.default_rng(3)
    weights = rng.normal(0, 0.02, (96, 64))
    check = IntegerProductCheck(np.array_split(weights, 3))
    x, _ = quantize_inputs(rng.normal(size=(4, 64)))
    integers = np.rint(weights / check.scales_O[:, None]).astype(np.int64)
    y = x @ integers.T
    assert check.accepts(x, y)
    assert not check.accepts(x, y[::-1])
    for place in range(96):
        wrong = y.copy()
        wrong[2, place] += 1 << 10
        assert not check.accepts(x, wrong)
