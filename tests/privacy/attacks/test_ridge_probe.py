"""The ridge probe against closed forms: what it recovers, and that it finds nothing in noise."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.linear_model import Ridge

from nesa_node.privacy.attacks.ridge_probe import RidgeProbe, nearest_rows, whiten

VOCABULARY, HIDDEN = 200, 24


def states_of(ids_T: torch.Tensor, table_VE: torch.Tensor, noise: float) -> torch.Tensor:
    """Embeddings, turned, in channels of very different sizes, with noise in them."""
    generator = torch.Generator().manual_seed(len(ids_T))
    if noise < 0:
        return torch.randn(len(ids_T), HIDDEN, generator=generator)
    fixed_DD = torch.linalg.qr(torch.arange(1.0, HIDDEN**2 + 1).view(HIDDEN, HIDDEN).sin()).Q
    noisy_TD = table_VE[ids_T] + noise * torch.randn(len(ids_T), HIDDEN, generator=generator)
    states_TD: torch.Tensor = noisy_TD @ fixed_DD * torch.logspace(-2, 3, HIDDEN) + 7
    return states_TD


def recovered(noise: float) -> float:
    generator = torch.Generator().manual_seed(0)
    table_VE = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    known, secret = torch.randint(0, VOCABULARY, (2, 3000), generator=generator)
    # Half of the vocabulary occurs in the attacker's text only.
    known = known % (VOCABULARY // 2)
    probe = RidgeProbe.fit(states_of(known, table_VE, noise), table_VE[known])
    found = probe.recover(states_of(secret[:2000], table_VE, noise), table_VE)
    return float((found == secret[:2000]).float().mean())


def test_tokens_that_the_attacker_never_saw_are_recovered() -> None:
    assert recovered(0.1) > 0.99


def test_more_noise_leaves_less_and_noise_alone_nothing() -> None:
    assert 0.2 < recovered(1.0) < 0.9
    assert recovered(-1) < 3 / VOCABULARY


def test_predictions_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    states, embeddings = rng.normal(size=(500, 8)), rng.normal(size=(500, 5))
    probe = RidgeProbe.fit(torch.tensor(states), torch.tensor(embeddings), penalty=0.1)
    scaled = (states - states.mean(0)) / states.std(0, ddof=1)
    penalty = 0.1 * float((scaled**2).sum(0).mean())
    expected = Ridge(alpha=penalty).fit(scaled, embeddings).predict(scaled)
    assert np.allclose(probe.predict(torch.tensor(states)).numpy(), expected, atol=1e-5)


def test_the_nearest_row_is_that_of_the_largest_cosine() -> None:
    table = torch.tensor([[10.0, 0.0], [0.0, 0.1], [-3.0, -3.0]])
    assert nearest_rows(torch.tensor([[1.0, 2.0], [5.0, 1.0], [-1.0, -2.0]]), table).tolist() == [
        1,
        0,
        2,
    ]


def test_white_rows_have_covariance_one_also_of_few_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(VOCABULARY, HIDDEN, generator=generator) * torch.logspace(-1, 2, HIDDEN) + 5
    assert torch.allclose(torch.cov(whiten(table).T, correction=0), torch.eye(HIDDEN), atol=1e-3)
    assert whiten(table[: HIDDEN // 2]).isfinite().all()
