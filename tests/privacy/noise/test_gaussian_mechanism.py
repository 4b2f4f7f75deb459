"""The analytic Gaussian mechanism against its definition, and against the classical bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad

from nesa_node.privacy.noise.gaussian_mechanism import (
    add_noise,
    clip_norms,
    compose_epsilon,
    find_delta,
    find_epsilon,
    find_sigma,
    random_normal,
)


@pytest.mark.parametrize(("epsilon", "sigma"), [(0.5, 3.0), (1.0, 1.0), (4.0, 0.5)])
def test_delta_is_that_of_the_definition(epsilon: float, sigma: float) -> None:
    """The largest of P(set) - e^eps Q(set): the integral of the positive part of the densities."""

    def gap(x: float) -> float:
        p = math.exp(-((x - 1) ** 2) / (2 * sigma**2))
        q = math.exp(-(x**2) / (2 * sigma**2))
        return max(p - math.exp(epsilon) * q, 0.0) / (sigma * math.sqrt(2 * math.pi))

    border = sigma**2 * epsilon + 0.5
    expected, _ = quad(gap, border, border + 40 * sigma)
    assert find_delta(epsilon, 1 / sigma) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 10.0, 1e3, 1e5])
def test_sigma_is_the_least_one(epsilon: float) -> None:
    sigma = find_sigma(epsilon, 1e-5, 2.0)
    assert find_delta(epsilon, 2.0 / sigma) <= 1e-5 * (1 + 1e-9)
    assert find_delta(epsilon, 2.0 / (0.999 * sigma)) > 1e-5
    assert find_epsilon(1e-5, 2.0 / sigma) == pytest.approx(epsilon, rel=1e-6)
    if epsilon <= 1:  # Dwork and Roth 2014, theorem A.1: proven there only
        assert sigma < 2.0 * math.sqrt(2 * math.log(1.25e5)) / epsilon


def test_composition_is_that_of_one_vector_of_all() -> None:
    assert compose_epsilon(2.0, 1e-5, 1) == pytest.approx(2.0, rel=1e-6)
    sigma = find_sigma(2.0, 1e-5, 1.0)
    nine = compose_epsilon(2.0, 1e-5, 9)
    assert find_delta(nine, 3.0 / sigma) == pytest.approx(1e-5, rel=1e-6)
    assert 3 * 2.0 < nine < 9 * 2.0


def test_norms_are_clipped_and_short_vectors_stay() -> None:
    states = torch.tensor([[3.0, 4.0], [30.0, 40.0], [0.0, 0.0]])
    assert torch.allclose(clip_norms(states, 10.0), torch.tensor([[3.0, 4.0], [6.0, 8.0], [0, 0]]))


def test_noise_is_normal_and_of_its_size() -> None:
    drawn = random_normal((400, 500)).numpy()
    assert abs(drawn.mean()) < 0.02
    assert abs(drawn.std() - 1) < 0.01
    assert np.isfinite(drawn).all()
    assert abs((drawn > 1.959964).mean() - 0.025) < 0.002
    assert not np.array_equal(random_normal((3, 4)), random_normal((3, 4)))
    states = torch.full((2000, 8), 5.0, dtype=torch.bfloat16)
    noisy = add_noise(states, 1.0, 2.0)
    assert noisy.dtype == torch.bfloat16
    assert float(noisy.float().mean()) == pytest.approx(1 / math.sqrt(8), abs=0.1)
    assert float(noisy.float().std()) == pytest.approx(2.0, abs=0.1)
