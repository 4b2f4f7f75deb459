"""Products with masks: exact, and of numbers that tell nothing."""

from __future__ import annotations

import numpy as np
import pytest

from nesa_node.privacy.masked_product import (
    MASK_BITS,
    PRIMES,
    Masked,
    MaskLayout,
    encode_integers,
    hide,
    input_bits,
    make_integer_linear,
    multiply_encrypted_mask,
    multiply_masked,
    pack_masked,
    plan_mask_layout,
    quantize_inputs,
    quantize_rows,
    reveal,
    unpack_masked,
    weight_bits,
)
from nesa_node.privacy.native_ring import make_ring
from nesa_node.privacy.parameters import RingParameters
from nesa_node.privacy.ring import Ring
from nesa_node.privacy.sampling import random_masks
from nesa_node.privacy.secret_key import SecretKey

RINGS = [make_ring(RingParameters()), Ring(RingParameters())]
SHAPES = [(960, 576), (576, 1536), (100, 37), (1, 1), (3, 5000), (300, 4096), (2, 28672)]


def mask_product(
    ring: Ring, layout: MaskLayout, integers: np.ndarray, mask: Masked, key: SecretKey
) -> Masked:
    fresh = [key.encrypt_mask(chunk) for chunk in layout.split(mask, ring.degree)]
    ciphertexts = np.stack([each.expand(ring) for each in fresh])
    encoded = encode_integers(ring, layout, integers)
    products = multiply_encrypted_mask(ring, layout, encoded, ciphertexts)
    return key.decrypt_products(*products, layout.places).reshape(-1)[: layout.outputs]


def exact(integers: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """By integers of any size."""
    product: np.ndarray = integers.astype(np.int64).astype(object) @ numbers.astype(object)
    return product


@pytest.mark.parametrize("ring", RINGS, ids=["machine code", "numpy"])
@pytest.mark.parametrize("shape", SHAPES[2:])
def test_products_with_encrypted_masks_are_exact(ring: Ring, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    integers, _ = quantize_rows(rng.normal(0, 0.02, shape))
    layout, mask = plan_mask_layout(*shape, ring.degree), random_masks(shape[1])
    found = mask_product(ring, layout, integers, mask, SecretKey(ring))
    assert list(found) == list(exact(integers, mask) % (1 << MASK_BITS))


@pytest.mark.parametrize("shape", [(300, 200), (200, 4097)])
def test_rows_of_one_weight_leave_noise_enough(shape: tuple[int, int]) -> None:
    """No row has larger squares than one whose weight is all of its sum."""
    ring, (outputs, inputs) = RINGS[0], shape
    integers = np.zeros(shape, np.float32)
    integers[np.arange(outputs), np.arange(outputs) % inputs] = 1 << weight_bits(inputs)
    layout, key = plan_mask_layout(*shape, ring.degree), SecretKey(ring)
    for mask in (random_masks(inputs), np.full(inputs, (1 << MASK_BITS) - 1, np.uint64)):
        found = mask_product(ring, layout, integers, mask, key)
        assert list(found) == list(exact(integers, mask) % (1 << MASK_BITS))


@pytest.mark.parametrize("shape", SHAPES)
def test_masked_products_are_those_of_integers(shape: tuple[int, int]) -> None:
    """The largest sums that there can be among them."""
    rng = np.random.default_rng(2)
    weights = rng.normal(0, 0.02, shape)
    weights[0] = 0.25 * rng.choice([-1.0, 1.0], shape[1])
    inputs = rng.normal(size=(3, shape[1]))
    inputs[1] = np.sign(weights[0])
    inputs[2, 0] = 25_000.0
    integers, scales = quantize_rows(weights)
    numbers, input_scales = quantize_inputs(inputs)
    assert np.abs(numbers).max() == (1 << input_bits(shape[1])) - 1
    assert np.abs(integers).sum(1).max() <= 1 << weight_bits(shape[1])
    masks = random_masks(numbers.size).reshape(numbers.shape)
    masked = unpack_masked(pack_masked(hide(numbers, masks)), numbers.shape)
    answers = multiply_masked(make_integer_linear(integers), masked)
    products = np.stack([exact(integers, mask) % (1 << MASK_BITS) for mask in masks])
    found = reveal(answers, products.astype(np.uint64))
    assert np.array_equal(found, np.stack([exact(integers, x) for x in numbers]))
    y = found * scales * input_scales[:, None]
    expected = inputs @ weights.T
    assert np.abs(y - expected).max() <= 1e-3 * np.abs(expected).max()


def test_masked_numbers_are_uniform_for_any_input() -> None:
    masks = random_masks(200_000)
    largest = (1 << input_bits(1)) - 1
    for x in (0, largest, -largest):
        hidden = hide(np.full(len(masks), x), masks)
        counts = np.bincount((hidden >> np.uint64(MASK_BITS - 4)).astype(int), minlength=16)
        assert abs(counts - len(masks) / 16).max() < 6 * (len(masks) / 16) ** 0.5


@pytest.mark.parametrize("shape", SHAPES)
def test_layouts_hold_every_weight_once_in_little_memory(shape: tuple[int, int]) -> None:
    layout = plan_mask_layout(*shape, 4096)
    assert layout.rows * layout.width <= 4096
    assert layout.chunks * layout.width >= shape[1]
    assert layout.blocks * layout.rows >= shape[0]
    if min(shape) >= 500:
        assert layout.nbytes(4096) / (shape[0] * shape[1]) < 18


def test_wide_layers_are_rounded_no_more_than_int8() -> None:
    for inputs in (1536, 4096, 8192, 16384, 28672):
        weight = np.random.default_rng(0).normal(0, 0.02, (4, inputs))
        integers, scales = quantize_rows(weight)
        error = np.linalg.norm(integers * scales[:, None] - weight) / np.linalg.norm(weight)
        assert error < 0.009


@pytest.mark.parametrize("size", [0.0, 1e-320, 1e-300, 1e30])
def test_numbers_near_zero_and_far_from_it_make_no_scale_zero(size: float) -> None:
    integers, scales = quantize_rows(np.array([[size, -size]]))
    numbers, input_scales = quantize_inputs(np.array([[size, -size]]))
    assert np.allclose(integers * scales[:, None], [[size, -size]], rtol=1e-3, atol=1e-290)
    assert np.allclose(numbers * input_scales[:, None], [[size, -size]], rtol=1e-3, atol=1e-290)


def test_weights_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        quantize_rows(np.array([[1.0, np.nan]]))


def test_masks_are_encrypted_under_the_modulus_that_is_secure() -> None:
    assert sum(RingParameters().prime_bits[:PRIMES]) == 78
