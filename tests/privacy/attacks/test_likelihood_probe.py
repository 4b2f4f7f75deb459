"""The most likely tokens: as many as the best rule finds, and more than the ridge probe."""

from __future__ import annotations

import torch

from nesa_node.privacy.attacks.likelihood_probe import LikelihoodProbe
from nesa_node.privacy.attacks.ridge_probe import RidgeProbe

VOCABULARY, HIDDEN = 300, 16


def test_it_is_the_best_rule_where_the_rest_is_normal() -> None:
    """Context that is large in a few directions hides little from it, much from the ridge probe."""
    generator = torch.Generator().manual_seed(0)
    table_VE = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    mixing_DD = torch.randn(HIDDEN, HIDDEN, generator=generator) * torch.logspace(-0.2, 1.2, HIDDEN)
    map_ED = torch.randn(HIDDEN, HIDDEN, generator=generator)

    def states(ids_T: torch.Tensor) -> torch.Tensor:
        rest_TD = torch.randn(len(ids_T), HIDDEN, generator=generator) @ mixing_DD.T
        return table_VE[ids_T] @ map_ED + rest_TD + 3

    known = torch.randint(0, VOCABULARY // 2, (6000,), generator=generator)
    secret = torch.randint(0, VOCABULARY, (2000,), generator=generator)
    own_TD, seen_TD = states(known), states(secret)
    # The best rule knows the map and the covariance.
    inverse_DD = torch.linalg.inv(mixing_DD @ mixing_DD.T)
    gaps_TVD = seen_TD[:, None] - 3 - table_VE @ map_ED
    best_T = torch.einsum("tvd,de,tve->tv", gaps_TVD, inverse_DD, gaps_TVD).argmin(1)

    def hits(found_T: torch.Tensor) -> float:
        return float((found_T == secret).float().mean())

    probe = LikelihoodProbe.fit(own_TD, table_VE[known], penalty=1e-6)
    found = hits(probe.recover(seen_TD, table_VE))
    ridge = hits(RidgeProbe.fit(own_TD, table_VE[known]).recover(seen_TD, table_VE))
    assert 0.3 < hits(best_T) < 0.99
    assert hits(best_T) - 0.05 < found <= hits(best_T) + 0.02
    assert found > ridge + 0.02


def test_noise_alone_gives_no_token() -> None:
    generator = torch.Generator().manual_seed(1)
    table_VE = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    ids = torch.randint(0, VOCABULARY, (3000,), generator=generator)
    noise_TD = torch.randn(3000, HIDDEN, generator=generator)
    found = LikelihoodProbe.fit(noise_TD[:2000], table_VE[ids[:2000]]).recover(
        noise_TD[2000:], table_VE
    )
    assert (found == ids[2000:]).float().mean() < 0.02
