"""Products of weights with encrypted vectors, against numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from nesa_node.privacy.encrypted_product import encode_matrix, multiply
from nesa_node.privacy.layout import ProductLayout, plan_layout
from nesa_node.privacy.native_ring import make_ring
from nesa_node.privacy.parameters import RingParameters
from nesa_node.privacy.ring import Ring
from nesa_node.privacy.secret_key import SecretKey
from tests.privacy.keys import decrypted_products, expanded_keys

PARAMETERS = RingParameters()
SLOTS = PARAMETERS.slots
RINGS = {"reference": Ring(PARAMETERS), "machine code": make_ring(PARAMETERS)}

Vector = npt.NDArray[np.float64]


def encrypted_product(ring: Ring, layout: ProductLayout, weight: Vector, x: Vector) -> Vector:
    largest = np.abs(x).max() or 1.0
    product: Vector = decrypted_products(ring, layout, weight, x[None] / largest)[0] * largest
    return product


@pytest.mark.parametrize("kind", list(RINGS))
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(6, 4), (64, 128), (37, 100), (960, 576), (576, 1536), (300, 5000)]
)
def test_product_is_that_of_the_weights(kind: str, outputs: int, inputs: int) -> None:
    rng = np.random.default_rng(outputs)
    weight, x = rng.normal(size=(outputs, inputs)), rng.normal(size=inputs)
    # A channel as large as those of language models.
    x[inputs // 3] = 200.0
    layout = plan_layout(outputs, inputs, SLOTS)
    found = encrypted_product(RINGS[kind], layout, weight * 0.02, x)
    expected = weight * 0.02 @ x
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("chunks", "blocks"),
    [
        ((2048,), (1024, 256)),
        ((2048, 2048), (64, 32, 8)),
        ((64, 4), (16, 16)),
        ((4,), (2, 2)),
        ((1,), (2048,)),
    ],
)
def test_layouts_that_are_planned_for_no_small_matrix(
    chunks: tuple[int, ...], blocks: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(len(chunks))
    inputs, outputs = max(sum(chunks) - 1, 1), 2 * sum(blocks) - 1
    weight, x = rng.normal(size=(outputs, inputs)), rng.normal(size=inputs)
    layout = ProductLayout(inputs, outputs, SLOTS, chunks, blocks)
    found = encrypted_product(RINGS["machine code"], layout, weight, x)
    assert np.abs(found - weight @ x).max() <= 1e-5 * np.abs(weight @ x).max()


@pytest.mark.parametrize(("rows", "columns"), [(1, 2048), (2, 8), (16, 16), (2048, 32), (8, 2)])
def test_each_weight_is_in_one_place(rows: int, columns: int) -> None:
    layout = ProductLayout(columns, 2 * rows, SLOTS, (columns,), (rows,))
    numbers = np.arange(1, 2 * rows * columns + 1, dtype=np.float64).reshape(2 * rows, columns)
    slots = np.concatenate(list(layout.diagonal_slots(numbers, 0, 0, 5)))
    found = np.concatenate([slots.real.ravel(), slots.imag.ravel()])
    assert np.array_equal(np.sort(found[found > 0]), numbers.ravel())


@pytest.mark.parametrize(
    ("outputs", "inputs", "most"),
    [(2048, 2048, 16), (2560, 2048, 16), (11264, 2048, 16), (2048, 5632, 17.5)],
)
def test_encoded_weights_of_a_larger_model_take_few_bytes(
    outputs: int, inputs: int, most: float
) -> None:
    layout = plan_layout(outputs, inputs, SLOTS)
    diagonals = sum(
        layout.diagonals(chunk, block)
        for chunk in range(len(layout.chunks))
        for block in range(len(layout.blocks))
    )
    assert diagonals * 16 * PARAMETERS.degree <= most * outputs * inputs


def test_zeros_give_zeros() -> None:
    layout = plan_layout(8, 8, SLOTS)
    ring = RINGS["machine code"]
    for weight, x in ((np.zeros((8, 8)), np.ones(8)), (np.ones((8, 8)), np.zeros(8))):
        assert np.abs(encrypted_product(ring, layout, weight, x)).max() < 1e-6


def test_weights_that_cannot_be_encoded_are_refused() -> None:
    layout = plan_layout(8, 8, SLOTS)
    ring = RINGS["reference"]
    for bad in (np.nan, np.inf):
        weight = np.ones((8, 8))
        weight[3, 5] = bad
        with pytest.raises(ValueError, match="must be finite"):
            encode_matrix(ring, layout, weight)
    with pytest.raises(ValueError, match="cannot be encoded"):
        encode_matrix(ring, layout, np.full((8, 8), 1e12))


def test_the_largest_result_does_not_wrap() -> None:
    """All weights and inputs of one sign and as large as they may be."""
    layout = plan_layout(64, 2048, SLOTS)
    for sign in (-1, 1):
        found = encrypted_product(
            RINGS["machine code"], layout, np.full((64, 2048), 0.75), np.full(2048, float(sign))
        )
        assert np.abs(found - sign * 1536).max() < 1e-2


def test_slots_beyond_one_are_not_encrypted() -> None:
    key = SecretKey(RINGS["reference"])
    for bad in (1.1, np.nan, np.inf):
        slots = np.zeros(SLOTS, complex)
        slots[5] = bad
        with pytest.raises(ValueError, match="at most 1"):
            key.encrypt(slots)


def test_another_key_decrypts_to_noise() -> None:
    ring = RINGS["machine code"]
    layout = plan_layout(8, 8, SLOTS)
    key, other = SecretKey(ring), SecretKey(ring)
    matrix = encode_matrix(ring, layout, np.eye(8))
    keys = expanded_keys(key, ring, [layout])
    (slots,) = layout.pack(np.linspace(0.1, 0.8, 8))
    (result,) = multiply(ring, matrix, [key.encrypt(slots).expand(ring)], keys)
    assert np.abs(layout.unpack([key.decrypt(result, matrix.scale)])[:8]).max() < 1
    assert np.abs(layout.unpack([other.decrypt(result, matrix.scale)])).max() > 100


def test_equal_vectors_give_different_ciphertexts() -> None:
    ring = RINGS["reference"]
    key = SecretKey(ring)
    slots = np.full(SLOTS, 0.5 + 0j)
    first, second = key.encrypt(slots), key.encrypt(slots)
    assert first.seed != second.seed
    assert not np.array_equal(first.c0, second.c0)
