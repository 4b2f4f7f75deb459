"""Folded weights compute the same, and hide nothing: their key is recovered in two ways."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from nesa_node.privacy.attacks.folded_weights import (
    FoldingKey,
    recover_key_from_text,
    recover_key_from_weights,
)

HIDDEN = 48
Matrix = npt.NDArray[np.float64]


def weights_and_key(rng: np.random.Generator) -> tuple[list[Matrix], FoldingKey]:
    """Gate, up and values of a small layer."""
    outputs = (96, 96, 16)
    weights = [rng.normal(size=(HIDDEN, each)) for each in outputs]
    return weights, FoldingKey.random(HIDDEN, outputs, rng)


def relative_error(found: Matrix, key: Matrix) -> float:
    return float(min(np.abs(found - key).max(), np.abs(found + key).max()) / np.abs(key).max())


def test_the_node_computes_what_the_owner_unfolds() -> None:
    rng = np.random.default_rng(0)
    weights, key = weights_and_key(rng)
    x = rng.normal(size=(5, HIDDEN))
    for weight, folded, output in zip(weights, key.fold(weights), key.outputs, strict=True):
        assert np.allclose(key.hide(x) @ folded @ output.T, x @ weight)
        assert not np.allclose(folded, weight, rtol=0.5)


@pytest.mark.parametrize("seed", range(5))
def test_public_weights_give_the_key(seed: int) -> None:
    """Also where the folded weights are stored in float32."""
    weights, key = weights_and_key(np.random.default_rng(seed))
    folded = [each.astype(np.float32).astype(np.float64) for each in key.fold(weights)]
    assert relative_error(recover_key_from_weights(weights, folded), key.input_DD) < 1e-2
    assert relative_error(recover_key_from_weights(weights, key.fold(weights)), key.input_DD) < 1e-6


def test_two_layers_and_a_known_input_give_the_key() -> None:
    rng = np.random.default_rng(3)
    weights, key = weights_and_key(rng)
    known = rng.normal(size=(3, HIDDEN))
    found = recover_key_from_weights(weights[:2], key.fold(weights)[:2], (known, key.hide(known)))
    assert np.abs(found - key.input_DD).max() < 1e-6 * np.abs(key.input_DD).max()


def test_other_weights_do_not_give_the_key() -> None:
    rng = np.random.default_rng(1)
    weights, key = weights_and_key(rng)
    other, _ = weights_and_key(rng)
    assert relative_error(recover_key_from_weights(other, key.fold(weights)), key.input_DD) > 0.5


def test_a_known_text_gives_the_key_once_it_spans_the_inputs() -> None:
    rng = np.random.default_rng(2)
    _, key = weights_and_key(rng)
    known = rng.normal(size=(HIDDEN + 2, HIDDEN))
    found = recover_key_from_text(known, key.hide(known))
    assert relative_error(found, key.input_DD) < 1e-9
    with pytest.raises(ValueError, match="47 inputs span 47 of 48"):
        recover_key_from_text(known[:47], key.hide(known[:47]))
